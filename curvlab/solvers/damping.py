"""Damping: how the identity is mixed into a curvature before it is inverted.

    Mixed(α)      (1-α) C + α I     the paper's; what `alpha=` means
    Additive(τ)   C + τ I

Conjugate gradients and the exact reference solve this system. The factored inverse splits the
identity's share over its two factors instead, (B + √α/π I)⁻¹ ⊗ (A + π√α I)⁻¹, so it reads `shift` only:

    π_t = sqrt((tr A / n_{t-1}) / (tr B / n_t))

Where the curvature is C + λI with an l2 term (`l2`, which `solve` sets), A, B and π are of the data part C:

    s (C + λI) + τI = s C + (τ + sλ) I      what `shift` gives conjugate gradients and the exact reference
    τ + λ                                   `factored_shift`, in the place of α in the factored inverse

The paper leaves π undefined; this is KFAC's, with A the input factor in use, and clamped to [1e-6, 1e6]:
tr B = 0 gives 1e6 (the limit is -G/τ), tr A = 0 gives 1e-6, both 0 give 1. Whether the clamp binds is part of
the result, as a tensor: the solve itself reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvlab.exceptions import SpecError
from curvlab.specs import check_number

__all__ = ["PI_LIMITS", "Additive", "Damping", "DampingSplit", "Mixed", "damping_from", "split_damping"]


@dataclass(frozen=True)
class Mixed:
    """(1-α) C + α I, 0 < α ≤ 1.

    >>> Mixed(0.05).scale, Mixed(0.05).shift
    (0.95, 0.05)
    """

    alpha: float
    l2: float = field(default=0.0, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        expected = "the identity's share, a number in (0, 1]; the paper uses 0.01 to 0.1"
        check_number("alpha", self.alpha, expected, lambda x: 0 < x <= 1)

    @property
    def scale(self) -> float:
        """What C is multiplied by."""
        return 1 - self.alpha

    @property
    def shift(self) -> float:
        """What I is multiplied by, beside s times the data part of C."""
        return self.alpha + self.scale * self.l2

    @property
    def factored_shift(self) -> float:
        """What the factored inverse splits over its factors."""
        return self.alpha + self.l2

    def __str__(self) -> str:
        return f"mixed({self.alpha:g})"


@dataclass(frozen=True)
class Additive:
    """C + τ I, τ > 0.

    >>> Additive(0.1).scale, Additive(0.1).shift
    (1.0, 0.1)
    """

    tau: float
    l2: float = field(default=0.0, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        expected = "the added multiple of the identity, a positive and finite number"
        check_number("tau", self.tau, expected, lambda x: 0 < x < float("inf"))

    @property
    def scale(self) -> float:
        """What C is multiplied by."""
        return 1.0

    @property
    def shift(self) -> float:
        """What I is multiplied by, beside the data part of C."""
        return self.tau + self.l2

    @property
    def factored_shift(self) -> float:
        """What the factored inverse splits over its factors."""
        return self.tau + self.l2

    def __str__(self) -> str:
        return f"additive({self.tau:g})"


Damping = Mixed | Additive


def damping_from(alpha: float | None, damping: Damping | None) -> Damping:
    """The damping given as `alpha=` or as a value; exactly one of them."""
    if (alpha is None) == (damping is None):
        raise SpecError(
            "give the damping once: alpha=0.05 (the paper's (1-α)C + αI) or damping=Additive(0.1)"
        )
    if alpha is not None:
        return Mixed(check_number("alpha", alpha, "a number in (0, 1]", lambda _: True))
    if not isinstance(damping, Mixed | Additive):
        raise SpecError(f"damping={damping!r}: expected Mixed(alpha) or Additive(tau), or alpha={damping}")
    return damping


PI_LIMITS = (1e-6, 1e6)


@dataclass(frozen=True, eq=False)
class DampingSplit:
    """π, and whether it would lie outside of `PI_LIMITS` (both scalar tensors; of a stack one for each)."""

    pi: Tensor
    clamped: Tensor

    @classmethod
    def from_value(cls, pi: float, like: Tensor, count: int = 1) -> DampingSplit:
        """A π that was given, not computed; the same for all systems of a stack of `count`."""
        one = torch.ones(() if count == 1 else (count,), dtype=like.dtype, device=like.device)
        return cls(pi * one, torch.zeros_like(one, dtype=torch.bool))


def split_damping(trace_a: Tensor, n_a: int, trace_b: Tensor, n_b: int) -> DampingSplit:
    """π from the average traces of the factors.

    >>> split_damping(torch.tensor(8.0), 2, torch.tensor(3.0), 3).pi.item()
    2.0
    """
    # Two roots, because the ratio of the traces overflows where that of their roots does not.
    ratio = (trace_a / n_a).clamp(min=0).sqrt() / (trace_b / n_b).clamp(min=0).sqrt()
    raw = ratio.nan_to_num(nan=1.0, posinf=float("inf"))
    pi = raw.clamp(*PI_LIMITS)
    return DampingSplit(pi, pi != raw)
