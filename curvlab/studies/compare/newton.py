"""The exact damped Newton direction, block by block, and how far another direction is from it.

    ((1-α) H_b + αI) n_b = -g_b         H_b the exact Hessian's block of parameter b
    cosine = ⟨d, n⟩ / (‖d‖ ‖n‖)         distance = ‖d - n‖ / ‖n‖

Solved by conjugate gradients to a relative residual of 1e-8, on a float64 copy on the CPU: float32 does
not reach it. Where a damped block is indefinite there is no Newton direction to compare with.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvlab.defaults import NEWTON_LIMIT
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.solvers import Solution, Status, solve

__all__ = ["Closeness", "Newton", "newton"]

TOLERANCE = 1e-8
MAX_ITERATIONS = 2000


@dataclass(frozen=True)
class Closeness:
    """How close a direction is to Newton's; NaN with the reason where that is not known.

    A direction of zero has no cosine, and is at distance 1: it leaves the whole way.
    """

    cosine: float
    distance: float
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Newton:
    """The direction by parameter name, and why it is missing for those that have none."""

    direction: Mapping[str, Tensor]
    reasons: Mapping[str, str]

    def block(self, direction: Mapping[str, Tensor], name: str) -> Closeness:
        """The closeness of `direction` for one parameter."""
        return self._closeness(direction, [name])

    def joint(self, direction: Mapping[str, Tensor]) -> Closeness:
        """The closeness of `direction` over all parameters together."""
        return self._closeness(direction, list(direction))

    def _closeness(self, direction: Mapping[str, Tensor], names: list[str]) -> Closeness:
        missing = [name for name in names if name in self.reasons]
        if missing:
            others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            return Closeness(math.nan, math.nan, f"{missing[0]}{others}: {self.reasons[missing[0]]}")
        pairs = [(direction[name].detach().to("cpu", torch.float64), self.direction[name]) for name in names]
        dot = sum(float((d * n).sum()) for d, n in pairs)
        gap, size, ours = (
            _norm(x) for x in ((d - n for d, n in pairs), (n for _, n in pairs), (d for d, _ in pairs))
        )
        if size == 0:
            return Closeness(math.nan, math.nan, "the gradient is zero here, and so is Newton's direction")
        if ours == 0:
            return Closeness(math.nan, gap / size, "this direction is zero, so it has no angle to Newton's")
        return Closeness(dot / (ours * size), gap / size)


def newton(problem: Problem, alpha: float, *, parameters: int = NEWTON_LIMIT) -> Newton:
    """The exact damped Newton direction of `problem`, if it has at most `parameters` parameters.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    >>> problem = Problem(model, "cross-entropy", torch.eye(3), torch.tensor([0, 1, 0]))
    >>> exact = newton(problem, alpha=0.05)
    >>> round(exact.joint(exact.direction).cosine, 9)
    1.0
    """
    sizes = _sizes(problem)
    if sum(sizes.values()) > parameters:
        why = f"left out: {sum(sizes.values()):,} parameters, more than the limit of {parameters:,}"
        return Newton({}, dict.fromkeys(sizes, why))
    exact = _in_float64(problem)
    solver = f"cg[max_iter={MAX_ITERATIONS},tol={TOLERANCE}]"
    solution = solve(solver, estimate("hessian", exact), exact.gradient(), alpha=alpha)
    reasons = {name: why for name in solution.blocks if (why := _reason(solution, name))}
    return Newton({name: solution.direction[name].detach() for name in solution.direction}, reasons)


def _sizes(problem: Problem) -> dict[str, int]:
    """How many numbers each parameter with a block has."""
    parameters = dict(problem.model.named_parameters())
    names = [name for layer in problem.layers for name in layer.names]
    return {name: parameters[name].numel() for name in names}


def _reason(solution: Solution, name: str) -> str:
    block = solution.blocks[name]
    if block.status is Status.CONVERGED:
        return ""
    if block.status is Status.NEGATIVE_CURVATURE:
        return "the damped Hessian is indefinite, so Newton's direction need not be one of descent"
    return f"not solved to {TOLERANCE:g}: residual {block.residual:.1e} after {block.iterations} iterations"


def _in_float64(problem: Problem) -> Problem:
    model = copy.deepcopy(problem.model).to("cpu", torch.float64)
    batches = [(pytree.tree_map_only(Tensor, _real, b.inputs), _real(b.targets)) for b in problem.batches()]
    data = (batches,) if problem.streamed else batches[0]
    chosen = list(problem.network.parameters)
    output = problem.network.call.output
    return Problem(model, problem.criterion, *data, layers=chosen, l2=problem.l2, output=output)


def _real(targets: Tensor) -> Tensor:
    return targets.to("cpu", torch.float64) if targets.is_floating_point() else targets.to("cpu")


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(tensor.norm()) for tensor in tensors))
