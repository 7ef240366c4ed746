"""Criteria that are a mean over outputs of a scalar loss: ξ = (1/K) Σ_k ρ(h_k, y_k).

Their gradient is ρ'/K and their Hessian is diagonal, ρ''/K, so a criterion is its three functions ρ, ρ', ρ''.

- mse: ρ = r², with the residual r = h - y
- tukey: ρ = c²/6 (1 - (1 - (r/c)²)³) for |r| ≤ c, c²/6 beyond
- bce, as torch's BCEWithLogitsLoss, with p = sigmoid(h), weights w of the outputs and positive weights ω:

    ρ = -w (ω y log p + (1-y) log(1-p)),    ρ' = w ((1-y) p - ω y (1-p)),    ρ'' = w p (1-p) (ω y + 1 - y)

  torch divides by the number of entries whatever the weights, so they belong to ξ and every c_i is one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from curvlab.criteria.base import Criterion, as_weights, check_logits, check_positive, check_real_targets
from curvlab.exceptions import ProblemError
from curvlab.measure.device import readable

__all__ = ["BCE", "MSE", "SeparableCriterion", "Tukey"]


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
        u2 = self._clip_residuals(logits, targets).square()
        # 1 - (1 - u²)³ multiplied out: the difference would cancel for small residuals.
        return self.c**2 / 6 * u2 * (3 - 3 * u2 + u2.square())

    def output_slopes(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ' = r (1 - u²)²."""
        u = self._clip_residuals(logits, targets)
        return self.c * u * (1 - u.square()).square()

    def output_curvatures(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ'' = (1 - u²)(1 - 5u²)."""
        u2 = self._clip_residuals(logits, targets).square()
        return (1 - u2) * (1 - 5 * u2)

    def _clip_residuals(self, logits: Tensor, targets: Tensor) -> Tensor:
        """r/c in [-1, 1]: at ±1 value, slope and curvature are those of the constant part."""
        return ((logits - targets) / self.c).clamp(-1, 1)


@dataclass(frozen=True)
class BCE(SeparableCriterion):
    """Binary cross-entropy with logits; targets (m, K) in [0, 1].

    `weight` and `pos_weight` hold one number, or one for each output; tensors are kept as tuples.
    The mean over outputs makes ξ the Bernoulli likelihood's divided by K, so for K > 1 the Fisher of
    drawn labels is 1/K of the Gauss-Newton matrix.

    >>> BCE().gradients(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([[-0.5000]])
    """

    name: ClassVar[str] = "bce"
    convex: ClassVar[bool] = True

    weight: tuple[float, ...] | None = None
    pos_weight: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", as_weights(self.weight, "weight"))
        object.__setattr__(self, "pos_weight", as_weights(self.pos_weight, "pos_weight"))

    @property
    def likelihood(self) -> bool:
        """Weights take the gradients of drawn labels away from the Bernoulli likelihood's."""
        return self.weight is None and self.pos_weight is None

    def check(self, logits: Tensor, targets: Tensor) -> None:
        """Raise `ProblemError` unless targets are (m, K) in [0, 1] and weights fit."""
        super().check(logits, targets)
        for argument in ("weight", "pos_weight"):
            given = getattr(self, argument)
            if given is not None and len(given) not in (1, logits.shape[1]):
                raise ProblemError(
                    f"`{argument}` has {len(given)} entries; expected 1, or {logits.shape[1]}: one an output"
                )
        if readable(targets) and bool(((targets < 0) | (targets > 1)).any()):
            raise ProblemError(
                f"`targets` range from {targets.min():.4g} to {targets.max():.4g}; "
                "expected probabilities from 0 to 1"
            )

    def output_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ = -w (ω y log p + (1-y) log(1-p))."""
        w, omega = self._weights(logits)
        # logsigmoid, not softplus: torch's softplus drops the tail beyond its threshold.
        negative, positive = functional.logsigmoid(-logits), functional.logsigmoid(logits)
        return -w * ((1 - targets) * negative + omega * targets * positive)

    def output_slopes(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ' = w ((1-y) p - ω y (1-p))."""
        w, omega = self._weights(logits)
        return w * ((1 - targets) * logits.sigmoid() - omega * targets * (-logits).sigmoid())

    def output_curvatures(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ρ'' = w p (1-p) (ω y + 1 - y)."""
        w, omega = self._weights(logits)
        return w * logits.sigmoid() * (-logits).sigmoid() * (omega * targets + 1 - targets)

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Bernoulli labels, one for each output: u < p."""
        return (uniforms < logits.sigmoid()).to(logits.dtype)

    def label_factor(self, logits: Tensor) -> Tensor:
        """A square root of E[∇ξ ∇ξᵀ] = diag(d²) + μ μᵀ, exactly, with K rows.

        Labels are independent, so the gradient's covariance is diagonal, d = (w/K) √(p(1-p)) (p + ω(1-p));
        its mean is μ = (w/K) (1-ω) p (1-p), zero without positive weights. With ν = μ/d the root is
        (I + κ ν νᵀ) diag(d), κ = 1 / (1 + √(1 + ‖ν‖²)).
        """
        w, omega = self._weights(logits)
        scale = w / logits.shape[1]
        p, q = logits.sigmoid(), (-logits).sigmoid()
        spread, slope = (p * q).sqrt(), p + omega * q
        # slope is zero only where spread is: ω = 0 and p = 0 after underflow.
        nu = (1 - omega) * spread / slope.clamp_min(torch.finfo(p.dtype).tiny)
        kappa = 1 / (1 + (1 + nu.square().sum(-1, keepdim=True)).sqrt())
        rank_one = (kappa * nu).T[:, :, None] * (scale * (1 - omega) * p * q)
        return rank_one + torch.diag_embed(scale * spread * slope).movedim(1, 0)

    def predictions(self, logits: Tensor) -> Tensor:
        """0 or 1 for each output, (m, K)."""
        return (logits > 0).long()

    def _weights(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The weights w and ω, each of one entry or K."""
        w, omega = (
            torch.tensor((1.0,) if given is None else given, dtype=logits.dtype, device=logits.device)
            for given in (self.weight, self.pos_weight)
        )
        return w, omega
