"""Damping: how the identity is mixed into a curvature before it is inverted.

    Mixed(α)      (1-α) C + α I     the paper's; what `alpha=` means
    Additive(τ)   C + τ I

Conjugate gradients and the exact reference solve this system. The factored inverse splits the
identity's share over its two factors instead, (B + √α/π I)⁻¹ ⊗ (A + π√α I)⁻¹, so it reads `shift` only.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Additive", "Damping", "Mixed", "damping_from"]


@dataclass(frozen=True)
class Mixed:
    """(1-α) C + α I, 0 < α ≤ 1.

    >>> Mixed(0.05).scale, Mixed(0.05).shift
    (0.95, 0.05)
    """

    alpha: float

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(
                f"alpha={self.alpha}: the identity's share must be in (0, 1]; the paper uses 0.01 to 0.1"
            )

    @property
    def scale(self) -> float:
        """What C is multiplied by."""
        return 1 - self.alpha

    @property
    def shift(self) -> float:
        """What I is multiplied by."""
        return self.alpha

    def __str__(self) -> str:
        return f"mixed({self.alpha:g})"


@dataclass(frozen=True)
class Additive:
    """C + τ I, τ > 0.

    >>> Additive(0.1).scale, Additive(0.1).shift
    (1.0, 0.1)
    """

    tau: float

    def __post_init__(self) -> None:
        if not 0 < self.tau < float("inf"):
            raise ValueError(
                f"tau={self.tau}: the added multiple of the identity must be positive and finite"
            )

    @property
    def scale(self) -> float:
        """What C is multiplied by."""
        return 1.0

    @property
    def shift(self) -> float:
        """What I is multiplied by."""
        return self.tau

    def __str__(self) -> str:
        return f"additive({self.tau:g})"


Damping = Mixed | Additive


def damping_from(alpha: float | None, damping: Damping | None) -> Damping:
    """The damping given as `alpha=` or as a value; exactly one of them."""
    if (alpha is None) == (damping is None):
        raise ValueError(
            "give the damping once: alpha=0.05 (the paper's (1-α)C + αI) or damping=Additive(0.1)"
        )
    if alpha is not None:
        return Mixed(float(alpha))
    if not isinstance(damping, Mixed | Additive):
        raise ValueError(f"damping={damping!r}: expected Mixed(alpha) or Additive(tau), or alpha={damping}")
    return damping
