"""What the sample space saves: the cost of the paper's equations over that of curvlab's forms, counted.

    python -m benchmarks.sample_space_plot [--folder docs/figures]

For the first layer of the paper's networks, n_{t-1} inputs and 1024 outputs, the cost of one solve and its
update is counted on tensors without values, so that any width fits in memory: floating-point operations
of the linear algebra, and the bytes that every operation reads and writes, in the unit of the solvers' cost
model (`curvlab.solvers.input_coordinates`). One panel each for the width, the batch and the iterations; the
others stay at n_{t-1} = 3072, m = 100, 20 iterations.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import curvlab
from curvlab.measure.operations import count
from curvlab.solvers.input_coordinates import FLOPS_PER_BYTE

OUTPUTS = 1024
SWEEPS = {
    "width": (256, 1024, 3072, 12_288, 49_152, 150_528),
    "batch": (10, 30, 100, 300, 1000),
    "iterations": (1, 5, 10, 20, 50),
}
LABELS = {"width": "inputs $n_{t-1}$", "batch": "batch $m$", "iterations": "CG iterations"}
SOLVERS = {"ea-cg": "o", "cg": "s", "kfi": "^", "sm-kfi": "D"}


@dataclass(frozen=True)
class Point:
    """One size of the problem."""

    width: int = 3072
    batch: int = 100
    iterations: int = 20


def spec(solver: str, point: Point, formulation: str) -> str:
    fields = f"max_iter={point.iterations}," if "cg" in solver else ""
    return f"{solver}[{fields}formulation={formulation}]"


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write; views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return result


def cost(solver: str, point: Point, formulation: str) -> float:
    """Cost of a solve and its update; the pass and the curvature are not part of it."""
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(point.width, OUTPUTS), nn.Sigmoid(), nn.Linear(OUTPUTS, 10))
        inputs = torch.randn(point.batch, point.width)
        problem = curvlab.Problem(model, "cross-entropy", inputs, torch.zeros(point.batch, dtype=torch.int64))
        curvature, gradient = curvlab.estimate("pch-1", problem), problem.gradient()

        def step() -> None:
            solution = curvlab.solve(spec(solver, point, formulation), curvature, gradient, alpha=0.05)
            solution.add_to(model, lr=0.1)

        with Traffic() as traffic:
            operations = count(step)
        return operations + FLOPS_PER_BYTE * traffic.bytes


def table() -> pd.DataFrame:
    """One row a sweep, size and solver."""
    rows = []
    for sweep, values in SWEEPS.items():
        for value in values:
            point = replace(Point(), **{sweep: value})
            for solver in SOLVERS:
                if sweep == "iterations" and "cg" not in solver:
                    continue
                explicit = cost(solver, point, "explicit")
                default = cost(solver, point, "reduced")
                rows.append((sweep, value, solver, explicit, default, explicit / default))
    return pd.DataFrame(rows, columns=["sweep", "value", "solver", "explicit", "default", "ratio"])


def draw(axes: Axes, data: pd.DataFrame, sweep: str) -> None:
    for solver, marker in SOLVERS.items():
        line = data[(data["sweep"] == sweep) & (data["solver"] == solver)]
        if len(line):
            axes.loglog(line["value"], line["ratio"], marker=marker, markersize=4, label=solver)
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set_xlabel(LABELS[sweep])
    axes.set_xticks(SWEEPS[sweep], [f"{value:,}" for value in SWEEPS[sweep]], rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(True, color="0.9")


def figure(data: pd.DataFrame) -> plt.Figure:
    result, panels = plt.subplots(1, 3, figsize=(10.5, 3.6), sharey=True, layout="constrained")
    for axes, sweep in zip(panels, SWEEPS, strict=True):
        draw(axes, data, sweep)
    panels[0].set_ylabel("cost, explicit / default")
    panels[0].legend(frameon=False)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("docs/figures"))
    folder = parser.parse_args().folder
    data = table()
    print(data.to_string(index=False, float_format=lambda value: f"{value:.3g}"))
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "curvlab"
    for kind in ("png", "svg"):
        options = {"dpi": 150} if kind == "png" else {"metadata": {"Date": None}}
        figure(data).savefig(folder / f"sample-space.{kind}", **options)


if __name__ == "__main__":
    main()
