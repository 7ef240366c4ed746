"""Damped systems of blocks that are diagonal in a basis of their own: `exact` on structure=ekfac.

(s C + τI) d = -g,   C = U diag(λ) Uᵀ:     d = -U [(Uᵀ g) / (s λ + τ)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from curvlab.curvature_layers import LayerCurvature, OperatorLayer
from curvlab.curvature_structures import EigenLayer
from curvlab.linalg import Block, EigenBlock, FactorBlock
from curvlab.linalg.inverse import NotPositiveDefiniteError, shifted_inverse
from curvlab.measure import device
from curvlab.solvers.base import LayerDirection, LayerGradient, Solver
from curvlab.solvers.damping import Damping
from curvlab.solvers.input_coordinates import form_gradient
from curvlab.solvers.systems import BlockSystem, SolvedBlock

__all__ = ["EigenExact"]


@dataclass(frozen=True, eq=False)
class _State:
    name: str
    block: Block
    damping: Damping


@dataclass(frozen=True)
class EigenExact(Solver):
    """`exact` on an `EigenLayer`: the weight in its own basis, the bias by its factor."""

    structures: ClassVar[tuple[str, ...]] = ("ekfac",)
    layers_apart: ClassVar[bool] = False

    def units(self, layer: LayerCurvature) -> Sequence[LayerCurvature]:
        """One for each parameter."""
        assert isinstance(layer, EigenLayer)
        return [OperatorLayer(layer.name, {name: b}, weight_name=name) for name, b in layer.blocks.items()]

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _State:
        ((name, block),) = layer.blocks.items()
        if isinstance(block, EigenBlock) and device.readable(block.example):
            smallest = damping.scale * float(block.smallest()) + damping.shift
            if not smallest > 0:
                raise NotPositiveDefiniteError(smallest)
        return _State(name, block, damping)

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, _State)
        assert gradient.weight is not None
        given, block = form_gradient(gradient.weight), state.block
        step = -_solved(block, given, state.damping)
        system = {state.name: SolvedBlock(given, step, block.matmul(step))}
        rank = block.factor.rank_bound if isinstance(block, FactorBlock) else block.numel
        return LayerDirection(step, None, BlockSystem({state.name: system}), "eigen", rank)


def _solved(block: Block, given: Tensor, damping: Damping) -> Tensor:
    """(s C + τI)⁻¹ g."""
    if isinstance(block, EigenBlock):
        return block.solve(given, damping.scale, damping.shift)
    assert isinstance(block, FactorBlock)
    if not damping.scale:
        return given / damping.shift
    shift = damping.shift / damping.scale
    check = device.readable(block.example)
    inverse = shifted_inverse(block.factor, shift, ("exact", shift), check)
    return inverse(given.reshape(-1, 1)).reshape(given.shape) / damping.scale
