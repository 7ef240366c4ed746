"""Binary cross-entropy of each output, averaged over the K outputs, as torch's BCEWithLogitsLoss.

With p = sigmoid(h), per output weights w and positive weights ω,

    ρ = -w (ω y log p + (1-y) log(1-p)),    ρ' = w ((1-y) p - ω y (1-p)),    ρ'' = w p (1-p) (ω y + 1 - y).

torch divides by the number of entries whatever the weights, so they belong to ξ and every c_i is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from curvlab.criteria.checks import as_weights
from curvlab.criteria.separable import SeparableCriterion
from curvlab.exceptions import ProblemError
from curvlab.measure.device import readable

__all__ = ["BCE"]


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
