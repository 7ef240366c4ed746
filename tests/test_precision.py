"""float32 agrees with float64 on the paper's CIFAR-10 network, block by block."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import curvlab

WIDTHS = (3072, 1024, 512, 256, 128, 64, 32, 16, 10)
PROVIDERS = ["fisher", "fisher[kind=mc]", "fisher[kind=exact]", "gauss-newton", "pch-1", "pch-2"]
TOLERANCE = 5e-6


def network() -> nn.Sequential:
    """Sigmoid, Xavier, biases zero."""
    layers: list[nn.Module] = []
    for a, b in pairwise(WIDTHS):
        linear = nn.Linear(a, b)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Sigmoid()]
    return nn.Sequential(*layers[:-1])


def relative_error(single: Tensor, double: Tensor) -> float:
    return float((single.double() - double).norm() / double.norm())


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["cross-entropy", "robust"])
def test_float32_agrees_with_float64_on_the_paper_s_network(criterion: str) -> None:
    model, x, y = network(), torch.randn(100, WIDTHS[0]), torch.randint(0, 10, (100,))
    single = curvlab.Problem(model, criterion, x, y)
    double = curvlab.Problem(deepcopy(model).double(), criterion, x.double(), y)
    pairs = zip(curvlab.estimate(PROVIDERS, single), curvlab.estimate(PROVIDERS, double), strict=True)
    for low, high in pairs:
        for a, b in zip(low.layers, high.layers, strict=True):
            bias = relative_error(
                a.blocks[f"{a.name}.bias"].to_dense(), b.blocks[f"{b.name}.bias"].to_dense()
            )
            inputs = relative_error(a.inputs.full.to_dense(), b.inputs.full.to_dense())
            # The error of a Kronecker product is at most the sum of its factors' errors, to first order.
            assert bias + inputs < TOLERANCE, (low.provider, a.name)
    expected = double.gradient()
    for name, value in single.gradient().items():
        assert relative_error(value, expected[name]) < TOLERANCE, name
