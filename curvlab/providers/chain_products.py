"""Products of the whole Hessian of a chain with several vectors in one pass, cross-layer blocks included.

The R-operator perturbs all parameters along (V^t, b^t) and differentiates the gradient:

    forward    z^t_ = V^t h^{t-1} + b^t + W^t h^{t-1}_,     h^t_ = σ' ⊙ z^t_
    backward   g^k_ = ∇²ξ z^k_,  g^{t-1}_ = σ' ⊙ (W^tᵀ g^t_ + V^tᵀ g^t) + σ'' ⊙ (W^tᵀ g^t) ⊙ z^{t-1}_
    image      Σ_i c_i (g^t_ h^{t-1}ᵀ + g^t h^{t-1}_ᵀ)

Everything is held feature by example, (r, n_t, m) for r vectors and m examples: what is the same for all
vectors, V^t h^{t-1} and g^t_ h^{t-1}ᵀ, is then one matrix product for all of them, in the parameters' layout.
The weights c_i are taken into ∇²ξ, g and the second-order terms once: what comes back is linear in these.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from curvlab.model.recording import ChainRecording

__all__ = ["ChainProducts"]


class ChainProducts:
    """Products with the sum over one recording's examples, each with its weight."""

    def __init__(self, recording: ChainRecording, weights: Tensor) -> None:
        self.recording, self.weights = recording, weights
        self._layers = recording.chain.layers
        self._inputs = [h.T.contiguous() for h in recording.inputs]
        self._slopes = [slope.T.contiguous() for slope in recording.activation_slopes]
        self._gradients = [(g * weights[:, None]).T.contiguous() for g in recording.gradients]
        self._terms = [
            None if term is None else (term * weights[:, None]).T.contiguous()
            for term in recording.second_order_terms
        ]

    def of(
        self, vectors: Mapping[str, Tensor], into: Mapping[str, Tensor] = MappingProxyType({})
    ) -> dict[str, Tensor]:
        """The images of the vectors {name: (r, *shape)}, in the same layout: those in `into`, if any."""
        outputs, inputs = self._forward(vectors)
        return self._backward(vectors, outputs, inputs, into)

    def _forward(self, vectors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """z^t_ of every layer, and h^{t-1}_; None where a layer's input does not change."""
        count = len(next(iter(vectors.values())))
        outputs: list[Tensor] = []
        inputs: list[Tensor | None] = []
        along: Tensor | None = None
        for index, layer in enumerate(self._layers):
            inputs.append(along)
            rows, examples = len(layer.weight), len(self.weights)
            if layer.weight_name is not None:
                # One matrix after the other: rows of all parameters are no rows of one matrix without a copy.
                z = torch.bmm(vectors[layer.weight_name], self._inputs[index].expand(count, -1, -1))
            else:
                z = layer.weight.new_zeros(count, rows, examples)
            if layer.bias_name is not None:
                z += vectors[layer.bias_name][:, :, None]
            if along is not None:
                z += layer.weight.expand(count, -1, -1) @ along
            outputs.append(z)
            along = z * self._slopes[index] if index < len(self._slopes) else None
        return outputs, inputs

    def _backward(
        self,
        vectors: Mapping[str, Tensor],
        outputs: list[Tensor],
        inputs: list[Tensor | None],
        into: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        recording, count = self.recording, len(outputs[0])
        curved = recording.criterion.hessian_products(recording.logits, recording.targets, outputs[-1].mT)
        back = (curved * self.weights[:, None]).mT.contiguous()
        images: dict[str, Tensor] = {}
        for index in range(len(self._layers) - 1, -1, -1):
            layer, gradient = self._layers[index], self._gradients[index].expand(count, -1, -1)
            if layer.bias_name is not None:
                images[layer.bias_name] = torch.sum(back, 2, out=into.get(layer.bias_name))
            if layer.weight_name is not None:
                rows, moved = self._inputs[index].T.expand(count, -1, -1), inputs[index]
                image = torch.bmm(back, rows, out=into.get(layer.weight_name))
                images[layer.weight_name] = image if moved is None else image.baddbmm_(gradient, moved.mT)
            if index:
                error = layer.weight.T.expand(count, -1, -1) @ back
                if layer.weight_name is not None:
                    error += vectors[layer.weight_name].mT @ gradient
                back = error.mul_(self._slopes[index - 1])
                term = self._terms[index - 1]
                if term is not None:
                    back.addcmul_(outputs[index - 1], term)
        names = [name for layer in self._layers for name in (layer.weight_name, layer.bias_name) if name]
        return {name: images[name] for name in names}
