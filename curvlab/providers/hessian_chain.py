"""The exact Hessian of a chain, from the tensors of its recording: the model is not run again.

A single batch's recording is kept; a stream is recorded anew for every product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.linalg import OperatorBlock
from curvlab.linalg.factors import row_square_norms
from curvlab.model.recording import ChainRecording, Recording
from curvlab.problem import Problem
from curvlab.providers.hessian_recursion import chunks, hessian_products, layer_hessians, mean_hessians
from curvlab.providers.live import LiveData
from curvlab.providers.statistics import Statistic, Values

__all__ = ["BiasHessians", "ChainHessian"]


@dataclass(frozen=True)
class BiasHessians(Statistic):
    """E[H_i^t] for each layer with blocks."""

    def of(self, recording: Recording) -> Values:
        assert isinstance(recording, ChainRecording)
        return tuple(mean_hessians(recording))


class ChainHessian:
    """Products with the exact Hessian of a chain."""

    def __init__(self, problem: Problem) -> None:
        chain = problem.network.chain
        assert chain is not None
        self.data = LiveData.of(problem)
        self.layers = problem.network.selected
        self.positions = [chain.layers.index(layer) for layer in self.layers]

    def batches(self) -> Iterator[tuple[ChainRecording, Tensor]]:
        """Each batch's recording, with its rows' weights in the mean over all."""
        for recording, share in self.data.batches():
            assert isinstance(recording, ChainRecording)
            yield recording, share

    def weight_block(self, index: int) -> OperatorBlock:
        """E[(h_i h_iᵀ) ⊗ H_i^t] as an operator, with closed forms for its diagonal, trace and norm."""
        return _Weight(self, self.positions[index], self.layers[index].weight).block()

    def matrices(self, position: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(H_i^t, h_i, c_i) for a chunk of examples after the other."""
        for recording, share in self.batches():
            for rows in chunks(recording, position):
                *_, (_, hessians) = layer_hessians(recording, rows, position)
                yield hessians, recording.inputs[position][rows], share[rows]

    def pair_sum(self, position: int, centre: Tensor | None = None) -> Tensor:
        """‖E[(h_i h_iᵀ) ⊗ Δ_i]‖_F² with Δ_i = H_i^t - `centre`, from inner products over pairs of examples.

        = Σ_ij c_i c_j (h_i·h_j)² tr(Δ_i Δ_j); with centre B it is the squared error of the Kronecker block
        E[hhᵀ] ⊗ B, with nothing of the weight's size squared ever formed.
        """
        total = torch.zeros((), dtype=torch.float64)
        # A shuffled stream has another order in every pass, so only a kept batch has a lower triangle.
        symmetric = not self.data.problem.streamed
        for a, (left, h_left, share_left) in enumerate(self.matrices(position)):
            delta_left = left if centre is None else left - centre
            for b, (right, h_right, share_right) in enumerate(self.matrices(position)):
                if symmetric and b > a:
                    break
                delta_right = right if centre is None else right - centre
                traces = delta_left.flatten(1) @ delta_right.flatten(1).T
                pairs = traces * (h_left @ h_right.T).square() * torch.outer(share_left, share_right)
                total += (2 if symmetric and b < a else 1) * pairs.sum().double().cpu()
        return total.to(h_left)

    def full_product(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The Hessian of the mean loss over all selected parameters, cross-layer blocks included."""
        results: dict[str, Tensor] = {}
        for recording, share in self.batches():
            for name, value in _full_product(recording, share, vectors).items():
                results[name] = value if name not in results else results[name].add_(value)
        return results


@dataclass(frozen=True, eq=False)
class _Weight:
    """The weight block of the layer at `position` of the chain."""

    hessian: ChainHessian
    position: int
    like: Tensor

    def product(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for recording, share in self.hessian.batches():
            h = recording.inputs[self.position]
            curved = hessian_products(recording, self.position, h @ x.T)
            result.addmm_((curved * share[:, None]).T, h)
        return result

    def diagonal(self) -> Tensor:
        result = torch.zeros_like(self.like)
        for hessians, h, share in self.hessian.matrices(self.position):
            diagonals = hessians.diagonal(dim1=1, dim2=2)
            result.addmm_((diagonals * share[:, None]).T, h.square())
        return result

    def trace(self) -> Tensor:
        result = self.like.new_zeros(())
        for hessians, h, share in self.hessian.matrices(self.position):
            result += share @ (hessians.diagonal(dim1=1, dim2=2).sum(1) * row_square_norms(h))
        return result

    def square_norm(self) -> Tensor:
        return self.hessian.pair_sum(self.position)

    def block(self) -> OperatorBlock:
        shape = (self.like.shape[0], self.like.shape[1])
        return OperatorBlock(shape, self.product, self.like, 0, self.diagonal, self.trace, self.square_norm)


def _full_product(
    recording: ChainRecording, share: Tensor, vectors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The R-operator: perturb all parameters along `vectors`, differentiate the gradient."""
    layers = recording.chain.layers
    along_h: Tensor | None = None
    inputs_along: list[Tensor | None] = []
    outputs_along: list[Tensor] = []
    for index, layer in enumerate(layers):
        inputs_along.append(along_h)
        z = torch.zeros_like(recording.preactivations[index])
        if layer.weight_name is not None:
            z = z + recording.inputs[index] @ vectors[layer.weight_name].T
        if layer.bias_name is not None:
            z = z + vectors[layer.bias_name]
        if along_h is not None:
            z = z + along_h @ layer.weight.T
        outputs_along.append(z)
        if index < len(recording.slopes):
            along_h = z * recording.slopes[index]
    return _full_backward(recording, share, vectors, inputs_along, outputs_along)


def _full_backward(
    recording: ChainRecording,
    share: Tensor,
    vectors: Mapping[str, Tensor],
    inputs_along: list[Tensor | None],
    outputs_along: list[Tensor],
) -> dict[str, Tensor]:
    layers = recording.chain.layers
    results: dict[str, Tensor] = {}
    back = recording.criterion.hessian_products(recording.logits, recording.targets, outputs_along[-1])
    for index in range(len(layers) - 1, -1, -1):
        layer, gradient = layers[index], recording.gradients[index]
        if layer.bias_name is not None:
            results[layer.bias_name] = share @ back
        if layer.weight_name is not None:
            product = (back * share[:, None]).T @ recording.inputs[index]
            perturbed = inputs_along[index]
            if perturbed is not None:
                product = product + (gradient * share[:, None]).T @ perturbed
            results[layer.weight_name] = product
        if index:
            error = back @ layer.weight
            if layer.weight_name is not None:
                error = error + gradient @ vectors[layer.weight_name]
            back = error * recording.slopes[index - 1]
            bend = recording.bends[index - 1]
            if bend is not None:
                back = back + bend * outputs_along[index - 1]
    order = [name for layer in layers for name in (layer.weight_name, layer.bias_name) if name is not None]
    return {name: results[name] for name in order}
