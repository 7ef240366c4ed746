"""π: how the factored inverse splits the damping between its two factors.

    π_t = sqrt((tr A / n_{t-1}) / (tr B / n_t))

The paper leaves it undefined; this is KFAC's, with A the input factor in use, 1 where a trace is 0,
and clamped to [1e-6, 1e6] (it grows without bound as tr B → 0). Whether the clamp binds is part of
the result, as a tensor: the solve itself reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LIMITS", "Split", "split"]

LIMITS = (1e-6, 1e6)


@dataclass(frozen=True, eq=False)
class Split:
    """π, and whether it would lie outside of `LIMITS` (both scalar tensors)."""

    pi: Tensor
    clamped: Tensor

    @classmethod
    def fixed(cls, pi: float, like: Tensor) -> Split:
        """A π that was given, not computed."""
        one = torch.ones((), dtype=like.dtype, device=like.device)
        return cls(pi * one, torch.zeros_like(one, dtype=torch.bool))


def split(trace_a: Tensor, n_a: int, trace_b: Tensor, n_b: int) -> Split:
    """π from the average traces of the factors.

    >>> split(torch.tensor(8.0), 2, torch.tensor(3.0), 3).pi.item()
    2.0
    """
    usable = (trace_a > 0) & (trace_b > 0)
    # Two roots, because the ratio of the traces overflows where that of their roots does not.
    ratio = (trace_a / n_a).clamp(min=0).sqrt() / (trace_b / n_b).clamp(min=0).sqrt()
    raw = torch.where(usable, ratio, torch.ones_like(ratio))
    pi = raw.clamp(*LIMITS)
    return Split(pi, pi != raw)
