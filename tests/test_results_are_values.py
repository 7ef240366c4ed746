"""What a result hands out is the caller's: editing it in place changes no later result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlab

PROVIDERS = (
    "fisher",
    "fisher[kind=exact]",
    "fisher[structure=diagonal]",
    "gauss-newton",
    "gauss-newton[kind=exact]",
    "pch-1",
    "hessian",
)
SOLVERS = ("kfi", "sm-kfi", "cg", "ea-cg", "exact")


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.arange(6) % 3


def problem(model: nn.Module, streamed: bool = False, **options: Any) -> curvlab.Problem:
    x, y = batch()
    if streamed:
        return curvlab.Problem(model, "cross-entropy", [(x[:2], y[:2]), (x[2:], y[2:])], **options)
    return curvlab.Problem(model, "cross-entropy", x, y, **options)


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Mapping):
        return [found[name] for name in found]
    return [found]


def spoil(read: Callable[[], Any]) -> None:
    """Read twice what may be edited; the second reading is as the first was."""
    first = tensors(read())
    copies = [tensor.clone() for tensor in first]
    for tensor in first:
        tensor.add_(1).mul_(7)
    for now, before in zip(tensors(read()), copies, strict=True):
        assert torch.equal(now, before)


@pytest.mark.parametrize("model", [chain, convolution])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_gradients_and_losses_are_the_callers(
    model: Callable[[], nn.Module], streamed: bool, l2: float
) -> None:
    given = problem(model(), streamed, l2=l2)
    gradient = given.gradient()
    spoil(lambda: gradient)
    spoil(given.gradient)
    spoil(given.loss)
    spoil(gradient.norm)


@pytest.mark.parametrize("l2", [0.0, 0.1])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_a_curvature_returns_is_the_callers(provider: str, l2: float) -> None:
    given = problem(chain(), l2=l2)
    curvature = curvlab.estimate(provider, given)
    vectors = dict(given.gradient().items())
    spoil(curvature.to_dense)
    spoil(curvature.diagonal)
    spoil(curvature.trace)
    spoil(curvature.frobenius_norm)
    spoil(curvature.eigvalsh)
    spoil(lambda: curvature @ vectors)
    for block in curvature.blocks.values():
        for read in (block.to_dense, block.diagonal, block.trace, block.frobenius_norm, block.eigvalsh):
            spoil(read)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("model", [chain, convolution])
def test_directions_are_the_callers(model: Callable[[], nn.Module], solver: str, plain: bool) -> None:
    given = problem(model())
    gradient = given.gradient()
    chosen = dict(gradient.items()) if plain else gradient
    solution = curvlab.solve(solver, curvlab.estimate("fisher", given), chosen, alpha=0.1)
    spoil(lambda: solution.direction)
    # Measures are taken when they are read: of the step as it was solved, not as it was edited.
    again = curvlab.solve(solver, curvlab.estimate("fisher", given), given.gradient(), alpha=0.1)
    for name, block in solution.blocks.items():
        assert block.residual == pytest.approx(again.blocks[name].residual, rel=1e-6, abs=1e-12)
