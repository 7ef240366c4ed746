"""The paper's bounded, non-convex criterion ξ = 1 / (1 + exp(δ (yᵀ softmax(h) - ε))).

With u = p_y, φ(u) = sigmoid(-δ (u - ε)) and a = e_y - p,

    ∇u = u a,    ∇²u = u (a aᵀ - (diag(p) - p pᵀ)),
    ∇ξ = φ' u a,    ∇²ξ = (φ'' u² + φ' u) a aᵀ - φ' u (diag(p) - p pᵀ),

where φ' = -δ φ (1-φ) and φ'' = δ² φ (1-φ) (1-2φ).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.criteria.base import Criterion
from curvlab.criteria.checks import check_labels, check_logits, check_positive
from curvlab.criteria.cross_entropy import covariance_products, draw, one_hot, weighted_covariance
from curvlab.exceptions import SpecError

__all__ = ["Robust"]


@dataclass(frozen=True)
class Robust(Criterion):
    """A loss between 0 and 1 that stops caring about examples it cannot win; targets are class indices.

    >>> Robust(delta=5.0, epsilon=0.5).losses(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.5000])
    """

    name: ClassVar[str] = "robust"
    convex: ClassVar[bool] = False
    likelihood: ClassVar[bool] = False

    delta: float = 5.0
    epsilon: float = 0.2

    def __post_init__(self) -> None:
        check_positive(self.name, delta=self.delta)
        if not math.isfinite(self.epsilon):
            raise SpecError(f"epsilon={self.epsilon} of `robust`: expected a finite number")

    def check(self, logits: Tensor, targets: Tensor) -> None:
        """Raise `ProblemError` unless targets are class indices (m,)."""
        check_logits(logits, targets)
        check_labels(logits, targets)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ξ_i = φ(p_{y_i})."""
        label_probability = logits.softmax(-1).gather(1, targets.long()[:, None]).squeeze(1)
        return self._phi(label_probability)[0]

    def gradients(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give φ' u a."""
        _, a, _, covariance_coefficient = self._terms(logits, targets)
        return -covariance_coefficient[:, None] * a

    def hessian_products(self, logits: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """Give ((φ'' u² + φ' u) a aᵀ - φ' u (diag(p) - p pᵀ)) v."""
        p, a, outer_coefficient, covariance_coefficient = self._terms(logits, targets)
        outer = outer_coefficient[:, None] * a * (a * vectors).sum(-1, keepdim=True)
        return outer + covariance_coefficient[:, None] * covariance_products(p, vectors)

    def mean_hessian(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Give the weighted sum of Hessians from two (K, m) by (m, K) products."""
        p, a, outer_coefficient, covariance_coefficient = self._terms(logits, targets)
        outer = (a * (weights * outer_coefficient)[:, None]).T @ a
        return (outer + outer.T) / 2 + weighted_covariance(p, weights * covariance_coefficient)

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Class indices from softmax(logits); the criterion is not their likelihood."""
        return draw(logits.softmax(-1), uniforms[:, 0])

    def label_factor(self, logits: Tensor) -> Tensor:
        """v_c = √p_c ∇ξ(y = c) = √p_c φ'(p_c) p_c (e_c - p)."""
        p = logits.softmax(-1)
        _, slope, _ = self._phi(p)
        identity = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
        return (p.sqrt() * slope * p).T[:, :, None] * (identity[:, None, :] - p)

    def predictions(self, logits: Tensor) -> Tensor:
        """Give the most probable class."""
        return logits.argmax(-1)

    def _phi(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """φ, φ' and φ'' at u."""
        phi = torch.sigmoid(-self.delta * (u - self.epsilon))
        spread = phi * torch.sigmoid(self.delta * (u - self.epsilon))
        return phi, -self.delta * spread, self.delta**2 * spread * (1 - 2 * phi)

    def _terms(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """p, a and the coefficients of a aᵀ and of the covariance in ∇²ξ."""
        p = logits.softmax(-1)
        labels = one_hot(targets, logits)
        u = (labels * p).sum(-1)
        _, slope, bend = self._phi(u)
        return p, labels - p, u * (bend * u + slope), -slope * u
