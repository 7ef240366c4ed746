"""How a calibrated floor compares with measured steps on this machine: four networks by five methods.

    python -m benchmarks.floor [--rounds 7] [--out reports/floor]

    floor = operations · host cost + Σ max(flops / rate(kind, side), bytes / bandwidth(bytes))

Rates and bandwidths are measured first, for every network anew, one kind of operation after the other and by
size (`curvlab.studies.small.speeds`). The host's cost of an operation is measured for each method on a twin
of the network: as many layers, all of width 4, batch 16, so small that nothing else counts. What a step asks
for is counted. Then the steps of a network and their twins take turns in every round, so that a slow moment
of the machine is one for all, and medians are compared. No measured step has a part in its own prediction,
and nothing is fitted to measured steps. One thread; `curvlab plan --device cpu` predicts the same way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from curvlab.measure.environment import environment
from curvlab.measure.operations import Operations, operations
from curvlab.measure.stopwatch import interleaved
from curvlab.optim import SecondOrder
from curvlab.studies.small.speeds import Speeds, measure_speeds

METHODS = ("sgd", "pch-1 + ea-cg", "pch-1 + kfi", "fisher + kfi", "gauss-newton + cg")
NETWORKS = {
    "3072-1024-512-256-128-64-32-16-10": 500,
    "784-256-256-10": 256,
    "64-32-16-10": 100,
    "9000-300-10": 100,
}
NARROW, CLASSES, FEW = 4, 3, 16
TWIN = " (twin)"
RATE, ALPHA = 1e-4, 0.1
MEDIAN, WORST = 0.20, 0.35
ABOUT = """What is predicted: operations · host cost + Σ max(flops / rate(kind, side), bytes / bandwidth).

- *Calibrated, by micro-benchmarks of single operations, anew before every network:* products by their
  shortest side, Cholesky factorisations, their inverses and solves by theirs, additions by the bytes they
  touch.
- *Calibrated, by a twin:* the host's cost of an operation, of the same method on a network of as many layers
  that are 4 wide, in turns with what is measured.
- *Fitted:* nothing. No step of the table has a part in its own prediction.
- *Networks and data:* fully connected, sigmoid, cross-entropy, float32, drawn from seed 0; lr 1e-4, α 0.1.

What it does not show: other devices (a floor by data sheet is a bound, no time), other networks than fully
connected ones (convolutions are taken for products at their peak), several threads, a machine that is busy.
"""


@dataclass(frozen=True)
class Row:
    """One method on one network: seconds predicted and measured."""

    network: str
    method: str
    predicted: float
    measured: float
    spread: float
    operations: int
    host_cost: float

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


def twin(network: str) -> str:
    """The network with as many layers that are as narrow as can be.

    >>> twin("3072-1024-10")
    '4-4-3'
    """
    layers = network.count("-")
    return "-".join([str(NARROW)] * layers + [str(CLASSES)])


def cost_of(asked: Operations) -> int:
    """What the host does: operations and views."""
    return len(asked.launches) + asked.views


def measure(rounds: int) -> tuple[dict[str, Speeds], list[Row]]:
    """Calibrate, count, and measure; what is predicted needs nothing of what it is compared with."""
    found, rows = {}, []
    for network, batch in NETWORKS.items():
        speeds = found[network] = measure_speeds("cpu")
        steps = {method: step_of(method, network, batch) for method in METHODS}
        twins = {method + TWIN: step_of(method, twin(network), FEW) for method in METHODS}
        asked = {name: asked_of(step) for name, step in (steps | twins).items()}
        timings = interleaved(steps | twins, rounds, min_seconds=0.05)
        for method in METHODS:
            cost = timings[method + TWIN].median / cost_of(asked[method + TWIN])
            count = cost_of(asked[method])
            predicted, timing = cost * count + speeds.seconds(asked[method]), timings[method]
            rows.append(Row(network, method, predicted, timing.median, timing.iqr, count, cost))
    return found, rows


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, then their median and worst error."""
    lines = ["| network | method | operations | host µs each | predicted ms | measured ms (IQR) | error |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        cells = [row.network, row.method, row.operations, f"{1e6 * row.host_cost:.2f}"]
        cells += [f"{1e3 * row.predicted:.2f}", f"{1e3 * row.measured:.2f} ({1e3 * row.spread:.2f})"]
        lines.append("| " + " | ".join(map(str, [*cells, f"{100 * row.error:+.0f} %"])) + " |")
    errors = [abs(row.error) for row in rows]
    middle, worst = f"{100 * median(errors):.0f} %", f"{100 * max(errors):.0f} %"
    limits = f"limits {100 * MEDIAN:.0f} and {100 * WORST:.0f} %"
    verdict = f"Median error {middle}, worst {worst}; {limits}: {'held' if holds(rows) else 'MISSED'}."
    return "\n".join([*lines, "", verdict])


def holds(rows: Sequence[Row]) -> bool:
    """Whether both limits are held."""
    errors = [abs(row.error) for row in rows]
    return median(errors) <= MEDIAN and max(errors) <= WORST


def publish(out: Path, rounds: int, speeds: dict[str, Speeds], rows: Sequence[Row]) -> None:
    """Write the table and all numbers, with what they were measured on."""
    known = environment("cpu")
    out.mkdir(parents=True, exist_ok=True)
    environment_words = "\n".join(f"- {key}: {value}" for key, value in known.items())
    (out / "README.md").write_text(
        f"# Predicted and measured steps\n\n`python -m benchmarks.floor --rounds {rounds} --out {out}`: "
        f"medians of {rounds} rounds, one thread.\n\n{table(rows)}\n\n{ABOUT}\nMeasured on:\n\n"
        f"{environment_words}\n"
    )
    found = {
        "environment": known,
        "speeds": {network: asdict(own) for network, own in speeds.items()},
        "rows": [asdict(row) for row in rows],
    }
    (out / "floor.json").write_text(json.dumps(found, indent=1, default=str) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for README.md and floor.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    speeds, rows = measure(given.rounds)
    print(table(rows))
    if given.out is not None:
        publish(given.out, given.rounds, speeds, rows)


if __name__ == "__main__":
    main()
