"""float32 agrees with float64 on the paper's CIFAR-10 network, block by block."""

from __future__ import annotations

import warnings
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.optim import SecondOrder, guard
from curvlab.optim.guard import StagnationWarning

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


def stationary(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """Pairs of nearly equal examples with opposite residuals: gradients of size 1, their mean 1e-5."""
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(20, 400, generator=generator, dtype=torch.float64) + 1
    second = first + 1e-5 * torch.randn(20, 400, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Linear(400, 3).double()
    residual = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        targets = torch.cat([model(first) + residual, model(second) - residual])
    return model.to(dtype), torch.cat([first, second]).to(dtype), targets.to(dtype)


def test_the_norm_of_a_gradient_that_cancels_is_that_of_the_formed_one() -> None:
    norms = [
        float(curvlab.Problem(model, "mse", x, y).gradient().norm())
        for model, x, y in map(stationary, (torch.float32, torch.float64))
    ]
    model, x, y = stationary(torch.float64)
    nn.functional.mse_loss(model(x), y).backward()
    expected = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    assert norms[1] == pytest.approx(expected, rel=1e-9)
    assert norms[0] == pytest.approx(expected, rel=1e-2)


def test_an_optimizer_says_once_that_rounding_stops_its_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LOOK_EVERY", 2)
    model, x, y = stationary(torch.float32)
    optimizer = SecondOrder(model, "mse", "fisher", "ea-cg[route=sample]", lr=1e-12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.step(x, y)
    (said,) = [str(one.message) for one in caught if one.category is StagnationWarning]
    assert "`weight` has a relative residual of" in said
    assert "route=dense" in said


@pytest.mark.parametrize(
    ("dtype", "solver"), [(torch.float64, "ea-cg[route=sample]"), (torch.float32, "ea-cg[route=dense]")]
)
def test_an_optimizer_whose_solves_are_right_says_nothing(dtype: torch.dtype, solver: str) -> None:
    model, x, y = stationary(dtype)
    optimizer = SecondOrder(model, "mse", "fisher", solver, lr=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StagnationWarning)
        for _ in range(10):
            optimizer.step(x, y)
