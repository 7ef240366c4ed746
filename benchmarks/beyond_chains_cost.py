"""What a step with PCH costs on a ResNet-18 and a transformer, in gradients, beside curvlinops in one run.

    python -m benchmarks.beyond_chains_cost ROWS.jsonl [--networks resnet18 transformer] [--batches 32 128]
                                            [--threads 1 2] [--rounds 3] [--seconds 240]
    python -m benchmarks.beyond_chains_cost ROWS.jsonl --table

A gradient is a forward and a backward pass; every step includes its own. The ResNet-18 is that for 32 × 32
images (SiLU, no norm, 11.2 M parameters), the transformer has 4 blocks of width 256, 65 positions. Methods
are timed each with a gradient before it, round by round; the figure is the median ratio by the clock.
`peak` is that of tensor bytes over the gradient's, parameters and batch included in both, counted on one
number of threads. One row is appended for each network, batch, number of threads and method; what has a row
is not measured again: a run that ends after `--seconds` goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.any_model_cost import PEER, Method, Row, Work, has_peer, peer_step, second_order_step
from curvlab.architectures import architectures
from curvlab.measure.memory import peak_bytes

NETWORKS = {
    "resnet18": "resnet[widths=64-128-256-512,blocks=2-2-2-2,activation=silu,norm=none]",
    "transformer": "vit-tiny[width=256,depth=4,heads=4,patch=4]",
}
PEAK, SLOWER = 1.4, 3.0


def pch(fields: str) -> str:
    """The provider by rows."""
    return f"pch[kind=rows,{fields}]"


METHODS = (
    Method("node + kfi", pch("poseig=node,positions=4"), "kfi", 2.2, SLOWER),
    Method("node + ea-cg", pch("poseig=node,positions=4"), "ea-cg", 1.9, SLOWER),
    Method("last + kfi", pch("poseig=last,positions=4"), "kfi", 3.0, SLOWER),
    Method("last + ea-cg", pch("poseig=last,positions=4"), "ea-cg", 2.7, SLOWER),
    Method("node, structure=layer + exact", pch("poseig=node,structure=layer"), "exact", 4.0),
)


@dataclass(frozen=True)
class Cell:
    """A network at a batch size, on some threads."""

    network: str
    batch: int
    threads: int

    def named(self, method: str) -> Row:
        """How a row names it."""
        return {"network": self.network, "batch": self.batch, "threads": self.threads, "step": method}

    def make(self) -> tuple[nn.Module, Tensor, Tensor]:
        """The network and a batch of random images, from a seed."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.batch, 3, 32, 32, generator=generator)
        return (
            architectures.make(NETWORKS[self.network]).build(seed=0),
            x,
            torch.randint(10, (self.batch,), generator=generator),
        )


def seconds_of(work: Work) -> float:
    """What a call takes by the clock."""
    start = perf_counter()
    work()
    return perf_counter() - start


def measured(cell: Cell, method: Method | None, rounds: int, peak: object = None) -> Row:
    """Times of a method (None: the peer) and of gradients before each, and both peaks unless known."""
    torch.set_num_threads(cell.threads)
    model, x, y = cell.make()
    parameters = list(model.parameters())

    def gradient() -> object:
        return torch.autograd.grad(F.cross_entropy(model(x), y), parameters)

    own = deepcopy(model)
    step = peer_step(own, x, y) if method is None else second_order_step(own, method, x, y)
    gradient(), step()
    pairs = [(seconds_of(gradient), seconds_of(step)) for _ in range(rounds)]
    if peak is None:
        of_gradient, of_step = (
            peak_bytes(work, device="cpu", baseline=[*held, x, y])
            for work, held in ((gradient, parameters), (step, list(own.parameters())))
        )
        peak = of_step / of_gradient
    return {
        **cell.named(PEER if method is None else method.name),
        "gradient_s": median(first for first, _ in pairs),
        "step_s": median(second for _, second in pairs),
        "gradients": median(second / first for first, second in pairs),
        "least": min(second / first for first, second in pairs),
        "most": max(second / first for first, second in pairs),
        "peak": peak,
        "rounds": rounds,
        "torch": torch.__version__,
    }


def read_rows(path: Path) -> list[Row]:
    """The rows so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def known_peak(cell: Cell, method: Method | None, rows: list[Row]) -> object:
    """That of the same step on another number of threads, which is the same: a count of bytes."""
    wanted = cell.named(PEER if method is None else method.name)
    same = (r for r in rows if all(r[key] == wanted[key] for key in ("network", "batch", "step")))
    return next((r["peak"] for r in same), None)


def open_cells(cells: list[Cell], rows: list[Row]) -> Iterator[tuple[Cell, Method | None]]:
    """What has no row yet."""
    known = {(r["network"], r["batch"], r["threads"], r["step"]) for r in rows}
    methods: tuple[Method | None, ...] = (*METHODS, *([None] if has_peer() else []))
    for cell in cells:
        for method in methods:
            if tuple(cell.named(PEER if method is None else method.name).values()) not in known:
                yield cell, method


def table(rows: list[Row]) -> str:
    """The rows in Markdown, with the limits and what missed them."""
    limits = {method.name: method for method in METHODS}
    peers = {(r["network"], r["batch"], r["threads"]): r for r in rows if r["step"] == PEER}
    lines = [
        "| network | batch | threads | step | gradients (range) | at most | peer takes | peak | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        method, peer = limits.get(str(r["step"])), peers.get((r["network"], r["batch"], r["threads"]))
        most = "" if method is None else f"{method.most}"
        slower = float(peer["gradients"]) / float(r["gradients"]) if peer and method else None  # type: ignore[arg-type]
        kept = method is None or (
            float(r["gradients"]) <= method.most  # type: ignore[arg-type]
            and float(r["peak"]) <= PEAK  # type: ignore[arg-type]
            and (method.faster is None or slower is None or slower >= method.faster)
        )
        lines.append(
            f"| {r['network']} | {r['batch']} | {r['threads']} | {r['step']} | {r['gradients']:.2f} "
            f"({r['least']:.2f}–{r['most']:.2f}) | {most} | {'' if slower is None else f'{slower:.1f} ×'} "
            f"| {r['peak']:.2f} | {'' if method is None else 'ok' if kept else 'MISSED'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        end = monotonic() + options.seconds
        cells = [Cell(n, b, t) for b in options.batches for t in options.threads for n in options.networks]
        for cell, method in open_cells(cells, read_rows(options.rows)):
            if monotonic() > end:
                break
            peak = known_peak(cell, method, read_rows(options.rows))
            row = measured(cell, method, options.rounds, peak)
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(table(read_rows(options.rows)))


if __name__ == "__main__":
    main()
