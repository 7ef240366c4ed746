"""Chains: Linear layers with an element-wise activation between each and the next.

    h⁰ = x,   z^t = W^t h^{t-1} + b^t,   h^t = σ_t(z^t) for t < k,   logits h^k = z^k

A chain is read while the model's own forward runs: the reader follows the input through the functions that
are really called and keeps each h^t and z^t it meets. Nothing is traced symbolically, so what is read is what
was computed, for this batch; a forward that computes something else for the next one is read as that.

A forward that was nothing but such links is a `KnownChain`. Of a later batch only this is then looked at:
does the model's forward make the same calls, each on what the one before gave, and with the same parameters?
Where one differs the batch is read like the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from curvlab.activations import (
    CALLS,
    Activation,
    Identity,
    LeakyReLU,
    activation_of,
    activation_of_call,
    elementwise,
)
from curvlab.exceptions import ProblemError
from curvlab.measure import device
from curvlab.staleness import own_hook

__all__ = ["GETTERS", "QUESTIONS", "ChainFollower", "ChainLayer", "ChainReader", "KnownChain", "ReadChain"]

# Questions about a tensor that compute nothing: the way that a forward takes is made of the other calls.
QUESTIONS = frozenset(
    {"__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "__len__"}
)
# Attributes that are tensors of their own: `p.T` is a constant where p is one.
VIEWS = ("T", "mT", "H", "mH", "data", "real", "imag")
GETTERS = frozenset(
    getattr(Tensor, name).__get__ for name in VIEWS if hasattr(getattr(Tensor, name), "__get__")
)

FLATTENS = frozenset({torch.flatten, Tensor.flatten, torch.reshape, Tensor.reshape, Tensor.view})
COPIES = frozenset({Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to, Tensor.float, Tensor.double})
DROPOUTS = frozenset({F.dropout, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout})
RESHAPED_OR_COPIED = FLATTENS | COPIES | DROPOUTS
PRELU = frozenset({F.prelu, torch.prelu, Tensor.prelu})


@dataclass(frozen=True, eq=False)
class ChainLayer:
    """One Linear layer of a chain as a batch saw it: h^{t-1}, z^t and the parameters' tensors."""

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    preactivation: Tensor


@dataclass(frozen=True, eq=False)
class Link:
    """One call of a chain's forward: the function, and what it is given beside the tensor before it.

    `weight` and `bias` are those of a Linear layer, which has no other arguments.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    weight: Tensor | None = None
    bias: Tensor | None = None
    activates: bool = False

    def alike(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is given the same beside the tensor before it."""
        if kwargs.keys() != self.keywords.keys() or not _same(args[1:], self.arguments):
            return False
        return not kwargs or _same(tuple(kwargs.values()), tuple(self.keywords[key] for key in kwargs))


@dataclass(frozen=True, eq=False)
class KnownChain:
    """A forward that was nothing but the links of a chain."""

    links: tuple[Link, ...]

    def has_hooks(self) -> bool:
        """Whether a hook of a parameter sees gradients."""
        return any(
            p is not None and p._backward_hooks for link in self.links for p in (link.weight, link.bias)
        )


@dataclass(frozen=True, eq=False)
class ReadChain:
    """What a forward computed for one batch: its layers and the activations between them."""

    layers: tuple[ChainLayer, ...] = ()
    activations: tuple[Activation, ...] = ()
    pending: Activation | None = None

    def linear(self, layer: ChainLayer) -> ReadChain:
        """The chain with one more layer, after the pending activation."""
        between = (self.pending or Identity(),) if self.layers else ()
        return ReadChain((*self.layers, layer), (*self.activations, *between))

    def activated(self, activation: Activation, before: Tensor) -> ReadChain:
        """The chain with an activation of `before`, the last layer's output as it was."""
        last = replace(self.layers[-1], preactivation=before)
        return ReadChain((*self.layers[:-1], last), self.activations, activation)


