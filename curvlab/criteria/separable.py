"""Criteria that are a mean over outputs of a scalar loss: ξ = (1/K) Σ_k ρ(h_k, y_k).

Their gradient is ρ'/K and their Hessian is diagonal, ρ''/K, so a criterion is its three functions ρ, ρ', ρ''.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from curvlab.criteria.base import Criterion
from curvlab.criteria.checks import check_logits, check_real_targets

__all__ = ["SeparableCriterion"]


class SeparableCriterion(Criterion):
    """Everything of a criterion from ρ, ρ' and ρ'' of each output, all (m, K)."""

    @abstractmethod
    def output_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """ρ(h_ik, y_ik)."""

    @abstractmethod
    def output_slopes(self, logits: Tensor, targets: Tensor) -> Tensor:
        """ρ'(h_ik, y_ik)."""

    @abstractmethod
    def output_curvatures(self, logits: Tensor, targets: Tensor) -> Tensor:
        """ρ''(h_ik, y_ik)."""

    def check(self, logits: Tensor, targets: Tensor) -> None:
        """Raise `ProblemError` unless targets are finite numbers (m, K)."""
        check_logits(logits, targets)
        check_real_targets(logits, targets)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ξ_i = Σ_k ρ_ik / K."""
        return self.output_losses(logits, targets.to(logits.dtype)).mean(-1)

    def gradients(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ'_i / K."""
        return self.output_slopes(logits, targets.to(logits.dtype)) / logits.shape[1]

    def hessians(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give diag(ρ''_i) / K."""
        return torch.diag_embed(self._diagonals(logits, targets))

    def mean_hessian(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Give Σ_i weights_i diag(ρ''_i) / K."""
        return torch.diag(weights @ self._diagonals(logits, targets))

    def hessian_products(self, logits: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """Give ρ''_i ⊙ v_i / K."""
        return self._diagonals(logits, targets) * vectors

    def _diagonals(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.output_curvatures(logits, targets.to(logits.dtype)) / logits.shape[1]
