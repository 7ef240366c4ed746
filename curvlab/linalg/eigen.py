"""Eigendecompositions of symmetric matrices, M = V Λ Vᵀ, on devices with and without an operation for them.

torch has no `_linalg_eigh` for mps. Such a device sends the matrix to the host and takes the result back: the
numbers are the CPU's. The notes of a curvature on such a device tell of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["eigh", "eigvalsh"]


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors as columns, of one symmetric matrix or a batch of them.

    >>> eigh(torch.tensor([[0.0, 2.0], [2.0, 0.0]]))[0].tolist()
    [-2.0, 2.0]
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except NotImplementedError:
        values, vectors = torch.linalg.eigh(matrix.cpu())
    return values.to(matrix.device), vectors.to(matrix.device)


def eigvalsh(matrix: Tensor) -> Tensor:
    """The eigenvalues alone, ascending.

    >>> eigvalsh(torch.tensor([[0.0, 2.0], [2.0, 0.0]])).tolist()
    [-2.0, 2.0]
    """
    try:
        return torch.linalg.eigvalsh(matrix)
    except NotImplementedError:
        return torch.linalg.eigvalsh(matrix.cpu()).to(matrix.device)
