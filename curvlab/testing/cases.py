"""Small problems: between them every structure a provider meets, and every form of layer a solver does.

Each is built anew whenever it is asked for, so that no check sees what another has done to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.exceptions import ProblemError
from curvlab.problem import Problem

__all__ = ["Case", "provider_cases", "solver_cases"]

EXAMPLES, INPUTS, OUTPUTS = 5, 6, 3
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "softplus": nn.Softplus,
}
CRITERIA = ("cross-entropy", "robust", "mse", "tukey")
REGRESSION = ("mse", "tukey")


@dataclass(frozen=True, eq=False)
class Case:
    """A problem in its parts: it can be built in another dtype, or with its batch split."""

    label: str
    model: nn.Module
    criterion: Any
    inputs: Tensor
    targets: Tensor
    layers: tuple[str, ...] | None = None

    @classmethod
    def of(cls, problem: Problem) -> Case:
        """The parts of a user's own problem; a stream's batches are joined."""
        batches = list(problem.batches())
        given = [batch.inputs for batch in batches if isinstance(batch.inputs, Tensor)]
        if len(given) < len(batches):
            raise ProblemError(
                "checks take a problem whose inputs are one tensor: wrap the model so that it does"
            )
        inputs = torch.cat(given)
        targets = torch.cat([batch.targets for batch in batches])
        layers = tuple(problem.network.parameters)
        return cls(repr(problem), problem.model, problem.criterion, inputs, targets, layers)

    def problem(self, dtype: torch.dtype = torch.float64) -> Problem:
        """The problem on one batch, with a model of its own."""
        return self._problem(dtype, lambda inputs, targets: (inputs, targets))

    def stream(self, dtype: torch.dtype = torch.float64) -> Problem:
        """The same examples as a stream of uneven batches."""
        return self._problem(dtype, lambda inputs, targets: (_uneven_batches(inputs, targets),))

    def _problem(self, dtype: torch.dtype, data: Callable[[Tensor, Tensor], tuple[Any, ...]]) -> Problem:
        model = copy.deepcopy(self.model).to(dtype)
        given = data(_convert(self.inputs, dtype), _convert(self.targets, dtype))
        return Problem(model, self.criterion, *given, layers=self.layers)


def _convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()


def _uneven_batches(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Batches of one, of two, and of the rest."""
    cuts = [start for start in (0, 1, 3) if start < len(inputs)]
    ends = [*cuts[1:], len(inputs)]
    return [(inputs[a:b], targets[a:b]) for a, b in zip(cuts, ends, strict=True)]


def provider_cases() -> Iterator[Case]:
    """Activations times criteria, then what else a model or a batch may have."""
    for criterion in CRITERIA:
        for activation, module in ACTIVATIONS.items():
            yield _provider_case(f"{activation} layers with {criterion}", _mlp(module), criterion)
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), ignore_index=1)
    yield _provider_case("class weights and ignored examples", _mlp(nn.Tanh), weighted)
    yield _provider_case("a frozen weight and a missing bias", _partly_frozen(), "cross-entropy")
    yield _provider_case("a subset of the layers", _mlp(nn.Sigmoid), "robust", ("2",))
    yield _provider_case("a single layer", _seeded_model(lambda: nn.Linear(INPUTS, OUTPUTS)), "cross-entropy")
    yield _provider_case("a residual connection", _seeded_model(Residual), "cross-entropy")


def _provider_case(
    label: str, model: nn.Module, criterion: Any, layers: tuple[str, ...] | None = None
) -> Case:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, INPUTS, dtype=torch.float64, generator=generator)
    targets = torch.arange(EXAMPLES) % OUTPUTS
    if criterion in REGRESSION:
        targets = torch.randn(EXAMPLES, OUTPUTS, dtype=torch.float64, generator=generator)
    return Case(label, model, criterion, inputs, targets, layers)


def _seeded_model(make: Callable[[], nn.Module]) -> nn.Module:
    """The model in float64, the same each time, with the caller's random state left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


def _mlp(activation: type[nn.Module], bias: bool = True) -> nn.Module:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(INPUTS, 3), activation(), nn.Linear(3, 4, bias), activation(), nn.Linear(4, OUTPUTS)
        )

    return _seeded_model(make)


def _partly_frozen() -> nn.Module:
    model = _mlp(nn.Sigmoid, bias=False)
    model.get_parameter("0.weight").requires_grad_(False)
    return model


class Residual(nn.Module):
    """Linear layers that are no chain: the first one's output also goes around the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, OUTPUTS)
        self.last = nn.Linear(OUTPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        """z + last(tanh z) with z = first(x)."""
        z = self.first(x)
        return z + self.last(z.tanh())


def solver_cases() -> Iterator[Case]:
    """Problems that every Kronecker curvature exists for: layers that are wide, narrow, degenerate."""
    yield _solver_case("a layer wider than the batch", (12, 5, 3), examples=4)
    yield _solver_case("layers narrower than the batch", (4, 5, 3), examples=9)
    yield _solver_case("no biases", (12, 5, 3), examples=4, bias=False)
    yield _solver_case("a subset of the layers", (7, 5, 3), examples=4, layers=("2",))
    yield _solver_case("a single example", (6, 4, 3), examples=1)
    yield _solver_case("repeated examples", (12, 5, 3), inputs=_shifted_inputs(3, 12).repeat(2, 1))
    yield _solver_case("inputs that are zero", (12, 5, 3), inputs=torch.zeros(4, 12, dtype=torch.float64))
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64))
    yield _solver_case("class weights, one of them zero", (12, 5, 3), examples=5, criterion=weighted)


def _solver_case(
    label: str,
    widths: tuple[int, ...],
    examples: int = 4,
    bias: bool = True,
    layers: tuple[str, ...] | None = None,
    inputs: Tensor | None = None,
    criterion: str | nn.Module = "cross-entropy",
) -> Case:
    given = _shifted_inputs(examples, widths[0]) if inputs is None else inputs
    targets = torch.arange(len(given)) % widths[-1]
    return Case(label, _sigmoid_network(widths, bias), criterion, given, targets, layers)


def _shifted_inputs(examples: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(examples, width, dtype=torch.float64, generator=generator) + 0.3


def _sigmoid_network(widths: tuple[int, ...], bias: bool) -> nn.Module:
    def make() -> nn.Module:
        modules: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            modules += [nn.Linear(fan_in, fan_out, bias, dtype=torch.float64), nn.Sigmoid()]
        return nn.Sequential(*modules[:-1])

    return _seeded_model(make)
