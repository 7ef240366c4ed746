"""Seconds of whole steps on a chain of Linear layers, as JSON: one tree's part of `any_model_cost --before`.

    PYTHONPATH=tree python -P benchmarks/chain_step.py [--repetitions 3] [--threads 1]

Uses torch and the names that every version of curvlab has had, so that one file measures two trees. The
network is 3072-1024-512-256-128-64-32-16-10 with sigmoids, batch 500, on random data; processor seconds. The
damping is named: its default has changed, and conjugate gradients take more iterations for less damping.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from statistics import median
from time import process_time

import torch
from torch import nn

from curvlab.optim import SecondOrder

WIDTHS = (3072, 1024, 512, 256, 128, 64, 32, 16, 10)
BATCH = 500
METHODS = (("pch-1", "ea-cg"), ("pch-1", "kfi"), ("fisher", "kfi"))


def network() -> nn.Sequential:
    """The chain, from a seed."""
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        modules += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*modules[:-1])


def main() -> None:
    """Take every kind of step in turns and print the median of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = network()
    x, y = torch.randn(BATCH, WIDTHS[0]), torch.randint(WIDTHS[-1], (BATCH,))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def sgd_step() -> None:
        sgd.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        sgd.step()

    steps = {"sgd": sgd_step}
    for provider, solver in METHODS:
        optimizer = SecondOrder(model, "cross-entropy", provider, solver, lr=1e-4, alpha=0.05)
        steps[f"{provider} + {solver}"] = lambda optimizer=optimizer: optimizer.step(x, y)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.repetitions + 1):  # the first round warms up
        for name, step in steps.items():
            start = process_time()
            step()
            seconds[name].append(process_time() - start)
    print(json.dumps({name: median(found[1:]) for name, found in seconds.items()}))


if __name__ == "__main__":
    main()
