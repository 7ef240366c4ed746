"""Checks whose numbers are read together: one wait of the host for all of them.

To read a number from an accelerator is to wait until it has done all of its work. `require` hands over the
numbers of a check and what judges them:

    on the CPU, and outside of `collected()`    read and judged at once
    inside of `collected()`, elsewhere          kept, until `Checks.read` reads all of them in one transfer

A judge raises what is wrong, or returns True where it has mended a tensor that others were computed from
since: `read` then returns True, and what was computed has to be computed again. Checks are judged in the
order in which they were made, so the first failure is the one that is raised; an error of any other kind in
between (NaN makes factorisations fail) gives way to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.linalg.execution import in_pieces, readable

__all__ = ["Checks", "collected", "explained", "in_pieces", "readable", "require"]


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


_ACTIVE: ContextVar[Checks | None] = ContextVar("checks", default=None)
_EXPLAIN: ContextVar[Explanation] = ContextVar("explain", default=nullcontext)


@contextmanager
def collected() -> Iterator[Checks | None]:
    """Collect the checks made inside; None is yielded where an outer one does already.

    Whoever is given the checks calls `read` before the results are used.
    """
    if _ACTIVE.get() is not None:
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


@contextmanager
def explained(explain: Explanation) -> Iterator[None]:
    """Judge the checks made inside in the context that `explain` makes: it says what they were part of."""
    token = _EXPLAIN.set(explain)
    try:
        yield
    finally:
        _EXPLAIN.reset(token)


def require(values: Sequence[Tensor], judge: Judge) -> None:
    """Judge the entries of `values` now or, inside of `collected`, together with those of other checks.

    >>> def judge(numbers):
    ...     print(numbers)
    >>> require([torch.tensor(True), torch.tensor([2.0, 3.0])], judge)
    [1.0, 2.0, 3.0]
    """
    if not values or not readable(values[0]):
        return
    active = _ACTIVE.get()
    if active is not None and values[0].device.type != "cpu":
        active.add(values, judge)
        return
    if len(values) == 1:
        found = values[0].tolist()
        judge([float(x) for x in found] if isinstance(found, list) else [float(found)])
        return
    judge(torch.cat([value.reshape(-1) for value in values]).tolist())
