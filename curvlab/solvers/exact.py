"""The reference: the damped Kronecker system in the basis where it is diagonal.

    B = U Λ Uᵀ,  A = Q S Qᵀ:   D = -U [ (Uᵀ G Q) / (s λ_i σ_j + τ) ] Qᵀ

In the sample space K = V S Vᵀ takes the place of A: s B M K + τ M = -S'ᵀ is solved by the same formula
with Q = V, and D = M H'. A diagonal factor is in its own basis. Of a wide B that is held as fewer rows only
the eigenvectors of those are made; on what is orthogonal to them, B is zero and the solution is -G/τ. Blocks
that are no Kronecker products, second moments of the examples' rows, are solved among these rows
(`curvlab.solvers.structure_systems`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.curvature_structures import EigenLayer
from curvlab.exceptions import PairError
from curvlab.linalg import DiagonalFactor, Factor, GramFactor, eigh
from curvlab.linalg.factors import InputKind
from curvlab.linalg.inverse import NotFiniteError, require_positive
from curvlab.solvers.base import DampedSystem, Damping, Guidance, LayerDirection, LayerGradient, Solver
from curvlab.solvers.input_coordinates import (
    Eigen,
    InputCoordinates,
    Scalar,
    choose_coordinates,
    input_rank,
    output_factor,
)
from curvlab.solvers.structure_systems import EigenExact, ExampleExact

__all__ = ["Exact"]

EXAMPLE_STRUCTURES = ("block", "layer", "full")
WHOLE_BASIS_UP_TO = 4096  # outputs: a wider Gram factor has the eigenvectors of its rows alone


@dataclass(frozen=True, eq=False)
class _Basis:
    """Eigenvalues and eigenvectors of a symmetric matrix; None: the unit vectors.

    `thin`: there are fewer eigenvectors than rows, and the matrix is zero on the rest of the space.
    """

    values: Tensor
    vectors: Tensor | None
    thin: bool = False

    def coordinates(self, x: Tensor) -> Tensor:
        """Uᵀ x."""
        return x if self.vectors is None else self.vectors.mT @ x

    def vector(self, x: Tensor) -> Tensor:
        """U x."""
        return x if self.vectors is None else self.vectors @ x


@dataclass(frozen=True, eq=False)
class _WeightBasis:
    """The coordinates of the input side, and the eigenvalues σ and eigenvectors Q of A in them."""

    coordinates: InputCoordinates
    basis: _Basis


@dataclass(frozen=True, eq=False)
class _State:
    """The basis of B, and that of the input side where there is a weight."""

    layer: LayerCurvature
    damping: Damping
    output: _Basis
    weight: _WeightBasis | None


@dataclass(frozen=True)
class Exact(Solver):
    """The damped Kronecker system solved exactly, by the eigenvectors of both factors.

    >>> Exact().needs_psd
    True
    """

    input_factor: ClassVar[InputKind] = "full"
    structures: ClassVar[tuple[str, ...]] = ("kronecker", "ekfac", "diagonal", *EXAMPLE_STRUCTURES)

    def adapt(self, curvature: Curvature, name: str, guidance: Guidance) -> Solver:
        """Itself on factors; among the examples' rows where the curvature is made of these."""
        adapted = super().adapt(curvature, name, guidance)
        if curvature.structure not in EXAMPLE_STRUCTURES:
            return adapted
        if self.route != "auto":
            raise PairError(
                f"`{name}`: `route` chooses how Kronecker factors are used, and `{curvature.provider}` has "
                f"none. Leave it out"
            )
        return ExampleExact(curvature=curvature)

    def for_layer(self, layer: LayerCurvature, curvature: Curvature) -> Solver:
        """Itself on factors; in a block's own basis where it has one."""
        return EigenExact() if isinstance(layer, EigenLayer) else self

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _State:
        output = _output_basis(output_factor(layer))
        weight, largest = None, None
        if gradient.weight is not None:
            coordinates = choose_coordinates(layer, gradient.weight, self.input_factor, self.route, Eigen())
            weight = _WeightBasis(coordinates, _input_basis(coordinates))
            largest = weight.basis.values.amax(-1)
        checked = _Basis(_check_values(output.values, damping, largest), output.vectors, output.thin)
        return _State(layer, damping, checked, weight)

    @property
    def solves_stacks(self) -> bool:
        own = type(self).prepare is Exact.prepare and type(self).apply is Exact.apply
        return own and self.route in ("auto", "dense")

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, _State)
        layer, output, (scale, shift) = (
            state.layer,
            state.output,
            (state.damping.scale, state.damping.shift),
        )
        weight = bias = None
        route, rank = "bias", output_factor(layer).rank_bound
        if state.weight is not None and gradient.weight is not None:
            given, right = state.weight.coordinates.of(gradient.weight), state.weight.basis
            inner = output.coordinates(given.x)
            outside = given.x - output.vector(inner) if output.thin else None
            if right.vectors is not None:
                inner = inner @ right.vectors
            products = output.values[..., :, None] * right.values[..., None, :]
            x = output.vector(inner / (scale * products + shift))
            x = -x if right.vectors is None else -x @ right.vectors.mT
            if outside is not None:
                x = x - outside / shift
            weight = given.assemble(x, Scalar(x.new_full((), -1 / shift)))
            route, rank = state.weight.coordinates.route, input_rank(layer, self.input_factor)
        if gradient.bias is not None:
            inner = output.coordinates(gradient.bias)
            bias = -output.vector(inner / (scale * output.values + shift))
            if output.thin:
                bias = bias - (gradient.bias - output.vector(inner)) / shift
        return LayerDirection(weight, bias, DampedSystem("full", scale, shift), route, rank)


def _output_basis(output: Factor) -> _Basis:
    if isinstance(output, DiagonalFactor):
        return _Basis(output.values, None)
    if isinstance(output, GramFactor) and output.narrow and output.size > WHOLE_BASIS_UP_TO:
        values, vectors = output.remember("svd", lambda: _svd(output))
        return _Basis(values, vectors, thin=True)
    return _Basis(*output.remember("eigh", lambda: _eigh(output.to_dense())))


def _input_basis(coordinates: InputCoordinates) -> _Basis:
    if coordinates.route == "diagonal" and coordinates.diagonal is not None:
        return _Basis(coordinates.diagonal, None)
    return _Basis(*coordinates.remember((coordinates.route, "eigh"), lambda: _eigh(coordinates.matrix)))


def _check_values(values: Tensor, damping: Damping, largest: Tensor | None) -> Tensor:
    """The eigenvalues of B with those that are rounding set to zero; refused if the system is indefinite.

    `largest` is the largest eigenvalue of the input factor; a bias has 1 in its place.
    """
    factor = 1.0 if largest is None else largest.clamp(min=1)
    rounding = values.shape[-1] * torch.finfo(values.dtype).eps * values.abs().amax(-1, keepdim=True)
    values = torch.where(values.abs() <= rounding, values.clamp(min=0), values)
    smallest = (damping.scale * values.amin(-1) * factor + damping.shift).amin()
    require_positive(smallest)
    return values


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    try:
        return eigh(matrix)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        if bool(torch.isfinite(matrix).all()):
            raise
        raise NotFiniteError("the matrix to be factorised holds NaN or infinity") from error


def _svd(factor: GramFactor) -> tuple[Tensor, Tensor]:
    """The eigenvalues of F and their eigenvectors, n × m: squares and right vectors of its scaled rows."""
    _, singular, vectors = torch.linalg.svd(factor.scaled_rows(), full_matrices=False)
    return singular.square(), vectors.T
