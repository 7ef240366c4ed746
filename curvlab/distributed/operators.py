"""Matrix-free blocks over the rows of all ranks: every product is a sum over rows, so it is reduced.

    C x = Σ_r s_r C_r x        with C_r the block over the rows of rank r, s_r its share of the weight

Each product, diagonal, trace or dense form is one all-reduce, so all ranks must ask for it, in the same
order: a call on one rank only waits for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import LayerCurvature, OperatorLayer
from curvlab.distributed.communicator import Communicator, failure_of
from curvlab.linalg import Block
from curvlab.linalg.factors import frobenius_norm
from curvlab.linalg.flat import NamedProduct, WholeProduct

__all__ = ["JoinedBlock", "join_operators"]


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

    def _sum(self, function: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        def shared() -> list[Tensor]:
            return [function() * self.share if self.share else self.example.new_zeros(shape)]

        return _sum_or_raise(self.communicator, shared, [self.example.new_zeros(shape)])[0]

    def matmul(self, x: Tensor) -> Tensor:
        return self._sum(lambda: self.own.matmul(x), self.shape)

    def diagonal(self) -> Tensor:
        return self._sum(self.own.diagonal, self.shape)

    def trace(self) -> Tensor:
        return self._sum(self.own.trace, ())

    def frobenius_norm(self) -> Tensor:
        """From the dense form: the closed form pairs each row with every other, also across ranks."""
        return frobenius_norm(self.to_dense())

    def _dense(self) -> Tensor:
        return self._sum(self.own.to_dense, (self.numel, self.numel))


def _sum_or_raise(
    communicator: Communicator, function: Callable[[], list[Tensor]], nothing: list[Tensor]
) -> list[Tensor]:
    """Σ_r of what `function` returns; where it raises on one rank, all raise.

    One more entry in the same message counts the ranks that failed and added `nothing`.
    """
    failed: Exception | None = None
    try:
        mine = function()
    except Exception as error:
        failed, mine = error, nothing
    flag = nothing[0].new_full((), float(failed is not None))
    *totals, failures = communicator.sums([*mine, flag])
    if float(failures):
        told = communicator.gather_objects(None if failed is None else failure_of(failed, communicator.rank))
        raise failed or next(failure for failure in told if failure is not None).error()
    return totals


def join_operators(curvature: Curvature, communicator: Communicator, share: float) -> Curvature:
    """The curvature with its matrix-free blocks and cross-layer products reduced over all ranks."""
    if not curvature.live:
        return curvature
    layers = tuple(_layer(layer, communicator, share) for layer in curvature.layers)
    full = curvature.full_product
    # A reduction cannot be batched: one product after the other.
    curvature = replace(curvature, products_at_once=1)
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
    nothing = [torch.zeros_like(vector) for vector in vectors.values()]

    def shared() -> list[Tensor]:
        if not share:
            return nothing
        found = own(vectors)
        return [found[name] * share for name in vectors]

    return dict(zip(vectors, _sum_or_raise(communicator, shared, nothing), strict=True))


def _layer(layer: LayerCurvature, communicator: Communicator, share: float) -> LayerCurvature:
    if not isinstance(layer, OperatorLayer):
        return layer
    return layer.map_blocks(lambda block: JoinedBlock(block, communicator, share))
