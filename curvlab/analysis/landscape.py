"""The loss around the present parameters, along one or two directions, beside its quadratic model.

    loss        L(θ + x d₁ + y d₂)
    quadratic   L(θ) + gᵀ s + ½ sᵀ H s,     s = x d₁ + y d₂

with g the gradient and H the whole Hessian. Directions are used as they are given, so x is in units of d₁: an
eigenvector of length one, or a step to the next iterate (x = 1). The parameters are put aside while the loss
is evaluated, not written to: a curvature of the same model is as fresh afterwards as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.analysis.figures import axes_for
from curvlab.criteria.base import AllWeightsZeroError, LossTerms
from curvlab.exceptions import ArgumentError, SpecError, describe_argument
from curvlab.linalg.execution import full_precision
from curvlab.matrix_functions import check_whole
from curvlab.problem import Problem
from curvlab.providers.base import estimate
from curvlab.specs import check_number

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Landscape", "landscape"]

Direction = Mapping[str, Tensor]
EVALUATION_SECONDS = 1e-4  # the least that one takes


@dataclass(frozen=True, eq=False)
class Landscape:
    """The loss and its quadratic model on a line, (points,), or a square of points, (points, points)."""

    x: Tensor
    y: Tensor | None
    loss: Tensor
    quadratic: Tensor

    def frame(self) -> pd.DataFrame:
        """One row per point: x, y where there are two directions, loss, quadratic."""
        import pandas as pd

        if self.y is None:
            places = {"x": self.x.tolist()}
        else:
            pairs = list(product(self.x.tolist(), self.y.tolist()))
            places = {"x": [x for x, _ in pairs], "y": [y for _, y in pairs]}
        return pd.DataFrame(
            {**places, "loss": self.loss.flatten().tolist(), "quadratic": self.quadratic.flatten().tolist()}
        )

    def plot(self, ax: Axes | None = None) -> Figure:
        """Both along a line, or the level lines of both (the quadratic model's are dashed)."""
        axes = axes_for(ax)
        if self.y is None:
            axes.plot(self.x.tolist(), self.loss.tolist(), label="loss")
            axes.plot(self.x.tolist(), self.quadratic.tolist(), "--", label="quadratic model")
            axes.set(xlabel="x", ylabel="loss")
            axes.legend(frameon=False)
        else:
            grid = (self.x.numpy(force=True), self.y.numpy(force=True))
            lines = axes.contour(*grid, self.loss.numpy(force=True).T, levels=12)
            axes.contour(
                *grid,
                self.quadratic.numpy(force=True).T,
                levels=lines.levels,
                linestyles="dashed",
                alpha=0.5,
            )
            axes.set(xlabel="x", ylabel="y")
        return axes.get_figure()  # type: ignore[return-value]

    def __repr__(self) -> str:
        shape, low, high = " × ".join(map(str, self.loss.shape)), self.loss.min(), self.loss.max()
        return f"Landscape({shape} points, loss from {float(low):.4g} to {float(high):.4g})"


@full_precision
def landscape(
    problem: Problem,
    directions: Direction | Sequence[Direction],
    radius: float = 1.0,
    *,
    points: int = 21,
) -> Landscape:
    """The loss from -radius to radius along one direction, or over a square along two.

    Args:
        problem: the model at its present parameters, with criterion and data.
        directions: {name: tensor}, such as `spectrum.eigenvectors[0]`, or a list of one or two; parameters
            that are not named stay where they are.
        radius: how far, in units of the directions.
        points: along each.

    >>> import curvlab
    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> problem = curvlab.Problem(model, "mse", torch.ones(1, 1).double(), torch.ones(1, 1).double())
    >>> curvlab.landscape(problem, {"weight": torch.ones(1, 1).double()}, points=3).loss.tolist()
    [4.0, 1.0, 0.0]
    """
    chosen = _check_directions(problem, directions)
    radius = check_number("radius", radius, "a positive and finite number", lambda x: 0 < x < inf)
    points = check_whole("points", points, 2)
    days = points ** len(chosen) * EVALUATION_SECONDS / 86_400
    if days > 1:
        raise SpecError(
            f"points={points:,}: {points ** len(chosen):.3g} evaluations of the loss take at least "
            f"{days:,.1f} days; 21 points along each direction are usual"
        )
    line = torch.linspace(-radius, radius, points, dtype=torch.float64)
    places = [(x,) for x in line.tolist()] if len(chosen) == 1 else list(product(line.tolist(), repeat=2))
    base, gradient, curved = _quadratic_model(problem, chosen)
    losses = [_loss_at(problem, chosen, place) for place in places]
    steps = torch.tensor(places, dtype=torch.float64)
    quadratic = base + steps @ gradient + 0.5 * torch.einsum("pi,ij,pj->p", steps, curved, steps)
    shape = (points,) * len(chosen)
    second = None if len(chosen) == 1 else line.clone()
    return Landscape(
        line, second, torch.tensor(losses, dtype=torch.float64).reshape(shape), quadratic.reshape(shape)
    )


def _check_directions(
    problem: Problem, directions: Direction | Sequence[Direction]
) -> list[dict[str, Tensor]]:
    if not isinstance(problem, Problem):
        raise ArgumentError(f"landscape takes a Problem; got a {describe_argument(problem)}")
    given = [directions] if isinstance(directions, Mapping) else directions
    mappings = isinstance(given, Sequence) and all(isinstance(one, Mapping) and one for one in given)
    if not mappings or len(given) not in (1, 2):
        raise ArgumentError(
            f"landscape takes one or two directions, {{parameter name: tensor}} each; got "
            f"{describe_argument(directions)}"
        )
    parameters = problem.network.parameters
    for direction in given:
        for name, value in direction.items():
            dense = isinstance(value, Tensor) and value.layout is torch.strided
            if not dense or value.is_complex() or value.is_meta or not bool(torch.isfinite(value).all()):
                raise ArgumentError(
                    f"landscape: a direction has a {describe_argument(value)} for `{name}`; expected a dense "
                    f"tensor of finite real numbers"
                )
            if name not in parameters or value.shape != parameters[name].shape:
                known = parameters[name].shape if name in parameters else f"a name among {list(parameters)}"
                raise ArgumentError(
                    f"landscape: a direction has `{name}` of shape {tuple(value.shape)}; expected {known}"
                )
    return [{n: value.detach().to(parameters[n]) for n, value in one.items()} for one in given]


def _quadratic_model(problem: Problem, directions: Sequence[Direction]) -> tuple[float, Tensor, Tensor]:
    """L(θ), gᵀdᵢ and dᵢᵀHdⱼ."""
    hessian = estimate("hessian[structure=full]", problem)
    mean = problem.gradient()
    whole = [{name: d.get(name, torch.zeros_like(mean[name])) for name in hessian.blocks} for d in directions]
    images = [hessian @ one for one in whole]
    slopes = [_dot(mean, one) for one in whole]
    curved = [[_dot(a, image) for image in images] for a in whole]
    as_double = {"dtype": torch.float64}
    return float(problem.loss()), torch.tensor(slopes, **as_double), torch.tensor(curved, **as_double)  # type: ignore[arg-type]


def _dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return sum(float((a[name].double() * b[name].double()).sum()) for name in b)


def _loss_at(problem: Problem, directions: Sequence[Direction], place: Sequence[float]) -> float:
    moved: dict[str, Tensor] = {}
    for direction, distance in zip(directions, place, strict=True):
        for name, value in direction.items():
            start = moved.get(name, problem.network.parameters[name].detach())
            moved[name] = start + distance * value
    with _moved_to(problem.network.parameters, moved), torch.no_grad():
        return _loss(problem)


@contextmanager
def _moved_to(parameters: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> Iterator[None]:
    """The parameters hold other tensors meanwhile; their own are not written to, and come back."""
    own = {name: parameters[name].data for name in moved}
    try:
        for name, value in moved.items():
            parameters[name].data = value
        yield
    finally:
        for name, value in own.items():
            parameters[name].data = value


def _loss(problem: Problem) -> float:
    """E[ξ] + λ/2 ‖θ‖² from forward passes alone."""
    total = weight = 0.0
    for batch in problem.batches():
        with suppress(AllWeightsZeroError):
            logits = problem.network.call(batch.inputs)
            terms = LossTerms.of(problem.criterion, logits, batch.targets, torch_layout=problem.torch_layout)
            counted = float(terms.total_weight)
            total += float(terms.loss) * counted
            weight += counted
    if not weight:
        raise AllWeightsZeroError
    squares = sum(float(p.detach().double().square().sum()) for p in problem.network.parameters.values())
    return total / weight + 0.5 * problem.l2 * squares
