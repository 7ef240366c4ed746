"""Stacks of equal symmetric matrices: G small factors of one size as one tensor, for batched operations.

    F = (F_1, …, F_G)      each n × n: products, Cholesky factors and eigenvectors of all of them in one call

A depthwise convolution of 768 channels has 768 Kronecker products of 49 inputs and one output. One by one the
calls take all of the time; as a stack they take that of the arithmetic. The rules of `inverse`, of
`conjugate_gradients` and of the solvers hold for a stack as for a matrix: they work on the last two
dimensions, and what is a number of a matrix is one number for each of a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.linalg.factors import (
    DenseFactor,
    DiagonalFactor,
    Factor,
    GramFactor,
    InputFactors,
    RankOneFactor,
)

__all__ = ["STACKED_UP_TO", "DenseStack", "are_stackable", "diagonal_blocks", "stack_factors"]

STACKED_UP_TO = 256
"""Rows of the factors that are stacked: of larger ones the arithmetic takes longer than the calls."""


@dataclass(frozen=True, eq=False, repr=False)
class DenseStack(DenseFactor):
    """G symmetric matrices, `matrix` (G, n, n), which act on stacks (G, n, r); traces are one for each.

    `rank` is the sum of the ranks, where it is known to be less than G · n.

    >>> stack = DenseStack(torch.stack([torch.eye(2), 3 * torch.eye(2)]))
    >>> stack.count, stack.size, stack.trace().tolist()
    (2, 2, [2.0, 6.0])
    >>> stack.matmul(torch.ones(2, 2, 1)).flatten().tolist()
    [1.0, 1.0, 3.0, 3.0]
    """

    kind: ClassVar[str] = "dense-stack"
    rank: int | None = field(default=None, kw_only=True)

    @property
    def count(self) -> int:
        return self.matrix.shape[0]

    @property
    def size(self) -> int:
        return self.matrix.shape[-1]

    @property
    def rank_bound(self) -> int:
        return self.count * self.size if self.rank is None else self.rank

    def trace(self) -> Tensor:
        return self.diagonal().sum(-1)

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def frobenius_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.matrix, dim=(-2, -1))

    def diagonal_block(self, start: int, stop: int) -> DenseStack:
        return DenseStack(self.matrix[:, start:stop, start:stop])


def are_stackable(factors: Sequence[Factor | InputFactors]) -> bool:
    """Whether there are several factors of one size that is worth a stack, and none is diagonal.

    Input factors of which only E[h] has been read are judged by their size, and are not formed.

    >>> are_stackable([DenseFactor(torch.eye(2)), DenseFactor(torch.eye(2))]), are_stackable([])
    (True, False)
    """
    formed = [f.full if isinstance(f, InputFactors) and f.formed else f for f in factors]
    diagonal = any(isinstance(factor, DiagonalFactor | RankOneFactor) for factor in formed)
    sizes = {factor.size for factor in factors}
    return not diagonal and len(factors) > 1 and len(sizes) == 1 and max(sizes) <= STACKED_UP_TO


def stack_factors(factors: Sequence[Factor]) -> DenseStack:
    """The stack of factors of one size.

    >>> rows = GramFactor(torch.tensor([[1.0, 2.0]]), torch.ones(1))
    >>> stack_factors([rows, rows]).matrix[1].tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    rank = sum(factor.rank_bound for factor in factors)
    grams = [factor for factor in factors if isinstance(factor, GramFactor)]
    if len(grams) == len(factors) and len({len(factor.rows) for factor in grams}) == 1:
        # In one product; and no factor keeps a matrix of its own that nobody asked it for.
        rows = torch.stack([factor.rows for factor in grams])
        rows = rows * torch.stack([factor.root for factor in grams])[..., None]
        return DenseStack(rows.mT @ rows, rank=rank)
    return DenseStack(torch.stack([factor.to_dense() for factor in factors]), rank=rank)


def diagonal_blocks(factor: Factor, count: int) -> DenseStack:
    """The `count` equal blocks on the diagonal of a factor.

    >>> diagonal_blocks(DenseFactor(torch.arange(16.0).reshape(4, 4)), 2).matrix[1].tolist()
    [[10.0, 11.0], [14.0, 15.0]]
    """
    size = factor.size // count
    if isinstance(factor, GramFactor):
        rows = factor.scaled_rows().unflatten(1, (count, size)).transpose(0, 1)
        return DenseStack(rows.mT @ rows, rank=count * min(len(factor.rows), size))
    if isinstance(factor, DenseFactor):
        blocks = factor.matrix.reshape(count, size, count, size).diagonal(dim1=0, dim2=2)
        return DenseStack(blocks.permute(2, 0, 1).contiguous())
    return DenseStack(torch.diag_embed(factor.diagonal().reshape(count, size)))
