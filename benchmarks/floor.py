"""How a calibrated floor compares with measured steps on this machine: four networks by five methods.

    python -m benchmarks.floor [--rounds 7] [--json FILE]

    floor = operations · host cost + Σ max(flops / peak, bytes / bandwidth)

The peak, the bandwidth and the host's cost of an operation are measured first; the last for each method on
a network of widths 4-4-4-3, so small that nothing else counts. What a step asks for is counted, then
predicted, then measured: the methods of a network take turns in every round, and the median is compared. No
measured step has a part in its own prediction. One thread; `curvlab plan --device cpu` predicts the same way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn

from curvlab.measure.environment import environment
from curvlab.measure.operations import Operations, operations
from curvlab.measure.stopwatch import interleaved
from curvlab.optim import SecondOrder
from curvlab.studies.small.floor import Rates, calibrate

METHODS = ("sgd", "pch-1 + ea-cg", "pch-1 + kfi", "fisher + kfi", "gauss-newton + cg")
NETWORKS = {
    "3072-1024-512-256-128-64-32-16-10": 500,
    "784-256-256-10": 256,
    "64-32-16-10": 100,
    "9000-300-10": 100,
}
TINY = "4-4-4-3", 16
RATE, ALPHA = 1e-4, 0.1


@dataclass(frozen=True)
class Row:
    """One method on one network: seconds predicted and measured."""

    network: str
    method: str
    predicted: float
    measured: float
    operations: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def step_of(
    method: str, network: str, batch: int, device: str | torch.device = "cpu", **options: Any
) -> Callable[[], object]:
    """A step of a method on a fully-connected network of sigmoids, the same every time it is asked for."""
    widths = [int(width) for width in network.split("-")]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Sigmoid())]
        model, inputs = nn.Sequential(*layers[:-1]), torch.randn(batch, widths[0])
        targets = torch.randint(widths[-1], (batch,))
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    if method == "sgd":
        plain = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, foreach=True)

        def step() -> None:
            plain.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            plain.step()

        return step
    provider, _, solver = method.partition(" + ")
    optimizer = SecondOrder(model, "cross-entropy", provider, solver, lr=RATE, alpha=ALPHA, **options)
    return lambda: optimizer.step(inputs, targets)


def asked_of(step: Callable[[], object]) -> Operations:
    """What the third step asks for: the first ones make what the others keep."""
    step()
    step()
    with operations() as asked:
        step()
    return asked


def host_cost(method: str, rounds: int) -> float:
    """Seconds an operation or a view of the method takes where its arithmetic is nothing."""
    step = step_of(method, *TINY)
    asked = asked_of(step)
    seconds = interleaved({method: step}, 3 * rounds)[method].median
    return seconds / (len(asked.launches) + asked.views)


def measure(rounds: int) -> tuple[Rates, list[Row]]:
    """Calibrate, predict, then measure."""
    rates = calibrate("cpu").rates
    costs = {method: host_cost(method, rounds) for method in METHODS}
    rows = []
    for network, batch in NETWORKS.items():
        steps = {method: step_of(method, network, batch) for method in METHODS}
        asked = {method: asked_of(step) for method, step in steps.items()}
        timings = interleaved(steps, rounds, min_seconds=0.05)
        for method, found in asked.items():
            count = len(found.launches) + found.views
            predicted = costs[method] * count + found.seconds(rates.flops, rates.bandwidth)
            rows.append(Row(network, method, predicted, timings[method].median, count))
    return rates, rows


def show(rates: Rates, rows: Sequence[Row]) -> None:
    """The table, and its median and worst error."""
    print(f"{rates.flops / 1e9:.1f} GFLOP/s, {rates.bandwidth / 1e9:.1f} GB/s\n")
    print("| network | method | operations | predicted ms | measured ms | error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        seconds = f"{1e3 * row.predicted:.2f} | {1e3 * row.measured:.2f}"
        print(f"| {row.network} | {row.method} | {row.operations} | {seconds} | {100 * row.error:+.0f} % |")
    errors = [abs(row.error) for row in rows]
    print(
        f"\nmedian error {100 * median(errors):.0f} % (limit 20), worst {100 * max(errors):.0f} % (limit 35)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write rows, rates and environment to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rates, rows = measure(given.rounds)
    show(rates, rows)
    if given.json:
        found = {"environment": environment("cpu"), "rates": vars(rates), "rows": [vars(row) for row in rows]}
        with open(given.json, "w") as file:
            json.dump(found, file, indent=1, default=str)


if __name__ == "__main__":
    main()
