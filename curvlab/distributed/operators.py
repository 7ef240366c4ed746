"""Matrix-free blocks over the rows of all ranks: every product is a sum over rows, so it is reduced.

    C x = Σ_r s_r C_r x        with C_r the block over the rows of rank r, s_r its share of the weight

Each product, diagonal, trace or dense form is one all-reduce, so all ranks must ask for it, in the same
order: a call on one rank only waits for the others. A small message before it holds that they ask for the
same of the same operand, and one before each iteration that its settings are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import LayerCurvature, OperatorLayer
from curvlab.distributed.agreement import Description, Named, agree
from curvlab.distributed.communicator import Communicator
from curvlab.linalg import Block
from curvlab.linalg.factors import frobenius_norm
from curvlab.linalg.flat import NamedProduct, WholeProduct

__all__ = ["JoinedBlock", "join_operators"]

ASKED = "what is asked of a matrix"


@dataclass(frozen=True, eq=False)
class JoinedBlock(Block):
    """The block of one parameter over all ranks; `own` is this rank's, with `share` of the weight."""

    kind: ClassVar[str] = "operator"
    own: Block
    communicator: Communicator = field(repr=False)
    share: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.own.shape

    @property
    def example(self) -> Tensor:
        return self.own.example

    @property
    def nbytes(self) -> int:
        return self.own.nbytes

    def _sum(
        self, asked: str, function: Callable[[], Tensor], shape: tuple[int, ...], operand: Named | None = None
    ) -> Tensor:
        def shared() -> list[Tensor]:
            return [function() * self.share if self.share else self.example.new_zeros(shape)]

        what = asked, shape
        return _agreed_sums(self.communicator, what, operand or {}, shared, self.example.device)[0]

    def matmul(self, x: Tensor) -> Tensor:
        return self._sum("a product", lambda: self.own.matmul(x), self.shape, {"": x})

    def diagonal(self) -> Tensor:
        return self._sum("the diagonal", self.own.diagonal, self.shape)

    def trace(self) -> Tensor:
        return self._sum("the trace", self.own.trace, ())

    def frobenius_norm(self) -> Tensor:
        """From the dense form: the closed form pairs each row with every other, also across ranks."""
        return frobenius_norm(self.to_dense())

    def _dense(self) -> Tensor:
        return self._sum("the dense form", self.own.to_dense, (self.numel, self.numel))


def _agreed_sums(
    communicator: Communicator,
    asked: object,
    operand: Named,
    function: Callable[[], list[Tensor]],
    on: torch.device,
) -> list[Tensor]:
    """Σ_r of what `function` returns; where it raises on one rank, or not all ask alike, all raise."""
    said = Description({ASKED: asked}, {"the operand of a product": operand})
    return communicator.sums(agree(communicator, function, lambda _: said, on=on))


@dataclass(frozen=True)
class _Agreement:
    """Asks whether all ranks want the same: one whose iteration is longer would wait for the others."""

    communicator: Communicator
    on: torch.device

    def __call__(self, asked: object) -> None:
        agree(self.communicator, lambda: None, lambda _: Description({ASKED: asked}), on=self.on)


def join_operators(curvature: Curvature, communicator: Communicator, share: float) -> Curvature:
    """The curvature with its matrix-free blocks and cross-layer products reduced over all ranks."""
    if not curvature.live:
        return curvature
    layers = tuple(_layer(layer, communicator, share) for layer in curvature.layers)
    full = curvature.full_product
    agreement = _Agreement(communicator, next(iter(layers[0].blocks.values())).example.device)
    # A reduction cannot be batched: one product after the other.
    curvature = replace(curvature, products_at_once=1, agree_on=agreement)
    if full is None:
        return replace(curvature, layers=layers)

    def joined(products: Sequence[NamedProduct]) -> NamedProduct:
        (own,) = products
        return lambda vectors: _joined_product(own, vectors, communicator, share)

    return replace(curvature, layers=layers, full_product=WholeProduct.made_of([full], joined))


def _joined_product(
    own: NamedProduct, vectors: Mapping[str, Tensor], communicator: Communicator, share: float
) -> dict[str, Tensor]:
    """One reduction, of the images of one vector or of several."""

    def shared() -> list[Tensor]:
        if not share:
            return [torch.zeros_like(vector) for vector in vectors.values()]
        found = own(vectors)
        return [found[name] * share for name in vectors]

    on = next(iter(vectors.values())).device
    found = _agreed_sums(communicator, "a product of all parameters", vectors, shared, on)
    return dict(zip(vectors, found, strict=True))


def _layer(layer: LayerCurvature, communicator: Communicator, share: float) -> LayerCurvature:
    if not isinstance(layer, OperatorLayer):
        return layer
    return layer.map_blocks(lambda block: JoinedBlock(block, communicator, share))
