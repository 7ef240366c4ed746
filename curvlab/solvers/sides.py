"""The input side of a layer: coordinates in which the wide dimension n_{t-1} does not appear.

A solver's direction is D = X Z + L G⊥, where the rows of Z span what the input factor A sees, G⊥ is the
part of the gradient outside it, and L acts on G⊥ from the left (a scalar in CG, a matrix in the
factored inverse). The solver computes with X alone; the right action of A on X is a small matrix.

    side      Z                       X             A acts as       metric   G⊥
    sample    H' = diag(√c) H         n_t × m       K = H'H'ᵀ       K        0
    row       Qᵀ from QR of H'ᵀ       n_t × m       R Rᵀ            I        G - (GQ)Qᵀ
    dense     I                       n_t × n_{t-1} A               I        0
    mean      qᵀ = E[h]ᵀ/‖E[h]‖       n_t × 1       ‖E[h]‖²         I        G - (Gq)qᵀ

The mean side takes a gradient in factors (then G⊥ stays in the sample space too) or a formed one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvlab.gradient import RowGradient
from curvlab.linalg import GramFactor, RowProduct
from curvlab.linalg.factors import DenseFactor
from curvlab.linalg.inputs import InputFactors
from curvlab.linalg.inverse import cholesky_shifted

__all__ = ["Coordinates", "DenseSide", "InputSide", "MeanSide", "RowSide", "SampleSide"]

Left = Callable[[Tensor], Tensor]
SPLIT_ELEMENTS = 1 << 18
WeightGradient = Tensor | RowGradient


@dataclass(frozen=True, eq=False)
class Coordinates:
    """A weight gradient as a side sees it: X_G (n_t × r), ‖G⊥‖ (None: zero), and what forms G⊥."""

    x: Tensor
    perp_norm: Tensor | None
    whole: Tensor | RowProduct | None


class InputSide(ABC):
    """One choice of coordinates for the input side of a layer."""

    route: str

    @property
    @abstractmethod
    def trace(self) -> Tensor:
        """tr A."""

    @property
    @abstractmethod
    def matrix(self) -> Tensor:
        """The small symmetric matrix by which A acts on X from the right."""

    @property
    def metric(self) -> Tensor | None:
        """The metric of the coordinates; None is the identity."""
        return None

    @abstractmethod
    def coordinates(self, gradient: WeightGradient) -> Coordinates:
        """The gradient in these coordinates."""

    @abstractmethod
    def assemble(self, gradient: Coordinates, x: Tensor, left: Left) -> Tensor | RowProduct:
        """D = X Z + L G⊥; `left` is L and returns a new tensor."""

    @abstractmethod
    def remember(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
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
    def trace(self) -> Tensor:
        return self.gram.gram.trace()

    @property
    def matrix(self) -> Tensor:
        return self.gram.gram

    @property
    def metric(self) -> Tensor:
        return self.gram.gram

    def coordinates(self, gradient: WeightGradient) -> Coordinates:
        assert isinstance(gradient, RowGradient)
        x = (gradient.gradients.rows * gradient.gradients.root[:, None]).T
        return Coordinates(x, None, None)

    def assemble(self, gradient: Coordinates, x: Tensor, left: Left) -> RowProduct:
        return RowProduct(x, self.gram)

    def remember(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
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
    def trace(self) -> Tensor:
        return self.gram.trace()

    @cached_property
    def matrix(self) -> Tensor:
        return self._qr[1] @ self._qr[1].T

    def coordinates(self, gradient: WeightGradient) -> Coordinates:
        formed = _formed(gradient)
        return Coordinates(*_split(formed, self.basis), formed)

    def assemble(self, gradient: Coordinates, x: Tensor, left: Left) -> Tensor:
        assert isinstance(gradient.whole, Tensor)
        return left(gradient.whole).addmm_(x - left(gradient.x), self.basis.T)

    def remember(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        return self.gram.remember(key, make)


class DenseSide(InputSide):
    """D = X: the input factor as an n_{t-1} × n_{t-1} matrix."""

    route = "dense"

    def __init__(self, factor: DenseFactor | GramFactor) -> None:
        self.factor = factor

    @property
    def trace(self) -> Tensor:
        return self.factor.trace()

    @property
    def matrix(self) -> Tensor:
        return self.factor.to_dense()

    def coordinates(self, gradient: WeightGradient) -> Coordinates:
        return Coordinates(_formed(gradient), None, None)

    def assemble(self, gradient: Coordinates, x: Tensor, left: Left) -> Tensor:
        return x

    def remember(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        return self.factor.remember(key, make)


class MeanSide(InputSide):
    """D = X qᵀ + L G⊥ with q = E[h]/‖E[h]‖ (zero where E[h] is): the rank-one input factor."""

    def __init__(self, inputs: InputFactors, route: str) -> None:
        self.inputs = inputs
        self.route = route

    @cached_property
    def trace(self) -> Tensor:
        return self.inputs.mean.square().sum()

    @property
    def matrix(self) -> Tensor:
        return self.trace.reshape(1, 1)

    @cached_property
    def _norm(self) -> Tensor:
        """‖E[h]‖, one where it is zero."""
        norm = self.trace.sqrt()
        return torch.where(norm > 0, norm, torch.ones_like(norm))

    @cached_property
    def basis(self) -> Tensor:
        """q as a column."""
        return (self.inputs.mean / self._norm)[:, None]

    def coordinates(self, gradient: WeightGradient) -> Coordinates:
        if isinstance(gradient, RowGradient) and self.route == "sample":
            return self._in_factors(gradient)
        formed = _formed(gradient)
        return Coordinates(*_split(formed, self.basis), formed)

    def _in_factors(self, gradient: RowGradient) -> Coordinates:
        """Gq = S'ᵀ(H'q) and ‖G⊥‖² = Σ S'S'ᵀ ⊙ K̃, with K̃ from the centred inputs: no digits are lost."""
        h, s = gradient.inputs, gradient.gradients
        along = h.rows @ self.basis[:, 0]
        x = s.rows.T @ (along * h.root.square())
        off_centre = h.root * (along - self.inputs.mean @ self.basis[:, 0])
        centred = h.centred_gram - torch.outer(off_centre, off_centre)
        perp = (s.gram * centred).sum().clamp(min=0).sqrt()
        whole = RowProduct((s.rows * s.root[:, None]).T, h)
        return Coordinates(x[:, None], perp, whole)

    def assemble(self, gradient: Coordinates, x: Tensor, left: Left) -> Tensor | RowProduct:
        whole, correction = gradient.whole, x - left(gradient.x)
        if isinstance(whole, RowProduct):
            # qᵀ = (√c / ‖E[h]‖)ᵀ H': the correction stays in the sample space.
            coefficients = left(whole.coefficients)
            coefficients.addmm_(correction, (whole.gram.root / self._norm)[None])
            return RowProduct(coefficients, whole.gram)
        assert whole is not None
        return left(whole).addmm_(correction, self.basis.T)

    def remember(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        return self.inputs.mean_factor.remember(key, make)


def _formed(gradient: WeightGradient) -> Tensor:
    return gradient.form() if isinstance(gradient, RowGradient) else gradient


def _split(gradient: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """GQ and ‖G⊥‖; G⊥ is orthogonalised twice, so that only rounding of its component along Q is left.

    A few rows at a time: G⊥ is needed for its norm alone and is never held whole.
    """
    parts, norms = [], []
    for rows in gradient.split(max(1, SPLIT_ELEMENTS // gradient.shape[1])):
        x = rows @ basis
        perp = torch.addmm(rows, x, basis.T, alpha=-1)
        again = perp @ basis
        perp.addmm_(again, basis.T, alpha=-1)
        parts.append(x.add_(again))
        norms.append(torch.linalg.matrix_norm(perp))
    return torch.cat(parts), torch.stack(norms).norm()
