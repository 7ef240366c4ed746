"""Small problems for the simulated device, and their twins on the CPU."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn

import curvlab

__all__ = ["CHAIN", "NETWORKS", "chain", "cnn", "problem", "seeded"]

CHAIN = (24, 16, 12, 10, 8, 8, 6, 5, 4)
"""As many layers as 3072-1024-…-10, narrow."""

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
