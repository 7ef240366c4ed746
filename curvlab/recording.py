"""One forward and one backward pass over a batch, and all that providers read of it.

    forward    z^t = W^t h^{t-1} + b^t,  h^t = σ(z^t)
    backward   g^k = ∇ξ(z^k),  e^{t-1} = W^tᵀ g^t,  g^{t-1} = σ'(z^{t-1}) ⊙ e^{t-1}

The gradients stop at the pre-activations: no gradient of a weight is formed. A *row* is what a
layer sees of one example; `inputs` and `gradients` of a layer hold one row each for every row,
and `root` the square root of its weight in the mean. A chain is run from its weights; any other
model is called once, with its Linear layers observed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from curvlab import device
from curvlab.criteria import Criterion
from curvlab.exceptions import ProblemError
from curvlab.linalg import GramFactor
from curvlab.network import Chain, Layer, Network

__all__ = ["ChainRecording", "GraphRecording", "LayerRecord", "Recording", "record"]


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """What one layer saw: its inputs H (rows × n_{t-1}) and the gradients S (rows × n_t) at its output."""

    layer: Layer
    inputs: GramFactor
    gradients: GramFactor


@dataclass(frozen=True, eq=False)
class Recording(ABC):
    """A batch as the model and the criterion saw it."""

    network: Network
    criterion: Criterion
    logits: Tensor
    targets: Tensor
    weights: Tensor
    first_row: int

    @property
    def examples(self) -> int:
        """Number of examples in the batch."""
        return self.logits.shape[0]

    @cached_property
    def total_weight(self) -> Tensor:
        """Σ c_i: what the batch weighs in a mean over several."""
        return self.weights.sum()

    @cached_property
    def share(self) -> Tensor:
        """c_i / Σ c_j, the weight of each row in the mean."""
        return self.weights / self.total_weight

    @cached_property
    def root(self) -> Tensor:
        """The square root of `share`."""
        return self.share.sqrt()

    @cached_property
    def loss(self) -> Tensor:
        """E[ξ_i]."""
        return self.share @ self.criterion.losses(self.logits, self.targets)

    @cached_property
    def output_hessian(self) -> Tensor:
        """E[∇²ξ(h^k)]."""
        return self.criterion.mean_hessian(self.logits, self.targets, self.share)

    @property
    @abstractmethod
    def layers(self) -> tuple[LayerRecord, ...]:
        """A record for each layer that has blocks, as `network.selected` lists them."""

    @abstractmethod
    def pullback(self, cotangents: Tensor) -> tuple[Tensor, ...]:
        """J_iᵀ v for each cotangent v at the logits: (r, m, K) to (r, m, n_t) for each layer of `layers`."""

    def layer_record(self, layer: Layer, inputs: Tensor, gradients: Tensor) -> LayerRecord:
        """A record with this batch's row weights."""
        return LayerRecord(layer, GramFactor(inputs, self.root), GramFactor(gradients, self.root))


