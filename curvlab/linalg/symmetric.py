"""Symmetric matrices: products at about half the multiplications, and PosEig.

    gram(X) = X Xᵀ          congruence(W, B) = Wᵀ B W  with B symmetric

torch has no symmetric rank-k update, so both compute block rows of the lower triangle and mirror
them. Blocks are large enough that each product still runs at the speed of a plain one.

PosEig_γ multiplies the negative eigenvalues by γ ≤ 0:

    PosEig_γ(U Λ Uᵀ) = U f(Λ) Uᵀ,   f(λ) = λ where λ ≥ 0, γλ where λ < 0

γ = -1 takes absolute values, γ = 0 clips. It is not linear: take means first.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["congruence", "gram", "poseig", "poseig_diagonal", "symmetric_product"]

BLOCK = 192
COLUMN_CHUNK = 8192


def gram(rows: Tensor, centre: Tensor | None = None) -> Tensor:
    """X Xᵀ for X = rows, or (X - 1cᵀ)(X - 1cᵀ)ᵀ where a `centre` c is given.

    The centred copy is made a chunk of columns at a time, so it stays in the cache and the
    subtraction costs neither memory nor, in float32, the digits that centring a finished
    X Xᵀ would lose.

    >>> import torch
    >>> gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    if centre is None:
        return symmetric_product(rows, rows)
    total = rows.new_zeros(rows.shape[0], rows.shape[0])
    for chunk, offset in zip(rows.split(COLUMN_CHUNK, dim=1), centre.split(COLUMN_CHUNK), strict=True):
        centred = chunk - offset
        total += symmetric_product(centred, centred)
    return total


def congruence(weight: Tensor, matrix: Tensor) -> Tensor:
    """Wᵀ B W for a symmetric B.

    >>> import torch
    >>> congruence(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])).tolist()
    [[3.0, 6.0], [6.0, 12.0]]
    """
    return symmetric_product(weight.T, (matrix @ weight).T)


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """left rightᵀ, known to be symmetric, from its lower triangle of blocks.

    >>> import torch
    >>> symmetric_product(torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [4.0]])).tolist()
    [[2.0, 4.0], [4.0, 8.0]]
    """
    n = left.shape[0]
    if n <= 2 * BLOCK:
        return left @ right.T
    out = left.new_empty(n, n)
    # At most 32 block rows: more would save next to nothing and cost a call each.
    block = max(BLOCK, -(-n // 32))
    for start in range(0, n, block):
        stop = min(start + block, n)
        block_row = left[start:stop] @ right[:stop].T
        out[start:stop, :stop] = block_row
        out[:start, start:stop] = block_row[:, :start].T
    return out


def poseig_diagonal(values: Tensor, gamma: float) -> Tensor:
    """PosEig of a diagonal matrix, entry by entry.

    >>> poseig_diagonal(torch.tensor([2.0, -3.0]), gamma=-1.0)
    tensor([2., 3.])
    """
    return torch.where(values < 0, gamma * values, values)


def poseig(matrix: Tensor, gamma: float) -> Tensor:
    """PosEig of a symmetric matrix.

    >>> poseig(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), gamma=-1.0).round(decimals=4).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    scaled = vectors * poseig_diagonal(eigenvalues, gamma)
    result = scaled @ vectors.T
    return (result + result.T) / 2
