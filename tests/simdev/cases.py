"""Problems for the simulated device with their twins on the CPU, and what a step asks of the device."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import curvlab
from curvlab.architectures import architecture
from curvlab.linalg.execution import host_costs
from curvlab.optim import SecondOrder
from curvlab.studies.setup import Setup
from curvlab.studies.train.plan import TrainPlan
from curvlab.studies.train.run import TrainRun
from tests.simdev.device import Counts, Sim
from tests.solver_cases import PROVIDERS

__all__ = [
    "CHAIN",
    "COUNTED",
    "EVERY_PROVIDER",
    "NETWORKS",
    "STRUCTURES",
    "chain",
    "cnn",
    "counts_of_step",
    "problem",
    "reads_in_training",
    "reads_of_step",
    "residual",
    "seeded",
]

CHAIN = (24, 16, 12, 10, 8, 8, 6, 5, 4)
"""As many layers as 3072-1024-…-10, narrow."""

STRUCTURES = [
    f"{provider}structure={structure}]"
    for provider in ("fisher[", "gauss-newton[kind=rows,", "pch[kind=rows,")
    for structure in ("ekfac", "diagonal", "block", "layer", "full")
]
OTHER_KINDS = [
    "gauss-newton[kind=rows]",
    "gauss-newton[structure=full,kind=exact]",
    "pch[poseig=last]",
    "pch[kind=rows]",
    "pch[kind=rows,poseig=node]",
    "pch[kind=exact]",
    "hessian[kind=rows]",
]
EVERY_PROVIDER = [*PROVIDERS, *OTHER_KINDS, *STRUCTURES]
"""Kinds and structures too, of each what makes a difference to how a step is taken."""

Made = tuple[nn.Module, Tensor, Tensor]


def chain(widths: tuple[int, ...] = CHAIN, examples: int = 20) -> Made:
    """Linear layers and sigmoids."""
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        modules += [nn.Linear(fan_in, fan_out), nn.Sigmoid()]
    model = nn.Sequential(*modules[:-1])
    return model, torch.randn(examples, widths[0]), torch.randint(widths[-1], (examples,))


def cnn() -> Made:
    """A convolution, pooling and a head."""
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    return nn.Sequential(*layers), torch.randn(8, 2, 6, 6), torch.randint(3, (8,))


NETWORKS = {"chain": chain, "cnn": cnn}


def seeded(name: str) -> Made:
    """A network with its batch, on the CPU, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return NETWORKS[name]()


def problem(made: Made, device: str) -> curvlab.Problem:
    """The same network and batch on `device`."""
    model, inputs, targets = made
    return curvlab.Problem(
        copy.deepcopy(model).to(device), "cross-entropy", inputs.to(device), targets.to(device)
    )


def residual() -> Made:
    """A residual network, on random images."""
    model = architecture("resnet8[norm=none,activation=silu]").build(inputs=(3, 32, 32), outputs=10)
    return model, torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


WIDE = (3072, 1024, 512, 256, 128, 64, 32, 16, 10)
COUNTED = {"chain": lambda: chain(WIDE, 500), "resnet8": residual}
"""The networks whose steps are counted."""


def counts_of_step(sim: Sim, network: str, provider: str, solver: str) -> Counts:
    """What the second step asks of the device: the first makes what the others keep."""
    host_costs.cache_clear()  # may have been measured with other costs
    model, inputs, targets = COUNTED[network]()
    model, inputs, targets = model.to("sim"), inputs.to("sim"), targets.to("sim")
    optimizer = SecondOrder(model, "cross-entropy", provider, solver, lr=0.1, alpha=0.1)
    optimizer.step(inputs, targets)
    with sim.counted() as counting:
        optimizer.step(inputs, targets)
    return counting.counts


def reads_of_step(sim: Sim, provider: str, solver: str, **options: Any) -> int:
    """The reads of the second step of a pair on the narrow chain."""
    host_costs.cache_clear()
    model, inputs, targets = (own.to("sim") for own in seeded("chain"))
    optimizer = SecondOrder(model, "cross-entropy", provider, solver, lr=0.1, alpha=0.1, **options)
    optimizer.step(inputs, targets)
    with sim.counted() as counting:
        optimizer.step(inputs, targets)
    return counting.counts.reads


def reads_in_training(sim: Sim, optimizer: str) -> tuple[list[int], list[int]]:
    """The reads of every step of a training of two epochs of six, and apart those of each epoch's scores."""
    host_costs.cache_clear()
    arch = "64-32-24-20-16-14-12-11-10"
    setup = Setup(data="digits[train=120]", arch=arch, batch=20, device="sim")
    run = TrainRun(TrainPlan(setup, optimizer=optimizer, epochs=2))
    run.begin()
    steps: list[int] = []
    scores: list[int] = []
    score = run._score

    def counted() -> dict[str, float]:
        with sim.counted() as own:
            found = score()
        scores.append(own.counts.reads)
        return found

    run._score = counted  # type: ignore[method-assign]
    while not run.finished:
        before = len(scores)
        with sim.counted() as counting:
            run.advance()
        steps.append(counting.counts.reads - sum(scores[before:]))
    return steps, scores
