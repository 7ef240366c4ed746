"""The factored inverse, with either input factor: KFI (full) and Sherman-Morrison KFI (mean).

    D = -(B + √τ/π I)⁻¹ G (A + π√τ I)⁻¹        d = -(B + τ I)⁻¹ g for a bias

In coordinates G = X_G Z + G⊥ it is D = X Z + L G⊥ with

    X = -(B + √τ/π I)⁻¹ X_G (Ã + π√τ I)⁻¹      L = -(B + √τ/π I)⁻¹ / (π√τ)

so an n_t × n_t and an m × m factorisation are all it takes, whatever n_{t-1}. For a gradient that is not the
factor's own no basis is made: D = -(B + √τ/π I)⁻¹ (G - GH'ᵀ(K + π√τ I)⁻¹H') / (π√τ). `damping` has the
formula of π, and what τ is where the curvature itself has a multiple of the identity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.exceptions import SpecError
from curvlab.linalg import Matrix
from curvlab.linalg.factors import InputKind
from curvlab.linalg.inverse import (
    DenseInverse,
    GramInverse,
    ShiftedInverse,
    shifted_inverse,
)
from curvlab.measure import device
from curvlab.solvers.base import (
    Damping,
    DampingSplit,
    FactoredSystem,
    Formulation,
    LayerDirection,
    LayerGradient,
    Solver,
    check_mean_above,
    split_damping,
)
from curvlab.solvers.input_coordinates import (
    InputCoordinates,
    Inverse,
    WeightGradient,
    choose_coordinates,
    input_factors,
    input_rank,
    output_factor,
)
from curvlab.solvers.textbook import TextbookInverse

__all__ = ["KFI", "ShermanMorrisonKFI"]


@dataclass(frozen=True, eq=False)
class _WeightInverse:
    """The factorisations that the weight's system takes."""

    coordinates: InputCoordinates
    left: ShiftedInverse
    right: ShiftedInverse
    gamma: Tensor

    def apply(self, gradient: WeightGradient) -> Matrix:
        given = self.coordinates.of(gradient)
        left = self.left
        if (
            isinstance(left, GramInverse)
            and isinstance(self.right, DenseInverse)
            and given.rows is not None
            and left.factor.shares_rows_with(given.rows)
        ):
            # The gradient's rows are the output factor's own: all of the solve is m × m.
            x = left.of_rows(-self.right.matrix())
        else:
            x = self.right(left(given.x).mT).mT.neg_()
        return given.assemble(x, lambda y: left(y) / -self.gamma)


@dataclass(frozen=True, eq=False)
class _SampleSpaceInverse:
    """The factorisations of one layer, on the smaller side of each factor."""

    weight: _WeightInverse | None
    bias: ShiftedInverse | None

    @property
    def route(self) -> str:
        return "bias" if self.weight is None else self.weight.coordinates.route

    def apply(self, gradient: LayerGradient) -> tuple[Matrix | None, Tensor | None]:
        weight = bias = None
        if self.weight is not None and gradient.weight is not None:
            weight = self.weight.apply(gradient.weight)
        if self.bias is not None and gradient.bias is not None:
            bias = -self.bias(gradient.bias[:, None])[:, 0]
        return weight, bias


@dataclass(frozen=True, eq=False)
class _State:
    """A layer's system and its inverse, in one of two forms."""

    layer: LayerCurvature
    system: FactoredSystem
    split: DampingSplit
    inverse: _SampleSpaceInverse | TextbookInverse


