"""Damped systems of second moments of examples, solved among their rows: `exact` on block, layer and full.

    (s F + τI) d = -g,   F = eᵀ e:     d = -(g - eᵀ (e eᵀ + τ/s I)⁻¹ e g) / τ

by a k × k kernel for k rows (n × n where there are no fewer), with the direction a re-weighted sum of the
examples' gradients. A group of parameters (one, those of a layer, or all) is one system, whose residual each
of them reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import LayerCurvature, OperatorLayer, PlainLayer
from curvlab.curvature_structures import JointLayer
from curvlab.exceptions import PairError
from curvlab.linalg import Factor
from curvlab.linalg.inverse import ShiftedInverse, shifted_inverse
from curvlab.measure import device
from curvlab.solvers.base import LayerDirection, LayerGradient, Solver
from curvlab.solvers.damping import Damping
from curvlab.solvers.input_coordinates import form_gradient
from curvlab.solvers.systems import BlockSystem, SolvedBlock

__all__ = ["ExampleExact"]


@dataclass(frozen=True, eq=False)
class _State:
    """One parameter of a group, and the inverse of the group's system."""

    name: str
    group: LayerCurvature
    factor: Factor
    damping: Damping
    inverse: ShiftedInverse | None


@dataclass(frozen=True, eq=False, kw_only=True)
class ExampleExact(Solver):
    """`exact` on the groups of parameters of one curvature."""

    # One system may go over all layers.
    layers_apart: ClassVar[bool] = False
    curvature: Curvature

    def units(self, layer: LayerCurvature) -> Sequence[LayerCurvature]:
        """One for each parameter, whose block acts on tensors of the parameter's own shape."""
        return [
            OperatorLayer(layer.name, {name: block}, weight_name=name) for name, block in layer.blocks.items()
        ]

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _State:
        (name,) = layer.blocks
        group = next(one for one in self.curvature.layers if name in one.blocks)
        if not isinstance(group, JointLayer | PlainLayer):
            raise PairError(f"layer `{group.name}` is not made of the rows of examples: use `cg`")
        inverse = None
        if damping.scale:
            shift = damping.shift / damping.scale
            check = device.readable(group.factor.example)
            inverse = shifted_inverse(group.factor, shift, ("exact", shift), check)
        return _State(name, group, group.factor, damping, inverse)

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        """The system of a parameter that is a group by itself."""
        return self.apply_jointly([state], [gradient])[0]

    def apply_jointly(
        self, states: Sequence[object], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection]:
        """Every group's system, for all of its parameters."""
        own = [state for state in states if isinstance(state, _State)]
        named = {
            state.name: form_gradient(given.weight)
            for state, given in zip(own, gradients, strict=True)
            if given.weight is not None
        }
        groups = {id(state.group): state for state in own}
        solved = {key: _solve(state, named) for key, state in groups.items()}
        return [_direction(state, solved[id(state.group)]) for state in own]


def _solve(state: _State, gradient: Mapping[str, Tensor]) -> dict[str, SolvedBlock]:
    """g, d and F d of every parameter of a group."""
    names = list(state.group.blocks)
    given = torch.cat([gradient[name].reshape(-1) for name in names])
    if state.inverse is None:
        step = -given / state.damping.shift
    else:
        step = -state.inverse(given[:, None])[:, 0] / state.damping.scale
    image = state.factor.matmul(step[:, None])[:, 0]
    sizes = [gradient[name].numel() for name in names]
    pieces = zip(names, step.split(sizes), image.split(sizes), strict=True)
    return {
        name: SolvedBlock(gradient[name], d.reshape(gradient[name].shape), y.reshape(gradient[name].shape))
        for name, d, y in pieces
    }


def _direction(state: _State, system: Mapping[str, SolvedBlock]) -> LayerDirection:
    route = "sample" if getattr(state.factor, "narrow", False) else "dense"
    step = system[state.name].direction
    return LayerDirection(step, None, BlockSystem({state.name: system}), route, state.factor.rank_bound)
