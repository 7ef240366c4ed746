"""One forward pass of a model on a batch, watched: its logits with their graph, and what it was made of.

The model's own forward runs, once, with gradients enabled; nothing is traced or replaced but functions that
hide uses of weights (see `curvlab.model.decompositions`). What is read is what was computed, for this batch:

    logits, loss terms           what the criterion sees
    uses                         each use of each parameter, with a tap that hears its output's gradient
    layers                       the parameters in groups that have blocks (`curvlab.model.layers`)
    chain                        h^t and z^t, where the forward is a chain of Linear layers
    nodes                        its non-linear functions (`curvlab.model.nodes`); `left_out` names those
                                 whose mean curvature is of no use, of which `further` has the local Hessians
                                 (`curvlab.model.own_curvature`) but for those in `unknown`
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.exceptions import ProblemError
from curvlab.linalg.execution import Limits, in_float, require
from curvlab.model.chain import ChainFollower, ChainReader, KnownChain, ReadChain
from curvlab.model.layers import Chain, Layer, WatchedUses, layers_of
from curvlab.model.network import Inputs, Network, example_count, map_tensors, tensors_of
from curvlab.model.nodes import NonlinearNode
from curvlab.model.own_curvature import FurtherNode
from curvlab.model.watch import Watch, leaves_behind
from curvlab.staleness import own_hook

__all__ = ["Forward", "check_finite", "follow_forward", "run_forward"]


@dataclass(frozen=True, eq=False)
class Forward:
    """A watched forward pass.

    `way` is equal for two batches that went the same way through the model; `rows_may_meet` where values
    decide what becomes of the rows. `calls` are all calls of a forward that was nothing but a chain.
    """

    network: Network
    examples: int
    logits: Tensor
    token: Tensor
    watched: WatchedUses
    way: Hashable
    rows_may_meet: bool
    read: ReadChain | None
    calls: KnownChain | None
    no_chain: str
    nodes: tuple[NonlinearNode, ...]
    left_out: tuple[str, ...]
    further: tuple[NonlinearNode | FurtherNode, ...]
    unknown: tuple[str, ...]

    @cached_property
    def chain(self) -> Chain | None:
        """The chain that the forward computes; None, with a reason in `no_chain`, where it computes none."""
        if self.read is None:
            return None
        names = {id(p): name for name, p in self.network.model.named_parameters()}
        return Chain(
            tuple(_chain_layer(self.network, names, layer.weight, layer.bias) for layer in self.read.layers),
            self.read.activations,
        )

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers with blocks, from input to output for a chain and else in the model's order."""
        if self.chain is not None:
            return tuple(layer for layer in self.chain.layers if layer.selected)
        return layers_of(self.network.parameters, self.watched)


def run_forward(network: Network, inputs: Inputs, *, sequences_first: bool = False) -> Forward:
    """Run the model on a batch and watch it; the model is left as it was."""
    network.check_unchanged()
    network.check_modes()
    given = _detach_inputs(inputs)
    examples = example_count(given)
    reader = _reader(network, given)
    model = network.model
    rest = (t for t in (*model.parameters(), *model.buffers()) if id(t) not in _identities(network))
    watch = Watch(network.parameters, examples, reader, rest, sequences_first)
    with torch.enable_grad():
        logits = _call(network, given, watch, reader)
    if len(logits) != examples:
        raise ProblemError(
            f"the model returned logits of shape {tuple(logits.shape)} for {examples} examples; expected the "
            f"examples in the first dimension"
        )
    if network.copied is not None:
        network.copied.check_own(leaves_behind(logits))
    watched = WatchedUses.of(watch.uses, watch.unknown, network.parameters)
    read, reason = _result(network, reader, logits)
    way = (tuple(watch.trace.steps), tuple(seen.reading for seen in watch.uses))
    finder = watch.finder
    return Forward(
        network,
        examples,
        logits,
        watch.token,
        watched,
        way,
        watch.rows_may_meet,
        read,
        None if read is None or reader is None or watch.rows_may_meet else reader.known(logits),
        reason,
        tuple(finder.nodes),
        tuple(finder.left_out),
        tuple(watch.further.nodes),
        tuple(watch.further.unknown),
    )


