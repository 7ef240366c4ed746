"""The way that a forward takes: its calls, what each is given, and whether rows of the batch may meet there.

Two batches take the same way where the same functions are called in the same order, on the same results of
earlier calls and the same parameters, with the same small whole numbers (dimensions, shifts, flags). What was
found of one of them then holds for the other, but for one thing: values may decide what becomes of the rows.
An index that was sorted may leave the examples in their order in one batch and not in the next, and a maximum
over all of them may have no effect in one batch and one in the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["CallTrace", "rows_may_meet"]

# Larger ones are sizes, of which another batch may have others.
SMALL = 16


class CallTrace:
    """The calls of one forward, as values that compare equal where two forwards take the same way.

    `parameters` are told apart by name; every other tensor is numbered when it first shows.

    >>> trace = CallTrace({})
    >>> x = torch.ones(2, 3)
    >>> trace.note("sum", (x, 0), {}, x.sum(0))
    >>> trace.steps
    [('sum', 0, (0,)), 1]
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.steps: list[Hashable] = []
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._count = 0

    def note(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """A call, and what it returned."""
        given = [self._described(value) for value in args]
        given += [(key, self._described(value)) for key, value in kwargs.items()]
        self.steps.append((name, *given))
        self.steps.extend(self._described(value) for value in _entries(output) if isinstance(value, Tensor))

    def _described(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self._number(value)
        if isinstance(value, bool | int):
            return (int(value),) if -SMALL <= value <= SMALL else "many"
        if isinstance(value, slice):
            return tuple(self._described(part) for part in (value.start, value.stop, value.step))
        if isinstance(value, list) and all(isinstance(entry, int) for entry in value):
            return tuple(value)  # an order, by hand
        if isinstance(value, tuple | list):
            return tuple(self._described(entry) for entry in value)
        return value if isinstance(value, str) else type(value).__name__

    def _number(self, tensor: Tensor) -> Hashable:
        name = self._names.get(id(tensor))
        if name is not None:
            return name
        held = self._numbers.get(id(tensor))
        if held is None or held[0]() is not tensor:
            held = self._numbers[id(tensor)] = (weakref.ref(tensor), self._count)
            self._count += 1
        return held[1]


def _entries(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple | list) else (value,)


Rule = Callable[[int, Callable[[Any], bool], tuple[Any, ...], dict[str, Any]], bool]


def rows_may_meet(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    examples: int,
    depends: Callable[[Any], bool],
) -> bool:
    """Whether a call moves or joins rows of the batch; `depends`: does a value depend on the examples?"""
    rule = RULES.get(getattr(func, "__name__", ""))
    return rule is not None and rule(examples, depends, args, kwargs)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _along_rows(tensor: Tensor, dim: Any) -> bool:
    """Whether a dimension, or one of several, is the first; None stands for all, a tensor for none."""
    if dim is None:
        return True
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return any(isinstance(one, int) and one % max(1, tensor.ndim) == 0 for one in dims)


def _indexed(examples: int, depends: Callable[[Any], bool], args: Any, kwargs: Any) -> bool:
    """x[index] and x[index] = y, where the first index is a tensor of the batch."""
    index = args[1] if len(args) > 1 else None
    first = index[0] if isinstance(index, tuple | list) and index else index
    return isinstance(first, np.ndarray) or depends(first)


def _chosen(place: int, default: Any = None) -> Rule:
    """f(input, …, dim, …) where dim, at its place, is that of the rows."""

    def rule(examples: int, depends: Callable[[Any], bool], args: Any, kwargs: Any) -> bool:
        tensor = args[0] if args else kwargs.get("input")
        if not depends(tensor) or tensor.ndim == 0 or len(tensor) % examples:
            return False
        return _along_rows(tensor, _argument(args, kwargs, place, "dim", default))

    return rule


def _multiplied(first: int) -> Rule:
    """A product of two matrices that both depend on the batch: its rows are combined with each other."""

    def rule(examples: int, depends: Callable[[Any], bool], args: Any, kwargs: Any) -> bool:
        pair = args[first : first + 2]
        if len(pair) < 2 or not all(depends(factor) for factor in pair):
            return False
        return any(factor.ndim < 3 or len(factor) % examples for factor in pair)

    return rule


def _summed(examples: int, depends: Callable[[Any], bool], args: Any, kwargs: Any) -> bool:
    """einsum of several tensors of the batch, where the first index of one is not that of the result."""
    operands = list(_entries(args[1])) if len(args) == 2 else list(args[1:])
    if sum(depends(operand) for operand in operands) < 2:
        return False
    if not isinstance(args[0], str) or "->" not in args[0]:
        return True
    inputs, output = args[0].replace(" ", "").split("->")
    pairs = zip(inputs.split(","), operands, strict=False)
    return any(labels[:1] != output[:1] for labels, operand in pairs if depends(operand))


def _looked_up(examples: int, depends: Callable[[Any], bool], args: Any, kwargs: Any) -> bool:
    """A lookup in rows of the batch."""
    return depends(_argument(args, kwargs, 1, "weight", None))


def _always(examples: int, depends: Callable[[Any], bool], args: Any, kwargs: Any) -> bool:
    return True


RULES: dict[str, Rule] = {
    **dict.fromkeys(("__getitem__", "__setitem__", "index_put", "index_put_"), _indexed),
    **dict.fromkeys(("index_select", "gather", "index_add", "index_add_", "index_copy"), _chosen(1)),
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_", "index_copy_"), _chosen(1)),
    **dict.fromkeys(("sum", "mean", "max", "min", "amax", "amin", "prod", "median", "logsumexp"), _chosen(1)),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean", "softmax", "log_softmax", "cumsum"), _chosen(1)),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "logcumsumexp"), _chosen(1)),
    **dict.fromkeys(("norm", "vector_norm", "renorm", "take_along_dim"), _chosen(2)),
    "normalize": _chosen(2, 1),
    "sort": _chosen(1, -1),
    "msort": _chosen(1, 0),
    "topk": _chosen(2, -1),
    "kthvalue": _chosen(2, -1),
    **dict.fromkeys(("masked_select", "masked_scatter", "masked_scatter_", "take", "put", "put_"), _always),
    **dict.fromkeys(("matmul", "mm", "__matmul__", "bmm", "cdist", "tensordot"), _multiplied(0)),
    **dict.fromkeys(("addmm", "baddbmm"), _multiplied(1)),
    torch.einsum.__name__: _summed,
    F.embedding.__name__: _looked_up,
}
