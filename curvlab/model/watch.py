"""Watching a forward: which functions it really calls, and with which parameters.

A `TorchFunctionMode` sees modules, methods and functional calls alike, in the thread that entered it and
in no other: nothing of torch is patched. Wherever a function is given a trainable parameter (or a row slice
or the transpose of one) together with data of the batch, a *use* of it is recorded, and a later backward pass
tells what gradient arrives at the function's output. Functions that hide several uses, such as attention, are
replaced by what they compute.

What depends on no example is told apart from what does: parameters, buffers and whatever functions make of
these alone are *constants*. A constant made of parameters (a normalised weight, a part of a positional
embedding) is used as a parameter is; its gradient is carried on to the parameters behind it. A parameter that
meets the batch in a function that curvlab does not know is *unknown* there: its gradients are then taken
example by example.

`CallTrace` notes the way that a forward takes: its calls, what each is given, and whether rows of the batch
may meet there.

Two batches take the same way where the same functions are called in the same order, on the same results of
earlier calls and the same parameters, with the same small whole numbers (dimensions, shifts, flags). What was
found of one of them then holds for the other, but for one thing: values may decide what becomes of the rows.
An index that was sorted may leave the examples in their order in one batch and not in the next, and a maximum
over all of them may have no effect in one batch and one in the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from curvlab.model.bindings import bindings
from curvlab.model.chain import GETTERS, QUESTIONS, ChainReader
from curvlab.model.decompositions import DECOMPOSITIONS, NotDecomposedError
from curvlab.model.double_backward import refuse_reentrant_checkpoint
from curvlab.model.nodes import NodeFinder, NonlinearNode, base_name, is_linear, weak_hook
from curvlab.model.own_curvature import FurtherFinder, FurtherNode, SoftmaxNode
from curvlab.model.uses import Use, WeightUse

__all__ = [
    "CallTrace",
    "Listener",
    "ParameterView",
    "SeenUse",
    "SeenWeight",
    "Watch",
    "leaves_behind",
    "listener_of",
    "rows_may_meet",
]


@dataclass(frozen=True)
class ParameterView:
    """A parameter as a function was given it: whole, some of its rows, or transposed."""

    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False


class Listener:
    """What hears the gradient at one function's output: set `receive` before a backward pass."""

    __slots__ = ("receive",)

    def __init__(self) -> None:
        self.receive: Callable[[Tensor], None] | None = None


class _Tap(torch.autograd.Function):
    """The identity, whose backward pass tells a listener what arrives.

    Every tap depends on `token`, a leaf: a backward pass to it alone goes through all taps and computes no
    gradient of a weight.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, listener: Listener) -> Tensor:
        ctx.listener = listener
        if output._is_view():
            return output.clone()
        # As an in-place operation, so that in-place activations after it are allowed; nothing is copied.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        if ctx.listener.receive is not None:
            ctx.listener.receive(gradient)
        return gradient, gradient.new_zeros(()), None


@dataclass(frozen=True, eq=False)
class SeenUse:
    """One parameter, or a constant made of parameters, in one call.

    `view` is the parameter as it was given and None for a constant made of parameters, which is `made`.
    `use` says how it was used, and is None where the rows cannot be those of the batch's examples, in order;
    `listener` hears the gradient at the call's output. `version` is that of the use's inputs. `reading` is
    what was taken for the examples: which dimension, whether another would fit too, and whether they are
    folded with positions.
    """

    view: ParameterView | None
    made: Tensor | None
    use: Use | None
    listener: Listener
    version: int
    batch_dim: int = 0
    reading: tuple[int, bool, bool] = (0, False, False)

    def examples_first(self, gradient: Tensor) -> Tensor:
        """The gradient at the call's output with the examples in its first dimension, as `use` has them."""
        return gradient.movedim(self.batch_dim, 0) if self.batch_dim else gradient


@dataclass(frozen=True, eq=False)
class SeenWeight:
    """A `SeenUse` of a view of a parameter as a matrix."""

    seen: SeenUse
    use: WeightUse
    view: ParameterView


