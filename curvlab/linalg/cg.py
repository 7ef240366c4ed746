"""Conjugate gradients on several systems at once, each iteration reported.

    A x = b    from x = 0 or a given start, for symmetric A

A is an operator object: it knows its product, and how the vectors of its systems lie in one tensor. The
iteration differs from the textbook's in this:

1. Several systems share one pass of the operator; a system that has finished is frozen by a mask.
2. Scalars stay tensors. Convergence is read back to the host every `read_interval` iterations (0: never).
3. Right-hand sides are normalised, so that neither their own size nor the small residuals of late iterations
   under- or overflow when they are squared.
4. Negative and zero curvature end a system and are reported, not divided by.
5. Where reads are free the operator is told which systems have ended, and may leave out their products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from curvlab.linalg.execution import in_pieces
from curvlab.linalg.factors import max_abs, nonzero_or_one

__all__ = [
    "CGResult",
    "FunctionOperator",
    "FunctionStack",
    "Iterating",
    "Outcome",
    "StackOperator",
    "SymmetricOperator",
    "conjugate_gradients",
    "iterate",
    "iterate_together",
]


class Outcome(IntEnum):
    """How a system ended."""

    LIMIT = 0
    CONVERGED = 1
    NEGATIVE_CURVATURE = 2
    BREAKDOWN = 3


class SymmetricOperator(ABC):
    """A symmetric A, and how the vectors of its systems lie in one tensor.

    As it is, a tensor of any shape is the vector of one system; a subclass with several systems has its own
    `dot`, `max_abs` and `spread`.
    """

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """A x; may be overwritten by the next call."""

    def rest(self, done: Tensor) -> None:
        """Be told which systems have ended: of these `matmul` may give any finite vector from now on."""
        return

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """⟨x, y⟩, one scalar per system."""
        return (x * y).sum().reshape(1)

    def max_abs(self, x: Tensor) -> Tensor:
        """max|x|, one scalar per system, laid out as those of `dot`."""
        return max_abs(x).reshape(1)

    def spread(self, scalars: Tensor) -> Tensor:
        """One scalar per system, in a shape that multiplies vectors."""
        return scalars.reshape(())


@dataclass(frozen=True, eq=False)
class FunctionOperator(SymmetricOperator):
    """One system, its product given as a function."""

    product: Callable[[Tensor], Tensor]

    def matmul(self, x: Tensor) -> Tensor:
        return self.product(x)


class StackOperator(SymmetricOperator):
    """One system for each entry of the first dimension, whose vectors are the rest of a tensor of three."""

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum((1, 2), keepdim=True)

    def max_abs(self, x: Tensor) -> Tensor:
        return x.abs().amax((1, 2), keepdim=True)

    def spread(self, scalars: Tensor) -> Tensor:
        return scalars


@dataclass(frozen=True, eq=False)
class FunctionStack(StackOperator):
    """A stack of systems, their product given as a function."""

    product: Callable[[Tensor], Tensor]

    def matmul(self, x: Tensor) -> Tensor:
        return self.product(x)


@dataclass(frozen=True, eq=False)
class CGResult:
    """x, and for each system its outcome, iterations and relative residuals (iterations + 1, systems)."""

    x: Tensor
    outcomes: Tensor
    iterations: Tensor
    residuals: Tensor


def conjugate_gradients(
    operator: SymmetricOperator,
    rhs: Tensor,
    *,
    max_iter: int,
    tol: float,
    read_interval: int = 1,
    start: Tensor | None = None,
    precondition: Callable[[Tensor], Tensor] | None = None,
    definite: bool = False,
) -> CGResult:
    """Solve A x = b to a residual of `tol` times that of x = 0, in at most `max_iter` iterations.

    Negative curvature, pᵀAp < -8 ε ‖p‖ ‖Ap‖, ends a system with the best x so far (at the first
    iteration: the right-hand side itself, steepest descent). pᵀAp = 0 is a breakdown. Where A is known to be
    `definite` and reads are not free, no negative curvature is looked for: pᵀAp ≤ 0, which only rounding
    can bring about, is a breakdown that is found when the iteration has ended.

    >>> a = torch.diag(torch.tensor([1.0, 4.0]))
    >>> result = conjugate_gradients(FunctionOperator(lambda x: a @ x), torch.ones(2), max_iter=5, tol=1e-6)
    >>> [round(x, 4) for x in result.x.tolist()], result.iterations.tolist()
    ([1.0, 0.25], [2])
    """
    (result,) = iterate_together(
        [iterate(operator, rhs, max_iter, tol, read_interval, start, precondition, definite)]
    )
    return result


Iterating = Generator[Tensor, bool, CGResult]
"""An iteration that gives its flags of converged systems whenever they may be read, and is told to end."""


def iterate_together(iterations: Sequence[Iterating]) -> list[CGResult]:
    """Run iterations side by side, so that one read tells which of them have converged."""
    found: dict[int, CGResult] = {}
    flags: dict[int, Tensor] = {}

    def go_on(index: int, end: bool | None) -> None:
        flags.pop(index, None)
        try:
            flags[index] = next(iterations[index]) if end is None else iterations[index].send(end)
        except StopIteration as ended:
            found[index] = ended.value

    for index in range(len(iterations)):
        go_on(index, None)
    while flags:
        waiting = list(flags)
        if len(waiting) == 1:
            ends = [bool(flags[waiting[0]].all())]
        else:
            ends = torch.stack([flags[index].all() for index in waiting]).tolist()
        for index, end in zip(waiting, ends, strict=True):
            go_on(index, end)
    return [found[index] for index in range(len(iterations))]


def iterate(
    operator: SymmetricOperator,
    rhs: Tensor,
    max_iter: int,
    tol: float,
    read_interval: int,
    start: Tensor | None,
    precondition: Callable[[Tensor], Tensor] | None,
    definite: bool,
) -> Iterating:
    """`conjugate_gradients`, for `iterate_together`."""
    matmul, dot, spread = operator.matmul, operator.dot, operator.spread
    b, scale = _normalise(operator, rhs)
    x = torch.zeros_like(b) if start is None else start / spread(scale)
    r = b if start is None else b - matmul(x)
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
    squares, finished, curvatures = [square], [], []
    on_host = in_pieces(rhs)
    free = on_host and read_interval == 1
    ended = _Ended(torch.zeros_like(done), torch.zeros_like(done))
    for k in range(max_iter):
        due = read_interval and k % read_interval == 0 and (k or free)
        if due and (yield done):
            break
        if free:
            operator.rest(done)
        ap = matmul(p)
        pap = dot(p, ap)
        # Where reads are free and every pᵀAp > 0 (always, for a definite operator) no norm need be known.
        if definite and not on_host:
            curvatures.append(pap)
        elif not free or not bool((pap > zero).all()):
            ended = ended.with_ends(~done, pap, _rounding(dot, p, ap))
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
    if curvatures:
        flat = ((torch.stack(curvatures) <= 0) & torch.stack(finished).logical_not()).any(0)
        ended = _Ended(ended.negative, ended.flat | flat)
    residuals = torch.stack(squares).clamp(min=0).sqrt().flatten(1)
    iterations = torch.stack(finished).logical_not().sum(0) if finished else torch.zeros_like(done).long()
    return CGResult(x * spread(scale), ended.outcomes(done).flatten(), iterations.flatten(), residuals)


def _normalise(operator: SymmetricOperator, rhs: Tensor) -> tuple[Tensor, Tensor]:
    """b / ‖b‖ and ‖b‖ (one where b is zero), by way of b / max|b|, whose square is in range."""
    peak = nonzero_or_one(operator.max_abs(rhs))
    b = rhs / operator.spread(peak)
    norm = nonzero_or_one(operator.dot(b, b).sqrt())
    return b / operator.spread(norm), peak * norm


@dataclass(frozen=True, eq=False)
class _Ended:
    """The systems that negative curvature, or a direction of none, has ended."""

    negative: Tensor
    flat: Tensor

    def with_ends(self, active: Tensor, pap: Tensor, rounding: Tensor) -> _Ended:
        """These and the `active` ones that end in this iteration."""
        negative = active & (pap < -rounding)
        flat = active & ~negative & ~(pap > 0)
        return _Ended(self.negative | negative, self.flat | flat)

    def outcomes(self, done: Tensor) -> Tensor:
        """How each system ended, given those that did."""
        outcomes = torch.where(done, int(Outcome.CONVERGED), int(Outcome.LIMIT))
        outcomes = torch.where(self.negative, int(Outcome.NEGATIVE_CURVATURE), outcomes)
        return torch.where(self.flat, int(Outcome.BREAKDOWN), outcomes)


def _rounding(dot: Callable[[Tensor, Tensor], Tensor], p: Tensor, ap: Tensor) -> Tensor:
    """8 ε ‖p‖ ‖Ap‖."""
    return 8 * torch.finfo(p.dtype).eps * (dot(p, p) * dot(ap, ap)).clamp(min=0).sqrt()
