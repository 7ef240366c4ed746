"""Watching a forward: which functions it really calls, and with which parameters.

A `TorchFunctionMode` sees modules, methods and functional calls alike, in the thread that entered it and
in no other: nothing of torch is patched. Wherever a function is given a trainable parameter (or a row slice
or the transpose of one) a *use* of it is recorded, and a later backward pass tells what gradient arrives at
the function's output. Functions that hide several uses, such as attention, are replaced by what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvlab.model.bindings import bindings
from curvlab.model.chain import ChainReader
from curvlab.model.decompositions import DECOMPOSITIONS, NotDecomposedError
from curvlab.model.uses import Use

__all__ = ["Listener", "ParameterView", "SeenUse", "Watch"]

# Questions about a tensor that compute nothing: the calls that tell two forwards apart are the others.
QUESTIONS = frozenset(
    {"__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "__len__"}
)


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
    """One parameter in one call: how it was used, and what hears the gradient at the call's output.

    `use` is None where the rows cannot be those of the batch's examples, in order.
    """

    parameter: ParameterView
    use: Use | None
    listener: Listener
    version: int


class Watch(TorchFunctionMode):
    """Records the uses of `parameters`, told apart by identity, in a batch of `examples`.

    `reader` follows the same calls, to find out whether they form a chain.

    >>> layer = torch.nn.Linear(3, 2)
    >>> with Watch(dict(layer.named_parameters()), examples=4) as watch:
    ...     _ = layer(torch.ones(4, 3))
    >>> [(seen.parameter.name, seen.use.kind) for seen in watch.uses]
    [('weight', 'linear'), ('bias', 'addition')]
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], examples: int, reader: ChainReader | None = None
    ) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._examples = examples
        self._reader = reader
        example = next(iter(parameters.values()))
        self.token = torch.zeros((), dtype=example.dtype, device=example.device, requires_grad=True)
        self.uses: list[SeenUse] = []
        self.calls: list[str] = []

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
        if name not in QUESTIONS:
            self.calls.append(name)
        if func in DECOMPOSITIONS:
            try:
                with self:
                    return DECOMPOSITIONS[func](*args, **kwargs)
            except NotDecomposedError:
                return func(*args, **kwargs)
        overwritten = None if self._reader is None else self._reader.before(func, args, kwargs)
        output = func(*args, **kwargs)
        bind = bindings().get(func)
        if bind is not None and isinstance(output, Tensor) and output.requires_grad:
            output = self._record(bind, args, kwargs, output)
        if self._reader is not None:
            self._reader.follow(func, args, kwargs, output, overwritten)
        return output

    def _record(
        self, bind: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        found = [(self.view_of(bound.argument), bound) for bound in bind(*args, **kwargs)]
        known = [(view, bound) for view, bound in found if view is not None]
        if not known:
            return output
        listener = Listener()
        tapped = _Tap.apply(output, self.token, listener)
        for view, bound in known:
            fits = tapped.ndim > 0 and len(tapped) % self._examples == 0
            use = bound.make(self._examples, tapped, view.transposed) if fits else None
            version = -1 if use is None or use.inputs.is_meta else use.inputs._version
            self.uses.append(SeenUse(view, use, listener, version))
        return tapped

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
        return None if rest else ParameterView(name, (first, first + len(tensor)))