class Watch(TorchFunctionMode):
    """Records the uses of `parameters`, told apart by identity, in a batch of `examples`.

    `constants` are further tensors that depend on no example: buffers and frozen parameters. `reader` follows
    the same calls, to find out whether they form a chain. `sequences_first`: where either of the first two
    dimensions may be the examples', (T, B, …) is meant.

    >>> layer = torch.nn.Linear(3, 2)
    >>> with Watch(dict(layer.named_parameters()), examples=4) as watch:
    ...     _ = layer(torch.ones(4, 3))
    >>> [(seen.view.name, seen.use.kind) for seen in watch.uses]
    [('weight', 'linear'), ('bias', 'addition')]
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        examples: int,
        reader: ChainReader | None = None,
        constants: Iterator[Tensor] | None = None,
        sequences_first: bool = False,
    ) -> None:
        super().__init__()
        self.sequences_first = sequences_first
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._examples = examples
        self._reader = reader
        self._constants: dict[int, tuple[Tensor, int]] = {}
        for tensor in (*parameters.values(), *(constants or ())):
            self._note_constant(tensor)
        example = next(iter(parameters.values()))
        self.token = torch.zeros((), dtype=example.dtype, device=example.device, requires_grad=True)
        self.uses: list[SeenUse] = []
        self.unknown: list[tuple[Tensor, str]] = []
        self.trace = CallTrace(parameters)
        self.rows_may_meet = False
        self.finder = NodeFinder(examples, sequences_first)
        self.further = FurtherFinder(self.finder)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._reader is not None and self._reader.resting:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in QUESTIONS:
            found = func(*args, **kwargs)
            if func in GETTERS:
                self._note_call(func, "view", args, kwargs, found)
                if self._is_constant(args[0]):
                    self._note_constant(found)
            return found
        output = self._call(func, name, args, kwargs)
        self._note_call(func, name, args, kwargs, output)
        return output

    def _note_call(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self.trace.note(name, args, kwargs, output)
        if self._reader is not None:
            self._reader.note(func, args, kwargs, output)

    def _call(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func in HIDING:
            try:
                with self:
                    return DECOMPOSITIONS[func](*args, **kwargs)
            except NotDecomposedError:
                return func(*args, **kwargs)
        given = list(_tensors_in((args, kwargs)))
        if not given:
            return self._call_on_nothing(func, args, kwargs)
        if all(self._is_constant(tensor) for tensor in given) and not self._spreads(func, args, kwargs):
            return self._call_on_constants(func, args, kwargs)
        return self._call_on_batch(func, name, args, kwargs, given)

    def _call_on_nothing(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What is made of no tensor is a constant, unless it is one row per example, as a first state is."""
        output = func(*args, **kwargs)
        for tensor in _tensors_in((output,)):
            if tensor.ndim < 2 or not tensor.is_floating_point() or self._examples not in tensor.shape:
                self._note_constant(tensor)
        return output

    def _call_on_constants(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A function of constants gives constants, and writes no data of the batch into its arguments."""
        output = func(*args, **kwargs)
        if any(_is_differentiable(tensor) for tensor in _tensors_in((output,))):
            trained = [tensor for tensor in _tensors_in((args, kwargs)) if tensor.requires_grad]
            base = base_name(func)
            if not is_linear(base, args, kwargs, trained):
                self.further.unknown[base] = None  # a weight that is made of parameters by it
        for tensor in _tensors_in((output, args)):
            self._note_constant(tensor)
        return output

    def _call_on_batch(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
    ) -> Any:
        self.rows_may_meet |= rows_may_meet(func, args, kwargs, self._examples, self._depends)
        overwritten = None if self._reader is None else self._reader.before(func, args, kwargs)
        node: NonlinearNode | FurtherNode | None = None
        if torch.is_grad_enabled():
            varying = [tensor for tensor in given if tensor.requires_grad and not self._is_constant(tensor)]
            node = self.finder.before(func, args, kwargs, varying)
            if self.finder.omitted is not None:
                node = self.further.before(self.finder.omitted, args, kwargs, varying)
        output = func(*args, **kwargs)
        if torch.is_grad_enabled():
            bind = bindings().get(func)
            bound = () if bind is None or not _is_differentiable(output) else bind(*args, **kwargs)
            if bound:
                output = self._record(bound, output)
            known = {id(one.argument) for one in bound}
            if any(_is_differentiable(out) for out in _tensors_in((output,))):
                self.unknown += [
                    (tensor, name)
                    for tensor in given
                    if id(tensor) not in known and tensor.requires_grad and self._is_constant(tensor)
                ]
        else:
            refuse_reentrant_checkpoint(args, kwargs)
        if node is not None and _is_differentiable(output):
            if isinstance(node, SoftmaxNode):
                node.returned(output)
            output.register_hook(weak_hook(node.hear))
        if self._reader is not None:
            self._reader.follow(func, args, kwargs, output, overwritten)
        return output

    def _spreads(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a constant is given one copy for each example, as a class token is."""
        if func not in SPREADING or not args or not isinstance(args[0], Tensor) or not args[0].requires_grad:
            return False
        sizes = args[1] if len(args) == 2 and isinstance(args[1], tuple | list | torch.Size) else args[1:]
        if len(args) == 2 and isinstance(args[1], Tensor):
            sizes = tuple(args[1].shape)
        if not sizes or sizes[0] != self._examples or len(sizes) < 2:
            return False
        fresh = len(sizes) > args[0].ndim or args[0].shape[0] == 1
        plain = func is not Tensor.repeat or all(size == 1 for size in sizes[1:])
        return fresh and plain

    def _record(self, bound: Any, output: Tensor) -> Tensor:
        found = [(self.view_of(one.argument), one) for one in bound]
        known = [
            (view, one)
            for view, one in found
            if view is not None or (one.argument.requires_grad and self._is_constant(one.argument))
        ]
        if not known:
            return output
        listener = Listener()
        tapped = _Tap.apply(output, self.token, listener)
        for view, one in known:
            use, batch_dim = self._use(one, tapped, view is not None and view.transposed)
            if use is not None and not use.fits(tuple(one.argument.shape)):
                use = None
            version = -1 if use is None or use.inputs.is_meta else use.inputs._version
            made = one.argument if view is None else None
            folded = use is not None and batch_dim == 0 and use.folds > 1
            reading = (batch_dim, self._is_ambiguous(tapped), folded)
            self.uses.append(SeenUse(view, made, use, listener, version, batch_dim, reading))
            if use is None:
                self.unknown.append((one.argument, "a function over rows that are not the batch's examples"))
        return tapped

    def _is_ambiguous(self, output: Tensor) -> bool:
        """Whether the examples may be either of the first two dimensions."""
        count = self._examples
        return output.ndim >= 2 and output.shape[1] == count and len(output) % count == 0

    def _use(self, one: Any, output: Tensor, transposed: bool) -> tuple[Use | None, int]:
        """The use of one argument, and which dimension of the output holds the examples.

        That is the first one, (B, …) or folded (B·T, …); or the second of a sequence, (T, B, …), where the
        first cannot be, or where `sequences_first` is true.
        """
        count = self._examples
        second = output.ndim >= 2 and output.shape[1] == count
        first = output.ndim > 0 and len(output) % count == 0
        if second and (not first or self.sequences_first):
            use = one.make(count, output.movedim(1, 0), transposed)
            if use.works_on_rows and use.inputs.shape[1:2] == (count,):
                return replace(use, inputs=use.inputs.movedim(1, 0)), 1
            if use.works_on_rows and use.inputs.shape[:1] == (count,):
                return use, 1  # it was made from the output's shape alone
        return (one.make(count, output, transposed), 0) if first else (None, 0)

    def _depends(self, value: Any) -> bool:
        """Whether a value is a tensor that depends on the examples."""
        return isinstance(value, Tensor) and not self._is_constant(value)

    def _note_constant(self, tensor: Tensor) -> None:
        # Held, so that no other tensor gets its identity while the forward runs.
        self._constants[id(tensor)] = (tensor, _version(tensor))

    def _is_constant(self, tensor: Any) -> bool:
        held = self._constants.get(id(tensor))
        return held is not None and _version(tensor) == held[1]

    def view_of(self, tensor: Tensor) -> ParameterView | None:
        """The trainable parameter that `tensor` is, or is some rows or the transpose of; None for others."""
        if not tensor.requires_grad:
            return None
        name = self._names.get(id(tensor))
        if name is not None:
            return ParameterView(name)
        base = tensor._base
        name = None if base is None else self._names.get(id(base))
        if name is None or base is None:
            return None
        if (
            tensor.ndim == base.ndim == 2
            and tensor.shape == base.T.shape
            and tensor.stride() == base.T.stride()
        ):
            if tensor.storage_offset() == base.storage_offset() and tensor.shape != base.shape:
                return ParameterView(name, transposed=True)
            if base.shape[0] == base.shape[1] and tensor.stride() != base.stride():
                return ParameterView(name, transposed=True)
        return self._row_slice(name, tensor, base)

    def _row_slice(self, name: str, tensor: Tensor, base: Tensor) -> ParameterView | None:
        alike = tensor.ndim == base.ndim and tensor.shape[1:] == base.shape[1:]
        if not alike or tensor.stride() != base.stride() or not base.stride(0):
            return None
        first, rest = divmod(int(tensor.storage_offset()) - int(base.storage_offset()), base.stride(0))
        if rest:
            return None
        whole = first == 0 and len(tensor) == len(base)
        return ParameterView(name, None if whole else (first, first + len(tensor)))


# Attention of given queries, keys and values hides no weight: torch's own kernels take less memory.
HIDING = frozenset(DECOMPOSITIONS) - {torch.nn.functional.scaled_dot_product_attention}
SPREADING = frozenset({Tensor.expand, Tensor.expand_as, Tensor.repeat})


RESHAPING = ("View", "Permute", "Transpose", "Squeeze", "Unsqueeze", "Reshape", "Alias", "Clone")


def listener_of(tensor: Tensor) -> Listener | None:
    """What hears the gradient at a tensor that is a tapped function's output, perhaps in another shape."""
    function = tensor.grad_fn
    while function is not None and any(function.name().startswith(word) for word in RESHAPING):
        function = function.next_functions[0][0]
    found: Listener | None = getattr(function, "listener", None)
    return found


def leaves_behind(tensor: Tensor) -> list[Tensor]:
    """The leaves that a tensor was computed from and that require gradients.

    >>> a, b = torch.ones(2, requires_grad=True), torch.ones(2)
    >>> [leaf is a for leaf in leaves_behind((a * b).sum())]
    [True]
    """
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    found: dict[int, Tensor] = {}
    nodes, seen = [tensor.grad_fn], {tensor.grad_fn}
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                nodes.append(parent)
    return list(found.values())


def _is_differentiable(output: Any) -> bool:
    return isinstance(output, Tensor) and output.requires_grad


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _tensors_in(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors_in(entry)


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
        given = [self._describe(value) for value in args]
        given += [(key, self._describe(value)) for key, value in kwargs.items()]
        self.steps.append((name, *given))
        self.steps.extend(self._describe(value) for value in _entries(output) if isinstance(value, Tensor))

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self._number(value)
        if isinstance(value, bool | int):
            return (int(value),) if -SMALL <= value <= SMALL else "many"
        if isinstance(value, slice):
            return tuple(self._describe(part) for part in (value.start, value.stop, value.step))
        if isinstance(value, list) and all(isinstance(entry, int) for entry in value):
            return tuple(value)  # an order, by hand
        if isinstance(value, tuple | list):
            return tuple(self._describe(entry) for entry in value)
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


def _index_rule(examples: int, depends: Callable[[Any], bool], args: Any, kwargs: Any) -> bool:
    """x[index] and x[index] = y, where the first index is a tensor of the batch."""
    index = args[1] if len(args) > 1 else None
    first = index[0] if isinstance(index, tuple | list) and index else index
    return isinstance(first, np.ndarray) or depends(first)


def _dim_rule(place: int, default: Any = None) -> Rule:
    """f(input, …, dim, …) where dim, at its place, is that of the rows."""

    def rule(examples: int, depends: Callable[[Any], bool], args: Any, kwargs: Any) -> bool:
        tensor = args[0] if args else kwargs.get("input")
        if not depends(tensor) or tensor.ndim == 0 or len(tensor) % examples:
            return False
        return _along_rows(tensor, _argument(args, kwargs, place, "dim", default))

    return rule


def _product_rule(first: int) -> Rule:
    """A product of two matrices that both depend on the batch: its rows are combined with each other."""

    def rule(examples: int, depends: Callable[[Any], bool], args: Any, kwargs: Any) -> bool:
        pair = args[first : first + 2]
        if len(pair) < 2 or not all(depends(factor) for factor in pair):
            return False
        return any(factor.ndim < 3 or len(factor) % examples for factor in pair)

    return rule


def _einsum_rule(examples: int, depends: Callable[[Any], bool], args: Any, kwargs: Any) -> bool:
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
    **dict.fromkeys(("__getitem__", "__setitem__", "index_put", "index_put_"), _index_rule),
    **dict.fromkeys(("index_select", "gather", "index_add", "index_add_", "index_copy"), _dim_rule(1)),
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_", "index_copy_"), _dim_rule(1)),
    **dict.fromkeys(
        ("sum", "mean", "max", "min", "amax", "amin", "prod", "median", "logsumexp"), _dim_rule(1)
    ),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean", "softmax", "log_softmax", "cumsum"), _dim_rule(1)),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "logcumsumexp"), _dim_rule(1)),
    **dict.fromkeys(("norm", "vector_norm", "renorm", "take_along_dim"), _dim_rule(2)),
    "normalize": _dim_rule(2, 1),
    "sort": _dim_rule(1, -1),
    "msort": _dim_rule(1, 0),
    "topk": _dim_rule(2, -1),
    "kthvalue": _dim_rule(2, -1),
    **dict.fromkeys(("masked_select", "masked_scatter", "masked_scatter_", "take", "put", "put_"), _always),
    **dict.fromkeys(("matmul", "mm", "__matmul__", "bmm", "cdist", "tensordot"), _product_rule(0)),
    **dict.fromkeys(("addmm", "baddbmm"), _product_rule(1)),
    torch.einsum.__name__: _einsum_rule,
    F.embedding.__name__: _looked_up,
}
