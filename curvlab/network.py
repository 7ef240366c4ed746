"""What a model is made of: its Linear layers, and whether they form a chain.

A chain is h⁰ = x, z^t = W^t h^{t-1} + b^t, h^t = σ_t(z^t), with the logits h^k = z^k. It is read off
the model's own forward by symbolic tracing, so nested Sequentials, custom forwards and functional
activations are all seen as what they compute. A model that is no chain is still analysed layer by
layer; `why_no_chain` then says what stands in the way of the recursions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from curvlab.activations import FUNCTIONS, Activation, activation_of, elementwise
from curvlab.exceptions import ProblemError

__all__ = ["Chain", "Layer", "Network", "unwrap"]

RESHAPES = {"flatten", "view", "reshape"}
SHAPE_QUERIES = {"size", "getattr", "getitem", "dim"}
DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True, eq=False)
class Layer:
    """One nn.Linear, and the names of its parameters that have a block (None: missing, frozen, not asked for)."""

    name: str
    module: nn.Linear
    weight_name: str | None
    bias_name: str | None

    @property
    def selected(self) -> bool:
        """Whether any parameter of the layer has a block."""
        return self.weight_name is not None or self.bias_name is not None

    @property
    def weight(self) -> Tensor:
        """W^t, detached."""
        return self.module.weight.detach()

    @property
    def label(self) -> str:
        """The name as error messages show it."""
        return f"layer `{self.name}`" if self.name else "the model's only layer"


@dataclass(frozen=True, eq=False)
class Chain:
    """Linear layers with an element-wise activation between each and the next."""

    layers: tuple[Layer, ...]
    activations: tuple[Activation, ...]
    flatten: bool


@dataclass(frozen=True, eq=False)
class Network:
    """The Linear layers of a model, in the order of its parameters, and their chain if they form one."""

    model: nn.Module
    layers: tuple[Layer, ...]
    chain: Chain | None
    why_no_chain: str

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[str] | None = None) -> Network:
        """Analyse `model`, with blocks for all trainable layers or for those named in `layers`."""
        model = unwrap(model)
        found = _linear_layers(model, layers)
        try:
            return cls(model, found, _chain(model, found), "")
        except _NoChain as reason:
            return cls(model, found, None, str(reason))

    @property
    def selected(self) -> tuple[Layer, ...]:
        """The layers that have blocks, from input to output where they form a chain."""
        layers = self.layers if self.chain is None else self.chain.layers
        return tuple(layer for layer in layers if layer.selected)

    def check_modes(self) -> None:
        """Refuse layers whose output is random or mixes the examples of a batch."""
        for name, module in self.model.named_modules():
            if isinstance(module, DROPOUTS) and module.training and module.p > 0:
                raise ProblemError(
                    f"layer `{name}` ({type(module).__name__}) is in training mode: its output is random, so the "
                    f"curvature would be that of one random draw. Call model.eval() first"
                )
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
                module.training or not module.track_running_stats
            ):
                raise ProblemError(
                    f"layer `{name}` ({type(module).__name__}) uses the statistics of the batch: examples depend on "
                    f"each other and per-example curvature is undefined. Call model.eval() first"
                )

    def require_chain(self, who: str) -> Chain:
        """The chain, or an error that says why `who` cannot go on without one."""
        if self.chain is None:
            raise ProblemError(
                f"`{who}` follows a recursion from layer to layer and needs Linear layers in a chain with element-wise "
                f"activations, but {self.why_no_chain}. `fisher` and `hessian` need no chain"
            )
        return self.chain


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel and DistributedDataParallel wrappers.

    >>> unwrap(nn.DataParallel(nn.Linear(2, 1)))
    Linear(in_features=2, out_features=1, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise ProblemError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _linear_layers(model: nn.Module, wanted: Sequence[str] | None) -> tuple[Layer, ...]:
    modules = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    _check_linear(modules)
    if wanted is not None:
        unknown = [name for name in wanted if name not in modules]
        if unknown:
            raise ProblemError(f"layers={list(wanted)}: no Linear layer {unknown}; the model has {list(modules)}")
    layers = tuple(_layer(name, module, wanted is None or name in wanted) for name, module in modules.items())
    if not any(layer.selected for layer in layers):
        raise ProblemError(
            "no Linear parameter to analyse: all are frozen (requires_grad=False). Unfreeze at least one"
            if layers
            else f"the model ({type(model).__name__}) contains no torch.nn.Linear layer, curvlab's unit of analysis"
        )
    return layers


def _layer(name: str, module: nn.Linear, wanted: bool) -> Layer:
    prefix = f"{name}." if name else ""
    weight = f"{prefix}weight" if wanted and module.weight.requires_grad else None
    has_bias = module.bias is not None and module.bias.requires_grad
    return Layer(name, module, weight, f"{prefix}bias" if wanted and has_bias else None)


def _check_linear(modules: dict[str, nn.Linear]) -> None:
    owners: dict[int, str] = {}
    for name, module in modules.items():
        if parametrize.is_parametrized(module) or not isinstance(module.weight, nn.Parameter):
            raise ProblemError(
                f"layer `{name}` is parametrised: its weight is computed from other parameters. Call "
                f"torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight') on a copy and analyse that"
            )
        if type(module).forward is not nn.Linear.forward:
            raise ProblemError(f"layer `{name}` ({type(module).__name__}) overrides nn.Linear.forward: use nn.Linear")
        if isinstance(module.weight, nn.parameter.UninitializedParameter):
            raise ProblemError(f"layer `{name}` is lazy and has no weight yet: run the model once on a batch first")
        for parameter in (module.weight, module.bias):
            if parameter is not None and owners.setdefault(id(parameter), name) != name:
                raise ProblemError(
                    f"layers `{owners[id(parameter)]}` and `{name}` share a parameter: curvature of shared weights "
                    f"is not supported. Give each layer its own"
                )


class _NoChain(Exception):
    """Why the layers of a model form no chain."""


class _Tracer(fx.Tracer):
    """Traces into what contains a Linear; everything else is one node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear) or not any(isinstance(child, nn.Linear) for child in m.modules())


