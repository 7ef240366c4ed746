"""The input side of the mean input factor E[h]E[h]ᵀ: one coordinate, along q = E[h]/‖E[h]‖.

    G = (Gq) qᵀ + G⊥,      D = X qᵀ + L G⊥

It takes a gradient in factors, where G⊥ stays in the sample space too, or a formed one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from curvlab.gradient import RowGradient
from curvlab.linalg import Combination, GramFactor, RowProduct
from curvlab.linalg.inputs import InputFactors
from curvlab.linalg.norms import binary_scale, trustworthy
from curvlab.measure import device
from curvlab.solvers.perpendicular import split_gradient
from curvlab.solvers.sides import (
    Coordinates,
    InputSide,
    Left,
    WeightGradient,
    formed,
    joined,
)

__all__ = ["MeanSide"]

T = TypeVar("T")


class MeanSide(InputSide):
    """D = X qᵀ + L G⊥ with q = E[h]/‖E[h]‖ (zero where E[h] is): the rank-one input factor."""

    def __init__(self, inputs: InputFactors, route: str, norm: bool = True) -> None:
        self.inputs = inputs
        self.route = route
        self.norm = norm

    @property
    def size(self) -> int:
        return 1

    @cached_property
    def trace(self) -> Tensor:
        return self.inputs.mean.square().sum()

    @property
    def diagonal(self) -> Tensor:
        return self.trace.reshape(1)

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
        """q, a vector."""
        return self.inputs.mean / self._norm

    def coordinates(self, gradient: WeightGradient) -> Coordinates:
        if (
            self.route == "sample"
            and isinstance(gradient, RowGradient)
            and gradient.inputs is self.inputs.full
        ):
            return self._in_factors(gradient)
        whole = formed(gradient)
        if not self.norm:
            return Coordinates((whole @ self.basis)[:, None], whole=whole)
        x, norm = split_gradient(whole, self.basis)
        return Coordinates(x[:, None], norm, whole)

    def _in_factors(self, gradient: RowGradient) -> Coordinates:
        """Gq = S'ᵀ(H'q), and ‖G⊥‖ where it is wanted."""
        h, s = gradient.inputs, gradient.gradients
        along = h.rows @ self.basis
        x = s.rows.T @ (along * h.root.square())
        perp = self._perp_norm(gradient, along) if self.norm else None
        return Coordinates(x[:, None], perp, RowProduct(s.scaled_rows().T, h))

    def _perp_norm(self, gradient: RowGradient, along: Tensor) -> Tensor:
        """‖G⊥‖² = Σ S'S'ᵀ ⊙ K̃, with K̃ from the centred inputs: no digits are lost."""
        h, s = gradient.inputs, gradient.gradients
        off_centre = h.root * (along - self.inputs.mean @ self.basis)
        centred = h.centred_gram - torch.outer(off_centre, off_centre)
        norm = (s.gram * centred).sum().clamp(min=0).sqrt()
        interval = device.read_interval(norm)
        if interval == 0 or (interval == 1 and trustworthy(norm)):
            return norm
        # The squares may have left the range of the dtype: those of S over its largest entry do not.
        scale = binary_scale(s.rows)
        return (GramFactor(s.rows / scale, s.root).gram * centred).sum().clamp(min=0).sqrt() * scale

    def assemble(self, gradient: Coordinates, x: Tensor, left: Left) -> Tensor | RowProduct | Combination:
        whole, correction = gradient.whole, x - left(gradient.x)
        if isinstance(whole, RowProduct):
            # qᵀ = (√c / ‖E[h]‖)ᵀ H': the correction stays in the sample space.
            coefficients = left(whole.coefficients)
            coefficients.addmm_(correction, (whole.gram.root / self._norm)[None])
            return RowProduct(coefficients, whole.gram)
        assert whole is not None
        return joined(whole, correction, self.basis[None], left)

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        return self.inputs.mean_factor.remember(key, make)