class ChainReader:
    """Follows `inputs` through the functions of a forward, as long as they are links of a chain.

    `weights` are the parameters that may be a layer's weight, by identity. `modules` are the model's own:
    element-wise ones that are made of several functions are taken as one activation.
    """

    def __init__(self, inputs: Tensor, weights: Mapping[int, Tensor | None], model: nn.Module) -> None:
        self._weights = weights
        self._model = model
        self._found: dict[int, tuple[Tensor, int, ReadChain]] = {}
        self.resting = False
        self.why_not = "its forward calls no Linear layer on its input"
        self.unknown_activations = False
        self.last_linear: tuple[Tensor, Tensor] | None = None
        self._links: list[Link] | None = []
        self._took_module = False
        self._last, self._last_version = inputs, inputs._version
        self._keep(inputs, ReadChain())

    def _keep(self, tensor: Tensor, chain: ReadChain) -> None:
        self._found[id(tensor)] = (tensor, tensor._version, chain)

    def _chain_of(self, tensor: Any) -> ReadChain | None:
        found = self._found.get(id(tensor)) if isinstance(tensor, Tensor) else None
        if found is None or found[0]._version != found[1]:
            return None
        return found[2]

    def note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Keep a call as the next link, as long as every call is one."""
        if self._links is None:
            return
        followed = args and args[0] is self._last and torch.is_grad_enabled()
        link = _link(func, args, kwargs) if followed else None
        if link is None or not isinstance(output, Tensor) or self._last._version != self._last_version:
            self._links = None
            return
        self._links.append(link)
        self._last, self._last_version = output, output._version

    def known(self, logits: Tensor) -> KnownChain | None:
        """What a later batch may be compared with; None where the forward was more than links."""
        if self._links is None or logits is not self._last or self._took_module:
            return None
        return KnownChain(tuple(self._links))

    def before(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """A copy of what an in-place activation is about to overwrite; None where nothing is."""
        if func is F.linear and len(args) > 1:
            self.last_linear = (args[0], args[1])
        if func not in CALLS or not args or self._chain_of(args[0]) is None:
            return None
        in_place = kwargs.get("inplace", False) or getattr(func, "__name__", "").endswith("_")
        positional = func in (F.relu, F.silu, F.elu, F.leaky_relu) and True in args[1:]
        return args[0].clone() if in_place or positional else None

    def follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        before: Tensor | None = None,
    ) -> None:
        """Look at one call of the forward, after it was made."""
        if self.resting or not isinstance(output, Tensor):
            return
        given = args[0] if args else kwargs.get("input", kwargs.get("self"))
        held = self._found.get(id(given))
        if held is None or not isinstance(given, Tensor):
            return
        if before is None and held[0]._version != held[1]:
            name = getattr(func, "__name__", str(func))
            self.why_not = f"its forward calls `{name}`, which overwrites what a Linear layer gave"
            del self._found[id(given)]
            return
        if torch.is_grad_enabled():
            chain = self._step(func, args, kwargs, output, held[2], given, before)
        else:
            chain = "a part of its forward runs without gradients"
        if isinstance(chain, ReadChain):
            self._keep(output, chain)
        else:
            self.why_not = chain
            if output is given:
                del self._found[id(given)]

    def _step(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
        chain: ReadChain,
        given: Tensor,
        before: Tensor | None,
    ) -> ReadChain | str:
        name = getattr(func, "__name__", str(func))
        if func is F.linear:
            return self._linear(chain, output, given, *args[1:], **_without(kwargs, "input"))
        if func in FLATTENS:
            plain = _keeps_rows(func, given, output)
            return chain if plain else f"its forward calls `{name}`, which is no plain flattening"
        if func in COPIES and _keeps_rows(func, given, output):
            return chain
        if func in DROPOUTS:
            dropped = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
            random = dropped.get("training", True) and dropped.get("p", 0.5) != 0
            return f"its forward calls `{name}` in training mode" if random else chain
        activation = self._activation(func, args, kwargs)
        if activation is None:
            return f"its forward calls `{name}`, which is no element-wise activation known to curvlab"
        return self._through_activation(chain, activation, given if before is None else before)

    def _linear(
        self, chain: ReadChain, output: Tensor, given: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> ReadChain | str:
        if id(weight) not in self._weights or self._weights[id(weight)] is not bias:
            return "a Linear layer is called with a weight or bias that is not its own parameter"
        if given.ndim != 2:
            return f"a Linear layer sees inputs of shape {tuple(given.shape)}, several positions per example"
        if any(layer.weight is weight for layer in chain.layers):
            return "a Linear layer is used twice"
        return chain.linear(ChainLayer(weight, bias, given, output))

    def _activation(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Activation | None:
        if func in PRELU:
            slope = args[1] if len(args) > 1 else kwargs["weight"]
            fixed = slope.numel() == 1 and not slope.requires_grad and device.readable(slope)
            return LeakyReLU(float(slope)) if fixed else None
        return activation_of_call(func, args, kwargs)

    def _through_activation(
        self, chain: ReadChain, activation: Activation, before: Tensor
    ) -> ReadChain | str:
        if isinstance(activation, Identity):
            return chain
        if not chain.layers:
            return f"the activation `{activation.name}` comes before the first Linear layer"
        if chain.pending is not None:
            both = f"`{chain.pending.name}` and `{activation.name}`"
            return f"two activations, {both}, follow one Linear layer"
        return chain.activated(activation, before)

    @contextmanager
    def watching_modules(self) -> Iterator[None]:
        """Take element-wise modules without parameters as one activation, whatever functions they call."""
        handles = []
        for module in self._model.modules():
            if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
                continue
            entered: list[ReadChain | None] = []
            handles.append(module.register_forward_pre_hook(self._entering(entered)))
            handles.append(module.register_forward_hook(self._leaving(entered)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, entered: list[ReadChain | None]) -> Callable[..., None]:
        @own_hook
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not self.resting:
                entered.append(self._chain_of(args[0]) if len(args) == 1 else None)

        return note

    def _leaving(self, entered: list[ReadChain | None]) -> Callable[..., None]:
        @own_hook
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self.resting:
                return
            chain = entered.pop()
            if chain is None or not isinstance(output, Tensor) or self._chain_of(output) is not None:
                return
            self._take_module(module, args[0], output, chain)

        return note

    def _take_module(self, module: nn.Module, given: Tensor, output: Tensor, chain: ReadChain) -> None:
        self.resting = self._took_module = True
        try:
            known = activation_of(module)
            activation = known or elementwise(module)
        except ProblemError as error:
            name = next(name for name, found in self._model.named_modules() if found is module)
            self.why_not = f"module `{name}` is between its Linear layers: {error}"
            return
        finally:
            self.resting = False
        self.unknown_activations |= known is None
        unchanged = self._chain_of(given) is not None
        found = (
            self._through_activation(chain, activation, given)
            if unchanged
            else "an activation overwrites its input"
        )
        if isinstance(found, ReadChain):
            self._keep(output, found)
        else:
            self.why_not = found

    def result(self, logits: Any) -> ReadChain | None:
        """The chain from the inputs to `logits`; None, with the reason in `why_not`, where there is none."""
        chain = self._chain_of(logits)
        if chain is None or not chain.layers:
            return None
        if chain.pending is not None:
            self.why_not = (
                f"the activation `{chain.pending.name}` follows the last Linear layer, where the logits are "
                f"expected (let the criterion apply it, as BCEWithLogitsLoss does)"
            )
            return None
        return chain


def _link(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Link | None:
    """A call as a link; None where it is given other tensors than those of a Linear layer."""
    if func is F.linear:
        weight, bias = (*args[1:], None, None)[:2]
        plain = isinstance(weight, Tensor) and len(args) < 4 and not kwargs
        return Link(func, weight=weight, bias=bias) if plain else None
    if not all(type(value) in PLAIN for value in (*args[1:], *kwargs.values())):
        return None
    if func in RESHAPED_OR_COPIED:
        return Link(func, args[1:], dict(kwargs))
    activation = activation_of_call(func, args, kwargs)
    if activation is None:
        return None
    return Link(func, args[1:], dict(kwargs), activates=not isinstance(activation, Identity))


class ChainFollower(TorchFunctionMode):
    """Watches a forward that is expected to be a known chain; `left` once a call is another one.

    `inputs` and `preactivations` are h^{t-1} and z^t of the layers so far.

    >>> layer = nn.Linear(2, 1)
    >>> known = KnownChain((Link(F.linear, weight=layer.weight, bias=layer.bias),))
    >>> with ChainFollower(known, torch.ones(3, 2)) as follower:
    ...     logits = layer(follower.last)
    >>> follower.ends_with(logits), len(follower.inputs)
    (True, 1)
    """

    def __init__(self, known: KnownChain, inputs: Tensor) -> None:
        super().__init__()
        self._links = iter(known.links)
        self.last, self._version = inputs, inputs._version
        self.left = False
        self.inputs: list[Tensor] = []
        self.preactivations: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self.left and not _asks(func):
            self.left = not self._follows(func, args, kwargs, output)
        return output

    def _follows(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> bool:
        """Whether a call is the next link; it is kept if so."""
        link, given = next(self._links, None), self.last
        if link is None or func is not link.function or not args or args[0] is not given:
            return False
        # Inference mode, in which tensors have no version, switches gradients off as well.
        if not torch.is_grad_enabled() or not isinstance(output, Tensor) or given._version != self._version:
            return False
        if link.weight is not None:
            weight, bias = (*args[1:], None, None)[:2]
            if (
                weight is not link.weight
                or bias is not link.bias
                or len(args) > 3
                or kwargs
                or given.ndim != 2
            ):
                return False
            self.inputs.append(given)
            self.preactivations.append(output)
        elif not link.alike(args, kwargs) or not _keeps_rows(func, given, output):
            return False
        elif link.activates:
            self.preactivations[-1] = given
        self.last, self._version = output, output._version
        return True

    def ends_with(self, logits: Tensor) -> bool:
        """Whether the forward was the known chain, from its first link to its last."""
        ended = next(self._links, None) is None
        return ended and not self.left and logits is self.last and logits._version == self._version


def _keeps_rows(func: Callable[..., Any], given: Tensor, output: Tensor) -> bool:
    """Whether a reshaping gives one row for each example, and a copy the same dtype on the same device."""
    if func in FLATTENS:
        return output.ndim == 2 and len(output) == len(given)
    return func not in COPIES or (output.dtype, output.device) == (given.dtype, given.device)


def _asks(func: Callable[..., Any]) -> bool:
    """Whether a function only asks about a tensor."""
    name = getattr(func, "__name__", "")
    return name in QUESTIONS and name != "__set__" and func not in GETTERS


# What a link may be given beside tensors: values that are equal where they mean the same.
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format})


def _same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    """Whether two lists of plain values are the same, 1 and True being told apart."""
    return ours == theirs and [type(value) for value in ours] == [type(value) for value in theirs]


def _without(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}
