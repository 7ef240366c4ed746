"""What a direction does to the loss: its decrease along θ + ηd, on the batch it is from and on another one.

    actual      1 - L(θ + ηd) / L(θ)       at η = 1, and at the best η that is found
    predicted   -(gᵀd + ½ dᵀCd) / L(θ)     by the pair's own curvature C, at η = 1

It needs no reference, so it exists for every network, however large. The best η is the first minimum that is
found from η = 1 on by doubling or halving, refined by golden sections of its bracket: about ten forward
passes. On the second batch the decrease is taken at the η that the first one chose, as a user would.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.criteria.base import LossTerms
from curvlab.curvature import Curvature
from curvlab.model.network import Inputs, ModelCall
from curvlab.problem import Problem

__all__ = ["Descent", "DescentBench", "backpropagate", "predicted_decrease"]

LARGEST, SMALLEST = 2.0**6, 2.0**-16
SECTIONS = 4
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Descent:
    """The relative decrease of the loss along a direction; NaN on another batch where there is none.

    `rate` is the best step size, `line` what was tried: (η, loss) in rising order of η.
    """

    full: float
    best: float
    rate: float
    other: float
    line: tuple[tuple[float, float], ...]


class DescentBench:
    """Measures directions from the parameters of a problem, on a copy of its model.

    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> torch.nn.init.constant_(model.weight, 2.0)
    Parameter containing:
    tensor([[2.]], dtype=torch.float64, requires_grad=True)
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> bench = DescentBench(Problem(model, "mse", one, 0 * one))
    >>> found = bench.along({"weight": -4 * one})
    >>> round(found.full, 3), round(found.best, 2), round(found.rate, 1)
    (0.0, 1.0, 0.5)
    """

    def __init__(self, problem: Problem, other: Problem | None = None) -> None:
        self.problem, self.other = problem, other
        self._model = copy.deepcopy(problem.model)
        self._call = ModelCall(self._model, problem.network.call.output)
        self._start = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        self.loss = self._loss(problem)
        self._other_loss = math.nan if other is None else self._loss(other)

    def along(self, direction: Mapping[str, Tensor]) -> Descent:
        """The decrease of the loss along `direction`."""
        step = {name: direction[name].detach() for name in direction}
        tried: dict[float, float] = {}

        def loss_at(rate: float) -> float:
            if rate not in tried:
                with self._moved(step, rate):
                    tried[rate] = self._loss(self.problem)
            return tried[rate]

        full = loss_at(1.0)
        best = _best_rate(loss_at)
        other = math.nan
        if self.other is not None:
            with self._moved(step, best):
                other = self._share(self._loss(self.other), self._other_loss)
        line = tuple(sorted(tried.items()))
        return Descent(self._share(full, self.loss), self._share(tried[best], self.loss), best, other, line)

    def _share(self, loss: float, start: float) -> float:
        return 1 - loss / start if start > 0 else math.nan

    def _moved(self, step: Mapping[str, Tensor], rate: float) -> _Moved:
        return _Moved(self._model, self._start, step, rate)

    def _loss(self, problem: Problem) -> float:
        with torch.no_grad():
            terms = [self._terms(batch.inputs, batch.targets) for batch in problem.batches()]
            total = sum(float(one.total_weight) for one in terms)
            data = sum(float(one.loss) * float(one.total_weight) for one in terms) / total
            if not problem.l2:
                return data
            chosen = dict(self._model.named_parameters())
            squares = sum(float(chosen[name].square().sum()) for name in problem.network.parameters)
            return data + 0.5 * problem.l2 * squares

    def _terms(self, inputs: Inputs, targets: Tensor) -> LossTerms:
        logits = self._call(inputs)
        layout = self.problem.torch_layout
        return LossTerms.of(self.problem.criterion, logits, targets, torch_layout=layout)


class _Moved:
    """The model at θ + ηd inside, at θ outside."""

    def __init__(
        self, model: torch.nn.Module, start: Mapping[str, Tensor], step: Mapping[str, Tensor], rate: float
    ) -> None:
        self.parameters = dict(model.named_parameters())
        self.start, self.step, self.rate = start, step, rate

    def __enter__(self) -> None:
        self._set(self.rate)

    def __exit__(self, *error: object) -> None:
        self._set(0.0)

    def _set(self, rate: float) -> None:
        with torch.no_grad():
            for name, change in self.step.items():
                start = self.start[name]
                self.parameters[name].copy_(start if rate == 0 else start + rate * change.to(start))


def _best_rate(loss_at: Callable[[float], float]) -> float:
    """The step size of the first minimum from 1 on; a loss that is not finite counts as the worst."""

    def value(rate: float) -> float:
        loss = loss_at(rate)
        return loss if math.isfinite(loss) else math.inf

    rate = 1.0
    for candidate in _along(2.0 if value(2.0) < value(1.0) else 0.5):
        if not value(candidate) < value(rate) and math.isfinite(value(rate)):
            break
        rate = candidate
    low, high = rate / 2, rate * 2
    for _ in range(SECTIONS):
        first = high * (low / high) ** GOLDEN
        second = low * (high / low) ** GOLDEN
        if value(first) < value(second):
            high = second
        else:
            low = first
    found: Iterable[float] = (rate, first, second)
    return min(found, key=value)


def _along(factor: float) -> Iterator[float]:
    rate = factor
    while SMALLEST <= rate <= LARGEST:
        yield rate
        rate *= factor


def predicted_decrease(
    curvature: Curvature, gradient: Mapping[str, Tensor], direction: Mapping[str, Tensor], loss: float
) -> float:
    """What the quadratic model with this curvature promises of a full step, as a share of the loss."""
    step = {name: direction[name].detach() for name in curvature.blocks}
    image = curvature @ step
    slope = sum(float((gradient[name] * step[name]).sum()) for name in step)
    bend = sum(float((image[name] * step[name]).sum()) for name in step)
    return -(slope + bend / 2) / loss if loss > 0 else math.nan


def backpropagate(problem: Problem, inputs: Inputs, targets: Tensor) -> float:
    """Add the gradient of the mean loss of a batch to the parameters' `.grad`; the loss itself."""
    with torch.enable_grad():
        logits = problem.network.call(inputs)
        terms = LossTerms.of(problem.criterion, logits, targets, torch_layout=problem.torch_layout)
        share = terms.within * terms.share[:, None]
        logits.backward(terms.as_logits(problem.criterion.gradients(terms.logits, terms.targets), share))
    if problem.l2:
        for parameter in problem.network.parameters.values():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=problem.l2)
    return float(terms.loss)
