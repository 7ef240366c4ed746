"""Multiples, sums and selections of a curvature's layers: one small rule for each form of layer.

c (A ⊗ B) = A ⊗ (cB)                  a multiple keeps its Kronecker factors
A₁ ⊗ B₁ + A₂ ⊗ B₂                     a sum has none: it is known by its products, and by its blocks'
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import singledispatch

import torch
from torch import Tensor

from curvlab.curvature_layers import (
    KroneckerLayer,
    KroneckerPart,
    LayerCurvature,
    OperatorLayer,
    PlainLayer,
    SharedLayer,
    Summand,
    TiedLayer,
)
from curvlab.curvature_structures import EigenLayer, JointLayer
from curvlab.linalg import (
    Block,
    DenseFactor,
    DiagonalFactor,
    ExampleFactor,
    Factor,
    FactorBlock,
    GramFactor,
    ScaledBlock,
    SumBlock,
)
from curvlab.linalg.flat import NamedProduct

__all__ = ["add_layers", "scale_factor", "scale_layer", "select_layer", "select_named", "sum_named"]


def scale_factor(factor: Factor, scale: float) -> Factor:
    """cF, in the same form where c allows it.

    >>> round(scale_factor(GramFactor(torch.ones(1, 2), torch.ones(1)), 4.0).trace().item(), 4)
    8.0
    """
    if isinstance(factor, DiagonalFactor):
        return DiagonalFactor(scale * factor.values)
    if isinstance(factor, GramFactor) and scale >= 0:
        return GramFactor(factor.rows, factor.root * scale**0.5)
    if isinstance(factor, ExampleFactor):
        signs = factor.signs
        if scale < 0:
            signs = -factor.root.new_ones(factor.count) if signs is None else -signs
        return ExampleFactor(factor.parts, factor.root * abs(scale) ** 0.5, factor.mixing, signs)
    return DenseFactor(scale * factor.to_dense())


def _scale_part(part: KroneckerPart, scale: float) -> KroneckerPart:
    return KroneckerPart(scale_factor(part.output, scale), part.inputs)


@singledispatch
def scale_layer(layer: LayerCurvature, scale: float) -> LayerCurvature:
    """The layer of c C."""
    raise TypeError(f"no rule to multiply a layer of the kind {type(layer).__name__}")


@scale_layer.register
def _(layer: KroneckerLayer, scale: float) -> LayerCurvature:
    return replace(layer, output=scale_factor(layer.output, scale))


@scale_layer.register
def _(layer: SharedLayer, scale: float) -> LayerCurvature:
    parts = tuple(_scale_part(part, scale) for part in layer.parts)
    return replace(layer, parts=parts, mean_output=scale_factor(layer.mean_output, scale))


@scale_layer.register
def _(layer: PlainLayer, scale: float) -> LayerCurvature:
    return replace(layer, factor=scale_factor(layer.factor, scale))


@scale_layer.register
def _(layer: JointLayer, scale: float) -> LayerCurvature:
    return replace(layer, factor=scale_factor(layer.factor, scale))


@scale_layer.register
def _(layer: EigenLayer, scale: float) -> LayerCurvature:
    parts = tuple(replace(part, values=scale * part.values) for part in layer.block.parts)
    return replace(
        layer,
        block=replace(layer.block, parts=parts),
        mean_output=scale_factor(layer.mean_output, scale),
    )


@scale_layer.register
def _(layer: TiedLayer, scale: float) -> LayerCurvature:
    summands = (
        Summand(one.view, tuple(_scale_part(part, scale) for part in one.parts)) for one in layer.summands
    )
    return replace(layer, summands=tuple(summands))


@scale_layer.register
def _(layer: OperatorLayer, scale: float) -> LayerCurvature:
    output = None if layer.output is None else scale_factor(layer.output, scale)
    blocks = {name: scale_block(block, scale) for name, block in layer.operators.items()}
    return replace(layer, operators=blocks, output=output)


def scale_block(block: Block, scale: float) -> Block:
    """The block of c C."""
    if isinstance(block, FactorBlock):
        return FactorBlock(scale_factor(block.factor, scale), block.parameter_shape)
    return ScaledBlock(block, scale)


@singledispatch
def select_layer(layer: LayerCurvature, names: Collection[str]) -> LayerCurvature | None:
    """The layer with the parameters among `names` alone; None where it has none of them."""
    return layer if set(layer.blocks) <= set(names) else None


@select_layer.register
def _(layer: KroneckerLayer, names: Collection[str]) -> LayerCurvature | None:
    weight, bias = _name_if_among(layer.weight_name, names), _name_if_among(layer.bias_name, names)
    return None if weight is bias is None else replace(layer, weight_name=weight, bias_name=bias)


@select_layer.register
def _(layer: SharedLayer, names: Collection[str]) -> LayerCurvature | None:
    weight, bias = _name_if_among(layer.weight_name, names), _name_if_among(layer.bias_name, names)
    if weight is None and bias is None:
        return None
    if weight is None:
        return replace(layer, weight_name=None, bias_name=bias, view=None, parts=())
    return replace(layer, bias_name=bias)


@select_layer.register
def _(layer: JointLayer, names: Collection[str]) -> LayerCurvature | None:
    shapes = {name: shape for name, shape in layer.shapes.items() if name in names}
    if not shapes:
        return None
    spans = [layer.spans[name] for name in shapes]
    return replace(layer, shapes=shapes, factor=_select_entries(layer.factor, spans))


def _select_entries(factor: Factor, spans: Sequence[tuple[int, int]]) -> Factor:
    """The factor over some of its entries."""
    if isinstance(factor, ExampleFactor):
        return factor.select(spans)
    index = torch.cat([torch.arange(*span) for span in spans]).to(factor.example.device)
    if isinstance(factor, GramFactor):
        return GramFactor(factor.rows[:, index], factor.root)
    return DenseFactor(factor.to_dense()[index[:, None], index])


@select_layer.register
def _(layer: EigenLayer, names: Collection[str]) -> LayerCurvature | None:
    if layer.weight_name in names:
        return replace(layer, bias_name=_name_if_among(layer.bias_name, names))
    if layer.bias_name is None or layer.bias_name not in names:
        return None
    return KroneckerLayer(layer.name, None, layer.bias_name, layer.mean_output)


@select_layer.register
def _(layer: OperatorLayer, names: Collection[str]) -> LayerCurvature | None:
    blocks = {name: block for name, block in layer.operators.items() if name in names}
    if not blocks:
        return None
    weight, bias = _name_if_among(layer.weight_name, names), _name_if_among(layer.bias_name, names)
    return replace(layer, operators=blocks, weight_name=weight, bias_name=bias)


def _name_if_among(name: str | None, names: Collection[str]) -> str | None:
    return name if name in names else None


def add_layers(layer: LayerCurvature, others: Mapping[str, Block]) -> OperatorLayer:
    """The layer whose blocks are its own and those of `others` by the same names, added."""
    blocks = {name: _add_blocks(block, others[name]) for name, block in layer.blocks.items()}
    return OperatorLayer(layer.name, blocks, weight_name=layer.weight_name, bias_name=layer.bias_name)


def _add_blocks(left: Block, right: Block) -> Block:
    if isinstance(left, FactorBlock) and isinstance(right, FactorBlock):
        return FactorBlock(_add_factors(left.factor, right.factor), left.parameter_shape)
    return SumBlock((left, right))


def _add_factors(left: Factor, right: Factor) -> Factor:
    """F₁ + F₂: rows of both where they stay fewer than columns, a diagonal, else the dense sum."""
    if isinstance(left, DiagonalFactor) and isinstance(right, DiagonalFactor):
        return DiagonalFactor(left.values + right.values)
    if isinstance(left, GramFactor) and isinstance(right, GramFactor):
        rows = torch.cat([left.rows, right.rows])
        if rows.shape[0] < rows.shape[1]:
            return GramFactor(rows, torch.cat([left.root, right.root]))
    return DenseFactor(left.to_dense() + right.to_dense())


def sum_named(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum of named tensors."""
    return {name: value + second[name] for name, value in first.items()}


def select_named(
    product: NamedProduct,
    blocks: Mapping[str, Block],
    chosen: Collection[str],
    vectors: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The product that the sub-matrix of the chosen blocks has: with zeros in all others."""
    like = vectors[next(iter(chosen))]
    several = like.shape[: like.ndim - len(blocks[next(iter(chosen))].shape)]
    whole = {
        name: vectors[name] if name in chosen else like.new_zeros(*several, *block.shape)
        for name, block in blocks.items()
    }
    return {name: image for name, image in product(whole).items() if name in chosen}
