"""The exact Gauss-Newton weight block as an operator on the Jacobian rows of each example.

    product    X ↦ Σ_i c_i C_i X h_i h_iᵀ        with C_i = J_iᵀ ∇²ξ_i J_i, never formed
    diagonal   Σ_i c_i diag(C_i) (h_i ⊙ h_i)ᵀ
    ‖·‖_F²     Σ_ij c_i c_j (h_i·h_j)² tr(C_i C_j)

A single batch's Jacobians are kept by its recording; a stream's are computed anew for every product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.curvature import LayerCurvature
from curvlab.linalg import Factor, OperatorBlock
from curvlab.linalg.factors import row_square_norms
from curvlab.model.recording import Recording
from curvlab.problem import Problem
from curvlab.providers.live import LiveData

__all__ = ["exact_layers"]


@dataclass(frozen=True, eq=False)
class _Weight:
    """The weight block of the layer at `index` among those with blocks."""

    data: LiveData
    index: int
    like: Tensor

    def rows(self, recording: Recording) -> tuple[Tensor, Tensor]:
        """The layer's inputs H (m × n_{t-1}) and Jacobians J (K, m, n_t)."""
        return recording.layers[self.index].inputs.rows, recording.jacobians[self.index]

    def product(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for recording, share in self.data.batches():
            h, jacobian = self.rows(recording)
            along = torch.einsum("kmn,mn->mk", jacobian, h @ x.T)
            curved = recording.criterion.hessian_products(recording.logits, recording.targets, along)
            back = torch.einsum("kmn,mk->mn", jacobian, curved * share[:, None])
            result.addmm_(back.T, h)
        return result

    def diagonal(self) -> Tensor:
        result = torch.zeros_like(self.like)
        for recording, share in self.data.batches():
            h, jacobian = self.rows(recording)
            diagonals = (jacobian * recording.curved(jacobian)).sum(0)
            result.addmm_((diagonals * share[:, None]).T, h.square())
        return result

    def trace(self) -> Tensor:
        result = self.like.new_zeros(())
        for recording, share in self.data.batches():
            h, jacobian = self.rows(recording)
            traces = (jacobian * recording.curved(jacobian)).sum((0, 2))
            result += share @ (traces * row_square_norms(h))
        return result

    def square_norm(self) -> Tensor:
        """tr(C_i C_j) = Σ_kl (J_i^k · V_j^l)(V_i^k · J_j^l) with V = ∇²ξ J."""
        total = self.like.new_zeros(())
        for left, share_left in self.data.batches():
            h_left, j_left = self.rows(left)
            v_left = left.curved(j_left)
            for right, share_right in self.data.batches():
                h_right, j_right = self.rows(right)
                v_right = right.curved(j_right)
                alignment = (h_left @ h_right.T).square() * torch.outer(share_left, share_right)
                for jl, vl in zip(j_left, v_left, strict=True):
                    for jr, vr in zip(j_right, v_right, strict=True):
                        total += (alignment * (jl @ vr.T) * (vl @ jr.T)).sum()
        return total

    def block(self, held_bytes: int) -> OperatorBlock:
        shape = (self.like.shape[0], self.like.shape[1])
        closed_forms = (self.diagonal, self.trace, self.square_norm)
        return OperatorBlock(shape, self.product, self.like, held_bytes, *closed_forms)


def exact_layers(problem: Problem, outputs: Sequence[Factor]) -> tuple[LayerCurvature, ...]:
    """Layers with the exact weight blocks, and the mean blocks `outputs` for the biases."""
    data = LiveData.of(problem)
    held = [0] * len(outputs) if problem.streamed else [j.nbytes for j in problem.recording().jacobians]
    layers = []
    for index, (layer, output) in enumerate(zip(problem.network.selected, outputs, strict=True)):
        operator = None
        if layer.weight_name is not None:
            operator = _Weight(data, index, layer.weight).block(held[index])
        names = (layer.name, layer.weight_name, layer.bias_name)
        layers.append(LayerCurvature(*names, output, weight_operator=operator))
    return tuple(layers)
