"""The reference: the damped Kronecker system in the basis where it is diagonal.

    B = U Λ Uᵀ,  A = Q S Qᵀ:   D = -U [ (Uᵀ G Q) / (s λ_i σ_j + τ) ] Qᵀ

In the sample space K = V S Vᵀ takes the place of A: s B M K + τ M = -S'ᵀ is solved by the same formula
with Q = V, and D = M H'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.curvature import LayerCurvature
from curvlab.linalg.factors import InputKind
from curvlab.linalg.inverse import NotFiniteError, NotPositiveDefiniteError
from curvlab.measure import device
from curvlab.solvers.base import LayerDirection, LayerGradient, Solver
from curvlab.solvers.cost_model import Eigen, choose_coordinates
from curvlab.solvers.damping import Damping
from curvlab.solvers.input_coordinates import InputCoordinates, Scalar
from curvlab.solvers.solution import DampedSystem, input_factors, output_factor

__all__ = ["Exact"]


@dataclass(frozen=True, eq=False)
class _WeightBasis:
    """The coordinates of the input side, and the eigenvalues σ and eigenvectors Q of A in them."""

    coordinates: InputCoordinates
    values: Tensor
    vectors: Tensor


@dataclass(frozen=True, eq=False)
class _State:
    """The eigenvalues λ and eigenvectors U of B, and the basis of the input side where there is a weight."""

    layer: LayerCurvature
    damping: Damping
    values: Tensor
    vectors: Tensor
    weight: _WeightBasis | None


@dataclass(frozen=True)
class Exact(Solver):
    """The damped Kronecker system solved exactly, by the eigenvectors of both factors.

    >>> Exact().needs_psd
    True
    """

    input_factor: ClassVar[InputKind] = "full"

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _State:
        output = output_factor(layer)
        values, vectors = output.remember("eigh", lambda: _eigh(output.to_dense()))
        weight, largest = None, None
        if gradient.weight is not None:
            coordinates = choose_coordinates(layer, gradient.weight, self.input_factor, self.route, Eigen())
            weight = _WeightBasis(coordinates, *self._eigen(coordinates))
            largest = weight.values[-1]
        return _State(layer, damping, _check_values(values, damping, largest), vectors, weight)

    @staticmethod
    def _eigen(coordinates: InputCoordinates) -> tuple[Tensor, Tensor]:
        return coordinates.remember((coordinates.route, "eigh"), lambda: _eigh(coordinates.matrix))

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, _State)
        layer, (scale, shift) = state.layer, (state.damping.scale, state.damping.shift)
        weight = bias = None
        route, rank = "bias", output_factor(layer).rank_bound
        if state.weight is not None and gradient.weight is not None:
            given = state.weight.coordinates.of(gradient.weight)
            sigma, q = state.weight.values, state.weight.vectors
            inner = state.vectors.T @ given.x @ q
            x = -state.vectors @ (inner / (scale * torch.outer(state.values, sigma) + shift)) @ q.T
            weight = given.assemble(x, Scalar(x.new_full((), -1 / shift)))
            route, rank = state.weight.coordinates.route, input_factors(layer).full.rank_bound
        if gradient.bias is not None:
            inner = (state.vectors.T @ gradient.bias) / (scale * state.values + shift)
            bias = -state.vectors @ inner
        return LayerDirection(weight, bias, DampedSystem("full", scale, shift), route, rank)


def _check_values(values: Tensor, damping: Damping, largest: Tensor | None) -> Tensor:
    """The eigenvalues of B with those that are rounding set to zero; refused if the system is indefinite.

    `largest` is the largest eigenvalue of the input factor; a bias has 1 in its place.
    """
    factor = 1.0 if largest is None else largest.clamp(min=1)
    rounding = len(values) * torch.finfo(values.dtype).eps * values.abs().amax()
    values = torch.where(values.abs() <= rounding, values.clamp(min=0), values)
    smallest = damping.scale * values[0] * factor + damping.shift
    if device.readable(values) and bool(smallest <= 0):
        raise NotPositiveDefiniteError(float(smallest))
    return values


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        if bool(torch.isfinite(matrix).all()):
            raise
        raise NotFiniteError("the matrix to be factorised holds NaN or infinity") from error
    return values, vectors
