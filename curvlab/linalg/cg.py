"""Conjugate gradients on several systems at once, each iteration reported.

    A x = b    from x = 0 or a given start, for symmetric A

The systems share the operator's one pass: their vectors lie in one tensor, in the way that `systems` knows.
Scalars stay tensors; a finished system is frozen by a mask, and convergence is read back to the host every
`read_interval` iterations (0: never). Right-hand sides are normalised, so that neither their own size nor the
small residuals of late iterations under- or overflow when they are squared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from curvlab.linalg.norms import largest, positive

__all__ = ["CGResult", "OneSystem", "Outcome", "Systems", "conjugate_gradients"]

Vectors = Callable[[Tensor], Tensor]


class Outcome(IntEnum):
    """How a system ended."""

    LIMIT = 0
    CONVERGED = 1
    NEGATIVE_CURVATURE = 2
    BREAKDOWN = 3


class Systems(Protocol):
    """How the vectors of several systems lie in one tensor."""

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """⟨x, y⟩, a scalar a system."""

    def peak(self, x: Tensor) -> Tensor:
        """max|x|, a scalar a system, laid out as those of `dot`."""

    def spread(self, scalars: Tensor) -> Tensor:
        """A scalar a system, in a shape that multiplies vectors."""


class OneSystem:
    """A single system, over all entries of a tensor of any shape."""

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """⟨x, y⟩."""
        return (x * y).sum().reshape(1)

    def peak(self, x: Tensor) -> Tensor:
        """max|x|."""
        return largest(x).reshape(1)

    def spread(self, scalars: Tensor) -> Tensor:
        """The scalar itself."""
        return scalars.reshape(())


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
    systems: Systems,
    *,
    max_iter: int,
    tol: float,
    read_interval: int = 1,
    start: Tensor | None = None,
    precondition: Vectors | None = None,
) -> CGResult:
    """Solve A x = b to a residual of `tol` times that of x = 0, in at most `max_iter` iterations.

    Negative curvature, pᵀAp < -8 ε ‖p‖ ‖Ap‖, ends a system with the best x so far (at the first
    iteration: the right-hand side itself, steepest descent). pᵀAp = 0 is a breakdown. What `operator`
    returns may be overwritten at its next call.

    >>> a = torch.diag(torch.tensor([1.0, 4.0]))
    >>> result = conjugate_gradients(lambda x: a @ x, torch.ones(2), OneSystem(), max_iter=5, tol=1e-6)
    >>> [round(x, 4) for x in result.x.tolist()], result.iterations.tolist()
    ([1.0, 0.25], [2])
    """
    dot, spread = systems.dot, systems.spread
    b, scale = _normalised(systems, rhs)
    x = torch.zeros_like(b) if start is None else start / spread(scale)
    r = b if start is None else b - operator(x)
    z = r if precondition is None else precondition(r)
    p = z
    rz = dot(r, z)
    square = rz if precondition is None else dot(r, r)
    # Squares below the smallest normal number lose their digits, so with tol = 0 the end is there.
    limits = torch.finfo(rhs.dtype)
    enough = torch.full_like(rz, max(tol * tol, limits.tiny / limits.eps))
    zero = torch.zeros_like(rz)
    # A NaN is not below anything: it goes on, to end as a breakdown.
    done = square <= enough
    squares, finished = [square], []
    ended = _Ended(torch.zeros_like(done), torch.zeros_like(done))
    for k in range(max_iter):
        if read_interval and k % read_interval == 0 and bool(done.all()):
            break
        ap = operator(p)
        pap = dot(p, ap)
        # Where reads are free and every pᵀAp > 0 (always, for a definite operator) no norm need be known.
        if read_interval != 1 or not bool((pap > zero).all()):
            ended = ended.joined(~done, pap, _bound(dot, p, ap))
            done = done | ended.negative | ended.flat
            if k == 0 and start is None:
                x = torch.where(spread(ended.negative), b, x)
        step = spread(torch.where(done, zero, rz / pap))
        x = torch.addcmul(x, step, p)
        r = torch.addcmul(r, step, ap, value=-1)
        z = r if precondition is None else precondition(r)
        rz_next = dot(r, z)
        square = rz_next if precondition is None else dot(r, r)
        squares.append(square)
        finished.append(done)
        done = done | (square <= enough)
        p = torch.addcmul(z, spread(torch.where(done, zero, rz_next / rz)), p)
        rz = rz_next
    ended = _Ended(ended.negative, ended.flat | square.isnan())  # also where no iteration was asked for
    residuals = torch.stack(squares).clamp(min=0).sqrt().flatten(1)
    iterations = torch.stack(finished).logical_not().sum(0) if finished else torch.zeros_like(done).long()
    return CGResult(x * spread(scale), ended.outcomes(done).flatten(), iterations.flatten(), residuals)


def _normalised(systems: Systems, rhs: Tensor) -> tuple[Tensor, Tensor]:
    """b / ‖b‖ and ‖b‖ (one where b is zero), by way of b / max|b|, whose square is in range."""
    peak = positive(systems.peak(rhs))
    b = rhs / systems.spread(peak)
    norm = positive(systems.dot(b, b).sqrt())
    return b / systems.spread(norm), peak * norm


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

    def outcomes(self, done: Tensor) -> Tensor:
        """How each system ended, given those that did."""
        outcomes = torch.where(done, int(Outcome.CONVERGED), int(Outcome.LIMIT))
        outcomes = torch.where(self.negative, int(Outcome.NEGATIVE_CURVATURE), outcomes)
        return torch.where(self.flat, int(Outcome.BREAKDOWN), outcomes)


def _bound(dot: Callable[[Tensor, Tensor], Tensor], p: Tensor, ap: Tensor) -> Tensor:
    """8 ε ‖p‖ ‖Ap‖."""
    return 8 * torch.finfo(p.dtype).eps * (dot(p, p) * dot(ap, ap)).clamp(min=0).sqrt()
