"""What one rank knows of its own rows: local means with their weight, from one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from curvlab.exceptions import NoRowsError
from curvlab.gradient import Gradient, GradientMean, gradient_of
from curvlab.problem import Problem
from curvlab.providers.statistics import Means, Statistic, TensorMean, Values

__all__ = ["Part", "part_of"]


@dataclass(frozen=True, eq=False)
class Part:
    """Means over the rows of one rank, and Σ c_i of these rows."""

    weight: float
    values: dict[Statistic, Values]
    gradient: Gradient | None = None
    loss: Tensor | None = None


def part_of(
    problem: Problem, statistics: Sequence[Statistic], gradient: bool, loss: bool, first_row: int
) -> Part | None:
    """The part of this rank; None where it has no row that counts."""
    try:
        if not (statistics or gradient or loss):
            # A model that cannot be recorded, which `hessian` alone accepts, still has a weight.
            return Part(float(problem.total_weight()), {})
        return _pass(problem, statistics, gradient, loss, first_row)
    except NoRowsError:
        return None


def _pass(
    problem: Problem, statistics: Sequence[Statistic], gradient: bool, loss: bool, first_row: int
) -> Part:
    means, gradients, losses = Means(statistics, first_row), GradientMean(), TensorMean()
    weight = 0.0
    for recording in problem.recordings():
        means.add(recording)
        if gradient and problem.streamed:
            gradients.add(recording)
        if loss:
            losses.add(recording.loss, recording.total_weight)
        weight += float(recording.total_weight)
    if not weight:
        raise NoRowsError("no row of this rank counts")
    found = None
    if gradient:
        found = gradients.value() if problem.streamed else gradient_of(problem.recording())
    return Part(weight, means.values(), found, losses.value() if loss else None)
