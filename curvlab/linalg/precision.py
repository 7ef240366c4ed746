"""One precision: what is computed is that of the tensors' own dtype, also where autocast is on.

Under `torch.autocast` matrix products of float32 tensors are rounded to bfloat16 or float16. A factor, a
product or a step would then be good to two digits, or fail where it meets a tensor that was not rounded.
Whatever is called from outside, and whatever is only computed when it is read, therefore runs with autocast
switched off: functions by `@full_precision`, the public methods of classes by the base `FullPrecision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property, wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["LOW_PRECISION", "FullPrecision", "autocast_switched_off", "full_precision", "in_float"]

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
