"""Matrices whose rows lie in the row space of a Gram factor: X = M H', H' = diag(√c) H.

The coefficients M (n × m) are all that is computed with; the wide dimension of H appears in the
m × m Gram matrix K = H'H'ᵀ, which is the metric: ⟨M₁H', M₂H'⟩ = tr(M₁ K M₂ᵀ), and in the one product
that adds X to a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.linalg.factors import GramFactor
from curvlab.linalg.symmetric import COLUMN_CHUNK

__all__ = ["RowProduct", "add_into", "form"]


@dataclass(frozen=True, eq=False)
class RowProduct:
    """X = M diag(√c) H, formed only on demand.

    >>> x = RowProduct(torch.ones(2, 1), GramFactor(torch.ones(1, 3), torch.ones(1)))
    >>> x.shape, x.form().sum().item()
    ((2, 3), 6.0)
    """

    coefficients: Tensor
    gram: GramFactor

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of X."""
        return (self.coefficients.shape[0], self.gram.size)

    @property
    def left(self) -> Tensor:
        """M diag(√c), so that X = left @ H."""
        return self.coefficients * self.gram.root

    def form(self) -> Tensor:
        """X itself."""
        return self.left @ self.gram.rows

    def square_norm(self) -> Tensor:
        """‖X‖², a chunk of columns at a time.

        tr(M K Mᵀ) would be cheaper, but loses half of the digits where M is large in the null space
        of K: it sees the difference of what cancels, not what is left.
        """
        left = self.left
        chunks = self.gram.rows.split(COLUMN_CHUNK, dim=1)
        return torch.stack([(left @ chunk).square().sum() for chunk in chunks]).sum()

    def dot(self, other: RowProduct) -> Tensor:
        """⟨X, Y⟩ for two matrices over the same rows."""
        return (self.coefficients * (other.coefficients @ self.gram.gram)).sum()


def form(value: Tensor | RowProduct) -> Tensor:
    """The matrix, whether it is kept in factors or not."""
    return value.form() if isinstance(value, RowProduct) else value


def add_into(target: Tensor, value: Tensor | RowProduct, scale: float) -> None:
    """target ← target + scale · value, in place; a product is added without being formed."""
    with torch.no_grad():
        if isinstance(value, RowProduct):
            target.addmm_(value.left, value.gram.rows, alpha=scale)
        else:
            target.add_(value, alpha=scale)
