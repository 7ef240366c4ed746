"""The exact Gauss-Newton weight block as an operator, one pass over the Jacobian rows a product.

    X ↦ Σ_i c_i J_iᵀ ∇²ξ_i J_i X h_i h_iᵀ

    diagonal   Σ_i c_i diag(J_iᵀ ∇²ξ_i J_i) (h_i ⊙ h_i)ᵀ
    ‖·‖_F²     Σ_ij c_i c_j (h_i·h_j)² ‖…‖, from inner products over pairs of examples
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.curvature import LayerCurvature
from curvlab.linalg import Factor, OperatorBlock
from curvlab.linalg.factors import row_square_norms
from curvlab.problem import Problem
from curvlab.recording import Recording

__all__ = ["exact_layers"]


@dataclass(frozen=True, eq=False)
class _Rows:
    """One batch at one layer: inputs H (m × n_{t-1}), J (K, m, n_t) and ∇²ξ J of the same shape."""

    inputs: Tensor
    jacobians: Tensor
    curved: Tensor
    share: Tensor


def _rows(recording: Recording, index: int) -> _Rows:
    outputs = recording.logits.shape[1]
    basis = torch.eye(outputs, dtype=recording.logits.dtype, device=recording.logits.device)
    cotangents = basis[:, None, :].expand(outputs, recording.examples, outputs)
    curved = recording.criterion.hessian_products(recording.logits, recording.targets, cotangents)
    inputs = recording.layers[index].inputs.rows
    return _Rows(inputs, recording.pullback(cotangents)[index], recording.pullback(curved)[index], recording.share)


class _GaussNewtonWeight:
    """The weight block of one layer; a single batch's Jacobians are kept, a stream's recomputed."""

    def __init__(self, problem: Problem, index: int) -> None:
        self.problem = problem
        self.index = index
        self.kept = None if problem.streamed else _rows(problem.recording(), index)

    def batches(self) -> Iterator[tuple[_Rows, Tensor]]:
        """Each batch's rows with their weights in the mean over all."""
        if self.kept is not None:
            yield self.kept, self.kept.share
            return
        total = sum(recording.total_weight for recording in self.problem.recordings())
        for recording in self.problem.recordings():
            yield _rows(recording, self.index), recording.weights / total

    def product(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for rows, share in self.batches():
            inner = torch.einsum("kmn,mn->km", rows.jacobians, rows.inputs @ x.T)
            outer = torch.einsum("kmn,km->mn", rows.curved, inner)
            result += (outer * share[:, None]).T @ rows.inputs
        return result

    def diagonal(self) -> Tensor:
        return torch.stack(
            [
                ((r.jacobians * r.curved).sum(0) * share[:, None]).T @ r.inputs.square()
                for r, share in self.batches()
            ]
        ).sum(0)

    def trace(self) -> Tensor:
        return torch.stack(
            [
                share @ ((r.jacobians * r.curved).sum((0, 2)) * row_square_norms(r.inputs))
                for r, share in self.batches()
            ]
        ).sum()

    def square_norm(self) -> Tensor:
        """Σ_ij c_i c_j (h_i·h_j)² tr(C_i C_j), C_i = J_iᵀ∇²ξ_iJ_i: tr = Σ_kl (J_i^k·V_j^l)(V_i^k·J_j^l)."""
        total: Tensor | float = 0.0
        for a, share_a in self.batches():
            for b, share_b in self.batches():
                alignment = (a.inputs @ b.inputs.T).square() * torch.outer(share_a, share_b)
                for ja, va in zip(a.jacobians, a.curved, strict=True):
                    for jb, vb in zip(b.jacobians, b.curved, strict=True):
                        total = total + (alignment * (ja @ vb.T) * (va @ jb.T)).sum()
        return torch.as_tensor(total)

    @property
    def held_bytes(self) -> int:
        if self.kept is None:
            return 0
        return sum(t.numel() * t.element_size() for t in (self.kept.jacobians, self.kept.curved))


def exact_layers(problem: Problem, outputs: list[Factor]) -> tuple[LayerCurvature, ...]:
    """Layers with the exact weight blocks, and the mean blocks `outputs` for the biases."""
    layers = []
    for index, (layer, output) in enumerate(zip(problem.network.selected, outputs, strict=True)):
        operator = None
        if layer.weight_name is not None:
            weight = _GaussNewtonWeight(problem, index)
            operator = OperatorBlock(
                tuple(layer.weight.shape),
                weight.product,
                layer.weight,
                weight.held_bytes,
                weight.diagonal,
                weight.trace,
                weight.square_norm,
            )
        layers.append(
            LayerCurvature(layer.name, layer.weight_name, layer.bias_name, output, weight_operator=operator)
        )
    return tuple(layers)
