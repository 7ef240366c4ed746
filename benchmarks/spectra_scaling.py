"""How top-5, density and trace of a whole Hessian grow with examples, probes and parameters.

    python -m benchmarks.spectra_scaling [--rounds 3] [-o FILE]

Fully-connected networks (tanh, cross-entropy, float32, one thread), random rows. One axis changes at a time:

    examples     250 to 4,000 rows, 101,770 parameters
    probes       2 to 16 probes of a density, twice as many of a trace, 101,770 parameters, 250 rows
    parameters   10 thousand to 10 million, 16 rows

Work is fixed by the number of products: top-5 ends after 30 of them whether or not its residuals are small
enough, a density has 4 probes (2 where parameters grow) of 10 steps, a trace twice as many probes
(Hutchinson). Making the problem and the operator is not timed. The growth is the slope of log seconds over
log size from the second point to the last: 1 is linear, below 1 has a part that does not grow.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

import curvlab
from curvlab.curvature import Curvature
from curvlab.measure.environment import environment
from curvlab.measure.stopwatch import interleaved

EXAMPLES = (250, 1000, 4000)
PROBES = (2, 4, 8, 16)
WIDTHS = {(64, 128): 16, (256, 384): 16, (1024, 976): 16, (3072, 2700): 16}
STEPS, PRODUCTS = 10, 30
Row = dict[str, Any]


def hessian(inputs: int, width: int, rows: int) -> Curvature:
    """The whole Hessian of inputs-width-10; of inputs-width-width/4-10 where the width is above 500."""
    torch.manual_seed(0)
    hidden = (width, width // 4) if width > 500 else (width,)
    sizes = (inputs, *hidden, 10)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    data = torch.randn(rows, inputs), torch.randint(0, 10, (rows,))
    return curvlab.estimate("hessian[structure=full]", curvlab.Problem(model, "cross-entropy", *data))


def tasks(curvature: Curvature, probes: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    return {
        "top-5": lambda: curvlab.spectrum(curvature, 5, max_products=PRODUCTS, tol=0.0),
        "density": lambda: curvlab.density(curvature, probes=probes, steps=STEPS),
        "trace": lambda: curvature.trace(probes=max(4, 2 * probes)),
    }


def timed(axis: str, size: int, curvature: Curvature, probes: int, rounds: int) -> list[Row]:
    """Median seconds of processor time of every task at one point of an axis."""
    found = interleaved(tasks(curvature, probes), rounds)
    return [
        {"axis": axis, "size": size, "task": task, "seconds": round(one.processor.median, 4)}
        for task, one in found.items()
    ]


def measured(rounds: int) -> list[Row]:
    """All axes, one after the other."""
    rows: list[Row] = []
    for examples in EXAMPLES:
        rows += timed("examples", examples, hessian(784, 128, examples), 4, rounds)
    curvature = hessian(784, 128, EXAMPLES[0])
    for probes in PROBES:
        found = timed("probes", probes, curvature, probes, rounds)
        rows += [row for row in found if row["task"] != "top-5"]
    for (inputs, width), examples in WIDTHS.items():
        curvature = hessian(inputs, width, examples)
        rows += timed("parameters", curvature.numel, curvature, 2, rounds)
    return rows


def growth(rows: pd.DataFrame) -> pd.DataFrame:
    """The slope of log seconds over log size, from the second size to the last, by axis and task."""
    slopes = []
    for (axis, task), group in rows.groupby(["axis", "task"], sort=False):
        (_, first), (_, last) = list(group.sort_values("size").iterrows())[1 :: len(group) - 2]
        slope = log(last["seconds"] / first["seconds"]) / log(last["size"] / first["size"])
        slopes.append({"axis": axis, "task": task, "growth": round(slope, 2)})
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
