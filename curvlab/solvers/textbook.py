"""The textbook form: the paper's equations to the letter, on the dense gradient.

    KFI       E[hhᵀ] formed; both damped factors inverted with torch.linalg.inv
    SM-KFI    (E[h]E[h]ᵀ + γI)⁻¹ by the Sherman-Morrison formula, as a matrix product with G
    CG        plain iteration on n_t × n_{t-1} matrices, E[hhᵀ] formed or E[h] kept as a vector

A diagonal factor is inverted and multiplied with entry by entry, and is not formed. A damped factor that is
not positive definite is refused where an entry on its inverse's diagonal is not positive: reading it costs
nothing, while a Cholesky factorisation would add a sixth to the textbook's cost. Not every indefinite matrix
shows there; curvatures that are known to be indefinite are refused before.

The tests hold the sample-space form to it, and benchmarks measure both. The field `formulation` chooses:
`reduced` is the sample-space form, `explicit` the textbook's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.curvature import LayerCurvature
from curvlab.linalg import DenseFactor, DiagonalFactor, Factor, GramFactor, RankOneFactor
from curvlab.linalg.cg import FunctionOperator, FunctionStack, SymmetricOperator
from curvlab.linalg.execution import eigvalsh
from curvlab.linalg.factors import InputFactors, InputKind
from curvlab.linalg.inverse import NotFiniteError, NotPositiveDefiniteError
from curvlab.measure import device
from curvlab.solvers.base import Damping, FactoredSystem, LayerGradient
from curvlab.solvers.input_coordinates import form_gradient, input_factors, output_factor

__all__ = ["TextbookInverse", "bias_operator", "weight_operator"]


@dataclass(frozen=True, eq=False)
class TextbookInverse:
    """Inverses of both damped factors, as matrices (the mean factor: by its vector)."""

    output_inverse: Callable[[Tensor], Tensor]
    bias_inverse: Callable[[Tensor], Tensor]
    times_input_inverse: Callable[[Tensor], Tensor] | None

    route: ClassVar[str] = "explicit"

    @classmethod
    def prepare(cls, layer: LayerCurvature, system: FactoredSystem) -> TextbookInverse:
        """Form and invert."""
        b = output_factor(layer)
        right = None if layer.inputs is None else _times_input_inverse(layer.inputs, system)
        return cls(_inverse_times(b, system.beta), _inverse_times(b, system.shift), right)

    def apply(self, gradient: LayerGradient) -> tuple[Tensor | None, Tensor | None]:
        """-(B + βI)⁻¹ G (A + γI)⁻¹ and -(B + τI)⁻¹ g."""
        weight = bias = None
        if gradient.weight is not None and self.times_input_inverse is not None:
            weight = -self.output_inverse(self.times_input_inverse(form_gradient(gradient.weight)))
        if gradient.bias is not None:
            bias = -self.bias_inverse(gradient.bias)
        return weight, bias


def _times_input_inverse(inputs: InputFactors, system: FactoredSystem) -> Callable[[Tensor], Tensor]:
    """G ↦ G (A + γI)⁻¹."""
    gamma = system.gamma
    if system.kind == "mean":
        a = inputs.mean[..., None]
        square = a.square().sum((-2, -1), keepdim=a.ndim == 3)
        return lambda g: (g - (g @ a) * (a.mT / (gamma + square))) / gamma
    if isinstance(inputs.full, DiagonalFactor):
        diagonal = _require_positive(_require_finite(inputs.full.values) + gamma)
        return lambda g: g / diagonal
    inverse = _inverse(inputs.full, gamma)
    return lambda g: g @ inverse


def _inverse_times(factor: Factor, shift: Tensor | float) -> Callable[[Tensor], Tensor]:
    """X ↦ (F + shift I)⁻¹ X."""
    if isinstance(factor, DiagonalFactor):
        inverted = DiagonalFactor(1 / _require_positive(_require_finite(factor.values) + shift))
        return inverted.matmul
    inverse = _inverse(factor, shift)
    return lambda x: inverse @ x


def _inverse(factor: Factor, shift: Tensor | float) -> Tensor:
    """(F + shift I)⁻¹."""
    matrix = _require_finite(factor.to_dense())
    unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    damped = matrix + shift * unit
    inverse: Tensor = torch.linalg.inv(damped)
    positive = (inverse.diagonal(dim1=-2, dim2=-1) > 0).all()
    if device.readable(positive) and not bool(positive):
        raise NotPositiveDefiniteError(float(eigvalsh(damped.cpu().double()).min()))
    return inverse


def _require_finite(matrix: Tensor) -> Tensor:
    """The matrix; refused where it is not finite, since its inverse can be finite though it is not."""
    if device.readable(matrix) and not bool(torch.isfinite(matrix.sum())):
        raise NotFiniteError("the matrix to be inverted holds NaN or infinity")
    return matrix


def _require_positive(diagonal: Tensor) -> Tensor:
    """The diagonal of a damped factor; refused where it is not positive."""
    positive = (diagonal > 0).all()
    if device.readable(positive) and not bool(positive):
        raise NotPositiveDefiniteError(float(diagonal.min()))
    return diagonal


def weight_operator(layer: LayerCurvature, damping: Damping, kind: InputKind) -> SymmetricOperator:
    """X ↦ s B X A + τ X."""
    b, inputs = _form_factor(output_factor(layer)), input_factors(layer)
    scale, shift = damping.scale, damping.shift
    make: type[FunctionOperator | FunctionStack] = FunctionOperator if b.count == 1 else FunctionStack
    if kind == "mean":
        a = inputs.mean[..., None]
        return make(lambda x: scale * (b.matmul(x @ a) * a.mT) + shift * x)
    full = inputs.full
    if isinstance(full, DiagonalFactor):
        return make(lambda x: scale * (b.matmul(x) * full.values) + shift * x)
    matrix = full.to_dense()
    return make(lambda x: scale * (b.matmul(x) @ matrix) + shift * x)


def _form_factor(factor: Factor) -> Factor:
    """A factor whose products are those of its matrix; a diagonal one and a stack as they are."""
    return DenseFactor(factor.to_dense()) if isinstance(factor, GramFactor | RankOneFactor) else factor


def bias_operator(layer: LayerCurvature, damping: Damping) -> FunctionOperator:
    """x ↦ s B x + τ x."""
    b = _form_factor(output_factor(layer))
    return FunctionOperator(lambda x: damping.scale * b.matmul(x) + damping.shift * x)
