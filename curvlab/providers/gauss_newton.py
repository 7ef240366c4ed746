"""Gauss-Newton, in two kinds.

    recursive (KFRA)   B^k = E[∇²ξ(h^k)],  B^{t-1} = (Wᵀ B^t W) ⊙ E[σ'σ'ᵀ]
    exact              B^t = E[J_iᵀ ∇²ξ_i J_i],  weight block E[(h_i h_iᵀ) ⊗ (J_iᵀ ∇²ξ_i J_i)]

With a criterion that is not convex either may be indefinite; the result's `definiteness` tells. The exact
weight block is an operator on the Jacobian rows of each example, with C_i = J_iᵀ ∇²ξ_i J_i never formed:

    product    X ↦ Σ_i c_i C_i X h_i h_iᵀ
    diagonal   Σ_i c_i diag(C_i) (h_i ⊙ h_i)ᵀ
    ‖·‖_F²     Σ_ij c_i c_j (h_i·h_j)² tr(C_i C_j)

A single batch's Jacobians are kept by its recording; a stream's are computed anew for every product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from curvlab.criteria import Criterion
from curvlab.curvature import Curvature, Definiteness, LayerCurvature
from curvlab.linalg import DenseFactor, Factor, OperatorBlock
from curvlab.linalg.factors import row_square_norms
from curvlab.measure import device
from curvlab.model.recording import Recording
from curvlab.problem import Problem
from curvlab.providers.base import INPUTS, Context, ProblemSnapshot, Provider, kronecker_layers
from curvlab.providers.pch import OUTPUT_HESSIAN, SLOPE_PRODUCTS, recurse
from curvlab.providers.statistics import GaussNewtonBlocks, OutputSpectrum, Statistic
from curvlab.specs import check_choices

__all__ = ["GaussNewton", "exact_layers"]

BLOCKS = GaussNewtonBlocks()
SPECTRUM = OutputSpectrum()


@dataclass(frozen=True)
class GaussNewton(Provider):
    """Gauss-Newton: with the expectation at every layer (recursive, KFRA) or with none (exact).

    >>> GaussNewton()
    GaussNewton(kind='recursive')
    """

    needs_chain: ClassVar[bool] = False
    kind: Literal["recursive", "exact"] = "recursive"

    def __post_init__(self) -> None:
        check_choices(self)

    def check(self, problem: Problem, name: str) -> None:
        if self.kind == "recursive":
            problem.network.require_chain(name)

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        if self.kind == "recursive":
            return (INPUTS, OUTPUT_HESSIAN, SLOPE_PRODUCTS)
        return (BLOCKS,) if problem.criterion.convex else (BLOCKS, SPECTRUM)

    def curvature(self, context: Context, name: str) -> Curvature:
        return _recursive(context, name) if self.kind == "recursive" else _exact(context, name)


def _recursive(context: Context, name: str) -> Curvature:
    chain, criterion = context.network.require_chain(name), context.problem.criterion
    (top,) = context.tensors(OUTPUT_HESSIAN)
    outputs = recurse(chain, top, context.tensors(SLOPE_PRODUCTS), [None] * len(chain.activations))
    definiteness = _known(criterion) or _measured_mean(top)
    return Curvature(name, criterion.name, kronecker_layers(context, outputs), definiteness)


def _exact(context: Context, name: str) -> Curvature:
    problem = context.problem
    layers = exact_layers(problem, [DenseFactor(block) for block in context.tensors(BLOCKS)])
    definiteness = _known(problem.criterion) or _measured_examples(*context.tensors(SPECTRUM))
    versions = problem.versions
    return Curvature(name, problem.criterion.name, layers, definiteness, versions=versions, live=True)


def _known(criterion: Criterion) -> Definiteness | None:
    return Definiteness(True, f"criterion `{criterion.name}` is convex") if criterion.convex else None


def _measured_mean(output: Tensor) -> Definiteness:
    """From E[∇²ξ]: congruences and Hadamard products with E[σ'σ'ᵀ] keep it positive semi-definite."""
    if not device.readable(output):
        return Definiteness(False, "the criterion is not known to be convex")
    eigenvalues = torch.linalg.eigvalsh(output)
    smallest = float(eigenvalues[0])
    rounding = 8 * torch.finfo(output.dtype).eps * float(eigenvalues.abs().max())
    return Definiteness(smallest >= -rounding, f"measured on this data: smallest eigenvalue {smallest:.2g}")


def _measured_examples(negative: Tensor, total: Tensor) -> Definiteness:
    """From each example's ∇²ξ: a weight block mixes the examples by their inputs, so each must be PSD."""
    if not device.readable(negative):
        return Definiteness(False, "the criterion is not known to be convex")
    rounding = 8 * torch.finfo(negative.dtype).eps * float(total)
    return Definiteness(
        float(negative) <= rounding,
        f"measured on this data: negative eigenvalues of the examples' output Hessians sum to "
        f"{float(-negative):.2g} in the mean",
    )


@dataclass(frozen=True, eq=False)
class _Weight:
    """The weight block of the layer at `index` among those with blocks."""

    snapshot: ProblemSnapshot
    index: int
    like: Tensor

    def rows(self, recording: Recording) -> tuple[Tensor, Tensor]:
        """The layer's inputs H (m × n_{t-1}) and Jacobians J (K, m, n_t)."""
        return recording.layers[self.index].inputs.rows, recording.jacobians[self.index]

    def product(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for recording, weights in self.snapshot.batches():
            h, jacobian = self.rows(recording)
            along = torch.einsum("kmn,mn->mk", jacobian, h @ x.T)
            curved = recording.criterion.hessian_products(recording.logits, recording.targets, along)
            back = torch.einsum("kmn,mk->mn", jacobian, curved * weights[:, None])
            result.addmm_(back.T, h)
        return result

    def diagonal(self) -> Tensor:
        result = torch.zeros_like(self.like)
        for recording, weights in self.snapshot.batches():
            h, jacobian = self.rows(recording)
            diagonals = (jacobian * recording.apply_output_hessian(jacobian)).sum(0)
            result.addmm_((diagonals * weights[:, None]).T, h.square())
        return result

    def trace(self) -> Tensor:
        result = self.like.new_zeros(())
        for recording, weights in self.snapshot.batches():
            h, jacobian = self.rows(recording)
            traces = (jacobian * recording.apply_output_hessian(jacobian)).sum((0, 2))
            result += weights @ (traces * row_square_norms(h))
        return result

    def square_norm(self) -> Tensor:
        """tr(C_i C_j) = Σ_kl (J_i^k · V_j^l)(V_i^k · J_j^l) with V = ∇²ξ J."""
        total = self.like.new_zeros(())
        for left, weights_left in self.snapshot.batches():
            h_left, j_left = self.rows(left)
            v_left = left.apply_output_hessian(j_left)
            for right, weights_right in self.snapshot.batches():
                h_right, j_right = self.rows(right)
                v_right = right.apply_output_hessian(j_right)
                alignment = (h_left @ h_right.T).square() * torch.outer(weights_left, weights_right)
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
    snapshot = ProblemSnapshot.of(problem)
    held = [0] * len(outputs) if problem.streamed else [j.nbytes for j in problem.recording().jacobians]
    layers = []
    for index, (layer, output) in enumerate(zip(problem.network.selected, outputs, strict=True)):
        operator = None
        if layer.weight_name is not None:
            operator = _Weight(snapshot, index, layer.weight).block(held[index])
        names = (layer.name, layer.weight_name, layer.bias_name)
        layers.append(LayerCurvature(*names, output, weight_operator=operator))
    return tuple(layers)
