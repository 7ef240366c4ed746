"""Small problems that between them show a solver every form of layer: wide, narrow, degenerate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from curvlab.testing.cases import Case

__all__ = ["solvable_cases"]


def solvable_cases() -> Iterator[Case]:
    """Problems that every Kronecker curvature exists for."""
    yield _case("a layer wider than the batch", (12, 5, 3), examples=4)
    yield _case("layers narrower than the batch", (4, 5, 3), examples=9)
    yield _case("no biases", (12, 5, 3), examples=4, bias=False)
    yield _case("a subset of the layers", (7, 5, 3), examples=4, layers=("2",))
    yield _case("a single example", (6, 4, 3), examples=1)
    yield _case("repeated examples", (12, 5, 3), inputs=_inputs(3, 12).repeat(2, 1))
    yield _case("inputs that are zero", (12, 5, 3), inputs=torch.zeros(4, 12, dtype=torch.float64))
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64))
    yield _case("class weights, one of them zero", (12, 5, 3), examples=5, criterion=weighted)


def _case(
    label: str,
    widths: tuple[int, ...],
    examples: int = 4,
    bias: bool = True,
    layers: tuple[str, ...] | None = None,
    inputs: Tensor | None = None,
    criterion: str | nn.Module = "cross-entropy",
) -> Case:
    given = _inputs(examples, widths[0]) if inputs is None else inputs
    targets = torch.arange(len(given)) % widths[-1]
    return Case(label, _network(widths, bias), criterion, given, targets, layers)


def _inputs(examples: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(examples, width, dtype=torch.float64, generator=generator) + 0.3


def _network(widths: tuple[int, ...], bias: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        modules: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            modules += [nn.Linear(fan_in, fan_out, bias, dtype=torch.float64), nn.Sigmoid()]
    return nn.Sequential(*modules[:-1])
