"""The paper's equations to the letter, on the dense gradient: the oracle of the fast forms and their rival.

KFI       E[hhᵀ] formed; both damped factors inverted with torch.linalg.inv
SM-KFI    (E[h]E[h]ᵀ + γI)⁻¹ by the Sherman-Morrison formula, as a matrix product with G
CG        textbook iteration on n_t × n_{t-1} matrices, E[hhᵀ] formed or E[h] kept as a vector
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.curvature import LayerCurvature
from curvlab.gradient import RowGradient
from curvlab.linalg.cg import CGResult, OneSystem, conjugate_gradients
from curvlab.linalg.inputs import InputKind
from curvlab.linalg.inverse import NotFiniteError
from curvlab.measure import device
from curvlab.solvers.base import LayerGradient
from curvlab.solvers.damping import Damping
from curvlab.solvers.residual import FactoredSystem

__all__ = ["ExplicitInverse", "explicit_cg"]


def _dense(gradient: Tensor | RowGradient) -> Tensor:
    return gradient.form() if isinstance(gradient, RowGradient) else gradient


def _plus_identity(matrix: Tensor, shift: Tensor | float) -> Tensor:
    return matrix + shift * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _require_finite(matrix: Tensor) -> None:
    """An inverse can be finite though the matrix is not."""
    if device.readable(matrix) and not bool(torch.isfinite(matrix.sum())):
        raise NotFiniteError("the matrix to be inverted holds NaN or infinity")


@dataclass(frozen=True, eq=False)
class ExplicitInverse:
    """Inverses of both damped factors, as matrices (the mean factor: as a vector)."""

    output_inverse: Tensor
    bias_inverse: Tensor
    input_inverse: Tensor | None
    mean: Tensor | None
    gamma: Tensor

    @classmethod
    def prepare(cls, layer: LayerCurvature, system: FactoredSystem) -> ExplicitInverse:
        """Form and invert."""
        assert layer.output is not None
        b = layer.output.to_dense()
        _require_finite(b)
        output_inverse = torch.linalg.inv(_plus_identity(b, system.beta))
        bias_inverse = torch.linalg.inv(_plus_identity(b, system.shift))
        if layer.inputs is None or system.kind == "mean":
            mean = None if layer.inputs is None else layer.inputs.mean
            return cls(output_inverse, bias_inverse, None, mean, system.gamma)
        a = layer.inputs.full.to_dense()
        _require_finite(a)
        return cls(
            output_inverse,
            bias_inverse,
            torch.linalg.inv(_plus_identity(a, system.gamma)),
            None,
            system.gamma,
        )

    def apply(self, gradient: LayerGradient) -> tuple[Tensor | None, Tensor | None]:
        """-(B + βI)⁻¹ G (A + γI)⁻¹ and -(B + τI)⁻¹ g."""
        weight = (
            None if gradient.weight is None else -self.output_inverse @ self._right(_dense(gradient.weight))
        )
        bias = None if gradient.bias is None else -self.bias_inverse @ gradient.bias
        return weight, bias

    def _right(self, g: Tensor) -> Tensor:
        if self.input_inverse is not None:
            return g @ self.input_inverse
        assert self.mean is not None
        a = self.mean
        return (g - torch.outer(g @ a, a) / (self.gamma + a @ a)) / self.gamma


def explicit_cg(
    layer: LayerCurvature,
    gradient: LayerGradient,
    damping: Damping,
    kind: InputKind,
    max_iter: int,
    tol: float,
    read_interval: int,
) -> list[CGResult]:
    """Textbook CG on the weight's and on the bias's system, one after the other."""
    assert layer.output is not None
    b = layer.output.to_dense()
    results = []
    for g in (gradient.weight, gradient.bias):
        if g is None:
            continue
        dense = _dense(g)
        results.append(
            conjugate_gradients(
                _operator(layer, b, damping, kind, dense.ndim),
                -dense,
                OneSystem(),
                max_iter=max_iter,
                tol=tol,
                read_interval=read_interval,
            )
        )
    return results


def _operator(
    layer: LayerCurvature, b: Tensor, damping: Damping, kind: InputKind, ndim: int
) -> Callable[[Tensor], Tensor]:
    scale, shift = damping.scale, damping.shift
    if ndim == 1:
        return lambda x: scale * (b @ x) + shift * x
    assert layer.inputs is not None
    if kind == "mean":
        a = layer.inputs.mean
        return lambda x: scale * torch.outer(b @ (x @ a), a) + shift * x
    matrix = layer.inputs.full.to_dense()
    return lambda x: scale * (b @ x @ matrix) + shift * x
