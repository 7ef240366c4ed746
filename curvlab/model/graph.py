"""What a model computes: its Linear layers, and the chain they form where they form one.

    h⁰ = x,   z^t = W^t h^{t-1} + b^t,   h^t = σ_t(z^t) for t < k,   logits h^k = z^k

A chain is read off the model's own forward by symbolic tracing, so nested Sequentials, custom forwards and
functional activations are all seen as what they compute. A model that is no chain is still analysed layer by
layer; `why_no_chain` then says what stands in the way of the recursions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from curvlab.activations import FUNCTIONS, Activation, Identity, activation_of, elementwise
from curvlab.exceptions import ProblemError
from curvlab.model.layers import Layer, linear_layers, unwrap

__all__ = ["DROPOUTS", "Chain", "Layer", "Network", "NoChain", "chain_of", "unwrap"]

# Two traces at once would each put back what the other had replaced.
_TRACING = threading.Lock()

RESHAPES = {"flatten", "view", "reshape"}
SHAPE_QUERIES = {"size", "getattr", "getitem", "dim"}
DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
FUNCTIONAL_DROPOUTS = {
    nn.functional.dropout,
    nn.functional.alpha_dropout,
    nn.functional.feature_alpha_dropout,
}


class NoChain(Exception):
    """Why the layers of a model form no chain."""


@dataclass(frozen=True, eq=False)
class Chain:
    """Linear layers t = 1..k and the activations between them.

    `flatten`: whether inputs are flattened first; `eval_only`: whether the forward has a functional
    dropout, so that it is this chain in eval mode only.
    """

    layers: tuple[Layer, ...]
    activations: tuple[Activation, ...]
    flatten: bool = False
    eval_only: bool = False

    def features(self, inputs: Tensor) -> Tensor:
        """h⁰, (examples, n_0): the inputs as the first layer sees them."""
        h = inputs.flatten(1) if self.flatten and inputs.ndim > 1 else inputs
        expected = self.layers[0].module.in_features
        if h.ndim != 2 or h.shape[1] != expected:
            missing = not self.flatten and h.ndim > 2 and h[0].numel() == expected
            raise ProblemError(
                f"inputs have shape {tuple(inputs.shape)}, but {self.layers[0].label} expects "
                f"(examples, {expected}){': put nn.Flatten() in front of it' if missing else ''}"
            )
        return h


def chain_of(model: nn.Module, layers: tuple[Layer, ...]) -> Chain:
    """The chain that `model` computes; raises `NoChain` where it computes something else."""
    if isinstance(model, nn.Linear):
        return Chain(layers, ())
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise NoChain(f"module `{name}` has a forward hook, which may change what it computes")
    try:
        with _TRACING:
            graph = _Tracer().trace(model)
    except Exception as error:
        raise NoChain(f"its forward cannot be traced ({type(error).__name__}: {error})") from error
    walk = _Walk({layer.module: layer for layer in layers})
    _follow(model, graph, walk)
    return walk.chain()


class _Tracer(fx.Tracer):
    """Traces into what contains a Linear; everything else is one node.

    While it traces, fx replaces nn.Module's `__call__` and `__getattr__` for the whole process. Other threads
    that call modules meanwhile are passed on to the originals, so that only this thread is traced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear) or not any(isinstance(child, nn.Linear) for child in m.modules())


@dataclass
class _Walk:
    """What was met on the way from the input to the logits."""

    by_module: dict[nn.Linear, Layer]
    layers: list[Layer] = field(default_factory=list)
    activations: list[Activation] = field(default_factory=list)
    pending: Activation | None = None
    flatten: bool = False
    eval_only: bool = False

    def linear(self, module: nn.Linear) -> None:
        layer = self.by_module[module]
        if layer in self.layers:
            raise layer.used_twice()
        if self.layers:
            _check_widths(self.layers[-1], layer)
            self.activations.append(self.pending or Identity())
        self.layers.append(layer)
        self.pending = None

    def activation(self, activation: Activation) -> None:
        if isinstance(activation, Identity):
            return
        if not self.layers:
            raise NoChain(f"the activation `{activation.name}` comes before the first Linear layer")
        if self.pending is not None:
            both = f"`{self.pending.name}` and `{activation.name}`"
            raise NoChain(f"two activations, {both}, follow one Linear layer")
        self.pending = activation

    def flattening(self) -> None:
        # After a Linear layer tensors are (examples, features) already.
        self.flatten = self.flatten or not self.layers

    def chain(self) -> Chain:
        if self.pending is not None:
            raise NoChain(
                f"the activation `{self.pending.name}` follows the last Linear layer, where the logits are "
                f"expected (let the criterion apply it, as BCEWithLogitsLoss does)"
            )
        return Chain(tuple(self.layers), tuple(self.activations), self.flatten, self.eval_only)


def _check_widths(before: Layer, after: Layer) -> None:
    given, expected = before.module.out_features, after.module.in_features
    if given != expected:
        raise ProblemError(f"{after.label} expects {expected} features, but {before.label} gives {given}")


def _follow(model: nn.Module, graph: fx.Graph, walk: _Walk) -> None:
    current: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            current = node if current is None else current
        elif _is_shape_query(node):
            continue
        elif current is None or not node.args or node.args[0] is not current:
            raise NoChain(f"`{node.name}` does not take the output of the step before it")
        elif node.op == "call_module":
            _module_step(model.get_submodule(str(node.target)), str(node.target), walk)
            current = node
        elif node.op != "output":
            _function_step(node, walk)
            current = node


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _is_shape_query(node: fx.Node) -> bool:
    return node.op in ("call_method", "call_function") and _name(node) in SHAPE_QUERIES


