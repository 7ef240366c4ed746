"""The reference: the damped Kronecker system in the basis where it is diagonal.

    B = U Λ Uᵀ,  A = Q S Qᵀ:   D = -U [ (Uᵀ G Q) / (s λ_i σ_j + τ) ] Qᵀ

On the sample side K = V S Vᵀ takes the place of A: s B M K + τ M = -S'ᵀ is solved by the same formula
with Q = V, and D = M H'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.curvature import LayerCurvature
from curvlab.linalg.inputs import InputKind
from curvlab.linalg.inverse import NotFiniteError, NotPositiveDefiniteError
from curvlab.measure import device
from curvlab.solvers.base import LayerDirection, LayerGradient, Solver
from curvlab.solvers.damping import Damping
from curvlab.solvers.residual import DampedSystem
from curvlab.solvers.routes import Eigen, side_for
from curvlab.solvers.sides import InputSide, Scalar

__all__ = ["Exact"]


@dataclass(frozen=True, eq=False)
class _State:
    layer: LayerCurvature
    damping: Damping
    side: InputSide | None
    values: Tensor
    vectors: Tensor
    right: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Exact(Solver):
    """The damped Kronecker system solved exactly, by the eigenvectors of both factors.

    >>> Exact().needs_psd
    True
    """

    input_factor: ClassVar[InputKind] = "full"

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _State:
        assert layer.output is not None
        output = layer.output
        values, vectors = output.remember("eigh", lambda: _eigh(output.to_dense()))
        side = right = None
        if gradient.weight is not None:
            side = side_for(layer, gradient.weight, self.input_factor, self.route, Eigen())
            right = self._right(side)
        values = _non_negative(values, damping, 1.0 if right is None else right[0][-1].clamp(min=1))
        return _State(layer, damping, side, values, vectors, right)

    @staticmethod
    def _right(side: InputSide) -> tuple[Tensor, Tensor]:
        return side.remember((side.route, "eigh"), lambda: _eigh(side.matrix))

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, _State)
        scale, shift = state.damping.scale, state.damping.shift
        weight = bias = None
        if state.side is not None and state.right is not None and gradient.weight is not None:
            coordinates = state.side.coordinates(gradient.weight)
            sigma, q = state.right
            inner = state.vectors.T @ coordinates.x @ q
            x = -state.vectors @ (inner / (scale * torch.outer(state.values, sigma) + shift)) @ q.T
            weight = state.side.assemble(coordinates, x, Scalar(x.new_full((), -1 / shift)))
        if gradient.bias is not None:
            inner = (state.vectors.T @ gradient.bias) / (scale * state.values + shift)
            bias = -state.vectors @ inner
        assert state.layer.output is not None
        rank = (
            state.layer.output.rank_bound
            if state.layer.inputs is None
            else state.layer.inputs.full.rank_bound
        )
        route = state.side.route if state.side is not None else "bias"
        return LayerDirection(weight, bias, DampedSystem("full", scale, shift), route, rank)


def _non_negative(values: Tensor, damping: Damping, largest: Tensor | float) -> Tensor:
    """The eigenvalues of B with those that are rounding set to zero; refused if the system is indefinite.

    `largest` is the largest eigenvalue of the input factor, or 1, which is what a bias has.
    """
    rounding = len(values) * torch.finfo(values.dtype).eps * values.abs().amax()
    values = torch.where(values.abs() <= rounding, values.clamp(min=0), values)
    smallest = damping.scale * values[0] * largest + damping.shift
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
