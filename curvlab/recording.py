"""One forward and one backward pass over a batch, and all that providers read of it.

    forward    z^t = W^t h^{t-1} + b^t,  h^t = σ(z^t)
    backward   g^k = ∇ξ(z^k),  e^{t-1} = W^tᵀ g^t,  g^{t-1} = σ'(z^{t-1}) ⊙ e^{t-1}

The gradients stop at the pre-activations: no gradient of a weight is formed. A *row* is what a
layer sees of one example; `inputs` and `gradients` of a layer hold one row each for every row,
and `root` the square root of its weight in the mean. What only some providers read (the backward
pass, σ', σ'', Jacobians) is computed when first asked for, and kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from curvlab.chain import Chain
from curvlab.criteria import Criterion
from curvlab.layers import Layer
from curvlab.linalg import GramFactor
from curvlab.network import Network

__all__ = ["ChainRecording", "GraphRecording", "LayerRecord", "Recording"]


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

    @cached_property
    def jacobians(self) -> tuple[Tensor, ...]:
        """J_i = ∂h^k/∂z^t, (K, m, n_t) for each layer of `layers`."""
        outputs = self.logits.shape[1]
        basis = torch.eye(outputs, dtype=self.logits.dtype, device=self.logits.device)
        return self.pullback(basis[:, None, :].expand(outputs, self.examples, outputs))

    def curved(self, jacobian: Tensor) -> Tensor:
        """∇²ξ_i J_i in the same layout as J_i, (K, m, n)."""
        hessians = self.criterion.hessians(self.logits, self.targets)
        return torch.einsum("mkl,lmn->kmn", hessians, jacobian)

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
