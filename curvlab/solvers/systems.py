"""True residuals, recomputed from the direction alone: how well does d solve a system?

    damped system      s B D A + τ D + G                (s, τ) from the damping, A the input factor
    factored system    (B + β I) D (A + γ I) + G        what the factored inverse solves

Both relative to ‖G‖. They share nothing with the solvers but the factors, and stay in the sample
space when the direction and the gradient do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.curvature import LayerCurvature
from curvlab.gradient import RowGradient
from curvlab.linalg import GramFactor, Matrix, RowProduct
from curvlab.linalg.inputs import InputKind
from curvlab.linalg.norms import binary_scale
from curvlab.linalg.product import form
from curvlab.measure import device
from curvlab.solvers.sides import WeightGradient

__all__ = [
    "DampedSystem",
    "FactoredSystem",
    "System",
    "bias_residual",
    "curvature_form",
    "inner",
    "relative",
    "weight_residual",
]


SIGNIFICANT = 1e3  # times its rounding: the least square norm that counts as accurate


@dataclass(frozen=True, eq=False)
class DampedSystem:
    """(s A ⊗ B + τ I) d = -g, for a bias (s B + τ I) d = -g."""

    kind: InputKind
    scale: float
    shift: float


@dataclass(frozen=True, eq=False)
class FactoredSystem:
    """(B + β I) D (A + γ I) = -G, for a bias (B + τ I) d = -g."""

    kind: InputKind
    beta: Tensor
    gamma: Tensor
    shift: float


System = DampedSystem | FactoredSystem


class _Sample:
    """Matrices M H' by their coefficients M."""

    def __init__(self, gram: GramFactor) -> None:
        self.gram = gram

    def times_input(self, x: Tensor, kind: InputKind) -> Tensor:
        """X A: M ↦ M K, or M K √c √cᵀ because E[h] = H'ᵀ√c."""
        image = x @ self.gram.gram
        return image if kind == "full" else torch.outer(image @ self.gram.root, self.gram.root)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * (y @ self.gram.gram)).sum()

    def square_norm(self, x: Tensor) -> Tensor:
        """‖XH'‖² by the Gram matrix, or by the product itself where rounding could be a part of it."""
        square = self.dot(x, x)
        rounding = torch.finfo(x.dtype).eps * x.square().sum() * self.gram.gram.trace()
        if not device.readable(square) or bool(square > SIGNIFICANT * rounding):
            return square
        return RowProduct(x, self.gram).square_norm()


class _Formed:
    """Matrices as they are."""

    def __init__(self, layer: LayerCurvature) -> None:
        assert layer.inputs is not None
        self.inputs = layer.inputs

    def times_input(self, x: Tensor, kind: InputKind) -> Tensor:
        return self.inputs.factor(kind).matmul(x.T).T

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum()

    def square_norm(self, x: Tensor) -> Tensor:
        return x.square().sum()


def _common(
    layer: LayerCurvature, direction: Matrix, gradient: WeightGradient
) -> tuple[_Sample | _Formed, Tensor, Tensor]:
    """Direction and gradient in the same representation."""
    assert layer.inputs is not None
    if (
        isinstance(direction, RowProduct)
        and isinstance(gradient, RowGradient)
        and direction.gram is gradient.inputs
        and gradient.inputs is layer.inputs.full
    ):
        s = gradient.gradients
        return _Sample(direction.gram), direction.coefficients, (s.rows * s.root[:, None]).T
    formed = gradient.form() if isinstance(gradient, RowGradient) else gradient
    return _Formed(layer), form(direction), formed


def weight_residual(
    system: System, layer: LayerCurvature, direction: Matrix, gradient: WeightGradient
) -> Tensor:
    """‖system applied to D, plus G‖ / ‖G‖ (zero where G is zero)."""
    space, d, g = _common(layer, direction, gradient)
    d, g = _in_range(d, g)
    output = layer.output
    assert output is not None
    right = space.times_input(d, system.kind)
    if isinstance(system, DampedSystem):
        r = system.scale * output.matmul(right) + system.shift * d + g
    else:
        right = right + system.gamma * d
        r = output.matmul(right) + system.beta * right + g
    return relative(space.square_norm(r), space.square_norm(g))


def bias_residual(system: System, layer: LayerCurvature, direction: Tensor, gradient: Tensor) -> Tensor:
    """The same for a bias."""
    assert layer.output is not None
    scale = system.scale if isinstance(system, DampedSystem) else 1.0
    direction, gradient = _in_range(direction, gradient)
    r = scale * layer.output.matmul(direction[:, None])[:, 0] + system.shift * direction + gradient
    return relative(r @ r, gradient @ gradient)


def _in_range(direction: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Both over the gradient's size: squares of what is relative to it do not under- or overflow."""
    size = binary_scale(gradient)
    return direction / size, gradient / size


def relative(square: Tensor, reference: Tensor) -> Tensor:
    """√(square / reference), or √square where the reference is zero."""
    square, reference = square.clamp(min=0), reference.clamp(min=0)
    return torch.where(
        reference > 0, (square / torch.where(reference > 0, reference, 1)).sqrt(), square.sqrt()
    )


def inner(layer: LayerCurvature, direction: Matrix, gradient: WeightGradient) -> Tensor:
    """⟨G, D⟩."""
    space, d, g = _common(layer, direction, gradient)
    return space.dot(d, g)


def curvature_form(layer: LayerCurvature, direction: Matrix, gradient: WeightGradient) -> Tensor:
    """⟨D, B D E[hhᵀ]⟩: the undamped quadratic form of the direction."""
    space, d, _ = _common(layer, direction, gradient)
    assert layer.output is not None
    return space.dot(d, layer.output.matmul(space.times_input(d, "full")))
