"""Gauss-Newton, in three kinds.

    recursive (KFRA)   B^k = E[∇²ξ(h^k)],  B^{t-1} = (Wᵀ B^t W) ⊙ E[σ'σ'ᵀ], on chains of Linear layers
    rows               sides of rows Jᵀ l for the columns l of ∇²ξ = L Lᵀ, on any model (KFLR; drawn: KFAC-MC)
    exact              B^t = E[J_iᵀ ∇²ξ_i J_i],  weight block E[(h_i h_iᵀ) ⊗ (J_iᵀ ∇²ξ_i J_i)], by products

With a criterion that is not convex each may be indefinite; the result's `definiteness` tells. The exact
weight block of a chain is an operator on the Jacobian rows of each example, with C_i = J_iᵀ ∇²ξ_i J_i never
formed:

    product    X ↦ Σ_i c_i C_i X h_i h_iᵀ
    diagonal   Σ_i c_i diag(C_i) (h_i ⊙ h_i)ᵀ
    ‖·‖_F²     Σ_ij c_i c_j (h_i·h_j)² tr(C_i C_j)

A single batch's Jacobians are kept by its recording; a stream's are computed anew for every product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvlab.criteria import Criterion
from curvlab.curvature import Curvature, Definiteness
from curvlab.curvature_layers import LayerCurvature, layer_from_parts
from curvlab.exceptions import SpecError
from curvlab.linalg import DenseFactor, Factor, OperatorBlock, eigvalsh, signed_difference
from curvlab.linalg.factors import row_square_norms
from curvlab.measure import device
from curvlab.model.recording import ChainRecording
from curvlab.problem import Problem
from curvlab.providers.base import INPUTS, ChainOrRows, Context, factor_layers, kronecker_layers
from curvlab.providers.ekfac import EigenMoments, eigen_layers, row_statistics
from curvlab.providers.operators import ModelOperator, ProblemSnapshot, products_at_once
from curvlab.providers.pch import OUTPUT_HESSIAN, SLOPE_PRODUCTS, recurse
from curvlab.providers.statistics import (
    CurvatureProducts,
    GaussNewtonBlocks,
    OutputSpectrum,
    Statistic,
    sides_for,
)

__all__ = ["GaussNewton", "exact_layers"]

BLOCKS = GaussNewtonBlocks()
SPECTRUM = OutputSpectrum()


@dataclass(frozen=True)
class GaussNewton(ChainOrRows):
    """Gauss-Newton: with an expectation at every layer (recursive), of rows, or not approximated (exact).

    Args:
        kind: `auto` is `recursive` on a chain of Linear layers and `rows` elsewhere.
        samples: for `rows`, how many random combinations of the columns of ∇²ξ go back, or `all` columns.
        structure: for `rows` as in `fisher`; `exact`, by products, is block diagonal by parameter unless
            `full`.

    >>> GaussNewton().kind
    'auto'
    """

    kind: Literal["auto", "recursive", "rows", "exact"] = "auto"
    samples: int | Literal["all"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples != "all" and self.samples < 1:
            raise SpecError(f"samples={self.samples}: expected `all` or a number of at least 1")
        fits = {"exact": ("kronecker", "block", "full"), "recursive": ("kronecker",)}
        if self.structure not in fits.get(self.kind, (self.structure,)):
            raise SpecError(
                f"structure={self.structure} does not go with kind={self.kind}; it does with kind=rows"
            )

    def products(self, problem: Problem) -> CurvatureProducts:
        """The statistic that gives the output sides of the kind `rows`."""
        drawn = None if self.samples == "all" else self.samples
        return CurvatureProducts(sides_for(self.sides, problem), drawn, self.seed)

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        kind = self.resolve(problem)
        if kind == "recursive":
            return (INPUTS, OUTPUT_HESSIAN, SLOPE_PRODUCTS)
        spectrum = () if problem.criterion.convex else (SPECTRUM,)
        if kind == "exact":
            return ((BLOCKS,) if problem.chain is not None else ()) + spectrum
        products = self.products(problem)
        return (*row_statistics(products, self.structure), *spectrum)

    def curvature(self, context: Context, name: str) -> Curvature:
        kind = self.resolve(context.problem)
        if kind == "recursive":
            return _recursive(context, name)
        if kind == "exact":
            return (
                _exact(context, name)
                if context.problem.chain is not None and self.structure != "full"
                else (_exact_operator(context, name, self.structure == "full"))
            )
        problem = context.problem
        products = self.products(problem)
        factors = context.factors(products)
        if self.sides.keeps_examples and products.signed(problem.criterion):
            half = len(factors) // 2
            pairs = zip(factors[:half], factors[half:], strict=True)
            factors = tuple(signed_difference(plus, minus) for plus, minus in pairs)
        layers, notes = factor_layers(context, factors, products.sides)
        if self.structure == "ekfac":
            layers = eigen_layers(problem.layers, layers, context.tensors(EigenMoments(products)))
        definiteness = _known_definiteness(problem.criterion) or _measured_examples(
            *context.tensors(SPECTRUM)
        )
        return Curvature(
            name,
            problem.criterion.name,
            layers,
            definiteness,
            notes=(*self.row_notes(problem), *notes),
            structure=self.structure,
        )


def _recursive(context: Context, name: str) -> Curvature:
    chain, criterion = context.problem.require_chain(name), context.problem.criterion
    (top,) = context.tensors(OUTPUT_HESSIAN)
    outputs = recurse(chain, top, context.tensors(SLOPE_PRODUCTS), [None] * len(chain.activations))
    definiteness = _known_definiteness(criterion) or _measured_mean(top)
    return Curvature(name, criterion.name, kronecker_layers(context, outputs), definiteness)


def _exact(context: Context, name: str) -> Curvature:
    problem = context.problem
    layers = exact_layers(problem, [DenseFactor(block) for block in context.tensors(BLOCKS)])
    definiteness = _known_definiteness(problem.criterion) or _measured_examples(*context.tensors(SPECTRUM))
    versions = problem.versions
    return Curvature(
        name, problem.criterion.name, layers, definiteness, versions=versions, live=True, structure="block"
    )


def _exact_operator(context: Context, name: str, coupled: bool) -> Curvature:
    """The exact matrix of any model, by products with it."""
    problem = context.problem
    operator, at_once = ModelOperator(problem, "gauss_newton"), products_at_once(problem)
    return Curvature(
        name,
        problem.criterion.name,
        operator.layers(),
        _known_definiteness(problem.criterion) or _measured_examples(*context.tensors(SPECTRUM)),
        full_product=operator.whole_product(at_once) if coupled else None,
        versions=problem.versions,
        live=True,
        structure="full" if coupled else "block",
        products_at_once=at_once,
    )


def _known_definiteness(criterion: Criterion) -> Definiteness | None:
    return Definiteness(True, f"criterion `{criterion.name}` is convex") if criterion.convex else None


def _measured_mean(output: Tensor) -> Definiteness:
    """From E[∇²ξ]: congruences and Hadamard products with E[σ'σ'ᵀ] keep it positive semi-definite."""
    if not device.readable(output):
        return Definiteness(False, "the criterion is not known to be convex")
    eigenvalues = eigvalsh(output)
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

    def batches(self) -> Iterator[tuple[ChainRecording, Tensor]]:
        """Each batch's recording, with its examples' weights in the mean over all."""
        for recording, weights in self.snapshot.batches():
            assert isinstance(recording, ChainRecording)
            yield recording, weights

    def rows(self, recording: ChainRecording) -> tuple[Tensor, Tensor]:
        """The layer's inputs H (m × n_{t-1}) and Jacobians J (K, m, n_t)."""
        return recording.layers[self.index].inputs.rows, recording.jacobians[self.index]

    def product(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for recording, weights in self.batches():
            h, jacobian = self.rows(recording)
            along = torch.einsum("kmn,mn->mk", jacobian, h @ x.T)
            curved = recording.criterion.hessian_products(recording.logits, recording.targets, along)
            back = torch.einsum("kmn,mk->mn", jacobian, curved * weights[:, None])
            result.addmm_(back.T, h)
        return result

    def diagonal(self) -> Tensor:
        result = torch.zeros_like(self.like)
        for recording, weights in self.batches():
            h, jacobian = self.rows(recording)
            diagonals = (jacobian * recording.apply_output_hessian(jacobian)).sum(0)
            result.addmm_((diagonals * weights[:, None]).T, h.square())
        return result

    def trace(self) -> Tensor:
        result = self.like.new_zeros(())
        for recording, weights in self.batches():
            h, jacobian = self.rows(recording)
            traces = (jacobian * recording.apply_output_hessian(jacobian)).sum((0, 2))
            result += weights @ (traces * row_square_norms(h))
        return result

    def square_norm(self) -> Tensor:
        """tr(C_i C_j) = Σ_kl (J_i^k · V_j^l)(V_i^k · J_j^l) with V = ∇²ξ J."""
        total = self.like.new_zeros(())
        for left, weights_left in self.batches():
            h_left, j_left = self.rows(left)
            v_left = left.apply_output_hessian(j_left)
            for right, weights_right in self.batches():
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
    recording = None if problem.streamed else problem.recording()
    held = (
        [j.nbytes for j in recording.jacobians]
        if isinstance(recording, ChainRecording)
        else [0] * len(outputs)
    )
    layers = []
    for index, (layer, output) in enumerate(zip(problem.layers, outputs, strict=True)):
        operator = None
        if layer.weight_name is not None:
            operator = _Weight(snapshot, index, layer.weight).block(held[index])
        names = (layer.name, layer.weight_name, layer.bias_name)
        layers.append(layer_from_parts(*names, output, weight_operator=operator))
    return tuple(layers)
