"""How top-5, density and trace of a whole Hessian grow with examples, probes and parameters.

    python -m benchmarks.spectra_scaling [--rounds 3] [-o FILE]

Fully-connected networks (tanh, cross-entropy, float32, one thread), random rows. One axis changes at a time:

    examples     250 to 4,000 rows, 101,770 parameters
    probes       2 to 16 probes of a density, twice as many of a trace, 101,770 parameters, 250 rows
    parameters   10 thousand to 10 million, 16 rows

Work is fixed by the number of products: top-5 ends after 30 of them whether or not its residuals are small
enough, a density has 4 probes (2 where parameters grow) of 10 steps, a trace twice as many probes
(Hutchinson). Making the problem and the operator is not timed. `gradient` is one forward and backward pass
of torch on the same model and rows: how the machine itself grows. One more run of each task counts what the
system gave: its seconds, and the pages of memory that were touched for the first time. The growth is the
slope of log seconds over log size from the second point to the last: 1 is linear, below 1 has a part that
does not grow. The last step is the ratio of the last two times over that of their sizes.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import curvlab
from curvlab.curvature import Curvature
from curvlab.measure.environment import environment
from curvlab.measure.stopwatch import interleaved

EXAMPLES = (250, 1000, 4000)
PROBES = (2, 4, 8, 16)
WIDTHS = {(64, 128): 16, (256, 384): 16, (1024, 976): 16, (3072, 2700): 16}
STEPS, PRODUCTS = 10, 30
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """A model with its rows, and its whole Hessian."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    hessian: Curvature

    def gradient(self) -> tuple[Tensor, ...]:
        """One forward and backward pass."""
        loss = F.cross_entropy(self.model(self.inputs), self.targets)
        return torch.autograd.grad(loss, list(self.model.parameters()))


def case(inputs: int, width: int, rows: int) -> Case:
    """A network inputs-width-10; inputs-width-width/4-10 where the width is above 500."""
    torch.manual_seed(0)
    hidden = (width, width // 4) if width > 500 else (width,)
    sizes = (inputs, *hidden, 10)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    data = torch.randn(rows, inputs), torch.randint(0, 10, (rows,))
    problem = curvlab.Problem(model, "cross-entropy", *data)
    return Case(model, *data, curvlab.estimate("hessian[structure=full]", problem))


def tasks(given: Case, probes: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    curvature = given.hessian
    return {
        "top-5": lambda: curvlab.spectrum(curvature, 5, max_products=PRODUCTS, tol=0.0),
        "density": lambda: curvlab.density(curvature, probes=probes, steps=STEPS),
        "trace": lambda: curvature.trace(probes=max(4, 2 * probes)),
        "gradient": given.gradient,
    }


def timed(axis: str, size: int, given: Case, probes: int, rounds: int) -> list[Row]:
    """Median seconds of processor time of every task at one point of an axis, and the system's part."""
    work = tasks(given, probes)
    found = interleaved(work, rounds)
    return [
        {"axis": axis, "size": size, "task": task, "seconds": round(one.processor.median, 4)}
        | of_the_system(work[task])
        for task, one in found.items()
    ]


def of_the_system(function: Callable[[], object]) -> Row:
    """Seconds that the system took while `function` ran, and the pages of memory that it touched first."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    function()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "system_seconds": round(after.ru_stime - before.ru_stime, 4),
        "page_faults": after.ru_minflt - before.ru_minflt,
    }


def measured(rounds: int) -> list[Row]:
    """All axes, one after the other."""
    rows: list[Row] = []
    for examples in EXAMPLES:
        rows += timed("examples", examples, case(784, 128, examples), 4, rounds)
    given = case(784, 128, EXAMPLES[0])
    for probes in PROBES:
        found = timed("probes", probes, given, probes, rounds)
        rows += [row for row in found if row["task"] in ("density", "trace")]
    for (inputs, width), examples in WIDTHS.items():
        given = case(inputs, width, examples)
        rows += timed("parameters", given.hessian.numel, given, 2, rounds)
    return rows


def growth(rows: pd.DataFrame) -> pd.DataFrame:
    """The slope of log seconds over log size, from the second size to the last, by axis and task."""
    slopes = []
    for (axis, task), group in rows.groupby(["axis", "task"], sort=False):
        ordered = group.sort_values("size")
        sizes, seconds = ordered["size"].tolist(), ordered["seconds"].tolist()
        slope = log(seconds[-1] / seconds[1]) / log(sizes[-1] / sizes[1])
        last = seconds[-1] / seconds[-2] / (sizes[-1] / sizes[-2])
        slopes.append({"axis": axis, "task": task, "growth": round(slope, 2), "last step": round(last, 2)})
    return pd.DataFrame(slopes)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measured(options.rounds)
    frame = pd.DataFrame(rows)
    slopes = growth(frame)
    print(frame.to_string(index=False), slopes.to_string(index=False), sep="\n")
    if options.output is not None:
        found = {"environment": environment(), "rows": rows, "growth": slopes.to_dict("records")}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
