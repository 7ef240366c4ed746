"""Criteria of the residual r = h - y: squared error and Tukey's biweight, each a mean over the K outputs.

- mse: ρ = r²
- tukey: ρ = c²/6 (1 - (1 - (r/c)²)³) for |r| ≤ c, c²/6 beyond
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.criteria.checks import check_positive
from curvlab.criteria.separable import SeparableCriterion

__all__ = ["MSE", "Tukey"]


@dataclass(frozen=True)
class MSE(SeparableCriterion):
    """Mean over outputs of the squared residual: the negative log-likelihood of N(h, K/2 I).

    >>> MSE().mean_hessian(torch.zeros(2, 2), torch.ones(2, 2), weights=torch.tensor([0.5, 0.5]))
    tensor([[1., 0.],
            [0., 1.]])
    """

    name: ClassVar[str] = "mse"
    convex: ClassVar[bool] = True
    likelihood: ClassVar[bool] = True

    def output_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ = r²."""
        return (logits - targets).square()

    def output_slopes(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ' = 2r."""
        return 2 * (logits - targets)

    def output_curvatures(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ'' = 2."""
        return torch.full_like(logits, 2.0)

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Draws from N(h, K/2 I)."""
        deviation = math.sqrt(logits.shape[1] / 2)
        return logits + deviation * torch.special.ndtri(uniforms.to(logits.dtype))

    def label_factor(self, logits: Tensor) -> Tensor:
        """√(2/K) e_r: ∇ξ = 2(h - y)/K has covariance 4/K² · K/2 I."""
        m, k = logits.shape
        identity = torch.eye(k, dtype=logits.dtype, device=logits.device)
        return (math.sqrt(2 / k) * identity)[:, None, :].expand(k, m, k)


@dataclass(frozen=True)
class Tukey(SeparableCriterion):
    """Tukey's biweight: quadratic near zero, constant for residuals beyond `c`; not convex.

    >>> Tukey(c=1.0).losses(torch.tensor([[0.0], [9.0]]), torch.zeros(2, 1))
    tensor([0.0000, 0.1667])
    """

    name: ClassVar[str] = "tukey"
    convex: ClassVar[bool] = False
    likelihood: ClassVar[bool] = False

    c: float = 4.685

    def __post_init__(self) -> None:
        check_positive(self.name, c=self.c)

    def output_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ, with u = r/c clipped to [-1, 1]."""
        u2 = self._clipped(logits, targets).square()
        # 1 - (1 - u²)³ multiplied out: the difference would cancel for small residuals.
        return self.c**2 / 6 * u2 * (3 - 3 * u2 + u2.square())

    def output_slopes(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ' = r (1 - u²)²."""
        u = self._clipped(logits, targets)
        return self.c * u * (1 - u.square()).square()

    def output_curvatures(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ'' = (1 - u²)(1 - 5u²)."""
        u2 = self._clipped(logits, targets).square()
        return (1 - u2) * (1 - 5 * u2)

    def _clipped(self, logits: Tensor, targets: Tensor) -> Tensor:
        """r/c in [-1, 1]: at ±1 value, slope and curvature are those of the constant part."""
        return ((logits - targets) / self.c).clamp(-1, 1)
