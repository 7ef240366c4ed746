"""One forward and one backward pass over a batch, and all that providers read of it.

    forward    z^t = W^t h^{t-1} + b^t,  h^t = σ(z^t)
    backward   g^k = ∇ξ(z^k),  e^{t-1} = W^tᵀ g^t,  g^{t-1} = σ'(z^{t-1}) ⊙ e^{t-1}

`record` runs a batch: a chain from its weights, any other model by one call with its Linear layers observed;
non-finite values are caught on the way. The gradients stop at the pre-activations: no gradient of a weight is
formed. A *row* is what a layer sees of one example; `inputs` and `gradients` of a layer hold one row each for
every row, `row_weights` its weight in the mean and `sqrt_row_weights` the square root of that. What only some
providers read (the backward pass, σ', σ'', Jacobians) is computed when first asked for, and kept.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from curvlab.criteria import Criterion
from curvlab.exceptions import ProblemError
from curvlab.linalg import GramFactor
from curvlab.measure import device
from curvlab.model.graph import Chain, Network
from curvlab.model.layers import Layer
from curvlab.model.terms import AllWeightsZeroError

__all__ = [
    "AllWeightsZeroError",
    "ChainRecording",
    "GraphRecording",
    "LayerRecord",
    "Recording",
    "call",
    "criterion_weights",
    "record",
    "uncompiled",
]


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

    def numbered_from(self, first_row: int) -> Self:
        """The same recording with its rows numbered from `first_row` on, sharing what was computed of it."""
        other = copy(self)
        object.__setattr__(other, "first_row", first_row)
        return other

    @cached_property
    def total_weight(self) -> Tensor:
        """Σ c_i: what the batch weighs in a mean over several."""
        return self.weights.sum()

    @cached_property
    def row_weights(self) -> Tensor:
        """c_i / Σ c_j, the weight of each row in the mean."""
        return self.weights / self.total_weight

    @cached_property
    def sqrt_row_weights(self) -> Tensor:
        """The square root of `row_weights`."""
        return self.row_weights.sqrt()

    @cached_property
    def loss(self) -> Tensor:
        """E[ξ_i]."""
        return self.row_weights @ self.criterion.losses(self.logits, self.targets)

    @cached_property
    def output_hessian(self) -> Tensor:
        """E[∇²ξ(h^k)]."""
        return self.criterion.mean_hessian(self.logits, self.targets, self.row_weights)

    @property
    @abstractmethod
    def layers(self) -> tuple[LayerRecord, ...]:
        """A record for each layer that has blocks, as `network.selected` lists them."""

    @abstractmethod
    def pullback(self, cotangents: Tensor) -> tuple[Tensor, ...]:
        """J_iᵀ v for each cotangent v at the logits: (r, m, K) to (r, m, n_t) for each layer of `layers`."""

    @cached_property
    def jacobians(self) -> tuple[Tensor, ...]:
        """J_i = ∂h^k/∂z^t, (K, m, n_t) for each layer of `layers`."""
        outputs = self.logits.shape[1]
        basis = torch.eye(outputs, dtype=self.logits.dtype, device=self.logits.device)
        return self.pullback(basis[:, None, :].expand(outputs, self.examples, outputs))

    def apply_output_hessian(self, jacobian: Tensor) -> Tensor:
        """∇²ξ_i J_i in the same layout as J_i, (K, m, n)."""
        hessians = self.criterion.hessians(self.logits, self.targets)
        return torch.einsum("mkl,lmn->kmn", hessians, jacobian)

    def layer_record(self, layer: Layer, inputs: Tensor, gradients: Tensor) -> LayerRecord:
        """A record with this batch's row weights."""
        return LayerRecord(
            layer, GramFactor(inputs, self.sqrt_row_weights), GramFactor(gradients, self.sqrt_row_weights)
        )


@dataclass(frozen=True, eq=False)
class ChainRecording(Recording):
    """A pass through a chain; `inputs`[t] is h^t and `preactivations`[t] is z^{t+1} (t from 0)."""

    chain: Chain
    inputs: tuple[Tensor, ...]
    preactivations: tuple[Tensor, ...]

    @cached_property
    def activation_slopes(self) -> tuple[Tensor, ...]:
        """σ'(z^t) for the hidden layers."""
        hidden = zip(self.chain.activations, self.preactivations, self.inputs[1:], strict=False)
        return tuple(activation.first(z, h) for activation, z, h in hidden)

    @cached_property
    def _backward(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        gradient = self.criterion.gradients(self.logits, self.targets)
        gradients, errors = [gradient], []
        for layer, slope in zip(self.chain.layers[:0:-1], self.activation_slopes[::-1], strict=True):
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
    def second_order_terms(self) -> tuple[Tensor | None, ...]:
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
            cotangents = (cotangents @ self.chain.layers[index].weight) * self.activation_slopes[index - 1]
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
        gradients = self.pullback(self.criterion.gradients(self.logits, self.targets)[None])
        observed = zip(self.observed, gradients, strict=True)
        return tuple(self.layer_record(layer, h, g[0]) for (layer, h, _), g in observed)

    def pullback(self, cotangents: Tensor) -> tuple[Tensor, ...]:
        outputs = [z for _, _, z in self.observed]
        with torch.inference_mode(False), torch.enable_grad():
            draws = [
                torch.autograd.grad(
                    self.graph_logits,
                    outputs,
                    v,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
                for v in cotangents
            ]
        return tuple(torch.stack(per_layer) for per_layer in zip(*draws, strict=True))


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
    weights = criterion_weights(criterion, logits, targets)
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
    weights = criterion_weights(criterion, values, targets)
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


def criterion_weights(criterion: Criterion, logits: Tensor, targets: Tensor) -> Tensor:
    """c_i for each row; raises `AllWeightsZeroError` if all are zero."""
    weights = criterion.weights(logits, targets)
    if weights is None:
        return logits.new_ones(logits.shape[0])
    if device.readable(weights) and not bool(weights.sum() > 0):
        raise AllWeightsZeroError
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
