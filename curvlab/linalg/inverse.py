"""(F + τI)⁻¹ for a factor F, on its smaller side.

dense      by Cholesky
rows       the same with rows that are never formed (`example_factors`)
Gram       (HᵀCH + τI)⁻¹ x = (x - H'ᵀ (K + τI)⁻¹ H' x) / τ    (Woodbury), K = H'H'ᵀ of m × m
rank one   (vvᵀ + τI)⁻¹ x = (x - v (vᵀx) / (τ + ‖v‖²)) / τ    (Sherman-Morrison)
diagonal   entry by entry
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from math import isfinite, isnan

import torch
from torch import Tensor

from curvlab.linalg.example_factors import ExampleFactor
from curvlab.linalg.execution import LEAST, FullPrecision, Limits, eigvalsh, require
from curvlab.linalg.factors import DiagonalFactor, Factor, GramFactor, RankOneFactor

__all__ = [
    "DenseInverse",
    "DiagonalInverse",
    "ExampleInverse",
    "GramInverse",
    "NotFiniteError",
    "NotPositiveDefiniteError",
    "ShiftedInverse",
    "cholesky_multiply",
    "cholesky_shifted",
    "diagonal_inverse",
    "require_positive",
    "shifted_inverse",
]


POSITIVE = Limits("a damped diagonal is not positive and finite", low=LEAST)
POSITIVE_SYSTEM = Limits("a damped system is not positive definite: increase alpha", low=LEAST)
FACTORISED = Limits("a damped factor is not positive definite in its own precision: increase alpha", 0, 0)
PAGE_BYTES = 4096
BORDER = 16


class NotPositiveDefiniteError(ArithmeticError):
    """A matrix that was to be factorised is not positive definite, in float64 either."""

    def __init__(self, smallest: float) -> None:
        super().__init__(f"not positive definite: smallest eigenvalue {smallest:.3g}")
        self.smallest = smallest


class NotFiniteError(ArithmeticError):
    """A matrix that was to be factorised holds NaN or infinity."""


def require_positive(smallest: Tensor) -> None:
    """Refuse a system whose smallest eigenvalue is not positive, or is NaN."""

    def judge(found: list[float]) -> None:
        (least,) = found
        if isnan(least):
            raise NotFiniteError("the matrix to be factorised holds NaN or infinity")
        if least <= 0:
            raise NotPositiveDefiniteError(least)

    require([smallest], judge, POSITIVE_SYSTEM)


def cholesky_shifted(matrix: Tensor, shift: Tensor | float, check: bool = True) -> Tensor:
    """The lower Cholesky factor of F + τI; a failure is retried once in float64, then raised.

    Of a stack (G, n, n), with τ a number or (G, 1, 1), those of all its matrices.

    >>> cholesky_shifted(torch.tensor([[3.0]]), 1.0).item()
    2.0
    """
    n = matrix.shape[-1]
    bordered = _copy_with_border(matrix)
    shifted = bordered[..., :n, :n]
    stacked = isinstance(shift, Tensor) and shift.ndim > 0
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift[..., 0] if stacked else shift)  # type: ignore[index]
    factor, info = torch.linalg.cholesky_ex(bordered)
    lower = factor[..., :n, :n]

    def judge(failed: list[float]) -> bool:
        if not any(failed):
            return False
        lower.copy_(_cholesky_in_float64(matrix, shift))
        return True

    if check:
        require([info], judge, FACTORISED)
    return lower


def _cholesky_in_float64(matrix: Tensor, shift: Tensor | float) -> Tensor:
    """The lower Cholesky factor of F + τI, on the host: not every device has float64."""
    # The shift is added again: in float32 it may have been lost in the diagonal.
    wide = matrix.cpu().double()
    unit = torch.eye(wide.shape[-1], dtype=wide.dtype, device="cpu")
    wide = wide + torch.as_tensor(shift).to(wide) * unit
    if not bool(torch.isfinite(wide).all()):
        raise NotFiniteError("the matrix to be factorised holds NaN or infinity")
    factor, info = torch.linalg.cholesky_ex(wide)
    if bool(info.any()):
        raise NotPositiveDefiniteError(float(eigvalsh(wide).amin()))
    return factor


def _copy_with_border(matrix: Tensor) -> Tensor:
    """A copy, as the leading block of a larger matrix [F 0; 0 I] where columns of F's own length are slow.

    On a CPU, columns that all start at the same place of a page evict each other from the cache: a
    factorisation then takes half as long again. The border moves them apart and changes no entry of L.
    """
    n = len(matrix)
    if matrix.ndim > 2 or matrix.device.type != "cpu" or n * matrix.element_size() % PAGE_BYTES:
        return matrix.clone()
    bordered = matrix.new_zeros(n + BORDER, n + BORDER)
    bordered.diagonal()[n:] = 1
    bordered[:n, :n] = matrix
    return bordered


def cholesky_multiply(lower: Tensor, x: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ x: by triangular solves, or by the inverse where x has at least as many columns as rows.

    >>> cholesky_multiply(torch.tensor([[2.0]]), torch.tensor([[8.0, 4.0]])).tolist()
    [[2.0, 1.0]]
    """
    if x.shape[-1] < x.shape[-2]:
        return torch.cholesky_solve(x, lower)
    return torch.cholesky_inverse(lower) @ x


