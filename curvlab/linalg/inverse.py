"""(F + τI)⁻¹ for a factor F, on its smaller side.

dense      by Cholesky
Gram       (HᵀCH + τI)⁻¹ x = (x - H'ᵀ (K + τI)⁻¹ H' x) / τ    (Woodbury), K = H'H'ᵀ of m × m
rank one   (vvᵀ + τI)⁻¹ x = (x - v (vᵀx) / (τ + ‖v‖²)) / τ    (Sherman-Morrison)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from curvlab.linalg.factors import Factor, GramFactor, RankOneFactor

__all__ = ["NotFiniteError", "NotPositiveDefiniteError", "cholesky_shifted", "shifted_inverse"]


class NotPositiveDefiniteError(ArithmeticError):
    """A matrix that was to be factorised is not positive definite, in float64 either."""

    def __init__(self, smallest: float) -> None:
        super().__init__(f"not positive definite: smallest eigenvalue {smallest:.3g}")
        self.smallest = smallest


class NotFiniteError(ArithmeticError):
    """A matrix that was to be factorised holds NaN or infinity."""


def cholesky_shifted(matrix: Tensor, shift: Tensor | float, check: bool = True) -> Tensor:
    """The lower Cholesky factor of F + τI; a failure is retried once in float64, then raised.

    >>> cholesky_shifted(torch.tensor([[3.0]]), 1.0).item()
    2.0
    """
    shifted = matrix.clone()
    shifted.diagonal().add_(shift)
    factor, info = torch.linalg.cholesky_ex(shifted)
    if not check or int(info) == 0:
        return factor
    if not bool(torch.isfinite(shifted).all()):
        raise NotFiniteError("the matrix to be factorised holds NaN or infinity")
    wide = shifted.double() if shifted.device.type != "mps" else shifted.cpu().double()
    factor, info = torch.linalg.cholesky_ex(wide)
    if int(info) != 0:
        raise NotPositiveDefiniteError(float(torch.linalg.eigvalsh(wide)[0]))
    return factor.to(matrix)


def shifted_inverse(
    factor: Factor, shift: Tensor | float, key: Hashable, check: bool = True
) -> Callable[[Tensor], Tensor]:
    """x ↦ (F + τI)⁻¹ x; the factorisation is kept on the factor under `key`, which stands for τ."""
    if isinstance(factor, RankOneFactor):
        return lambda x: _sherman_morrison(factor.vector, shift, x)
    if isinstance(factor, GramFactor) and factor.narrow:
        small = factor.remember(("gram", key), lambda: cholesky_shifted(factor.gram, shift, check))
        return lambda x: _woodbury(factor, small, shift, x)
    lower = factor.remember(("dense", key), lambda: cholesky_shifted(factor.to_dense(), shift, check))
    return lambda x: torch.cholesky_solve(x, lower)


def _sherman_morrison(vector: Tensor, shift: Tensor | float, x: Tensor) -> Tensor:
    projection = (vector @ x) / (shift + vector @ vector)
    return (x - torch.outer(vector, projection)) / shift


def _woodbury(factor: GramFactor, lower: Tensor, shift: Tensor | float, x: Tensor) -> Tensor:
    root = factor.root[:, None]
    inner = torch.cholesky_solve(root * (factor.rows @ x), lower)
    return (x - factor.rows.T @ (root * inner)) / shift
