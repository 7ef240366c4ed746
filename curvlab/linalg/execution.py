"""How tensors are computed with: in their own precision, as their device works, with few reads of numbers.

Under `torch.autocast` matrix products of float32 tensors are rounded to bfloat16 or float16. A factor, a
product or a step would then be good to two digits, or fail where it meets a tensor that was not rounded.
Whatever is called from outside, and whatever is only computed when it is read, therefore runs with autocast
switched off: functions by `@full_precision`, the public methods of classes by the base `FullPrecision`.

torch has no `_linalg_eigh` for mps. Such a device sends the matrix to the host and takes the result of `eigh`
or `eigvalsh` back: the numbers are the CPU's. The notes of a curvature on such a device tell of it.

To read a number from an accelerator is to wait until it has done all of its work: `readable` tells whether a
number may be read at all, `read_interval` how often an iteration should, `in_pieces` whether work is cut up.
Checks read their numbers together. `require` hands over the numbers of a check and what judges them:

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

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from math import inf
from statistics import median
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "FINITE",
    "LEAST",
    "LOW_PRECISION",
    "Census",
    "Checks",
    "Deferred",
    "FullPrecision",
    "HostCosts",
    "Limits",
    "askable",
    "autocast_switched_off",
    "census",
    "collected",
    "deferred",
    "deferring",
    "eigh",
    "eigvalsh",
    "elsewhere",
    "explained",
    "full_precision",
    "has_eigh",
    "host_costs",
    "in_float",
    "in_float64",
    "in_full_precision",
    "in_pieces",
    "read_interval",
    "readable",
    "require",
    "without_gradients",
    "without_reads",
    "would_read",
]

LOW_PRECISION = (torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda", "mps", "xpu")
OPERATORS = frozenset({"__matmul__", "__getitem__", "__call__"})
# Methods that compute nothing, see to it themselves, or work in place, which autocast leaves alone.
LOOKUPS = frozenset(
    {
        "add_product_",
        "computed",
        "factored",
        "remember",
        "remember_recent",
        "shares_rows_with",
        "tensors",
        "unfactorised",
    }
)
P = ParamSpec("P")
R = TypeVar("R")

_elsewhere: ContextVar[bool] = ContextVar("as on an accelerator", default=False)
_deferring: ContextVar[bool] = ContextVar("nothing is read", default=False)
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


def in_full_precision(make: Callable[[], R]) -> R:
    """What `make` returns with autocast switched off."""
    return full_precision(make)() if torch._C._is_any_autocast_enabled() else make()


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run with gradients switched off: `torch.no_grad`, at no cost where they are already.

    >>> @without_gradients
    ... def double(x):
    ...     return 2 * x
    >>> double(torch.ones(1, requires_grad=True)).requires_grad
    False
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
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
            elif isinstance(value, FunctionType) and (name in OPERATORS or _computes(name)):
                setattr(cls, name, full_precision(value))


def _computes(name: str) -> bool:
    """Whether a method of this name is called from outside, to compute."""
    return not name.startswith("_") and name not in LOOKUPS


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
    return tensor.device.type in ("cpu", "meta") and not _elsewhere.get()


@contextmanager
def elsewhere() -> Iterator[None]:
    """Take the routes of an accelerator inside, wherever tensors are: to count what they would be there."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def deferring() -> bool:
    """Whether nothing may be read now: inside of `without_reads()`."""
    return _deferring.get()


@contextmanager
def without_reads() -> Iterator[None]:
    """Let the host ask for no number inside: iterations run to their limits."""
    token = _deferring.set(True)
    try:
        yield
    finally:
        _deferring.reset(token)


def in_float64(tensor: Tensor) -> Tensor:
    """`tensor` in float64; on the host where its device, as mps, has none.

    >>> in_float64(torch.ones(1)).dtype
    torch.float64
    """
    try:
        return tensor.double()
    except (TypeError, RuntimeError):
        return tensor.cpu().double()


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


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors as columns, of one symmetric matrix or a batch of them.

    >>> eigh(torch.tensor([[0.0, 2.0], [2.0, 0.0]]))[0].tolist()
    [-2.0, 2.0]
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except NotImplementedError:
        values, vectors = torch.linalg.eigh(matrix.cpu())
    return values.to(matrix.device), vectors.to(matrix.device)


def eigvalsh(matrix: Tensor) -> Tensor:
    """The eigenvalues alone, ascending.

    >>> eigvalsh(torch.tensor([[0.0, 2.0], [2.0, 0.0]])).tolist()
    [-2.0, 2.0]
    """
    try:
        return torch.linalg.eigvalsh(matrix)
    except NotImplementedError:
        return torch.linalg.eigvalsh(matrix.cpu()).to(matrix.device)


COST_ROUNDS = 8


@dataclass(frozen=True)
class HostCosts:
    """Seconds that the host takes to launch an operation, and to wait for a number."""

    launch: float
    read: float


def read_interval(tensor: Tensor, launches: int = 16, limit: int = 20) -> int:
    """After how many of `limit` iterations, of so many launches each, convergence is read by the host.

    1 on the CPU, where a read is free, and 0 (never) without values or where nothing may be read. On an
    accelerator an iteration that converges anywhere costs n/k reads at an interval of k, and (k - 1)/2
    iterations too many:

        k = √(2 n r / (l c))    for n iterations, a read of r seconds, l launches of c seconds
    """
    if not readable(tensor) or deferring():
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
