"""What a step sends between ranks, and what a step takes on one and on two of them: `docs/scaling.md`.

    python -m benchmarks.scaling
    torchrun --nproc-per-node=2 -m benchmarks.scaling --measure cifar10 500

The first computes the tables of bytes. The second measures a step: in seconds of a rank's processor, which
other work on the machine changes little, and by the clock.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from statistics import median
from time import perf_counter, process_time

import torch

from curvlab.architectures import architecture
from curvlab.distributed import LayerTraffic, launched, layer_traffic, shard
from curvlab.optim import SecondOrder

WIDTHS = {"cifar10": 3072, "imagenet10": 150528}
HIDDEN = (1024, 512, 256, 128, 64, 32, 16, 10)
ROWS = (100, 1000)
RANKS = (2, 4, 8, 64)
BYTES = 4  # float32
PAIRS = (("pch-1", "ea-cg"), ("fisher", "kfi"))


def widths(name: str) -> tuple[int, ...]:
    return WIDTHS[name], *HIDDEN


def layers(name: str, rows: int) -> list[LayerTraffic]:
    """PCH's traffic layer by layer, for `rows` rows over all ranks."""
    sizes = list(pairwise(widths(name)))
    return [layer_traffic(rows, n, o, hidden=t < len(sizes)) for t, (n, o) in enumerate(sizes, start=1)]


def megabytes(elements: float) -> str:
    size = elements * BYTES / 1e6
    return "–" if not size else f"{size:,.1f}" if size >= 0.1 else f"{size:.3f}"


def print_layers(name: str) -> None:
    """Payload by layer, in MB."""
    print(f"\n{'-'.join(map(str, widths(name)))}, float32, MB of payload a step (all ranks together)\n")
    print("| layer | n_{t-1} × n_t | " + " | ".join(f"M = {m}: rows | sums" for m in ROWS) + " | DDP |")
    print("| --- | --- |" + " ---: | ---: |" * len(ROWS) + " ---: |")
    columns = [layers(name, m) for m in ROWS]
    for t, (n, o) in enumerate(pairwise(widths(name))):
        cells = [f"{megabytes(c[t].gathered)} | {megabytes(c[t].reduced)}" for c in columns]
        print(f"| {t + 1} | {n} × {o} | {' | '.join(cells)} | {megabytes(columns[0][t].data_parallel)} |")
    totals = [(sum(x.gathered for x in c), sum(x.reduced for x in c)) for c in columns]
    sums = [f"{megabytes(gathered)} | {megabytes(reduced)}" for gathered, reduced in totals]
    print(f"| all | | {' | '.join(sums)} | {megabytes(sum(x.data_parallel for x in columns[0]))} |")


def print_model(name: str) -> None:
    """What a ring brings into each rank, for N ranks and 100 rows on each."""
    print(f"\n{name}: MB that a ring brings into each rank per step, 100 rows on each rank\n")
    print("| ranks | M | PCH | DDP | ratio |\n| ---: | ---: | ---: | ---: | ---: |")
    for ranks in RANKS:
        found = layers(name, 100 * ranks)
        ours = sum(layer.received(ranks) for layer in found)
        ddp = sum(layer.received_data_parallel(ranks) for layer in found)
        print(f"| {ranks} | {100 * ranks} | {megabytes(ours)} | {megabytes(ddp)} | {ours / ddp:.3f} |")


def measure(name: str, rows: int, repetitions: int = 7) -> None:
    """Seconds of a step on the ranks that torchrun started, for a batch of `rows` over all of them."""
    torch.set_num_threads(1)
    with launched("cpu") as launch:
        mine = shard(rows, launch.rank, launch.ranks)
        inputs = torch.randn(rows, WIDTHS[name], generator=torch.Generator().manual_seed(0))[mine]
        targets = (torch.arange(rows) % HIDDEN[-1])[mine]
        for provider, solver in PAIRS:
            model = architecture("-".join(map(str, widths(name)))).build(0)
            optimizer = SecondOrder(
                model, "cross-entropy", provider, solver, lr=1e-3, process_group=launch.process_group
            )
            walls, busy = [], []
            for _ in range(repetitions + 1):
                wall, processor = perf_counter(), process_time()
                optimizer.step(inputs, targets)
                walls.append(perf_counter() - wall)
                busy.append(process_time() - processor)
            if launch.leads:
                print(
                    f"{name}, M = {rows}, {launch.ranks} ranks, {provider} + {solver}: a step takes ", end=""
                )
                print(f"{median(busy[1:]):.3f} s of a rank's processor, {spread(walls[1:])} s by the clock")


def spread(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(sys.argv[-2], int(sys.argv[-1]))
    else:
        for network in WIDTHS:
            print_layers(network)
        for network in WIDTHS:
            print_model(network)
