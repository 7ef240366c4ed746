"""Checks whose numbers are read together: one wait of the host for all of them.

To read a number from an accelerator is to wait until it has done all of its work. `require` hands over the
numbers of a check and what judges them:

    on the CPU, and outside of `collected()`    read and judged at once
    inside of `collected()`, elsewhere          kept, until `Checks.read` reads all of them in one transfer
    inside of `deferred()`                      kept, with the limits that tell on the device what is wrong

A judge raises what is wrong, or returns True where it has mended a tensor that others were computed from
since: `read` then returns True, and what was computed has to be computed again. Checks are judged in the
order in which they were made, so the first failure is the one that is raised; an error of any other kind in
between (NaN makes factorisations fail) gives way to it.

Deferred checks are not read before many steps have been taken (see `optim.capture`): a judge, which may
look at the tensors it is about, comes too late then, and `Limits` say what is fine and what to say if not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from curvlab.linalg.execution import deferring, in_pieces, readable, without_reads

__all__ = [
    "FINITE",
    "LEAST",
    "Census",
    "Checks",
    "Deferred",
    "Limits",
    "askable",
    "census",
    "collected",
    "deferred",
    "deferring",
    "explained",
    "require",
    "would_read",
]


@dataclass
class Census:
    """How often a run on tensors without values would have read."""

    reads: int = 0
    _waiting: int = 0

    def check(self) -> None:
        """One check: a read at once, or one of those that are read together."""
        if _ACTIVE.get() is None:
            self.reads += 1
        else:
            self._waiting += 1

    def read_together(self) -> None:
        """The end of `collected`."""
        self.reads += self._waiting > 0
        self._waiting = 0


@contextmanager
def census() -> Iterator[Census]:
    """Count the reads that checks would make of tensors without values."""
    own = Census()
    token = _CENSUS.set(own)
    try:
        yield own
    finally:
        _CENSUS.reset(token)


def would_read(times: int = 1) -> None:
    """Tell a census of reads that are left out for want of values."""
    counted = _CENSUS.get()
    for _ in range(times if counted is not None else 0):
        counted.check()  # type: ignore[union-attr]


def askable(tensor: Tensor) -> bool:
    """Whether the host may ask for values of `tensor` now: they are there, and the checks are not deferred.

    >>> askable(torch.ones(2)), askable(torch.ones(2, device="meta"))
    (True, False)
    """
    return readable(tensor) and not deferring()


Judge = Callable[[list[float]], bool | None]
Explanation = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, eq=False)
class _Check:
    values: Sequence[Tensor]
    judge: Judge
    explain: Explanation


class Checks:
    """The checks that are waiting to be read."""

    def __init__(self) -> None:
        self._waiting: list[_Check] = []

    def add(self, values: Sequence[Tensor], judge: Judge) -> None:
        """Keep a check until `read`."""
        self._waiting.append(_Check(values, judge, _EXPLAIN.get()))

    def read(self) -> bool:
        """Judge all checks, with one read; True where something was mended and must be computed again."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return False
        numbers = torch.cat([value.reshape(-1) for check in waiting for value in check.values]).tolist()
        mended, place = False, 0
        for check in waiting:
            count = sum(value.numel() for value in check.values)
            with check.explain():
                mended = bool(check.judge(numbers[place : place + count])) or mended
            place += count
        return mended


@dataclass(frozen=True)
class Limits:
    """What the numbers of a check are where nothing is wrong, low ≤ x ≤ high, and what to say of others.

    NaN and infinity are outside of all limits.
    """

    says: str
    low: float = -inf
    high: float = inf


FINITE = Limits("NaN or infinity was met")
LEAST = 1e-37
"""The least positive number of a check: smaller ones are zero to some devices, in float32."""


