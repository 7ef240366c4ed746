"""PosEig_γ: multiply the negative eigenvalues of a symmetric matrix by γ ≤ 0.

    PosEig_γ(U Λ Uᵀ) = U f(Λ) Uᵀ,   f(λ) = λ where λ ≥ 0, γλ where λ < 0

γ = -1 takes absolute values, γ = 0 clips. It is not linear: take means first.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["poseig", "poseig_diagonal"]


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
