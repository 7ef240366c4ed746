"""How tensors are computed with: in their own precision, and with few waits of the host.

One precision. Under `torch.autocast` matrix products of float32 tensors are rounded to bfloat16 or float16. A
factor, a product or a step would then be good to two digits, or fail where it meets a tensor that was not
rounded. Whatever is called from outside, and whatever is only computed when it is read, therefore runs with
autocast switched off: functions by `@full_precision`, the public methods of classes by `FullPrecision`.

Few waits. To read a number from an accelerator is to wait until it has done all of its work: `readable` tells
whether a number may be read at all, `read_interval` how often an iteration should. `require` hands over the
numbers of a check and what judges them:

    on the CPU, and outside of `collected()`    read and judged at once
    inside of `collected()`, elsewhere          kept, until `Checks.read` reads all of them in one transfer

A judge raises what is wrong, or returns True where it has mended a tensor that others were computed from
since: `read` then returns True, and what was computed has to be computed again. Checks are judged in the
order in which they were made, so the first failure is the one that is raised; an error of any other kind in
between (NaN makes factorisations fail) gives way to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from statistics import median
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "LOW_PRECISION",
    "Checks",
    "FullPrecision",
    "HostCosts",
    "autocast_switched_off",
    "collected",
    "explained",
    "full_precision",
    "has_eigh",
    "host_costs",
    "in_float",
    "in_pieces",
    "read_interval",
    "readable",
    "require",
]


LOW_PRECISION = (torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda", "mps", "xpu")
OPERATORS = frozenset({"__matmul__", "__getitem__", "__call__"})
P = ParamSpec("P")
R = TypeVar("R")

_switched_off: ContextVar[bool] = ContextVar("autocast switched off", default=False)


def autocast_switched_off() -> bool:
    """Whether the caller of curvlab has autocast on, which is switched off here."""
    return _switched_off.get()


@contextmanager
def _without_autocast() -> Iterator[None]:
    token = _switched_off.set(True)
    try:
        with ExitStack() as stack:
            for kind in DEVICES:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        _switched_off.reset(token)


def in_float(tensor: Tensor) -> Tensor:
    """A tensor of low precision as float32, any other as it is.

    >>> in_float(torch.ones(2, dtype=torch.bfloat16)).dtype, in_float(torch.ones(2).double()).dtype
    (torch.float32, torch.float64)
    """
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run with autocast switched off.

    >>> @full_precision
    ... def product(a, b):
    ...     return a @ b
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     product(torch.eye(2), torch.eye(2)).dtype, (torch.eye(2) @ torch.eye(2)).dtype
    (torch.float32, torch.bfloat16)
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # One question for all devices: with the public ones, device by device, it would take a microsecond.
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with _without_autocast():
            return function(*args, **kwargs)

    return run


class FullPrecision:
    """A class whose public methods, operators and cached properties run with autocast switched off.

    It holds for every class derived from it, those of other packages included.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            if isinstance(value, cached_property):
                value.func = full_precision(value.func)
            elif isinstance(value, FunctionType) and (name in OPERATORS or not name.startswith("_")):
                setattr(cls, name, full_precision(value))


def readable(tensor: Tensor) -> bool:
    """Whether the values of `tensor` can be read: not so for meta and fake tensors.

    >>> readable(torch.ones(2)), readable(torch.ones(2, device="meta"))
    (True, False)
    """
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def in_pieces(tensor: Tensor) -> bool:
    """Whether work on `tensor` is cut into pieces that stay in a cache, and reads decide what is computed.

    So it is on the CPU. Elsewhere every piece is a launch and every read a wait.

    >>> in_pieces(torch.ones(2))
    True
    """
    return tensor.device.type in ("cpu", "meta")


def has_eigh(tensor: Tensor) -> bool:
    """Whether the device of `tensor` decomposes symmetric matrices itself; mps does not.

    >>> has_eigh(torch.ones(1))
    True
    """
    return tensor.device.type in ("cpu", "meta") or not readable(tensor) or _has_eigh(tensor.device)


@cache
def _has_eigh(device: torch.device) -> bool:
    with _disable_current_modes():  # nothing for those who count operations or bytes
        try:
            torch.linalg.eigh(torch.eye(2, device=device))
        except NotImplementedError:
            return False
        return True


COST_ROUNDS = 8


@dataclass(frozen=True)
class HostCosts:
    """Seconds that the host takes to launch an operation, and to wait for a number."""

    launch: float
    read: float


def read_interval(tensor: Tensor, launches: int = 16, limit: int = 20) -> int:
    """After how many of `limit` iterations, of so many launches each, convergence is read by the host.

    1 on the CPU, where a read is free, and 0 (never) without values. On an accelerator an iteration that
    converges anywhere costs n/k reads at an interval of k, and (k - 1)/2 iterations too many:

        k = √(2 n r / (l c))    for n iterations, a read of r seconds, l launches of c seconds
    """
    if not readable(tensor):
        return 0
    if tensor.device.type == "cpu":
        return 1
    costs = host_costs(tensor.device)
    best = (2 * limit * costs.read / (launches * costs.launch)) ** 0.5
    return max(1, min(limit, round(best)))


@cache
def host_costs(device: torch.device) -> HostCosts:
    """What an accelerator costs the host, measured once: the median of a few launches and of a few reads."""
    with _disable_current_modes():  # nothing for those who count operations or bytes
        x = torch.ones(1, device=device)
        clock = getattr(torch.get_device_module(device), "clock", time.perf_counter)
        launches, reads = [], []
        for _ in range(COST_ROUNDS):
            started = clock()
            for _ in range(COST_ROUNDS):
                x = x * 1.0
            launched = clock()
            torch.accelerator.synchronize(device)
            waited = clock()
            x.item()
            launches.append((launched - started) / COST_ROUNDS)
            reads.append(clock() - waited)
    smallest = 1e-9
    return HostCosts(max(median(launches), smallest), max(median(reads), smallest))


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
