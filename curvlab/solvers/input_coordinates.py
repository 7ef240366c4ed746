"""The input side of a layer: coordinates in which the wide dimension n_{t-1} does not appear.

A solver's direction is D = X Z + L G⊥, where the rows of Z span what the input factor A sees, G⊥ is the
part of the gradient outside it, and L acts on G⊥ from the left (a scalar in CG, a matrix in the
factored inverse). The solver computes with X alone; the right action of A on X is a small matrix.

    side      Z                       X             A acts as       G⊥
    sample    H' = diag(√c) H         n_t × m       K = H'H'ᵀ       0
    eigen     Λ^-½ Vᵀ H', K = VΛVᵀ    n_t × m       Λ               where Λ is rounding
    row       Qᵀ from QR of H'ᵀ       n_t × m       R Rᵀ            G - (GQ)Qᵀ
    dense     I                       n_t × n_{t-1} A               0
    mean      qᵀ = E[h]ᵀ/‖E[h]‖       n_t × 1       ‖E[h]‖²         G - (Gq)qᵀ

All but the first are orthonormal: inner products are those of X, and nothing cancels in them. The first
is for solvers that take none; the second keeps the same route, `sample`, for those that do.

The last is in `mean_side`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from curvlab.exceptions import PairError
from curvlab.gradient import RowGradient
from curvlab.linalg import Combination, GramFactor, Matrix, RowProduct
from curvlab.linalg.factors import DenseFactor
from curvlab.linalg.inverse import cholesky_shifted
from curvlab.linalg.norms import binary_scale, frobenius_norm
from curvlab.solvers.perpendicular import split_gradient

__all__ = [
    "Coordinates",
    "DenseSide",
    "EigenSide",
    "InputSide",
    "Left",
    "RowSide",
    "SampleSide",
    "Scalar",
    "WeightGradient",
    "formed",
    "joined",
    "own_gradient",
]

T = TypeVar("T")
Left = Callable[[Tensor], Tensor]
WeightGradient = Tensor | RowGradient


@dataclass(frozen=True, eq=False)
class Scalar:
    """An L that is a number: L G⊥ need not be formed."""

    value: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.value * x


@dataclass(frozen=True, eq=False)
class Coordinates:
    """A weight gradient as a side sees it: X_G (n_t × r), ‖G⊥‖ (None: zero), and what forms G⊥.

    `rows` is set where X_G is the transpose of these rows, scaled by the roots of their weights.
    """

    x: Tensor
    perp_norm: Tensor | None = None
    whole: Tensor | RowProduct | None = None
    rows: GramFactor | None = None


class InputSide(ABC):
    """One choice of coordinates for the input side of a layer."""

    route: str

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of coordinates: columns of X."""

    @property
    @abstractmethod
    def trace(self) -> Tensor:
        """tr A."""

    @property
    @abstractmethod
    def matrix(self) -> Tensor:
        """The small symmetric matrix by which A acts on X from the right."""

    @property
    def diagonal(self) -> Tensor | None:
        """The diagonal of `matrix` where it has nothing else."""
        return None

    @abstractmethod
    def coordinates(self, gradient: WeightGradient) -> Coordinates:
        """The gradient in these coordinates."""

    @abstractmethod
    def assemble(self, gradient: Coordinates, x: Tensor, left: Left) -> Matrix:
        """D = X Z + L G⊥; `left` is L and returns a new tensor."""

    @abstractmethod
    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """A factorisation kept for all solvers that ask for the same one."""

    def cholesky(self, shift: Tensor | float, check: bool) -> Tensor:
        """The Cholesky factor of A + τI in these coordinates."""
        return cholesky_shifted(self.matrix, shift, check)


class SampleSide(InputSide):
    """D = X H': for a gradient of the very batch whose rows the input factor holds."""

    route = "sample"

    def __init__(self, gram: GramFactor) -> None:
        self.gram = gram

    @property
    def size(self) -> int:
        return self.gram.rows.shape[0]

    @property
    def trace(self) -> Tensor:
        return self.gram.gram.trace()

    @property
    def matrix(self) -> Tensor:
        return self.gram.gram

    def coordinates(self, gradient: WeightGradient) -> Coordinates:
        own = own_gradient(gradient, self.gram)
        return Coordinates(own.gradients.scaled_rows().T, rows=own.gradients)

    def assemble(self, gradient: Coordinates, x: Tensor, left: Left) -> RowProduct:
        return RowProduct(x, self.gram)

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        return self.gram.remember(key, make)