class _Walk:
    """Follows the traced graph from the input to the logits, one node after the other."""

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        self.by_module = {layer.module: layer for layer in layers}
        self.layers: list[Layer] = []
        self.activations: list[Activation] = []
        self.flatten = False
        self.pending: Activation | None = None

    def linear(self, module: nn.Linear) -> None:
        layer = self.by_module[module]
        if layer in self.layers:
            raise ProblemError(
                f"{layer.label} is used twice in one forward pass: curvature of shared weights is not supported"
            )
        if self.layers:
            self.activations.append(self.pending or elementwise_identity())
        self.layers.append(layer)
        self.pending = None

    def activation(self, activation: Activation) -> None:
        if not self.layers:
            raise _NoChain(f"the activation `{activation.name}` comes before the first Linear layer")
        if activation.name == "identity":
            return
        if self.pending is not None:
            raise _NoChain(f"two activations, `{self.pending.name}` and `{activation.name}`, follow one Linear layer")
        self.pending = activation

    def reshape(self, what: str) -> None:
        if self.layers:
            raise _NoChain(f"`{what}` changes the shape after the first Linear layer")
        self.flatten = True


def elementwise_identity() -> Activation:
    """σ(z) = z: what stands between two Linear layers with nothing between them."""
    found = activation_of(nn.Identity())
    assert found is not None
    return found


def _chain(model: nn.Module, layers: tuple[Layer, ...]) -> Chain:
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise _NoChain(f"module `{name}` has a forward hook, which may change what it computes")
    if isinstance(model, nn.Linear):
        return Chain(layers, (), False)
    try:
        graph = _Tracer().trace(model)
    except Exception as error:
        raise _NoChain(f"its forward cannot be traced ({type(error).__name__}: {error})") from error
    walk = _Walk(layers)
    _follow(model, graph, walk)
    if walk.pending is not None:
        raise _NoChain(
            f"the activation `{walk.pending.name}` follows the last Linear layer, where the logits are expected "
            f"(let the criterion apply it, as BCEWithLogitsLoss does)"
        )
    return Chain(tuple(walk.layers), tuple(walk.activations), walk.flatten)


def _follow(model: nn.Module, graph: fx.Graph, walk: _Walk) -> None:
    current: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            current = node if current is None else current
        elif _is_shape_query(node):
            continue
        elif current is None or not node.args or node.args[0] is not current:
            raise _NoChain(f"`{node.name}` does not take the output of the step before it")
        elif node.op != "output":
            _step(model, node, walk)
            current = node


def _is_shape_query(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_method", "call_function") and name in SHAPE_QUERIES


def _step(model: nn.Module, node: fx.Node, walk: _Walk) -> None:
    if node.op == "call_module":
        _module_step(model.get_submodule(str(node.target)), str(node.target), walk)
        return
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if name in RESHAPES:
        walk.reshape(name)
    elif target in FUNCTIONS:
        walk.activation(FUNCTIONS[target](*node.args[1:], **node.kwargs))
    else:
        raise _NoChain(f"its forward calls `{name}`, which is not an element-wise activation that curvlab knows")


def _module_step(module: nn.Module, name: str, walk: _Walk) -> None:
    if isinstance(module, nn.Linear):
        walk.linear(module)
    elif isinstance(module, nn.Flatten):
        walk.reshape("Flatten") if not walk.layers else None
    elif isinstance(module, (*DROPOUTS, nn.Identity)):
        return
    elif (known := activation_of(module)) is not None:
        walk.activation(known)
    else:
        walk.activation(_elementwise(module, name))


def _elementwise(module: nn.Module, name: str) -> Activation:
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        raise _NoChain(f"module `{name}` ({type(module).__name__}) has parameters or buffers of its own")
    try:
        return elementwise(module)
    except ProblemError as error:
        raise _NoChain(f"module `{name}` ({type(module).__name__}) is not element-wise ({error})") from error

