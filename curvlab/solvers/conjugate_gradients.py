"""Conjugate gradients on (s A ⊗ B + τI) d = -g, with either input factor: CG (full) and EA-CG (mean).

The iteration runs in the coordinates of an input side (see `sides`), iterate for iterate the textbook
one: with the mean input factor on n_t + 1 unknowns a layer, all layers in one iteration, with the full one
on n_t × m, whatever n_{t-1}. A matrix-free curvature is solved block by block (or, for a full Hessian, as
a whole) as truncated Newton: negative curvature ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from curvlab.curvature import LayerCurvature
from curvlab.linalg import Factor, GramFactor
from curvlab.linalg.cg import conjugate_gradients
from curvlab.linalg.factors import DenseFactor
from curvlab.linalg.inputs import InputKind
from curvlab.measure import device
from curvlab.solvers.base import Formulation, LayerDirection, LayerGradient, Solver
from curvlab.solvers.damping import Damping
from curvlab.solvers.explicit import explicit_cg
from curvlab.solvers.residual import DampedSystem
from curvlab.solvers.routes import Iteration, side_for
from curvlab.solvers.sides import InputSide, Scalar
from curvlab.solvers.stack import LayerSystems, Stack

__all__ = ["CG", "EACG"]

Preconditioner = Literal["none", "jacobi"]


@dataclass(frozen=True, eq=False)
class _State:
    layer: LayerCurvature
    output: Factor
    damping: Damping
    side: InputSide | None


@dataclass(frozen=True)
class CG(Solver):
    """Conjugate gradients with the full input factor E[hhᵀ], or on a matrix-free curvature.

    >>> CG(max_iter=50)
    CG(route='auto', max_iter=50, tol=1e-10, formulation='reduced', preconditioner='none')
    """

    input_factor: ClassVar[InputKind] = "full"
    needs_psd: ClassVar[bool] = False
    needs_kronecker: ClassVar[bool] = False
    max_iter: int = 20
    tol: float = 1e-10
    formulation: Formulation = field(default="reduced", kw_only=True)
    preconditioner: Preconditioner = field(default="none", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_iter < 0:
            raise ValueError(f"max_iter={self.max_iter} must not be negative")
        if not self.tol >= 0:
            raise ValueError(f"tol={self.tol} must not be negative (it is relative to the right-hand side)")

    def tolerance(self, dtype: torch.dtype) -> float:
        """Its own, doubled: the true residual is not the recursive one."""
        return 2 * self.tol

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _State:
        assert layer.output is not None
        side = None
        if gradient.weight is not None:
            work = Iteration(self.max_iter, layer.output.example.element_size())
            side = side_for(layer, gradient.weight, self.input_factor, self.route, work)
        columns = 1 if side is None else side.size + 1
        output = _cheapest(layer.output, self.max_iter * columns)
        return _State(layer, output, damping, side)

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, _State)
        if self.formulation == "explicit":
            return self._explicit(state, gradient)
        return self._solve([state], [gradient])[0]

    def _solve(self, states: Sequence[_State], gradients: Sequence[LayerGradient]) -> list[LayerDirection]:
        """All systems of the layers in one iteration."""
        layers = [_systems(state, gradient) for state, gradient in zip(states, gradients, strict=True)]
        stack = Stack(layers, states[0].damping)
        rhs = stack.right_hand_side()
        result = conjugate_gradients(
            stack.operator,
            rhs,
            stack,
            max_iter=self.max_iter,
            tol=self.tol,
            read_interval=device.read_interval(rhs),
        )
        directions = []
        for index, (state, layer) in enumerate(zip(states, layers, strict=True)):
            found, own = stack.split(result.x, index), stack.systems(index)
            direction = None
            if layer.side is not None and layer.weight is not None and found.x is not None:
                scale = torch.zeros_like(rhs[0, 0]) if found.scale is None else found.scale
                direction = layer.side.assemble(layer.weight, found.x, Scalar(scale))
            directions.append(
                LayerDirection(
                    direction,
                    found.bias,
                    self._system(state),
                    layer.side.route if layer.side is not None else "bias",
                    _rank(state, self.input_factor),
                    result.outcomes[own],
                    result.iterations[own],
                    result.residuals[:, own],
                )
            )
        return directions

    def _system(self, state: _State) -> DampedSystem:
        return DampedSystem(self.input_factor, state.damping.scale, state.damping.shift)

    def _explicit(self, state: _State, gradient: LayerGradient) -> LayerDirection:
        interval = device.read_interval(state.output.example)
        results = explicit_cg(
            state.layer, gradient, state.damping, self.input_factor, self.max_iter, self.tol, interval
        )
        solved = [r.x for r in results]
        weight = solved.pop(0) if gradient.weight is not None else None
        bias = solved.pop(0) if gradient.bias is not None else None
        return LayerDirection(
            weight,
            bias,
            self._system(state),
            "explicit",
            _rank(state, self.input_factor),
            torch.cat([r.outcomes for r in results]),
            torch.cat([r.iterations for r in results]),
            torch.nn.utils.rnn.pad_sequence([r.residuals[:, 0] for r in results], padding_value=float("nan")),
        )


@dataclass(frozen=True)
class EACG(CG):
    """Conjugate gradients with the mean input factor E[h]E[h]ᵀ: the paper's EA-CG.

    >>> EACG(max_iter=20).input_factor
    'mean'
    """

    input_factor: ClassVar[InputKind] = "mean"
    needs_psd: ClassVar[bool] = True
    needs_kronecker: ClassVar[bool] = True

    def apply_jointly(
        self, states: Sequence[object], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection] | None:
        """One iteration for all layers: its small operations are most of the time of narrow ones."""
        own = type(self).apply is CG.apply  # a subclass with an `apply` of its own is asked for every layer
        kinds = {(s.output.example.device, s.output.example.dtype) for s in states if isinstance(s, _State)}
        if self.formulation == "explicit" or not own or len(kinds) != 1:
            return None
        return self._solve([state for state in states if isinstance(state, _State)], gradients)


def _systems(state: _State, gradient: LayerGradient) -> LayerSystems:
    weight = None
    if state.side is not None and gradient.weight is not None:
        weight = state.side.coordinates(gradient.weight)
    return LayerSystems(state.output, state.side, weight, gradient.bias)


def _cheapest(factor: Factor, columns: int) -> Factor:
    """A Gram factor as it is, or formed once where products with `columns` columns are dearer than that."""
    if not isinstance(factor, GramFactor):
        return factor
    m, n = factor.rows.shape
    as_gram = 4.0 * m * n * columns
    formed = 1.3 * m * n * n + 2.0 * n * n * columns
    return factor if as_gram <= formed else DenseFactor(factor.to_dense())


def _rank(state: _State, kind: InputKind) -> int:
    if state.side is None or state.layer.inputs is None:
        return state.output.rank_bound
    return state.layer.inputs.factor(kind).rank_bound