class EigenSide(InputSide):
    """D = X Λ^-½ Vᵀ H' + L G⊥, with K = V Λ Vᵀ: the sample side in orthonormal coordinates.

    An eigenvalue within rounding of zero says nothing of its direction. What the gradient has there, of no
    size to speak of, is G⊥: kept in coefficients, where it is exact.
    """

    route = "sample"

    def __init__(self, gram: GramFactor) -> None:
        self.gram = gram

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        return self.gram.remember((self.route, "eigh"), lambda: tuple(torch.linalg.eigh(self.gram.gram)))

    @cached_property
    def _kept(self) -> Tensor:
        values = self._eigen[0]
        return values > len(values) * torch.finfo(values.dtype).eps * values[-1]

    @property
    def size(self) -> int:
        return self.gram.rows.shape[0]

    @property
    def trace(self) -> Tensor:
        return self.gram.gram.trace()

    @cached_property
    def diagonal(self) -> Tensor:
        return torch.where(self._kept, self._eigen[0], 0)

    @property
    def matrix(self) -> Tensor:
        return torch.diag(self.diagonal)

    def coordinates(self, gradient: WeightGradient) -> Coordinates:
        values, vectors = self._eigen
        along = own_gradient(gradient, self.gram).gradients.scaled_rows().T @ vectors
        scaled = along * values.clamp(min=0).sqrt()
        rest = torch.where(self._kept, 0, along)
        size = binary_scale(along)
        perp = frobenius_norm(torch.where(self._kept, 0, scaled) / size)
        # Its size is known up to rounding only; with none at all CG would leave it out of the step.
        rounding = torch.finfo(values.dtype).eps * values[-1].clamp(min=0).sqrt()
        perp = torch.maximum(perp, rounding * frobenius_norm(rest / size)) * size
        return Coordinates(torch.where(self._kept, scaled, 0), perp, RowProduct(rest, self.gram))

    def assemble(self, gradient: Coordinates, x: Tensor, left: Left) -> RowProduct:
        assert isinstance(gradient.whole, RowProduct)
        values, vectors = self._eigen
        inverse = torch.where(self._kept, values, 1).rsqrt()
        along = torch.where(self._kept, x * inverse, left(gradient.whole.coefficients))
        return RowProduct(along @ vectors.T, self.gram)

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        return self.gram.remember(key, make)


class RowSide(InputSide):
    """D = X Qᵀ + L G⊥ with Q an orthonormal basis of the rows of H' (which may be rank deficient)."""

    route = "row"

    def __init__(self, gram: GramFactor) -> None:
        self.gram = gram

    @cached_property
    def _qr(self) -> tuple[Tensor, Tensor]:
        return self.gram.remember("qr", lambda: tuple(torch.linalg.qr(self.gram.scaled_rows().T)))

    @property
    def basis(self) -> Tensor:
        """Q, n_{t-1} × m."""
        return self._qr[0]

    @property
    def size(self) -> int:
        return self.gram.rank_bound

    @property
    def trace(self) -> Tensor:
        return self.gram.trace()

    @cached_property
    def matrix(self) -> Tensor:
        return self._qr[1] @ self._qr[1].T

    def coordinates(self, gradient: WeightGradient) -> Coordinates:
        whole = formed(gradient)
        return Coordinates(*split_gradient(whole, self.basis), whole)

    def assemble(self, gradient: Coordinates, x: Tensor, left: Left) -> Tensor | Combination:
        assert isinstance(gradient.whole, Tensor)
        return joined(gradient.whole, x - left(gradient.x), self.basis.T, left)

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        return self.gram.remember(key, make)


class DenseSide(InputSide):
    """D = X: the input factor as an n_{t-1} × n_{t-1} matrix."""

    route = "dense"

    def __init__(self, factor: DenseFactor | GramFactor) -> None:
        self.factor = factor

    @property
    def size(self) -> int:
        return self.factor.size

    @property
    def trace(self) -> Tensor:
        return self.factor.trace()

    @property
    def matrix(self) -> Tensor:
        return self.factor.to_dense()

    def coordinates(self, gradient: WeightGradient) -> Coordinates:
        return Coordinates(formed(gradient))

    def assemble(self, gradient: Coordinates, x: Tensor, left: Left) -> Tensor:
        return x

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        return self.factor.remember(key, make)


def own_gradient(gradient: WeightGradient, rows: GramFactor) -> RowGradient:
    """The gradient, where it is one of the very `rows` that the coordinates are made of."""
    if isinstance(gradient, RowGradient) and gradient.inputs is rows:
        return gradient
    given = "one of another batch" if isinstance(gradient, RowGradient) else "a tensor"
    raise PairError(
        f"the solver was prepared for a gradient of the curvature's own batch, in factors, and is applied to "
        f"{given}: prepare it for that gradient, or for any with route `row` or `dense`"
    )


def joined(whole: Tensor, u: Tensor, z: Tensor, left: Left) -> Tensor | Combination:
    """L G + U Z; not formed where L is a number."""
    if isinstance(left, Scalar):
        return Combination(left.value, whole, u, z)
    return left(whole).addmm_(u, z)


def formed(gradient: WeightGradient) -> Tensor:
    """The gradient as a matrix."""
    return gradient.form() if isinstance(gradient, RowGradient) else gradient
