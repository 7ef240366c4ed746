"""The change a step makes to one parameter, and whether it would write NaN or infinity.

    δ = η (μ v + s d),    |δ| ≤ η (μ max|v| + s max|d|),    max|d| ≤ ‖M‖ ‖H'‖ for a step d = M H' in factors

with learning rate η, momentum buffer v and clipping s. A bound far below the largest number of the
dtype settles the question with one read back to the host; where it does not, δ is formed and looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.exceptions import SolveError
from curvlab.linalg import Step
from curvlab.linalg.execution import Limits, deferring, in_pieces, require
from curvlab.linalg.factors import max_abs
from curvlab.linalg.steps import add_step
from curvlab.solvers.solution import Solution, Status, check_parameters

__all__ = ["Change", "StagnationWarning", "check_finite", "check_writable", "looks_at_residual", "stagnated"]

# Where rounding leaves a relative residual beyond this, the step is not the one that was asked for.
STAGNATED_BEYOND = 1e-2
FIRST_LOOK, LOOK_EVERY = 10, 100


class StagnationWarning(UserWarning):
    """Rounding has stopped the solves of a step far from their solution."""


@dataclass(frozen=True, eq=False)
class Change:
    """δ = rate · (momentum · buffer + scale · direction) of the parameter called `name`."""

    name: str
    parameter: Tensor
    direction: Step
    rate: float
    scale: float = 1.0
    buffer: Tensor | None = None
    momentum: float = 0.0
    decay: float = 0.0

    def bound(self) -> Tensor:
        """A scalar that no entry of δ exceeds."""
        bound = self.direction.magnitude() * abs(self.scale)
        if self.buffer is not None:
            bound = bound + self.momentum * max_abs(self.buffer)
        return bound * abs(self.rate)

    def parts(self) -> list[Tensor]:
        """Tensors whose norms `bound_from` makes a bound of."""
        return [*self.direction.parts(), *([] if self.buffer is None else [self.buffer])]

    def bound_from(self, norms: Sequence[float]) -> float:
        """A number that no entry of δ exceeds, from the norms of `parts`."""
        if self.buffer is None:
            return self.direction.bound(norms) * abs(self.scale) * abs(self.rate)
        bound = self.direction.bound(norms[:-1]) * abs(self.scale) + self.momentum * norms[-1]
        return bound * abs(self.rate)

    def form(self) -> Tensor:
        """δ itself."""
        step = self.direction.form() * self.scale
        if self.buffer is not None:
            step = step.add(self.buffer, alpha=self.momentum)
        return step * self.rate

    def apply(self) -> None:
        """θ ← (1 - rate · decay) θ + δ, in place; with no buffer no δ is formed."""
        if self.decay:
            self.parameter.mul_(1 - self.rate * self.decay)
        if self.buffer is None:
            add_step(self.direction, self.parameter, self.rate * self.scale)
            return
        add_step(self.direction, self.buffer.mul_(self.momentum), self.scale)
        self.parameter.add_(self.buffer, alpha=self.rate)


def check_writable(changes: list[Change]) -> None:
    """Raise `SolveError` if a parameter cannot be changed in place, before any is."""
    check_parameters({change.name: change.parameter for change in changes})


def check_finite(changes: list[Change]) -> None:
    """Raise `SolveError`, naming the layer, if any change would write NaN or infinity."""
    if deferring() or (in_pieces(changes[0].parameter) and not _few(changes)):
        bounds = torch.stack([change.bound() for change in changes])
        limits = Limits("the step would write NaN or infinity", high=_limit(changes))
        require([bounds], lambda found: _refuse_beyond(changes, found), limits)
        return
    # Norms of all parts at once, bounds on the host: one launch instead of some for every parameter. On a CPU
    # the entries are what counts, unless they are few.
    parts = [change.parts() for change in changes]
    norms = torch._foreach_norm([tensor for own in parts for tensor in own])

    def judge(found: list[float]) -> None:
        given = iter(found)
        bounds = [
            change.bound_from([next(given) for _ in own]) for change, own in zip(changes, parts, strict=True)
        ]
        _refuse_beyond(changes, bounds)

    require(norms, judge)


FEW_ENTRIES = 1 << 14


def _few(changes: list[Change]) -> bool:
    return sum(change.parameter.numel() for change in changes) <= FEW_ENTRIES


def _limit(changes: list[Change]) -> float:
    return min(torch.finfo(change.parameter.dtype).max for change in changes) / 4


def _refuse_beyond(changes: list[Change], bounds: Sequence[float]) -> None:
    limit = _limit(changes)
    for change, bound in zip(changes, bounds, strict=True):
        if not bound <= limit and not _finite(change):
            layer = change.name.rpartition(".")[0]
            raise SolveError(
                f"layer `{layer}`: the step would write NaN or infinity into `{change.name}`; nothing was "
                f"changed. Increase alpha, lower lr, or set max_grad_norm"
            )


def _finite(change: Change) -> bool:
    moved = (change.parameter + change.form()).to(change.parameter.dtype)
    return bool(torch.isfinite(moved).all())


def looks_at_residual(step: int) -> bool:
    """Whether the residuals of a step, counted from 0, are looked at.

    It takes about a fifth of a step's time to know them: that of the tenth step and of every hundredth.

    >>> [step for step in range(250) if looks_at_residual(step)]
    [9, 99, 199]
    """
    return step + 1 == FIRST_LOOK or (step + 1) % LOOK_EVERY == 0


def stagnated(solution: Solution) -> str | None:
    """What to say where rounding stopped a solve with a residual above `STAGNATED_BEYOND`, if it did."""
    solution.read()
    far = [
        block
        for block in solution.blocks.values()
        if block.status is Status.STAGNATED and block.residual > STAGNATED_BEYOND
    ]
    if not far:
        return None
    worst = max(far, key=lambda block: block.residual)
    return (
        f"`{solution.solver}` on `{solution.provider}`: rounding stopped {len(far)} of "
        f"{len(solution.blocks)} blocks far from their solution; `{worst.name}` has a relative residual of "
        f"{worst.residual:.2g} (route {worst.route}), so that steps there are not those that were asked for. "
        f"Near a stationary point, where the gradients of the examples cancel, train in float64, or use the "
        f"solver with route=dense. This is said once"
    )