class Deferred:
    """The checks of one step, of which nothing is read while it is taken."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._limits: list[tuple[Limits, Explanation]] = []

    def add(self, values: Sequence[Tensor], limits: Limits) -> None:
        """Keep a check."""
        flat = [value.reshape(-1) for value in values]
        self._values += flat
        self._limits += [(limits, _EXPLAIN.get())] * sum(len(value) for value in flat)

    def numbers(self) -> Tensor:
        """The numbers of all checks, one after the other."""
        return torch.cat(self._values)

    def limits(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and the highest number that is fine, of every check, beside `like`."""
        largest = torch.finfo(like.dtype).max
        ends = [(max(own.low, -largest), min(own.high, largest)) for own, _ in self._limits]
        low, high = zip(*ends, strict=True)
        return like.new_tensor(low), like.new_tensor(high)

    def wrong(self, numbers: Sequence[float]) -> tuple[Limits, Explanation] | None:
        """The first check whose number is outside of its limits."""
        for number, (limits, explain) in zip(numbers, self._limits, strict=True):
            if not max(limits.low, -_LARGEST) <= number <= min(limits.high, _LARGEST):
                return limits, explain
        return None

    def same_as(self, other: Deferred) -> bool:
        """Whether another step made the same checks."""
        return [limits for limits, _ in self._limits] == [limits for limits, _ in other._limits]


_LARGEST = torch.finfo(torch.float64).max
_DEFERRED: ContextVar[Deferred | None] = ContextVar("deferred", default=None)


@contextmanager
def deferred() -> Iterator[Deferred]:
    """Keep the checks made inside, and let iterations run to their limits instead of asking the device."""
    own = Deferred()
    token = _DEFERRED.set(own)
    try:
        with without_reads():
            yield own
    finally:
        _DEFERRED.reset(token)


_CENSUS: ContextVar[Census | None] = ContextVar("census", default=None)
_ACTIVE: ContextVar[Checks | None] = ContextVar("checks", default=None)
_EXPLAIN: ContextVar[Explanation] = ContextVar("explain", default=nullcontext)


@contextmanager
def collected() -> Iterator[Checks | None]:
    """Collect the checks made inside; None is yielded where an outer one does already.

    Whoever is given the checks calls `read` before the results are used.
    """
    if _ACTIVE.get() is not None or deferring():
        yield None
        return
    own = Checks()
    token = _ACTIVE.set(own)
    try:
        yield own
    except Exception:
        own.read()  # what was wrong before says more
        raise
    finally:
        _ACTIVE.reset(token)
        if (counted := _CENSUS.get()) is not None:
            counted.read_together()


class explained:
    """Judge the checks made inside in the context that `explain` makes: it says what they were part of."""

    __slots__ = ("_explain", "_token")

    def __init__(self, explain: Explanation) -> None:
        self._explain = explain

    def __enter__(self) -> None:
        self._token = _EXPLAIN.set(self._explain)

    def __exit__(self, *_: object) -> None:
        _EXPLAIN.reset(self._token)


def require(values: Sequence[Tensor], judge: Judge, limits: Limits = FINITE) -> None:
    """Judge the entries of `values` now or, inside of `collected`, together with those of other checks.

    Inside of `deferred` it is not the judge who decides but the `limits`.

    >>> def judge(numbers):
    ...     print(numbers)
    >>> require([torch.tensor(True), torch.tensor([2.0, 3.0])], judge)
    [1.0, 2.0, 3.0]
    """
    if not values:
        return
    if not readable(values[0]):
        would_read()
        return
    later = _DEFERRED.get()
    if later is not None:
        later.add(values, limits)
        return
    active = _ACTIVE.get()
    if in_pieces(values[0]):
        # To read one number takes less time than to join it to others.
        judge([float(number) for value in values for number in _numbers(value)])
        return
    if active is not None:
        active.add(values, judge)
        return
    judge(torch.cat([value.reshape(-1) for value in values]).tolist())


def _numbers(value: Tensor) -> list[float]:
    return value.reshape(-1).tolist() if value.ndim else [value.item()]