@dataclass(frozen=True)
class KFI(Solver):
    """Inverse of the damped Kronecker factors, with the full input factor E[hhᵀ].

    Layers with more than `mean_above` inputs go by `sm-kfi`, as the first one did in the paper's ImageNet-10.

    >>> KFI(pi=1.0)
    KFI(route='auto', pi=1.0, formulation='reduced', mean_above=None)
    """

    input_factor: ClassVar[InputKind] = "full"
    pi: float | None = field(default=None, kw_only=True)
    formulation: Formulation = field(default="reduced", kw_only=True)
    mean_above: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mean_above(self.mean_above, self.input_factor)
        if self.pi is not None and not 0 < self.pi < float("inf"):
            raise SpecError(
                f"pi={self.pi}: the split of the damping must be positive and finite (None: from traces)"
            )

    def for_layer(self, layer: LayerCurvature, curvature: Curvature) -> Solver:
        """Itself, or the mean input factor's for a layer with more than `mean_above` inputs."""
        if self.mean_above is None or layer.input_size <= self.mean_above:
            return self
        return ShermanMorrisonKFI(route=self.route, pi=self.pi, formulation=self.formulation)

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _State:
        if self.formulation == "explicit":
            trace = None
            if gradient.weight is not None:
                inputs = input_factors(layer)
                full = self.input_factor == "full"
                trace = inputs.full.trace() if full else inputs.mean.square().sum(-1)
            split = self._split(layer, trace)
            system = self._system(split, damping)
            return _State(layer, system, split, TextbookInverse.prepare(layer, system))
        coordinates = None
        if gradient.weight is not None:
            coordinates = choose_coordinates(layer, gradient.weight, self.input_factor, self.route, Inverse())
        split = self._split(layer, None if coordinates is None else coordinates.trace)
        system = self._system(split, damping)
        output = output_factor(layer)
        check = device.readable(output.example)
        weight = bias = None
        if coordinates is not None:
            # π, and with it both shifts, is that of these inputs.
            key = (layer.inputs, self.input_factor, damping.factored_shift, self.pi)
            left = shifted_inverse(output, system.beta, ("weight", *key), check)
            # Kept on the output factor: π, and with it the shift, is this curvature's own, while other
            # curvatures of the same recording share the input factor.
            right = output.remember_recent(
                ("input", coordinates.route, *key), lambda: coordinates.inverse(system.gamma, check)
            )
            weight = _WeightInverse(coordinates, left, right, system.gamma)
        if gradient.bias is not None:
            bias = shifted_inverse(output, system.shift, ("bias", system.shift), check)
        return _State(layer, system, split, _SampleSpaceInverse(weight, bias))

    def _split(self, layer: LayerCurvature, trace: Tensor | None) -> DampingSplit:
        """π, from the trace of the input factor in use (None: there is no weight)."""
        output = output_factor(layer)
        if self.pi is not None:
            return DampingSplit.from_value(self.pi, output.example, output.count)
        if trace is None:
            return DampingSplit.from_value(1.0, output.example)
        return split_damping(trace, input_factors(layer).size, output.trace(), output.size)

    def _system(self, split: DampingSplit, damping: Damping) -> FactoredSystem:
        shift = damping.factored_shift
        root = shift**0.5
        # Of a stack one π for each of its matrices.
        pi = split.pi[:, None, None] if split.pi.ndim else split.pi
        return FactoredSystem(self.input_factor, root / pi, root * pi, shift)

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, _State)
        weight, bias = state.inverse.apply(gradient)
        layer, weighted = state.layer, gradient.weight is not None
        rank = input_rank(layer, self.input_factor) if weighted else output_factor(layer).rank_bound
        return LayerDirection(weight, bias, state.system, state.inverse.route, rank, split=state.split)

    @property
    def solves_stacks(self) -> bool:
        own = type(self).prepare is KFI.prepare and type(self).apply is KFI.apply
        return own and self.route in ("auto", "dense")


@dataclass(frozen=True)
class ShermanMorrisonKFI(KFI):
    """The same with the mean input factor E[h]E[h]ᵀ, inverted by the Sherman-Morrison formula.

    >>> ShermanMorrisonKFI().input_factor
    'mean'
    """

    input_factor: ClassVar[InputKind] = "mean"