class ShiftedInverse(FullPrecision, ABC):
    """x ↦ (F + τI)⁻¹ x for one factor F and one τ."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """(F + τI)⁻¹ x."""


@dataclass(frozen=True, eq=False)
class DenseInverse(ShiftedInverse):
    """By the Cholesky factor of F + τI."""

    lower: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return cholesky_multiply(self.lower, x)

    def matrix(self) -> Tensor:
        """(F + τI)⁻¹ itself."""
        return torch.cholesky_inverse(self.lower)


@dataclass(frozen=True, eq=False)
class DiagonalInverse(ShiftedInverse):
    """Entry by entry: `values` are f + τ."""

    values: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x / self.values[:, None]


def diagonal_inverse(values: Tensor, shift: Tensor | float, check: bool = True) -> DiagonalInverse:
    """x ↦ (diag(f) + τI)⁻¹ x; refused where an entry is not positive and finite.

    >>> diagonal_inverse(torch.tensor([1.0, 3.0]), 1.0)(torch.ones(2, 1)).flatten().tolist()
    [0.5, 0.25]
    """
    shifted = values + shift

    def judge(numbers: list[float]) -> None:
        smallest, total = numbers
        if not isfinite(total):
            raise NotFiniteError("the diagonal to be inverted holds NaN or infinity")
        if smallest <= 0:
            raise NotPositiveDefiniteError(smallest)

    if check:
        require([shifted.amin(), shifted.sum()], judge, POSITIVE)
    return DiagonalInverse(shifted)


@dataclass(frozen=True, eq=False)
class GramInverse(ShiftedInverse):
    """By the Cholesky factor of K + τI, m × m."""

    factor: GramFactor
    lower: Tensor
    shift: Tensor | float

    def __call__(self, x: Tensor) -> Tensor:
        root = self.factor.root[:, None]
        inner = cholesky_multiply(self.lower, (self.factor.rows @ x).mul_(root))
        return torch.addmm(x, self.factor.rows.T, inner.mul_(root), alpha=-1).div_(self.shift)

    def of_rows(self, right: Tensor) -> Tensor:
        """(F + τI)⁻¹ H'ᵀ right = H'ᵀ (K + τI)⁻¹ right: the push-through identity, at half the work."""
        return self.factor.scaled_rows().T @ cholesky_multiply(self.lower, right)


@dataclass(frozen=True, eq=False)
class ExampleInverse(ShiftedInverse):
    """The same for rows that are not formed: two products with them, and one of k × k between."""

    factor: ExampleFactor
    lower: Tensor
    shift: Tensor | float

    def __call__(self, x: Tensor) -> Tensor:
        columns = []
        for column in x.unbind(1):
            inner = cholesky_multiply(self.lower, self.factor.inner(column)[:, None])[:, 0]
            columns.append((column - self.factor.combination(inner)) / self.shift)
        return torch.stack(columns, 1)


@dataclass(frozen=True, eq=False)
class RankOneInverse(ShiftedInverse):
    """By the Sherman-Morrison formula."""

    vector: Tensor
    shift: Tensor | float

    def __call__(self, x: Tensor) -> Tensor:
        projection = (self.vector @ x) / (self.shift + self.vector @ self.vector)
        return (x - torch.outer(self.vector, projection)) / self.shift


def shifted_inverse(
    factor: Factor, shift: Tensor | float, key: Hashable, check: bool = True
) -> ShiftedInverse:
    """x ↦ (F + τI)⁻¹ x; the factorisation is kept on the factor under `key`, which stands for τ."""
    if isinstance(factor, RankOneFactor):
        return RankOneInverse(factor.vector, shift)
    if isinstance(factor, DiagonalFactor):
        return factor.remember_recent(key, lambda: diagonal_inverse(factor.values, shift, check))
    if isinstance(factor, GramFactor) and factor.narrow:
        small = factor.remember_recent(("gram", key), lambda: cholesky_shifted(factor.gram, shift, check))
        return GramInverse(factor, small, shift)
    if isinstance(factor, ExampleFactor) and factor.narrow and factor.signs is None:
        inner = factor.remember_recent(("gram", key), lambda: cholesky_shifted(factor.gram, shift, check))
        return ExampleInverse(factor, inner, shift)
    lower = factor.remember_recent(("dense", key), lambda: cholesky_shifted(factor.to_dense(), shift, check))
    return DenseInverse(lower)