def follow_forward(
    network: Network, inputs: Inputs, known: KnownChain
) -> tuple[Tensor, ChainFollower] | None:
    """Run a model whose forward is expected to be a known chain; None where it was something else.

    The caller compares the structure of the model, which shows what `Network.check_unchanged` looks for.
    """
    if network.copied is not None:
        network.check_unchanged()  # brings the copy to the model's values
    given = _detach_inputs(inputs)
    tensors = tensors_of(given)
    if len(tensors) != 1:
        return None
    follower = ChainFollower(known, tensors[0])
    try:
        with torch.enable_grad():
            logits = network.call(given, follower)
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit):
        return None  # watched in full it fails again, with an error that says where and why
    if not follower.ends_with(logits) or len(logits) != example_count(given):
        return None
    if network.copied is not None:
        network.copied.check_own(leaves_behind(logits))
    return logits, follower


def _identities(network: Network) -> set[int]:
    return {id(parameter) for parameter in network.parameters.values()}


def _detach_inputs(inputs: Inputs) -> Inputs:
    """The inputs without a graph, as the model is called with them."""

    def usable(tensor: Tensor) -> Tensor:
        if not tensor.is_inference() and not torch.is_inference_mode_enabled():
            return in_float(tensor.detach())
        with torch.inference_mode(False):
            return in_float(tensor.clone() if tensor.is_inference() else tensor.detach())

    found: Inputs = map_tensors(usable, inputs)
    return found


