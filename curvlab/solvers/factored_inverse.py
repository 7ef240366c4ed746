"""The factored inverse, with either input factor: KFI (full) and Sherman-Morrison KFI (mean).

    D = -(B + √τ/π I)⁻¹ G (A + π√τ I)⁻¹        d = -(B + τ I)⁻¹ g for a bias

On a side with coordinates G = X_G Z + G⊥ it is D = X Z + L G⊥ with

    X = -(B + √τ/π I)⁻¹ X_G (Ã + π√τ I)⁻¹      L = -(B + √τ/π I)⁻¹ / (π√τ)

so an n_t × n_t and an m × m factorisation are all it takes, whatever n_{t-1}.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.curvature import LayerCurvature
from curvlab.linalg import Factor, Matrix
from curvlab.linalg.inputs import InputKind
from curvlab.linalg.inverse import GramInverse, ShiftedInverse, cholesky_multiply, shifted_inverse
from curvlab.measure import device
from curvlab.solvers import explicit
from curvlab.solvers.base import Formulation, LayerDirection, LayerGradient, Solver
from curvlab.solvers.damping import Damping
from curvlab.solvers.pi import Split, split
from curvlab.solvers.residual import FactoredSystem
from curvlab.solvers.routes import Inverse, side_for
from curvlab.solvers.sides import InputSide

__all__ = ["KFI", "ShermanMorrisonKFI"]


@dataclass(frozen=True, eq=False)
class _State:
    """The factorisations of one layer."""

    layer: LayerCurvature
    side: InputSide | None
    system: FactoredSystem
    split: Split
    weight_inverse: ShiftedInverse | None
    bias_inverse: ShiftedInverse | None
    right_factor: Tensor | None
    explicit: explicit.ExplicitInverse | None = None


@dataclass(frozen=True)
class KFI(Solver):
    """Inverse of the damped Kronecker factors, with the full input factor E[hhᵀ].

    >>> KFI(pi=1.0)
    KFI(route='auto', pi=1.0, formulation='reduced')
    """

    input_factor: ClassVar[InputKind] = "full"
    pi: float | None = field(default=None, kw_only=True)
    formulation: Formulation = field(default="reduced", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pi is not None and not 0 < self.pi < float("inf"):
            raise ValueError(
                f"pi={self.pi}: the split of the damping must be positive and finite (None: from traces)"
            )

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _State:
        output = layer.output
        assert output is not None
        check = device.readable(output.example)
        if self.formulation == "explicit":
            chosen = self._split(layer, None if gradient.weight is None else self._factor(layer).trace())
            system = self._system(chosen, damping)
            prepared = explicit.ExplicitInverse.prepare(layer, system)
            return _State(layer, None, system, chosen, None, None, None, prepared)
        side = None
        if gradient.weight is not None:
            side = side_for(layer, gradient.weight, self.input_factor, self.route, Inverse())
        chosen = self._split(layer, None if side is None else side.trace)
        system = self._system(chosen, damping)
        # π, and with it both shifts, is that of these inputs.
        key = (layer.inputs, self.input_factor, damping.shift, self.pi)
        weight_inverse = bias_inverse = right = None
        if side is not None:
            weight_inverse = shifted_inverse(output, system.beta, ("weight", *key), check)
            # Kept on the output factor: π, and with it the shift, is this curvature's own, while other
            # curvatures of the same recording share the input factor.
            right = output.remember(("input", side.route, *key), lambda: side.cholesky(system.gamma, check))
        if gradient.bias is not None:
            bias_inverse = shifted_inverse(output, damping.shift, ("bias", damping.shift), check)
        return _State(layer, side, system, chosen, weight_inverse, bias_inverse, right)

    def _factor(self, layer: LayerCurvature) -> Factor:
        assert layer.inputs is not None
        return layer.inputs.factor(self.input_factor)

    def _split(self, layer: LayerCurvature, trace: Tensor | None) -> Split:
        """π, from the trace of the input factor in use (None: there is no weight)."""
        output = layer.output
        assert output is not None
        if self.pi is not None:
            return Split.fixed(self.pi, output.example)
        if trace is None or layer.inputs is None:
            return Split.fixed(1.0, output.example)
        return split(trace, layer.inputs.full.size, output.trace(), output.size)

    def _system(self, chosen: Split, damping: Damping) -> FactoredSystem:
        root = damping.shift**0.5
        return FactoredSystem(self.input_factor, root / chosen.pi, root * chosen.pi, damping.shift)

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, _State)
        weight: Matrix | None = None
        bias: Tensor | None = None
        if state.explicit is not None:
            weight, bias = state.explicit.apply(gradient)
            return LayerDirection(
                weight, bias, state.system, "explicit", _rank(state, gradient), split=state.split
            )
        if state.side is not None and gradient.weight is not None:
            weight = self._weight(state, state.side, gradient)
        if gradient.bias is not None and state.bias_inverse is not None:
            bias = -state.bias_inverse(gradient.bias[:, None])[:, 0]
        route = state.side.route if state.side is not None else "bias"
        return LayerDirection(weight, bias, state.system, route, _rank(state, gradient), split=state.split)

    def _weight(self, state: _State, side: InputSide, gradient: LayerGradient) -> Matrix:
        assert gradient.weight is not None
        inverse, gamma = state.weight_inverse, state.system.gamma
        assert inverse is not None
        assert state.right_factor is not None
        coordinates = side.coordinates(gradient.weight)
        if isinstance(inverse, GramInverse) and coordinates.rows is inverse.factor:
            # The gradient's rows are the output factor's own: all of the solve is m × m.
            x = inverse.of_rows(-torch.cholesky_inverse(state.right_factor))
        else:
            x = -cholesky_multiply(state.right_factor, inverse(coordinates.x).T).T
        return side.assemble(coordinates, x, lambda y: inverse(y) / -gamma)


@dataclass(frozen=True)
class ShermanMorrisonKFI(KFI):
    """The same with the mean input factor E[h]E[h]ᵀ, inverted by the Sherman-Morrison formula.

    >>> ShermanMorrisonKFI().input_factor
    'mean'
    """

    input_factor: ClassVar[InputKind] = "mean"


def _rank(state: _State, gradient: LayerGradient) -> int:
    assert state.layer.output is not None
    if gradient.weight is None or state.layer.inputs is None:
        return state.layer.output.rank_bound
    return state.layer.inputs.factor(state.system.kind).rank_bound
