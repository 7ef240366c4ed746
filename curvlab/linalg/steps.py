"""Matrices that are not formed until they are asked for.

    RowProduct     X = M H', H' = diag(√c) H    rows in the row space of a Gram factor
    Combination    X = c G + U Z                a multiple of a given matrix and a product of thin ones

Of a row product the coefficients M (n × m) are all that is computed with; the wide dimension of H appears in
the m × m Gram matrix K = H'H'ᵀ, which is the metric: ⟨M₁H', M₂H'⟩ = tr(M₁ K M₂ᵀ), and in the one product
that adds X to a parameter. A combination refers to G, which is not copied, and is added in place too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.linalg.factors import GramFactor
from curvlab.linalg.norms import frobenius_norm, largest
from curvlab.linalg.symmetric import COLUMN_CHUNK

__all__ = ["Combination", "Matrix", "RowProduct", "add_into", "checksum", "form", "magnitude"]


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


@dataclass(frozen=True, eq=False)
class Combination:
    """X = c G + U Z, with c a scalar tensor, U of few columns and Z of as many rows; formed on demand.

    >>> x = Combination(torch.tensor(2.0), torch.ones(2, 3), torch.ones(2, 1), torch.ones(1, 3))
    >>> x.shape, x.form().sum().item()
    ((2, 3), 18.0)
    """

    scale: Tensor
    matrix: Tensor
    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of X."""
        return (self.matrix.shape[0], self.matrix.shape[1])

    def form(self) -> Tensor:
        """X itself."""
        return (self.scale * self.matrix).addmm_(self.left, self.right)


Matrix = Tensor | RowProduct | Combination


def form(value: Matrix) -> Tensor:
    """The matrix, whether it is formed already or not."""
    return value if isinstance(value, Tensor) else value.form()


def add_into(target: Tensor, value: Matrix, scale: float) -> None:
    """target ← target + scale · value, in place; what is not formed is added without being formed."""
    with torch.no_grad():
        if isinstance(value, RowProduct):
            target.addmm_(value.left, value.gram.rows, alpha=scale)
        elif isinstance(value, Combination):
            target.addcmul_(value.scale, value.matrix, value=scale)
            target.addmm_(value.left, value.right, alpha=scale)
        else:
            target.add_(value, alpha=scale)


def checksum(value: Matrix) -> Tensor:
    """A scalar tensor that is finite only where what was computed of the matrix is.

    The rows of a product, and the matrix and the basis of a combination, were there before.
    """
    if isinstance(value, RowProduct):
        return value.coefficients.sum()
    return value.scale + value.left.sum() if isinstance(value, Combination) else value.sum()


def magnitude(value: Matrix) -> Tensor:
    """An upper bound of the largest entry, with no matrix formed: ‖M‖ √tr K, or |c| max|G| + ‖U‖ ‖Z‖.

    >>> magnitude(torch.tensor([[1.0, -3.0]])).item()
    3.0
    """
    if isinstance(value, RowProduct):
        return frobenius_norm(value.coefficients) * value.gram.trace().clamp(min=0).sqrt()
    if isinstance(value, Combination):
        thin = frobenius_norm(value.left) * frobenius_norm(value.right)
        return value.scale.abs() * largest(value.matrix) + thin
    return largest(value)