def _call(network: Network, inputs: Inputs, watch: Watch, reader: ChainReader | None) -> Tensor:
    modules = nullcontext() if reader is None else reader.watching_modules()
    with modules:
        try:
            return network.call(inputs, watch)
        except (ProblemError, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:  # a forward must not end the process of a study
            raise _forward_failed(network, inputs, error) from error


def _forward_failed(network: Network, inputs: Inputs, error: BaseException) -> ProblemError:
    """What to raise where the model's forward raises: by itself, or only when it is watched."""
    shapes = [tuple(tensor.shape) for tensor in tensors_of(inputs)]
    shown = shapes[0] if len(shapes) == 1 else shapes
    model = type(network.model).__name__
    try:
        with torch.enable_grad(), _entered_modules(network) as inside:
            network.call(inputs)
    except (Exception, SystemExit):
        misfit = _misfit(inside[-1], inputs) if inside else None
        where = f" in layer `{inside[-1].name}`" if inside and inside[-1].name else ""
        return ProblemError(
            misfit
            or f"the forward of {model} fails{where} on inputs of shape {shown}: "
            f"{type(error).__name__}: {error}"
        )
    return ProblemError(
        f"the forward of {model} fails while its calls are watched, which it must not depend on: "
        f"{type(error).__name__}: {error}"
    )


@dataclass(frozen=True, eq=False)
class _Entered:
    """A module that the forward has entered, and what it was given."""

    name: str
    module: nn.Module
    given: tuple[Any, ...]


@contextmanager
def _entered_modules(network: Network) -> Iterator[list[_Entered]]:
    """The modules that a call has entered and not left: where it fails, the last one is where."""
    inside: list[_Entered] = []
    handles = []
    for name, module in network.model.named_modules():

        @own_hook
        def enter(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            inside.append(_Entered(name, module, args))

        @own_hook
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            inside.pop()

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield inside
    finally:
        for handle in handles:
            handle.remove()


def _misfit(failed: _Entered, inputs: Inputs) -> str | None:
    """What does not fit where a Linear layer fails; None where it is something else."""
    layer, given = failed.module, failed.given[0] if failed.given else None
    if not isinstance(layer, nn.Linear) or not isinstance(given, Tensor):
        return None
    label = f"layer `{failed.name}`" if failed.name else "the model"
    first = any(given.data_ptr() == tensor.data_ptr() for tensor in tensors_of(inputs))
    if given.dtype != layer.weight.dtype:
        what = "inputs of the batch" if first else f"the inputs of {label}"
        return f"{what} are {given.dtype} but the model is {layer.weight.dtype}: convert one with .to()"
    if given.shape[-1] == layer.in_features:
        return None
    flat = given.ndim > 2 and given[0].numel() == layer.in_features
    return (
        f"{'inputs' if first else f'the inputs of {label}'} have shape {tuple(given.shape)}, but "
        f"{label if first else 'it'} expects (examples, {layer.in_features})"
        f"{': put nn.Flatten() in front' if flat else ''}"
    )


def _reader(network: Network, inputs: Inputs) -> ChainReader | None:
    """What follows a single input through a model whose parameters are those of Linear layers."""
    tensors = tensors_of(inputs)
    if len(tensors) != 1 or _other_parameter(network.model) is not None:
        return None
    weights = {
        id(module.weight): module.bias for module in network.model.modules() if isinstance(module, nn.Linear)
    }
    return ChainReader(tensors[0], weights, network.model)


def _other_parameter(model: nn.Module) -> str | None:
    """A parameter that is no Linear layer's."""
    linear = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    return next((name for name, p in model.named_parameters() if id(p) not in linear), None)


def _result(network: Network, reader: ChainReader | None, logits: Tensor) -> tuple[ReadChain | None, str]:
    if reader is None:
        other = _other_parameter(network.model)
        if other is None:
            return None, "its forward takes several tensors"
        return None, f"`{other}` belongs to no Linear layer"
    read = reader.result(logits)
    if read is None:
        return None, reader.why_not
    used = {id(p) for layer in read.layers for p in (layer.weight, layer.bias)}
    unused = next((name for name, p in network.parameters.items() if id(p) not in used), None)
    if unused is not None:
        return None, f"`{unused}` takes no part in its forward (leave it out with layers=[…])"
    return read, ""


def _chain_layer(network: Network, names: Mapping[int, str], weight: Tensor, bias: Tensor | None) -> Layer:
    weight_name = names[id(weight)]
    bias_name = None if bias is None else names[id(bias)]
    return Layer(
        weight_name.rpartition(".")[0],
        "linear",
        weight_name if weight_name in network.parameters else None,
        bias_name if bias_name in network.parameters else None,
        weight,
        bias,
    )


NOT_FINITE = Limits("the batch, a pre-activation or the logits hold NaN or infinity")


def check_finite(
    network: Network, inputs: Inputs, logits: Tensor, preactivations: Sequence[Tensor] | None
) -> None:
    """Catch NaN and infinity with a single read back to the host, and say where they first show.

    An activation may hide them from the logits: the hidden pre-activations of a chain, and else the input
    where there is one, are looked at as well. Of several, one may hold infinities on purpose, as a mask does.
    """
    tensors = tensors_of(inputs)
    looked = [logits.detach()]
    if preactivations is not None:
        looked += [z.detach() for z in preactivations]
    elif len(tensors) == 1 and tensors[0].is_floating_point():
        looked += tensors
    found = partial(_explain_not_finite, network, inputs, looked)
    require([tensor.sum() for tensor in looked], found, NOT_FINITE)


def _explain_not_finite(
    network: Network, inputs: Inputs, looked: Sequence[Tensor], sums: Sequence[float]
) -> None:
    """Say where NaN or infinity first shows, where one of the sums is."""
    if all(isfinite(total) for total in sums):
        return
    if all(bool(torch.isfinite(tensor).all()) for tensor in looked):
        return  # only their sum overflows
    for tensor in tensors_of(inputs):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = (~torch.isfinite(tensor.flatten(1))).any(1).nonzero()[:, 0]
            raise ProblemError(
                f"inputs are not finite: NaN or infinity in {len(bad)} examples, the first is {int(bad[0])}"
            )
    where = next(_modules_not_finite(network, inputs), "the logits")
    raise ProblemError(
        f"{where} are not finite: a weight or bias there holds NaN or infinity, or the output overflows. "
        f"Has training diverged?"
    )


def _modules_not_finite(network: Network, inputs: Inputs) -> Iterator[str]:
    """The layers whose outputs are not finite, in the order in which the forward calls them."""
    found: list[str] = []
    handles = []
    for name, module in network.model.named_modules():
        own = any(True for _ in module.parameters(recurse=False))

        @own_hook
        def note(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                found.append(f"the pre-activations of layer `{name}`" if name else "the model's outputs")

        if own:
            handles.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            network.call(inputs)
    finally:
        for handle in handles:
            handle.remove()
    yield from found
