"""Conjugate gradients on several systems at once, each iteration reported.

    A x = b    from x = 0 or a given start, for symmetric A

The systems share the operator's one pass: their vectors are columns of one tensor, `dot` gives a
scalar a system and `spread` lays scalars out over the columns. Scalars stay tensors; a finished
system is frozen by a mask, and convergence is read back to the host every `read_interval` iterations
(0: never). Right-hand sides are normalised, so the small residuals of late iterations do not underflow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["CGResult", "Outcome", "conjugate_gradients"]

Vectors = Callable[[Tensor], Tensor]


class Outcome(IntEnum):
    """How a system ended."""

    LIMIT = 0
    CONVERGED = 1
    NEGATIVE_CURVATURE = 2
    BREAKDOWN = 3


@dataclass(frozen=True, eq=False)
class CGResult:
    """x, and for each system its outcome, iterations and relative residuals (iterations + 1, systems)."""

    x: Tensor
    outcomes: Tensor
    iterations: Tensor
    residuals: Tensor


def conjugate_gradients(
    operator: Vectors,
    rhs: Tensor,
    *,
    dot: Callable[[Tensor, Tensor], Tensor],
    spread: Vectors,
    max_iter: int,
    tol: float,
    read_interval: int = 1,
    start: Tensor | None = None,
    precondition: Vectors | None = None,
) -> CGResult:
    """Solve A x = b to a residual of `tol` times that of x = 0, in at most `max_iter` iterations.

    Negative curvature, pᵀAp < -8 ε ‖p‖ ‖Ap‖, ends a system with the best x so far (at the first
    iteration: the right-hand side itself, steepest descent). pᵀAp = 0 is a breakdown.

    >>> a = torch.diag(torch.tensor([1.0, 4.0]))
    >>> result = conjugate_gradients(
    ...     lambda x: a @ x, torch.ones(2, 1), dot=lambda x, y: (x * y).sum(0), spread=lambda s: s,
    ...     max_iter=5, tol=1e-6)
    >>> result.x.round(decimals=4).flatten().tolist(), result.iterations.tolist()
    ([1.0, 0.25], [2])
    """
    scale = dot(rhs, rhs).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    b = rhs / spread(scale)
    x = torch.zeros_like(b) if start is None else start / spread(scale)
    r = b if start is None else b - operator(x)
    z = r if precondition is None else precondition(r)
    p = z
    rz = dot(r, z)
    square = rz if precondition is None else dot(r, r)
    # Squares below the smallest normal number lose their digits, so with tol = 0 the end is there.
    limits = torch.finfo(rhs.dtype)
    enough = max(tol * tol, limits.tiny / limits.eps)
    # Written so that a NaN goes on to end as a breakdown: it has not converged.
    active = ~(square <= enough)
    squares, worked = [square], []
    ended = _Ended(torch.zeros_like(active), torch.zeros_like(active))
    zero = torch.zeros_like(rz)
    for k in range(max_iter):
        if read_interval and k % read_interval == 0 and not bool(active.any()):
            break
        ap = operator(p)
        pap = dot(p, ap)
        # Where reads are free and every pᵀAp > 0 (always, for a definite operator) no norm need be known.
        if read_interval != 1 or not bool(pap.amin() > 0):
            ended = ended.joined(active, pap, _bound(dot, p, ap))
            active = active & ~ended.negative & ~ended.flat
            if k == 0 and start is None:
                x = torch.where(spread(ended.negative), b, x)
        step = spread(torch.where(active, rz / pap, zero))
        x = torch.addcmul(x, step, p)
        r = torch.addcmul(r, step, ap, value=-1)
        z = r if precondition is None else precondition(r)
        rz_next = dot(r, z)
        square = rz_next if precondition is None else dot(r, r)
        squares.append(square)
        worked.append(active)
        active = active & ~(square <= enough)
        p = torch.addcmul(z, spread(torch.where(active, rz_next / rz, zero)), p)
        rz = rz_next
    residuals = torch.stack(squares).clamp(min=0).sqrt()
    iterations = torch.stack(worked).sum(0) if worked else torch.zeros_like(active, dtype=torch.int64)
    return CGResult(x * spread(scale), ended.outcomes(active), iterations, residuals)


@dataclass(frozen=True, eq=False)
class _Ended:
    """The systems that negative curvature, or a direction of none, has ended."""

    negative: Tensor
    flat: Tensor

    def joined(self, active: Tensor, pap: Tensor, bound: Tensor) -> _Ended:
        """With those that end in this iteration."""
        negative = active & (pap < -bound)
        flat = active & ~negative & ~(pap > 0)
        return _Ended(self.negative | negative, self.flat | flat)

    def outcomes(self, active: Tensor) -> Tensor:
        """How each system ended, given those still active."""
        outcomes = torch.where(active, int(Outcome.LIMIT), int(Outcome.CONVERGED))
        outcomes = torch.where(self.negative, int(Outcome.NEGATIVE_CURVATURE), outcomes)
        return torch.where(self.flat, int(Outcome.BREAKDOWN), outcomes)


def _bound(dot: Callable[[Tensor, Tensor], Tensor], p: Tensor, ap: Tensor) -> Tensor:
    """8 ε ‖p‖ ‖Ap‖."""
    return 8 * torch.finfo(p.dtype).eps * (dot(p, p) * dot(ap, ap)).clamp(min=0).sqrt()
