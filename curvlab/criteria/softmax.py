"""The algebra of softmax outputs: covariances diag(p) - p pᵀ and draws from p.

A covariance of probabilities is a graph Laplacian: its rows sum to zero and its off-diagonal entries
are -p_j p_k. Taking the diagonal from the rows, not from p_j - p_j², keeps relative accuracy where
p_j is close to one.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["covariance_products", "covariances", "draw", "one_hot", "weighted_covariance"]


def one_hot(labels: Tensor, logits: Tensor) -> Tensor:
    """Rows e_{y_i} in the logits' dtype; unlike torch's one_hot it never reads values back."""
    rows = torch.zeros(labels.shape[0], logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return rows.scatter_(1, labels.long()[:, None], 1.0)


def covariance_products(probabilities: Tensor, vectors: Tensor) -> Tensor:
    """(diag(p) - p pᵀ) v for each row."""
    return probabilities * (vectors - (probabilities * vectors).sum(-1, keepdim=True))


def covariances(probabilities: Tensor) -> Tensor:
    """diag(p_i) - p_i p_iᵀ for each row, (m, K, K)."""
    return _laplacian(probabilities[:, :, None] * probabilities[:, None, :])


def weighted_covariance(probabilities: Tensor, weights: Tensor) -> Tensor:
    """Σ_i weights_i (diag(p_i) - p_i p_iᵀ), (K, K).

    >>> weighted_covariance(torch.tensor([[0.5, 0.5]]), torch.tensor([4.0]))
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    products = (probabilities * weights[:, None]).T @ probabilities
    return _laplacian((products + products.T) / 2)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Class indices by inverse cumulative distribution from one uniform number a row.

    >>> draw(torch.tensor([[0.2, 0.0, 0.8]]).expand(3, 3), torch.tensor([0.1, 0.3, 0.9]))
    tensor([0, 2, 2])
    """
    cumulative = probabilities.cumsum(-1)
    # The sum may miss one by rounding: scaled by it, no number points past the last class.
    positions = uniforms[:, None].to(cumulative.dtype) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, positions).squeeze(-1)


def _laplacian(weights: Tensor) -> Tensor:
    """The matrix with off-diagonal entries -weights and rows that sum to zero."""
    matrix = -weights
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal.zero_()
    diagonal.copy_(-matrix.sum(-1))
    return matrix
