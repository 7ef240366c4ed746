"""How tensors are computed with: in their own precision, and as their device works.

Under `torch.autocast` matrix products of float32 tensors are rounded to bfloat16 or float16. A factor, a
product or a step would then be good to two digits, or fail where it meets a tensor that was not rounded.
Whatever is called from outside, and whatever is only computed when it is read, therefore runs with autocast
switched off: functions by `@full_precision`, the public methods of classes by the base `FullPrecision`.

To read a number from an accelerator is to wait until it has done all of its work: `readable` tells whether a
number may be read at all, `read_interval` how often an iteration should, `in_pieces` whether work is cut up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    "FullPrecision",
    "HostCosts",
    "autocast_switched_off",
    "deferring",
    "elsewhere",
    "full_precision",
    "has_eigh",
    "host_costs",
    "in_float",
    "in_float64",
    "in_full_precision",
    "in_pieces",
    "read_interval",
    "readable",
    "without_gradients",
    "without_reads",
]


LOW_PRECISION = (torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda", "mps", "xpu")
OPERATORS = frozenset({"__matmul__", "__getitem__", "__call__"})
# Methods that compute nothing, or see to it themselves where they do.
LOOKUPS = frozenset(
    {"tensors", "factored", "shares_rows_with", "remember", "remember_recent", "unfactorised", "computed"}
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
