"""Damped systems of blocks that are no Kronecker product: `exact` on the structures of rows.

Second moments of examples, `block`, `layer` and `full`, are solved among their rows e:

    (s F + τI) d = -g,   F = eᵀ e:             d = -(g - eᵀ (e eᵀ + τ/s I)⁻¹ e g) / τ

by a k × k kernel for k rows (n × n where there are no fewer), with the direction a re-weighted sum of the
examples' gradients. A group of parameters (one, those of a layer, or all) is one system, whose residual each
of them reports. A block that is diagonal in a basis of its own, `ekfac`, is solved there:

    (s C + τI) d = -g,   C = U diag(λ) Uᵀ:     d = -U [(Uᵀ g) / (s λ + τ)]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import LayerCurvature, OperatorLayer, PlainLayer
from curvlab.curvature_structures import JointLayer
from curvlab.exceptions import PairError
from curvlab.linalg import EigenBlock, Factor, FactorBlock
from curvlab.linalg.inverse import NotPositiveDefiniteError, ShiftedInverse, shifted_inverse
from curvlab.measure import device
from curvlab.solvers.base import LayerDirection, LayerGradient, Solver
from curvlab.solvers.damping import Damping
from curvlab.solvers.input_coordinates import form_gradient
from curvlab.solvers.systems import BlockSystem, SolvedBlock

__all__ = ["EigenExact", "ExampleExact"]


@dataclass(frozen=True, eq=False)
class _DampedInverse:
    """g ↦ (s F + τI)⁻¹ g for a vector g."""

    damping: Damping
    shifted: ShiftedInverse | None

    @classmethod
    def of(cls, factor: Factor, damping: Damping) -> _DampedInverse:
        """By the inverse of F + τ/s I; where s is zero there is nothing to invert."""
        if not damping.scale:
            return cls(damping, None)
        shift = damping.shift / damping.scale
        return cls(damping, shifted_inverse(factor, shift, ("exact", shift), device.readable(factor.example)))

    def __call__(self, given: Tensor) -> Tensor:
        if self.shifted is None:
            return given / self.damping.shift
        return self.shifted(given[:, None])[:, 0] / self.damping.scale


@dataclass(frozen=True)
class _ByParameter(Solver):
    """A solver whose units are parameters, with blocks that act on tensors of the parameter's own shape."""

    # One system may go over all layers.
    layers_apart: ClassVar[bool] = False

    def units(self, layer: LayerCurvature) -> Sequence[LayerCurvature]:
        """One for each parameter."""
        return [
            OperatorLayer(layer.name, {name: block}, weight_name=name) for name, block in layer.blocks.items()
        ]


@dataclass(frozen=True, eq=False)
class _Parameter:
    """One parameter of a group, and the inverse of the group's system."""

    name: str
    group: LayerCurvature
    factor: Factor
    inverse: _DampedInverse


@dataclass(frozen=True, eq=False, kw_only=True)
class ExampleExact(_ByParameter):
    """`exact` on the groups of parameters of one curvature."""

    curvature: Curvature

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _Parameter:
        (name,) = layer.blocks
        group = next(one for one in self.curvature.layers if name in one.blocks)
        if not isinstance(group, JointLayer | PlainLayer):
            raise PairError(f"layer `{group.name}` is not made of the rows of examples: use `cg`")
        return _Parameter(name, group, group.factor, _DampedInverse.of(group.factor, damping))

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        """The system of a parameter that is a group by itself."""
        return self.apply_jointly([state], [gradient])[0]

    def apply_jointly(
        self, states: Sequence[object], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection]:
        """Every group's system, for all of its parameters."""
        own = [state for state in states if isinstance(state, _Parameter)]
        named = {
            state.name: form_gradient(given.weight)
            for state, given in zip(own, gradients, strict=True)
            if given.weight is not None
        }
        groups = {id(state.group): state for state in own}
        solved = {key: _solve(state, named) for key, state in groups.items()}
        return [_direction(state, solved[id(state.group)]) for state in own]


def _solve(state: _Parameter, gradient: Mapping[str, Tensor]) -> dict[str, SolvedBlock]:
    """g, d and F d of every parameter of a group; F d, a forward and a backward pass, when it is read."""
    names = list(state.group.blocks)
    step = -state.inverse(torch.cat([gradient[name].reshape(-1) for name in names]))
    shapes = {name: gradient[name].shape for name in names}
    image = _Image(state.factor, step, shapes)
    pieces = zip(names, step.split([shape.numel() for shape in shapes.values()]), strict=True)
    return {
        name: SolvedBlock(gradient[name], d.reshape(shapes[name]), partial(image.of, name))
        for name, d in pieces
    }


@dataclass(frozen=True, eq=False)
class _Image:
    """F d of a group's parameters, made once for all of them."""

    factor: Factor
    step: Tensor
    shapes: Mapping[str, torch.Size]

    @cached_property
    def _pieces(self) -> dict[str, Tensor]:
        image = self.factor.matmul(self.step[:, None])[:, 0]
        pieces = image.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: piece.reshape(shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def of(self, name: str) -> Tensor:
        """That of one parameter."""
        return self._pieces[name]


def _direction(state: _Parameter, system: Mapping[str, SolvedBlock]) -> LayerDirection:
    route = "sample" if getattr(state.factor, "narrow", False) else "dense"
    step = system[state.name].direction
    return LayerDirection(step, None, BlockSystem({state.name: system}), route, state.factor.rank_bound)


@dataclass(frozen=True, eq=False)
class _OwnBasis:
    """A block in its own basis, or the factor of a bias with its inverse."""

    name: str
    block: EigenBlock | FactorBlock
    damping: Damping
    inverse: _DampedInverse | None


@dataclass(frozen=True)
class EigenExact(_ByParameter):
    """`exact` on an `EigenLayer`: the weight in its own basis, the bias by its factor."""

    structures: ClassVar[tuple[str, ...]] = ("ekfac",)

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _OwnBasis:
        ((name, block),) = layer.blocks.items()
        if isinstance(block, FactorBlock):
            return _OwnBasis(name, block, damping, _DampedInverse.of(block.factor, damping))
        assert isinstance(block, EigenBlock)
        if device.readable(block.example):
            smallest = damping.scale * float(block.smallest()) + damping.shift
            if not smallest > 0:
                raise NotPositiveDefiniteError(smallest)
        return _OwnBasis(name, block, damping, None)

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, _OwnBasis)
        assert gradient.weight is not None
        given, block, damping = form_gradient(gradient.weight), state.block, state.damping
        if isinstance(block, EigenBlock):
            step, rank = -block.solve(given, damping.scale, damping.shift), block.numel
        else:
            assert state.inverse is not None
            step, rank = -state.inverse(given.reshape(-1)).reshape(given.shape), block.factor.rank_bound
        system = {state.name: SolvedBlock(given, step, partial(block.matmul, step))}
        return LayerDirection(step, None, BlockSystem({state.name: system}), "eigen", rank)
