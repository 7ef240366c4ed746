"""Levenberg-Marquardt: the damping follows how well the quadratic model predicted the last step.

    ρ = (ξ(θ) - ξ(θ + δ)) / -(gᵀδ + ½ δᵀCδ)
    α ← α·lower where ρ > ¾,   α ← α·raise_by where ρ < ¼     (Martens, 2010)

ξ is the loss of the step's own batch, C the undamped curvature, δ the step as it was taken (learning
rate, clipping and momentum included).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from curvlab.exceptions import SpecError

__all__ = ["LevenbergMarquardt"]


@dataclass(frozen=True)
class LevenbergMarquardt:
    """The rule's constants: how often it acts, by how much, and the bounds of α.

    >>> rule = LevenbergMarquardt()
    >>> rule.adapted(0.09, actual=0.9, predicted=1.0), rule.adapted(0.09, actual=0.1, predicted=1.0)
    (0.06, 0.135)
    """

    every: int = 5
    lower: float = 2 / 3
    raise_by: float = 3 / 2
    min_alpha: float = 1e-6
    max_alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise SpecError(f"every={self.every}: the damping is adapted after this many steps, at least 1")
        if not 0 < self.lower < 1 < self.raise_by < float("inf"):
            raise SpecError(
                f"lower={self.lower}, raise_by={self.raise_by}: expected a factor in (0, 1) and one above 1"
            )
        if not 0 < self.min_alpha <= self.max_alpha <= 1:
            raise SpecError(
                f"min_alpha={self.min_alpha}, max_alpha={self.max_alpha}: expected 0 < min ≤ max ≤ 1"
            )

    def adapted(self, alpha: float, actual: float, predicted: float) -> float:
        """The next α, from the actual and the predicted reduction of the loss.

        A loss that is no longer finite, or a model that predicts no reduction, raises it.
        """
        trusted = isfinite(actual) and predicted > 0
        ratio = actual / predicted if trusted else float("-inf")
        factor = self.lower if ratio > 0.75 else self.raise_by if ratio < 0.25 else 1.0
        return min(max(alpha * factor, self.min_alpha), self.max_alpha)
