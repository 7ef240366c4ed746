"""Layers of structures that are no Kronecker product, and the kinds of all layers that files hold.

    JointLayer    one factor on several parameters, joined         structure=layer, structure=full
    EigenLayer    a diagonal on the eigenvectors of A ⊗ B          structure=ekfac

`exact` and `cg` solve for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from curvlab.curvature_io import factor_from, tensors_under
from curvlab.curvature_layers import (
    KroneckerLayer,
    LayerCurvature,
    PlainLayer,
    SharedLayer,
    TensorMap,
    TiedLayer,
    under_prefix,
)
from curvlab.exceptions import PairError
from curvlab.linalg import Block, EigenBlock, EigenPart, Factor, FactorBlock, MatrixView
from curvlab.linalg.factors import InputKind

__all__ = ["EigenLayer", "JointLayer", "unpack_layer"]


@dataclass(frozen=True, eq=False)
class JointLayer(LayerCurvature):
    """Several parameters with the blocks between them: `factor` acts on them flattened and joined, in order.

    `shapes` are theirs, by name; `exact` and `cg` solve for all of them together.

    >>> from curvlab.linalg import DiagonalFactor
    >>> layer = JointLayer("0", {"0.weight": (1, 2), "0.bias": (1,)}, DiagonalFactor(torch.arange(3.0)))
    >>> layer.product({"0.weight": torch.ones(1, 2), "0.bias": torch.ones(1)})
    {'0.weight': tensor([[0., 1.]]), '0.bias': tensor([2.])}
    """

    kind: ClassVar[str] = "joint"
    name: str
    shapes: Mapping[str, tuple[int, ...]]
    factor: Factor

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Where each parameter lies among the entries of the factor."""
        ends = list(accumulate((prod(shape) for shape in self.shapes.values()), initial=0))
        return dict(zip(self.shapes, pairwise(ends), strict=True))

    @cached_property
    def blocks(self) -> dict[str, Block]:
        return {
            name: FactorBlock(self.factor.diagonal_block(*span), tuple(self.shapes[name]))
            for name, span in self.spans.items()
        }

    def join(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """The parameters' entries of `vectors`, flattened and joined."""
        return torch.cat([vectors[name].reshape(-1) for name in self.shapes])

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """What `join` joined, by parameter."""
        return {n: vector[a:b].reshape(self.shapes[n]) for n, (a, b) in self.spans.items()}

    def product(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The matrix over all its parameters times `vectors`."""
        return self.split(self.factor.matmul(self.join(vectors)[:, None])[:, 0])

    def map(self, function: TensorMap) -> Self:
        return replace(self, factor=self.factor.map(function))

    def formed(self) -> JointLayer:
        return replace(self, factor=self.factor.formed())

    def tensors(self) -> dict[str, Tensor]:
        return under_prefix("factor", self.factor.tensors())

    def header(self) -> dict[str, Any]:
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"kind": self.kind, "name": self.name, "shapes": shapes, "factor": self.factor.kind}

    @staticmethod
    def unpack(row: dict[str, Any], tensors: Mapping[str, Tensor]) -> JointLayer:
        """The layer that `header` and `tensors` took apart."""
        factor = factor_from(row["factor"], tensors_under(tensors, "factor"))
        return JointLayer(row["name"], {n: tuple(shape) for n, shape in row["shapes"].items()}, factor)

    def _units(self, kind: InputKind) -> tuple[KroneckerLayer, ...]:
        raise PairError(
            f"layer `{self.name}` has blocks between its parameters and no Kronecker factors: use `exact` or "
            f"`cg`"
        )


@dataclass(frozen=True, eq=False)
class EigenLayer(LayerCurvature):
    """A weight whose block is diagonal on the eigenvectors of its Kronecker factors; its bias has B of ḡ."""

    kind: ClassVar[str] = "eigen"
    name: str
    weight_name: str | None = field()
    bias_name: str | None = field()
    block: EigenBlock
    mean_output: Factor

    @property
    def blocks(self) -> dict[str, Block]:
        found: dict[str, Block] = {str(self.weight_name): self.block}
        if self.bias_name is not None:
            found[self.bias_name] = FactorBlock(self.mean_output)
        return found

    def map(self, function: TensorMap) -> Self:
        return replace(self, block=self.block.map(function), mean_output=self.mean_output.map(function))

    def tensors(self) -> dict[str, Tensor]:
        parts = enumerate(self.block.parts)
        found = {key: t for i, part in parts for key, t in under_prefix(f"part{i}", part.tensors()).items()}
        return found | under_prefix("mean-output", self.mean_output.tensors())

    def header(self) -> dict[str, Any]:
        row = {"kind": self.kind, "name": self.name, "weight": self.weight_name, "bias": self.bias_name}
        shapes = [[part.outputs, part.inputs] for part in self.block.parts]
        return row | {"view": self.block.view.pack(), "parts": shapes, "mean_output": self.mean_output.kind}

    @staticmethod
    def unpack(row: dict[str, Any], tensors: Mapping[str, Tensor]) -> EigenLayer:
        """The layer that `header` and `tensors` took apart."""
        parts = tuple(
            EigenPart(outputs, inputs, **tensors_under(tensors, f"part{index}"))
            for index, (outputs, inputs) in enumerate(row["parts"])
        )
        block = EigenBlock(MatrixView.unpack(row["view"]), parts)
        mean = factor_from(row["mean_output"], tensors_under(tensors, "mean-output"))
        return EigenLayer(row["name"], row["weight"], row["bias"], block, mean)

    def _units(self, kind: InputKind) -> tuple[KroneckerLayer, ...]:
        raise PairError(f"layer `{self.name}` has no Kronecker factors to solve by: use `exact` or `cg`")


KINDS: dict[str, Callable[[dict[str, Any], Mapping[str, Tensor]], LayerCurvature]] = {
    KroneckerLayer.kind: KroneckerLayer.unpack,
    SharedLayer.kind: SharedLayer.unpack,
    PlainLayer.kind: PlainLayer.unpack,
    TiedLayer.kind: TiedLayer.unpack,
    JointLayer.kind: JointLayer.unpack,
    EigenLayer.kind: EigenLayer.unpack,
}


def unpack_layer(row: dict[str, Any], tensors: Mapping[str, Tensor]) -> LayerCurvature:
    """The layer that `header` and `tensors` took apart; a row of the first format has no kind."""
    return KINDS[row.get("kind", KroneckerLayer.kind)](row, tensors)
