"""The change a step makes to one parameter, and whether it would write NaN or infinity.

    δ = η (μ v + s d),    |δ| ≤ η (μ max|v| + s max|d|),    max|d| ≤ ‖M‖ ‖H'‖ for a step d = M H' in factors

with learning rate η, momentum buffer v and clipping s. A bound far below the largest number of the
dtype settles the question with one read back to the host; where it does not, δ is formed and looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.exceptions import SolveError
from curvlab.linalg import Step
from curvlab.linalg.factors import max_abs
from curvlab.linalg.steps import add_step
from curvlab.measure import device

__all__ = ["Change", "check_finite"]


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


def check_finite(changes: list[Change]) -> None:
    """Raise `SolveError`, naming the layer, if any change would write NaN or infinity."""
    bounds = torch.stack([change.bound() for change in changes])
    if not device.readable(bounds):
        return
    limit = min(torch.finfo(change.parameter.dtype).max for change in changes) / 4
    for change, bound in zip(changes, bounds.tolist(), strict=True):
        if not bound <= limit and not _finite(change):
            layer = change.name.rpartition(".")[0]
            raise SolveError(
                f"layer `{layer}`: the step would write NaN or infinity into `{change.name}`; nothing was "
                f"changed. Increase alpha, lower lr, or set max_grad_norm"
            )


def _finite(change: Change) -> bool:
    moved = (change.parameter + change.form()).to(change.parameter.dtype)
    return bool(torch.isfinite(moved).all())
