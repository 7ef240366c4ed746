"""π: how the factored inverse splits the damping between its two factors.

    π_t = sqrt((tr A / n_{t-1}) / (tr B / n_t))

The paper leaves it undefined; this is KFAC's, with A the input factor in use, 1 where a trace is 0,
and clamped to [1e-6, 1e6] (it grows without bound as tr B → 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LIMITS", "split"]

LIMITS = (1e-6, 1e6)


def split(trace_a: Tensor, n_a: int, trace_b: Tensor, n_b: int) -> Tensor:
    """π from the average traces of the factors.

    >>> split(torch.tensor(8.0), 2, torch.tensor(3.0), 3).item()
    2.0
    """
    ratio = (trace_a / n_a) / (trace_b / n_b)
    usable = (trace_a > 0) & (trace_b > 0)
    return torch.where(usable, ratio.clamp(min=0).sqrt().clamp(*LIMITS), torch.ones_like(ratio))