def _module_step(module: nn.Module, name: str, walk: _Walk) -> None:
    if isinstance(module, nn.Linear):
        walk.linear(module)
    elif isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
        walk.flattening()
    elif not isinstance(module, DROPOUTS):
        walk.activation(activation_of(module) or _elementwise(module, name))


def _elementwise(module: nn.Module, name: str) -> Activation:
    try:
        return elementwise(module)
    except ProblemError as error:
        raise NoChain(f"module `{name}` is between its Linear layers: {error}") from error


def _function_step(node: fx.Node, walk: _Walk) -> None:
    name, target = _name(node), node.target
    if name in RESHAPES:
        if not _flattens(name, node) or (walk.layers and name != "flatten"):
            raise NoChain(f"its forward calls `{name}` with {node.args[1:]}, which is no plain flattening")
        walk.flattening()
    elif target in FUNCTIONAL_DROPOUTS:
        _check_dropout(name, node)
        walk.eval_only = True
    elif target in FUNCTIONS:
        walk.activation(_functional_activation(name, node))
    else:
        raise NoChain(f"its forward calls `{name}`, which is no element-wise activation known to curvlab")


def _functional_activation(name: str, node: fx.Node) -> Activation:
    try:
        return FUNCTIONS[node.target](*node.args[1:], **node.kwargs)
    except (TypeError, ValueError) as error:
        raise NoChain(
            f"its forward calls `{name}` with arguments that curvlab cannot read ({error})"
        ) from error


def _flattens(name: str, node: fx.Node) -> bool:
    """Whether a reshape is flatten(1): to (examples, -1), or to (-1, n), which the first layer checks."""
    if name == "flatten":
        start = node.kwargs.get("start_dim", node.args[1] if len(node.args) > 1 else 0)
        return bool(start == 1) and len(node.args) <= 2 and "end_dim" not in node.kwargs
    sizes = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple | list) else node.args[1:]
    if len(sizes) != 2:
        return False
    return bool(sizes[0] == -1) or (isinstance(sizes[0], fx.Node) and bool(sizes[1] == -1))


def _check_dropout(name: str, node: fx.Node) -> None:
    given = dict(zip(("p", "training"), node.args[1:], strict=False)) | dict(node.kwargs)
    if given.get("training", True) and given.get("p", 0.5) != 0:
        raise ProblemError(
            f"the model's forward calls `{name}` with training=True: its output is random, so the curvature "
            f"would be that of one random draw. Pass training=self.training and call model.eval() first"
        )


@dataclass(frozen=True, eq=False)
class Network:
    """The Linear layers of a model, as it registers them, and their chain if they form one.

    >>> network = Network.of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> [layer.name for layer in network.selected], network.chain.activations
    (['0', '2'], (ReLU(),))
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    chain: Chain | None
    why_no_chain: str

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[str] | None = None) -> Network:
        """Analyse `model`, with blocks for all trainable layers or for those named in `layers`."""
        model = unwrap(model)
        found = linear_layers(model, layers)
        network = cls(model, found, None, "")
        network.check_modes()
        try:
            chain = chain_of(model, found)
        except NoChain as reason:
            return cls(model, found, None, str(reason))
        for layer in found:
            if layer.selected and layer not in chain.layers:
                raise layer.unused([used.name for used in chain.layers])
        return cls(model, found, chain, "")

    @property
    def selected(self) -> tuple[Layer, ...]:
        """The layers that have blocks, from input to output where they form a chain."""
        layers = self.layers if self.chain is None else self.chain.layers
        return tuple(layer for layer in layers if layer.selected)

    def check_modes(self) -> None:
        """Refuse layers whose output is random, mixes the examples of a batch or changes their buffers."""
        for name, module in self.model.named_modules():
            if module.training and (isinstance(module, nn.RReLU) or _drops(module)):
                raise _in_training_mode(f"layer `{name}` ({type(module).__name__})")
            if isinstance(module, nn.modules.batchnorm._NormBase) and _uses_batch(module):
                raise ProblemError(
                    f"layer `{name}` ({type(module).__name__}) uses the statistics of the batch: examples "
                    f"depend on each other, or its running statistics would change. Call model.eval() first "
                    f"(with track_running_stats=True)"
                )
        if self.chain is not None and self.chain.eval_only and self.model.training:
            raise _in_training_mode("the functional dropout in the model's forward")

    def require_chain(self, who: str) -> Chain:
        """The chain, or an error that says why `who` cannot go on without one."""
        if self.chain is None:
            raise ProblemError(
                f"`{who}` follows a recursion from layer to layer and needs Linear layers in a chain with "
                f"element-wise activations, but {self.why_no_chain}. `fisher`, `hessian` and "
                f"`gauss-newton[kind=exact]` need no chain"
            )
        return self.chain


def _drops(module: nn.Module) -> bool:
    return isinstance(module, DROPOUTS) and module.p > 0


def _uses_batch(module: nn.modules.batchnorm._NormBase) -> bool:
    """Batch normalisation without running statistics always does; instance normalisation then does not."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module.training or not module.track_running_stats
    return module.training and module.track_running_stats


def _in_training_mode(what: str) -> ProblemError:
    return ProblemError(
        f"{what} is in training mode: its output is random, so the curvature would be that of one random "
        f"draw. Call model.eval() first"
    )
