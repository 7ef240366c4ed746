"""Seconds of whole steps on a chain of Linear layers, as JSON, and those of two trees in turns.

    PYTHONPATH=tree python -P benchmarks/chain_step.py [--repetitions 3] [--threads 1] [--network wide]
    python -P benchmarks/chain_step.py --trees BEFORE NOW --repetitions 12

Uses torch and the names that every version of curvlab has had, so that one file measures two trees. The
wide network is 3072-1024-512-256-128-64-32-16-10 with batch 500, the narrow one 64-32-16-10 with batch 100,
both with sigmoids, on random data; processor seconds. The damping is named: its default has changed, and
conjugate gradients take more iterations for less damping. With `--trees` each has a process of its own, they
take turns round by round; what is printed are medians, ratios to SGD, and those of the last to the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from time import process_time

import torch
from torch import nn

WIDTHS = {"wide": (3072, 1024, 512, 256, 128, 64, 32, 16, 10), "narrow": (64, 32, 16, 10)}
BATCH = {"wide": 500, "narrow": 100}
METHODS = (("pch-1", "ea-cg"), ("pch-1", "kfi"), ("fisher", "kfi"))
Round = dict[str, float]


def network(widths: Sequence[int]) -> nn.Sequential:
    """The chain, from a seed."""
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        modules += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*modules[:-1])


def steps_on(name: str) -> dict[str, Callable[[], object]]:
    """SGD's step and every second-order one, all on the same network."""
    from curvlab.optim import SecondOrder  # of the tree that is measured

    widths = WIDTHS[name]
    model = network(widths)
    x, y = torch.randn(BATCH[name], widths[0]), torch.randint(widths[-1], (BATCH[name],))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def sgd_step() -> None:
        sgd.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        sgd.step()

    steps: dict[str, Callable[[], object]] = {"sgd": sgd_step}
    for provider, solver in METHODS:
        optimizer = SecondOrder(model, "cross-entropy", provider, solver, lr=1e-4, alpha=0.05)
        steps[f"{provider} + {solver}"] = partial(optimizer.step, x, y)
    return steps


def one_round(steps: dict[str, Callable[[], object]]) -> Round:
    """Processor seconds of one step of each kind."""
    seconds = {}
    for name, step in steps.items():
        start = process_time()
        step()
        seconds[name] = process_time() - start
    return seconds


def in_turns(trees: Sequence[str], arguments: Sequence[str], repetitions: int) -> dict[str, object]:
    """Rounds of several trees, in turns."""
    command = [sys.executable, "-P", __file__, "--serve", *arguments]
    workers = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": tree},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for tree in trees
    ]
    rounds: list[list[Round]] = [[] for _ in trees]
    for _ in range(repetitions + 2):  # the first two warm up
        for worker, found in zip(workers, rounds, strict=True):
            assert worker.stdin is not None
            assert worker.stdout is not None
            print("go", file=worker.stdin, flush=True)
            found.append(json.loads(worker.stdout.readline()))
    for worker in workers:
        worker.communicate()
    kept = [found[2:] for found in rounds]
    report: dict[str, object] = {
        tree: {
            name: [median(r[name] for r in found), median(r[name] / r["sgd"] for r in found)]
            for name in found[0]
        }
        for tree, found in zip(trees, kept, strict=True)
    }
    pairs = list(zip(kept[0], kept[-1], strict=True))
    report["last over first"] = {name: median(b[name] / a[name] for a, b in pairs) for name in pairs[0][0]}
    return report


def main() -> None:
    """Take every kind of step in turns and print the median of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--network", choices=WIDTHS, default="wide")
    parser.add_argument("--trees", nargs="+", help="folders of curvlab to be measured in turns")
    parser.add_argument("--serve", action="store_true", help="print a round for every line of input")
    options = parser.parse_args()
    if options.trees:
        own = ["--threads", str(options.threads), "--network", options.network]
        print(json.dumps(in_turns(options.trees, own, options.repetitions), indent=1))
        return
    torch.set_num_threads(options.threads)
    steps = steps_on(options.network)
    if options.serve:
        for _ in sys.stdin:
            print(json.dumps(one_round(steps)), flush=True)
        return
    rounds = [one_round(steps) for _ in range(options.repetitions + 1)][1:]  # the first warms up
    print(json.dumps({name: median(found[name] for found in rounds) for name in steps}))


if __name__ == "__main__":
    main()
