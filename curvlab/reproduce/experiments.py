"""The experiments by name, and the paper's claims, in our words, by the experiment that answers them."""

from __future__ import annotations

import pandas as pd

from curvlab.exceptions import unknown_name
from curvlab.reproduce.curve_claims import (
    Choice,
    best_claim,
    level_claim,
    no_dearer_claim,
    same_time_claim,
    solver_claim,
)
from curvlab.reproduce.curve_figures import CurveFigure
from curvlab.reproduce.error_statistics import accumulation_claim, ordering_claim
from curvlab.reproduce.error_tables import KFI, ErrorTable
from curvlab.reproduce.experiment import Claim, Experiment
from curvlab.reproduce.grid_search import GridSearch
from curvlab.reproduce.growth_table import GrowthTable, card_claim, growth_claim

__all__ = ["claims", "experiment_named", "experiments"]


def claims() -> dict[str, tuple[Claim, ...]]:
    """Every claim that is judged, by experiment."""
    return {
        "table1": (card_claim(), growth_claim("kfi"), growth_claim("ea-cg")),
        "table2": (*_convex_errors(), accumulation_claim()),
        "table3": (*_convex_errors(), accumulation_claim()),
        "table4": (*_non_convex_errors(), accumulation_claim()),
        "table5": (*_non_convex_errors(), accumulation_claim()),
        "table2-kfi": (*_convex_errors(), accumulation_claim()),
        "table4-kfi": (*_non_convex_errors(), accumulation_claim()),
        "fig-convex-cifar10": (
            solver_claim("EA-CG converges faster than KFI by time.", "loss_at_time", "ea-cg", "kfi"),
            solver_claim("KFI's training loss falls faster by epochs.", "loss", "kfi", "ea-cg"),
            solver_claim("EA-CG has the better test accuracy.", "accuracy", "ea-cg", "kfi"),
            level_claim("With EA-CG the three matrices perform alike.", "loss", _with("ea-cg")),
            best_claim(
                "With KFI the Fisher matrix converges faster than the other two.",
                "loss_at_time",
                ["fisher + kfi"],
                _with("kfi"),
            ),
        ),
        "fig-convex-imagenet10": (
            same_time_claim("EA-CG and KFI take almost the same time.", "ea-cg", "kfi"),
            solver_claim("KFI has the lower training loss.", "loss", "kfi", "ea-cg"),
            no_dearer_claim("Second-order methods are as fast as SGD where inputs are wide.", "sgd"),
        ),
        "fig-nonconvex-cifar10": (
            solver_claim("EA-CG beats KFI in training loss by time.", "loss_at_time", "ea-cg", "kfi"),
            solver_claim("EA-CG beats KFI in test accuracy.", "accuracy", "ea-cg", "kfi"),
            best_claim("The Fisher matrix with EA-CG is best.", "loss", ["fisher + ea-cg"], _everything),
        ),
        "fig-nonconvex-imagenet10": (
            solver_claim("EA-CG beats KFI in training loss.", "loss", "ea-cg", "kfi"),
            level_claim("Test accuracy hardly tells EA-CG from KFI.", "accuracy", _second_order),
            best_claim("PCH with KFI has the best test accuracy.", "accuracy", ["pch-1 + kfi"], _everything),
        ),
        "pch1-vs-pch2": (
            level_claim("PCH-1 and PCH-2 train alike, cross-entropy, by loss.", "loss", _of("cross-entropy")),
            level_claim("… by test accuracy.", "accuracy", _of("cross-entropy")),
            level_claim("PCH-1 and PCH-2 train alike, robust loss, by loss.", "loss", _of("robust")),
            level_claim("… by test accuracy, robust loss.", "accuracy", _of("robust")),
        ),
    }


def _convex_errors() -> tuple[Claim, ...]:
    return (
        ordering_claim(
            ("pch-1", "gauss-newton"), "PCH-1 is closer to the absolute Hessian than Gauss-Newton."
        ),
        ordering_claim(("pch-2", "pch-1"), "PCH-2 is closer than PCH-1."),
        ordering_claim(("gauss-newton", "fisher"), "Gauss-Newton is closer than the Fisher matrix."),
        ordering_claim(
            ("pch-2", "pch-1", "gauss-newton", "fisher"), "The Totals are ordered as the table has them."
        ),
    )


def _non_convex_errors() -> tuple[Claim, ...]:
    return (
        ordering_claim(
            ("pch-1", "fisher"), "PCH-1 is closer to the absolute Hessian than the Fisher matrix."
        ),
        ordering_claim(
            ("pch-2", "fisher"), "PCH-2 is closer to the absolute Hessian than the Fisher matrix."
        ),
        ordering_claim(("pch-1", "pch-2"), "PCH-1 is closer than PCH-2."),
        ordering_claim(("pch-1", "pch-2", "fisher"), "The Totals are ordered as the table has them."),
    )


def _with(solver: str) -> Choice:
    return lambda table: table[table["solver"] == solver]


def _of(criterion: str) -> Choice:
    return lambda table: table[table["criterion"].str.startswith(criterion)]


def _second_order(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["provider"] != ""]


def _everything(table: pd.DataFrame) -> pd.DataFrame:
    return table


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
        raise unknown_name("experiment", name, known)
    return known[name]
