"""How far PCH and its rivals are from |H| beyond chains, and what their steps do, on networks for CIFAR-10.

    python -m benchmarks.beyond_chains_errors ROWS.jsonl [--seeds 0 1 2] [--points 0 100 400] [--seconds N]
                                              [--parts bias steps weights] [--networks ...] [--weights 1200]
    python -m benchmarks.beyond_chains_errors ROWS.jsonl --table

At the parameters that Adam (lr 0.003, batches of 128) reaches after so many updates, on 128 other training
images:

    bias      ‖B̃ - |B|‖_F / ‖|B|‖_F of every layer's bias block and in total, from exact Hessian products
    weights   the same of weight blocks of at most `--weights` parameters, formed; seed 0 only
    steps     the direction d of each provider and solver: its cosine with the damped Newton step
              -((1-α)|H| + αI)⁻¹ g of the whole network (Lanczos, `KRYLOV` products; `settled` is how much its
              last tenth changed it), and the decrease of the loss at the best step size, on the images it is
              from and on 128 more

The control of steps is the gradient. A row is appended for each part, network, seed and point; what has one
is not measured again, so that a run which ends after `--seconds` goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvlab import Curvature, Problem, errors, estimate, solve
from curvlab.linalg import poseig
from curvlab.studies.compare.directions import Descent, DescentBench, closeness
from curvlab.studies.compare.spectra import Krylov
from curvlab.studies.setup import Setup

Row = dict[str, Any]

NETWORKS = {
    "cnn": "cnn[widths=8-16-32]",
    "residual": "resnet[widths=8-16-32,norm=none]",
    "transformer": "vit-tiny[width=32,depth=2,heads=2,patch=8]",
    "paper-narrow": "3072-64-32-16-10",
    "residual, GroupNorm": "resnet[widths=8-16-32,norm=group]",
}
BATCH, RATE, KRYLOV = 128, 0.003, 60
ALPHAS = (0.1, 0.01)
NODE, LAST = "pch[kind=rows,poseig=node{}]", "pch[kind=rows,poseig=last{}]"
BIAS = {
    "fisher": "fisher",
    "gauss-newton": "gauss-newton[kind=rows]",
    "gauss-newton, 1 draw": "gauss-newton[kind=rows,samples=1]",
    "node": NODE.format(""),
    "node, clipped": NODE.format(",gamma=0"),
    "last": LAST.format(""),
    "last, clipped": LAST.format(",gamma=0"),
    "node, 4 draws": NODE.format(",samples=4"),
    "last, 4 draws": LAST.format(",samples=4"),
}
CHAIN_BIAS = {
    "recursion": "pch-1",
    "recursion, last": "pch[poseig=last]",
    "kfra": "gauss-newton[kind=recursive]",
}
WEIGHTS = {
    f"{name}, {structure}": spec[:-1] + f",structure={structure}]"
    for name, spec in (
        ("gauss-newton", BIAS["gauss-newton"]),
        ("node", NODE.format("")),
        ("last", LAST.format("")),
    )
    for structure in ("kronecker", "ekfac", "block")
}
STEPS = {
    "fisher + kfi": ("fisher", "kfi"),
    "gauss-newton + kfi": (BIAS["gauss-newton"], "kfi"),
    "node + kfi": (NODE.format(""), "kfi"),
    "last + kfi": (LAST.format(""), "kfi"),
    "node, positions=4 + kfi": (NODE.format(",positions=4"), "kfi"),
    "last, positions=4 + kfi": (LAST.format(",positions=4"), "kfi"),
    "gauss-newton + ea-cg": (BIAS["gauss-newton"], "ea-cg"),
    "node + ea-cg": (NODE.format(""), "ea-cg"),
    "last + ea-cg": (LAST.format(""), "ea-cg"),
    "fisher, ekfac": ("fisher[structure=ekfac]", "exact"),
    "gauss-newton, ekfac": ("gauss-newton[kind=rows,structure=ekfac]", "exact"),
    "node, ekfac": (NODE.format(",structure=ekfac"), "exact"),
    "last, ekfac": (LAST.format(",structure=ekfac"), "exact"),
    "gauss-newton, layer": ("gauss-newton[kind=rows,samples=1,structure=layer]", "exact"),
    "node, layer": (NODE.format(",structure=layer"), "exact"),
    "last, layer": (LAST.format(",structure=layer"), "exact"),
}


@dataclass(frozen=True)
class Point:
    """A network along a run: its seed, and how many updates it has seen."""

    network: str
    seed: int
    updates: int

    def named(self, part: str) -> Row:
        """How a row names it."""
        return {"part": part, "network": self.network, "seed": self.seed, "updates": self.updates}


class Run:
    """A network that Adam trains, and the images that it is measured on."""

    def __init__(self, network: str, seed: int, data_dir: str | None) -> None:
        setup = Setup(arch=NETWORKS[network], data="cifar10", data_dir=data_dir, batch=BATCH, seed=seed)
        self.resolved = setup.resolve()
        self.model: nn.Module = self.resolved.build_model()
        self.data = self.resolved.load_data()
        chosen = torch.Generator().manual_seed(1000 + seed)
        order = torch.randperm(len(self.data.train), generator=chosen)
        self.measured = [self.data.train.batch(order[i * BATCH : (i + 1) * BATCH]) for i in range(2)]
        self._optimizer, self._updates = torch.optim.Adam(self.model.parameters(), lr=RATE), 0
        self._left: Iterator[tuple[Tensor, Tensor]] = iter(())

    def go(self, updates: int) -> None:
        """Train until so many updates are made."""
        while self._updates < updates:
            batch = next(self._left, None)
            if batch is None:
                self._left = iter(self.data.batches(BATCH, self.resolved.seed, self._updates, drop_last=True))
                continue
            self._optimizer.zero_grad()
            F.cross_entropy(self.model(batch[0]), batch[1]).backward()
            self._optimizer.step()
            self._updates += 1

    def problem(self, which: int = 0) -> Problem:
        """The criterion on images that were drawn for measuring."""
        return Problem(self.model, "cross-entropy", *self.measured[which])


def bias_errors(run: Run, seed: int) -> Row:
    """The relative errors of bias blocks by provider and layer."""
    problem, found = run.problem(), {}
    named = BIAS | (CHAIN_BIAS if problem.chain is not None else {})
    frame = errors(problem, list(named.values()))
    for label, (_, group) in zip(named, frame.groupby("provider", sort=False), strict=True):
        found[label] = dict(zip(group["layer_name"], group["relative"].round(5), strict=True))
    return {"loss": float(problem.loss()), "relative": found}


def weight_errors(run: Run, seed: int, limit: int) -> Row:
    """The relative errors of the weight blocks of at most `limit` parameters, from |H| formed."""
    problem = run.problem()
    exact = estimate("hessian", problem).blocks
    names = [
        n
        for n, block in exact.items()
        if n.endswith("weight") and len(block.shape) > 1 and block.numel <= limit
    ]
    truths = {name: poseig(exact[name].to_dense().double(), -1.0) for name in names}
    found: dict[str, dict[str, float]] = {}
    for label, spec in WEIGHTS.items():
        blocks = estimate(spec, problem).blocks
        found[label] = {
            name: float((blocks[name].to_dense().double() - truth).norm() / truth.norm())
            for name, truth in truths.items()
        }
    return {"relative": found, "parameters": {name: exact[name].numel for name in names}}


class AbsoluteNewton:
    """-((1-α)|H| + αI)⁻¹ g of the whole network, by the function of H that Lanczos' method gives."""

    def __init__(self, problem: Problem) -> None:
        hessian, gradient = estimate("hessian[structure=full]", problem), problem.gradient()
        self.shapes = {name: gradient[name].shape for name in gradient}
        sizes = [shape.numel() for shape in self.shapes.values()]

        def split(flat: Tensor) -> dict[str, Tensor]:
            pieces = zip(self.shapes.items(), flat.split(sizes), strict=True)
            return {name: piece.reshape(shape) for (name, shape), piece in pieces}

        def product(flat: Tensor) -> Tensor:
            image = hessian @ split(flat)
            return torch.cat([image[name].flatten() for name in self.shapes])

        self.split = split
        self.space = Krylov(product, torch.cat([gradient[name].flatten() for name in self.shapes]))
        self.space.grow(KRYLOV)

    def step(self, alpha: float) -> tuple[dict[str, Tensor], float]:
        """The step, and how much of it the last tenth of the products changed."""
        steps = self.space.steps
        shorter, found = (self._in_basis(size, alpha) for size in (steps * 9 // 10, steps))
        padded = torch.cat([shorter, shorter.new_zeros(steps - len(shorter))])
        flat = self.space._basis[:steps].T @ found.to(self.space.start)
        return self.split(-flat), float((found - padded).norm() / found.norm())

    def _in_basis(self, size: int, alpha: float) -> Tensor:
        values, vectors = torch.linalg.eigh(self.space.tridiagonal()[:size, :size])
        return vectors @ (vectors[0] * self.space.norm / ((1 - alpha) * values.abs() + alpha))


def step_measures(run: Run, seed: int) -> Row:
    """Cosine with the damped Newton step and decrease of the loss, of each pair and of controls."""
    problem = run.problem()
    bench, newton, gradient = (
        DescentBench(problem, run.problem(1)),
        AbsoluteNewton(problem),
        problem.gradient(),
    )
    curvatures: dict[str, Curvature] = {}
    found: dict[str, dict[str, Row]] = {}
    settled = {}
    for alpha in ALPHAS:
        target, settled[str(alpha)] = newton.step(alpha)
        directions: dict[str, Callable[[], Mapping[str, Tensor]]] = {
            "gradient": lambda: {name: -gradient[name] for name in gradient},
            "newton": partial(dict, target),
        }
        for label, (spec, solver) in STEPS.items():
            if spec not in curvatures:
                curvatures[spec] = estimate(spec, problem)
            directions[label] = lambda c=curvatures[spec], s=solver, a=alpha: (
                solve(s, c, gradient, alpha=a).direction
            )  # type: ignore[misc]
        found[str(alpha)] = {label: _measured(make, target, bench) for label, make in directions.items()}
    return {"loss": bench.loss, "alphas": found, "settled": settled}


def _measured(
    make: Callable[[], Mapping[str, Tensor]], target: Mapping[str, Tensor], bench: DescentBench
) -> Row:
    direction = make()
    formed = {name: direction[name] for name in target}
    close = closeness([(formed[name], target[name]) for name in target])
    went: Descent = bench.along(formed)
    return {
        "cosine": round(close.cosine, 5),
        "best": round(went.best, 5),
        "other": round(went.other, 5),
        "full": went.full if math.isfinite(went.full) else None,
    }


def read_rows(path: Path) -> list[Row]:
    """The rows so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(options: argparse.Namespace) -> None:
    """Append the rows that are missing, until the time is over."""
    parts: dict[str, Callable[[Run, int], Row]] = {
        "bias": bias_errors,
        "steps": step_measures,
        "weights": partial(weight_errors, limit=options.weights),
    }
    known = {(r["part"], r["network"], r["seed"], r["updates"]) for r in read_rows(options.rows)}
    for seed in options.seeds:
        for network in options.networks:
            run = None
            for updates in sorted(options.points):
                point = Point(network, seed, updates)
                for part in options.parts:
                    named = point.named(part)
                    if tuple(named.values()) in known or (part == "weights" and seed):
                        continue
                    if process_time() > options.seconds:
                        return
                    run = run or Run(network, seed, options.data_dir)
                    run.go(updates)
                    start = process_time()
                    row = {**named, **parts[part](run, seed), "torch": torch.__version__}
                    row["cpu_seconds"] = round(process_time() - start, 2)
                    with options.rows.open("a") as file:
                        file.write(json.dumps(row) + "\n")


def table(rows: list[Row]) -> str:
    """Medians (ranges) over seeds in Markdown: by network and number of updates."""
    lines = []
    for part in ("bias", "weights", "steps"):
        cells: dict[str, dict[tuple[str, int], list[str]]] = defaultdict(dict)
        for network in NETWORKS:
            of_network = [r for r in rows if r["part"] == part and r["network"] == network]
            for updates in sorted({r["updates"] for r in of_network}):
                chosen = [r for r in of_network if r["updates"] == updates]
                for label, values in _values(part, chosen).items():
                    cells[label][network, updates] = [_spread(column) for column in values]
        if cells:
            lines += [*_markdown(part, cells), ""]
    return "\n".join(lines)


def _values(part: str, rows: list[Row]) -> dict[str, list[list[float]]]:
    """Columns of numbers by label: one number per seed in each."""
    if part == "bias":
        labels = rows[0]["relative"]
        return {label: [[r["relative"][label]["Total"] for r in rows]] for label in labels}
    if part == "weights":
        labels = rows[0]["relative"]
        return {label: [[v for r in rows for v in r["relative"][label].values()]] for label in labels}
    return {
        f"{label}, α={alpha}": [
            [r["alphas"][alpha][label][column] for r in rows] for column in ("cosine", "best", "other")
        ]
        for alpha in rows[0]["alphas"]
        for label in rows[0]["alphas"][alpha]
    }


def _spread(values: list[float]) -> str:
    return (
        f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})"
        if len(values) > 1
        else f"{values[0]:.2f}"
    )


def _markdown(part: str, cells: Mapping[str, Mapping[tuple[str, int], list[str]]]) -> list[str]:
    heads = list(dict.fromkeys(head for row in cells.values() for head in row))
    named = [f"{network}, {updates}" for network, updates in heads]
    lines = [f"| {part} | {' | '.join(named)} |", f"| --- |{' --- |' * len(heads)}"]
    for label, row in cells.items():
        lines.append(f"| {label} | {' | '.join(' / '.join(row.get(head, ['–'])) for head in heads)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--points", nargs="+", type=int, default=[0, 100, 400])
    parser.add_argument("--parts", nargs="+", default=["bias", "steps", "weights"])
    parser.add_argument("--weights", type=int, default=1200, help="most parameters of a weight block")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the processor")
    parser.add_argument("--data-dir")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        measure(options)
    print(table(read_rows(options.rows)))


if __name__ == "__main__":
    main()
