"""The experiments by name."""

from __future__ import annotations

from curvlab import specs
from curvlab.reproduce.curves.figure import CurveFigure
from curvlab.reproduce.errors.table import KFI, ErrorTable
from curvlab.reproduce.experiment import Experiment
from curvlab.reproduce.grid.search import GridSearch
from curvlab.reproduce.growth.table import GrowthTable

__all__ = ["experiment_named", "experiments"]

CONVEX = (
    ("pch-2", "pch-1"),
    ("pch-1", "gauss-newton"),
    ("gauss-newton", "fisher"),
    ("pch-2", "pch-1", "gauss-newton", "fisher"),
)
NON_CONVEX = (("pch-1", "pch-2"), ("pch-2", "fisher"), ("pch-1", "fisher"), ("pch-1", "pch-2", "fisher"))

CE, ROBUST = ("cross-entropy",), ("robust",)
SOLVERS = ("kfi", "ea-cg")
ALL_PAIRS = tuple((p, s) for p in ("fisher", "gauss-newton", "pch-1") for s in SOLVERS)
PSD_PAIRS = tuple((p, s) for p in ("fisher", "pch-1") for s in SOLVERS)


def experiments() -> dict[str, Experiment]:
    """Every experiment, in the order of the paper."""
    found: list[Experiment] = [
        GrowthTable("table1", "Table 1: what each method costs as sizes grow"),
        ErrorTable(
            "table2", "Table 2: errors on CIFAR-10, cross-entropy", "cifar10", "cross-entropy", CONVEX
        ),
        ErrorTable(
            "table3",
            "Table 3: errors on 150,528 inputs, cross-entropy",
            "imagenet10",
            "cross-entropy",
            CONVEX,
        ),
        ErrorTable("table4", "Table 4: errors on CIFAR-10, robust loss", "cifar10", "robust", NON_CONVEX),
        ErrorTable(
            "table5", "Table 5: errors on 150,528 inputs, robust loss", "imagenet10", "robust", NON_CONVEX
        ),
        ErrorTable(
            "table2-kfi",
            "Table 2 again, along training with KFI",
            "cifar10",
            "cross-entropy",
            CONVEX,
            KFI,
            "table2",
        ),
        ErrorTable(
            "table4-kfi",
            "Table 4 again, along training with KFI",
            "cifar10",
            "robust",
            NON_CONVEX,
            KFI,
            "table4",
        ),
        CurveFigure("fig-convex-cifar10", "Training on CIFAR-10, cross-entropy", "cifar10", CE, ALL_PAIRS),
        CurveFigure(
            "fig-convex-imagenet10", "Training on 150,528 inputs, cross-entropy", "imagenet10", CE, ALL_PAIRS
        ),
        CurveFigure(
            "fig-nonconvex-cifar10", "Training on CIFAR-10, robust loss", "cifar10", ROBUST, PSD_PAIRS
        ),
        CurveFigure(
            "fig-nonconvex-imagenet10",
            "Training on 150,528 inputs, robust loss",
            "imagenet10",
            ROBUST,
            PSD_PAIRS,
        ),
        CurveFigure(
            "pch1-vs-pch2",
            "PCH-1 against PCH-2 in training",
            "cifar10",
            CE + ROBUST,
            (("pch-1", "ea-cg"), ("pch-2", "ea-cg")),
            baseline=False,
        ),
        GridSearch("grid", "The grid search"),
    ]
    return {experiment.name: experiment for experiment in found}


def experiment_named(name: str) -> Experiment:
    """The experiment; an unknown name is an error that lists the known ones and the nearest."""
    known = experiments()
    if name not in known:
        raise specs.unknown("experiment", name, known)
    return known[name]
