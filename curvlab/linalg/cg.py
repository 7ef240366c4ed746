"""Conjugate gradients on several systems at once, each iteration reported.

    A x = b    from x = 0 or a given start, for symmetric A

The systems share the operator's one pass: their vectors are columns of one tensor, `dot` gives a
scalar a system and `spread` lays scalars out over the columns. Scalars stay tensors; a finished
system is frozen by a mask, and convergence is read back to the host every `read_interval` iterations
(0: never). Right-hand sides are normalised, so nothing under- or overflows.
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
    r = b.clone() if start is None else b - operator(x)
    z = r if precondition is None else precondition(r)
    p = z.clone()
    rz = dot(r, z)
    norm = rz.clamp(min=0).sqrt() if precondition is None else dot(r, r).clamp(min=0).sqrt()
    # Written so that a NaN goes on to end as a breakdown: it has not converged.
    active = ~(norm <= tol)
    residuals = [norm]
    outcomes = torch.where(active, int(Outcome.LIMIT), int(Outcome.CONVERGED))
    iterations = torch.zeros_like(outcomes)
    zero = torch.zeros_like(rz)
    eps = 8 * torch.finfo(rhs.dtype).eps
    for k in range(max_iter):
        if read_interval and k % read_interval == 0 and not bool(active.any()):
            break
        ap = operator(p)
        pap = dot(p, ap)
        # Where reads are free and every pᵀAp > 0 (always, for a definite operator) no norm need be known.
        if read_interval != 1 or not bool((pap > 0).all()):
            bound = eps * (dot(p, p) * dot(ap, ap)).clamp(min=0).sqrt()
            negative = active & (pap < -bound)
            flat = active & ~negative & ~(pap > 0)
            outcomes = torch.where(negative, int(Outcome.NEGATIVE_CURVATURE), outcomes)
            outcomes = torch.where(flat, int(Outcome.BREAKDOWN), outcomes)
            x = torch.where(spread(negative & (iterations == 0)), b, x) if start is None else x
            active = active & ~negative & ~flat
        step = torch.where(active, rz / pap, zero)
        laid = spread(step)
        x = torch.addcmul(x, laid, p)
        r = torch.addcmul(r, laid, ap, value=-1)
        z = r if precondition is None else precondition(r)
        rz_next = dot(r, z)
        norm = torch.where(active, rz_next if precondition is None else dot(r, r), residuals[-1].square())
        norm = norm.clamp(min=0).sqrt()
        residuals.append(norm)
        iterations = iterations + active
        finished = active & (norm <= tol)
        outcomes = torch.where(finished, int(Outcome.CONVERGED), outcomes)
        active = active & ~finished
        p = torch.addcmul(z, spread(torch.where(active, rz_next / rz, zero)), p)
        rz = rz_next
    return CGResult(x * spread(scale), outcomes, iterations, torch.stack(residuals))