@dataclass(frozen=True, eq=False)
class ChainRecording(Recording):
    """A pass through a chain; `inputs`[t] is h^t and `preactivations`[t] is z^{t+1} (t from 0)."""

    chain: Chain
    inputs: tuple[Tensor, ...]
    preactivations: tuple[Tensor, ...]

    @cached_property
    def slopes(self) -> tuple[Tensor, ...]:
        """σ'(z^t) for the hidden layers."""
        hidden = zip(self.chain.activations, self.preactivations, self.inputs[1:], strict=False)
        return tuple(activation.first(z, h) for activation, z, h in hidden)

    @cached_property
    def _backward(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        gradient = self.criterion.gradients(self.logits, self.targets)
        gradients, errors = [gradient], []
        for layer, slope in zip(self.chain.layers[:0:-1], self.slopes[::-1], strict=True):
            error = gradient @ layer.weight
            gradient = slope * error
            gradients.append(gradient)
            errors.append(error)
        return tuple(gradients[::-1]), tuple(errors[::-1])

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """g^t for all layers of the chain."""
        return self._backward[0]

    @property
    def backpropagated(self) -> tuple[Tensor, ...]:
        """e^t = W^{t+1}ᵀ g^{t+1} for the hidden layers."""
        return self._backward[1]

    @cached_property
    def bends(self) -> tuple[Tensor | None, ...]:
        """σ''(z^t) ⊙ e^t for the hidden layers: the diagonal term of the Hessian recursion (None: zero)."""
        result = []
        for activation, z, h, error in zip(
            self.chain.activations, self.preactivations, self.inputs[1:], self.backpropagated, strict=False
        ):
            second = activation.derivatives(z, h)[1]
            result.append(None if second is None else second * error)
        return tuple(result)

    @cached_property
    def layers(self) -> tuple[LayerRecord, ...]:
        return tuple(
            self.layer_record(layer, h, g)
            for layer, h, g in zip(self.chain.layers, self.inputs, self.gradients, strict=True)
            if layer.selected
        )

    def pullback(self, cotangents: Tensor) -> tuple[Tensor, ...]:
        pulled = [cotangents] if self.chain.layers[-1].selected else []
        for index in range(len(self.chain.layers) - 1, 0, -1):
            cotangents = (cotangents @ self.chain.layers[index].weight) * self.slopes[index - 1]
            if self.chain.layers[index - 1].selected:
                pulled.append(cotangents)
        return tuple(pulled[::-1])


@dataclass(frozen=True, eq=False)
class GraphRecording(Recording):
    """A call of a model that is no chain, its graph kept for further backward passes."""

    observed: tuple[tuple[Layer, Tensor, Tensor], ...]
    graph_logits: Tensor

    @cached_property
    def layers(self) -> tuple[LayerRecord, ...]:
        (gradients,) = (self.pullback(self.criterion.gradients(self.logits, self.targets)[None]),)
        return tuple(
            self.layer_record(layer, h, g[0]) for (layer, h, _), g in zip(self.observed, gradients, strict=True)
        )

    def pullback(self, cotangents: Tensor) -> tuple[Tensor, ...]:
        outputs = [z for _, _, z in self.observed]
        draws = [
            torch.autograd.grad(self.graph_logits, outputs, v, retain_graph=True, allow_unused=True)
            for v in cotangents
        ]
        return tuple(
            torch.stack([torch.zeros_like(z) if g is None else g for g in per_layer])
            for z, per_layer in zip(outputs, zip(*draws, strict=True), strict=True)
        )


def record(
    network: Network, criterion: Criterion, inputs: Tensor, targets: Tensor, first_row: int = 0
) -> Recording:
    """Run one batch through the network and keep what providers need; the model is left as it was."""
    network.check_modes()
    run = _run_graph if network.chain is None else _run_chain
    with torch.autocast(inputs.device.type, enabled=False):
        return run(network, criterion, inputs, targets, first_row)


def _run_chain(
    network: Network, criterion: Criterion, inputs: Tensor, targets: Tensor, first_row: int
) -> ChainRecording:
    chain = network.chain
    assert chain is not None
    h = inputs.detach().flatten(1) if chain.flatten else inputs.detach()
    _check_features(h, chain)
    hidden, preactivations = [h], []
    with torch.no_grad():
        for index, layer in enumerate(chain.layers):
            z = nn.functional.linear(hidden[-1], layer.module.weight, layer.module.bias)
            preactivations.append(z)
            if index < len(chain.activations):
                hidden.append(chain.activations[index].value(z))
        _check_finite(inputs, [(layer.label, z) for layer, z in zip(chain.layers, preactivations, strict=True)])
        weights = _row_weights(criterion, preactivations[-1], targets)
        return ChainRecording(
            network, criterion, preactivations[-1], targets, weights, first_row, chain, tuple(hidden), tuple(preactivations)
        )  # fmt: skip


def _check_features(h: Tensor, chain: Chain) -> None:
    expected = chain.layers[0].module.in_features
    if h.ndim != 2 or h.shape[1] != expected:
        raise ProblemError(
            f"inputs have shape {tuple(h.shape)} where {chain.layers[0].label} expects (examples, {expected})"
            + ("; add nn.Flatten() in front" if h.ndim > 2 and h[0].numel() == expected else "")
        )


def _run_graph(
    network: Network, criterion: Criterion, inputs: Tensor, targets: Tensor, first_row: int
) -> GraphRecording:
    seen: dict[Layer, tuple[Tensor, Tensor]] = {}

    def observe(layer: Layer, given: Tensor, output: Tensor) -> Tensor:
        if layer in seen:
            raise ProblemError(
                f"{layer.label} is used twice in one forward pass: curvature of shared weights is not supported"
            )
        seen[layer] = (given.detach(), output)
        # A copy goes on: an in-place activation must not overwrite the pre-activation just seen.
        return output.clone()

    handles = [
        layer.module.register_forward_hook(lambda _, args, out, layer=layer: observe(layer, args[0], out))  # type: ignore[misc]
        for layer in network.selected
    ]
    try:
        with torch.enable_grad():
            logits = network.model(inputs.detach())
    finally:
        for handle in handles:
            handle.remove()
    _check_observed(network, seen, logits, inputs)
    observed = tuple((layer, *seen[layer]) for layer in network.selected)
    weights = _row_weights(criterion, logits.detach(), targets)
    return GraphRecording(network, criterion, logits.detach(), targets, weights, first_row, observed, logits)


def _check_observed(
    network: Network, seen: dict[Layer, tuple[Tensor, Tensor]], logits: Tensor, inputs: Tensor
) -> None:
    for layer in network.selected:
        if layer not in seen:
            raise ProblemError(
                f"{layer.label} took no part in the forward pass; leave it out with layers=[…], from "
                f"{[other.name for other in seen]}"
            )
        if seen[layer][0].ndim != 2:
            raise ProblemError(
                f"{layer.label} saw inputs of shape {tuple(seen[layer][0].shape)}: several positions an example "
                f"(weight sharing), which only `hessian` supports. Expected (examples, features)"
            )
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[0] != inputs.shape[0]:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ProblemError(f"the model returned {shape}; expected logits of shape (examples, outputs)")
    _check_finite(inputs, [(layer.label, seen[layer][1]) for layer in network.selected])


def _row_weights(criterion: Criterion, logits: Tensor, targets: Tensor) -> Tensor:
    criterion.check(logits, targets)
    weights = criterion.weights(logits, targets)
    if weights is None:
        return logits.new_ones(logits.shape[0])
    if device.readable(weights) and not bool(weights.sum() > 0):
        raise ProblemError("every example of the batch has weight 0 (ignore_index or class weights): no mean exists")
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
        raise ProblemError(f"inputs are not finite: NaN or infinity in {len(bad)} examples, the first is {int(bad[0])}")
    for label, z in preactivations:
        if not bool(torch.isfinite(z).all()):
            raise ProblemError(
                f"the pre-activations of {label} are not finite: its weight or bias holds NaN or infinity, "
                f"or its output overflows. Has training diverged?"
            )
