"""Running one batch through a network, to record it.

A chain is run from its weights, by the forward pass of `curvlab.recording`; any other model is
called once, with its Linear layers observed. Non-finite values are caught on the way.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from curvlab import device
from curvlab.criteria import Criterion
from curvlab.exceptions import NoRowsError, ProblemError
from curvlab.layers import Layer
from curvlab.network import Network
from curvlab.recording import ChainRecording, GraphRecording, Recording

__all__ = ["Weightless", "call", "record", "row_weights", "uncompiled"]


class Weightless(NoRowsError):
    """A batch of which no example counts; a stream goes on without it."""

    def __init__(self) -> None:
        super().__init__("every example has weight 0 (ignore_index or class weights): no mean exists")


def record(
    network: Network, criterion: Criterion, inputs: Tensor, targets: Tensor, first_row: int = 0
) -> Recording:
    """Run one batch through the network and keep what providers need; the model is left as it was."""
    network.check_modes()
    run = _run_graph if network.chain is None else _run_chain
    with torch.autocast(inputs.device.type, enabled=False):
        return run(network, criterion, inputs.detach(), targets.detach(), first_row)


def _run_chain(
    network: Network, criterion: Criterion, inputs: Tensor, targets: Tensor, first_row: int
) -> ChainRecording:
    chain = network.chain
    assert chain is not None
    hidden, preactivations = [chain.features(inputs)], []
    with torch.no_grad():
        for index, layer in enumerate(chain.layers):
            z = nn.functional.linear(hidden[-1], layer.module.weight, layer.module.bias)
            preactivations.append(z)
            if index < len(chain.activations):
                hidden.append(chain.activations[index].value(z))
    labels = (f"the pre-activations of {layer.label}" for layer in chain.layers)
    _check_finite(inputs, list(zip(labels, preactivations, strict=True)))
    logits = preactivations[-1]
    weights = row_weights(criterion, logits, targets)
    seen = (chain, tuple(hidden), tuple(preactivations))
    return ChainRecording(network, criterion, logits, targets, weights, first_row, *seen)


def _run_graph(
    network: Network, criterion: Criterion, inputs: Tensor, targets: Tensor, first_row: int
) -> GraphRecording:
    seen: dict[Layer, tuple[Tensor, Tensor]] = {}

    def observe(layer: Layer, given: Tensor, output: Tensor) -> Tensor:
        if layer in seen:
            raise layer.used_twice()
        seen[layer] = (given.detach(), output)
        # A copy goes on: an in-place activation must not overwrite the pre-activation just seen.
        return output.clone()

    handles = [
        layer.module.register_forward_hook(lambda _, args, out, layer=layer: observe(layer, args[0], out))
        for layer in network.selected
    ]
    try:
        logits = call(network.model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    _check_observed(network, seen, logits, inputs)
    observed = tuple((layer, *seen[layer]) for layer in network.selected)
    values = logits.detach()
    criterion.check(values, targets)
    weights = row_weights(criterion, values, targets)
    return GraphRecording(network, criterion, values, targets, weights, first_row, observed, logits)


def call(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's output with its graph; a forward that draws random numbers is refused."""
    before = torch.get_rng_state()
    with torch.inference_mode(False), torch.enable_grad(), uncompiled():
        # Autograd cannot save what was made in inference mode; a copy it can.
        logits = model(inputs.clone() if inputs.is_inference() else inputs)
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise ProblemError(
            f"the forward of {type(model).__name__} draws random numbers: the curvature would be that of one "
            f"random draw. Call model.eval() first, or take the randomness out"
        )
    return logits


def uncompiled() -> AbstractContextManager[Any]:
    """Runs modules that were compiled in place as written: compiled code calls no hooks."""
    # While dynamo has not been imported nothing is compiled, and importing it takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _check_observed(
    network: Network, seen: dict[Layer, tuple[Tensor, Tensor]], logits: Tensor, inputs: Tensor
) -> None:
    for layer in network.selected:
        if layer not in seen:
            raise layer.unused([other.name for other in seen])
        if seen[layer][0].ndim != 2:
            raise ProblemError(
                f"{layer.label} saw inputs of shape {tuple(seen[layer][0].shape)}: several positions an "
                f"example (weight sharing), which only `hessian` supports. Expected (examples, features)"
            )
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[0] != inputs.shape[0]:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ProblemError(f"the model returned {shape}; expected logits of shape (examples, outputs)")
    outputs = [(f"the pre-activations of {layer.label}", seen[layer][1]) for layer in network.selected]
    _check_finite(inputs, [*outputs, ("the logits", logits)])


def row_weights(criterion: Criterion, logits: Tensor, targets: Tensor) -> Tensor:
    """c_i for each row; raises `Weightless` if all are zero."""
    weights = criterion.weights(logits, targets)
    if weights is None:
        return logits.new_ones(logits.shape[0])
    if device.readable(weights) and not bool(weights.sum() > 0):
        raise Weightless
    return weights


def _check_finite(inputs: Tensor, preactivations: list[tuple[str, Tensor]]) -> None:
    """Catch NaN and infinity where they first show, with a single read back to the host.

    A non-finite input or weight makes some pre-activation non-finite, so the wide tensors
    themselves need no pass of their own.
    """
    sums = torch.stack([z.detach().sum() for _, z in preactivations])
    if not device.readable(sums) or bool(torch.isfinite(sums).all()):
        return
    if not bool(torch.isfinite(inputs).all()):
        bad = (~torch.isfinite(inputs.flatten(1))).any(1).nonzero()[:, 0]
        raise ProblemError(
            f"inputs are not finite: NaN or infinity in {len(bad)} examples, the first is {int(bad[0])}"
        )
    for label, z in preactivations:
        if not bool(torch.isfinite(z).all()):
            raise ProblemError(
                f"{label} are not finite: a weight or bias there holds NaN or infinity, or the output "
                f"overflows. Has training diverged?"
            )
