"""Sizes of tensors whose squares would leave the range of their dtype.

max|x| takes no square, and ‖x‖ = max|x| ‖x / max|x|‖ neither under- nor overflows on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["binary_scale", "largest", "positive", "trustworthy"]


def largest(x: Tensor) -> Tensor:
    """max|x| as a scalar tensor; NaN where there is one.

    >>> largest(torch.tensor([1.0, -3.0])).item()
    3.0
    """
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)


def positive(x: Tensor) -> Tensor:
    """x, one where it is zero: something to divide by.

    >>> positive(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    return torch.where(x == 0, torch.ones_like(x), x)


def binary_scale(x: Tensor) -> Tensor:
    """A power of two about max|x| (1 where x is zero): to divide by it and multiply again changes no digit.

    >>> binary_scale(torch.tensor([1.0, -3.0])).item()
    4.0
    """
    peak = positive(largest(x))
    return peak / torch.frexp(peak).mantissa


def trustworthy(norm: Tensor) -> bool:
    """Whether a norm is so far from the ends of its dtype's range that its square lost nothing (reads it).

    >>> [trustworthy(torch.tensor(norm)) for norm in (1e-8, 1e-30, torch.inf)]
    [True, False, False]
    """
    limits = torch.finfo(norm.dtype)
    return (limits.tiny / limits.eps) ** 0.5 < float(norm) < float("inf")
