"""Sizes of tensors, to the last digits of their dtype and where squares would leave its range.

torch's own norm adds all squares in a few running sums: of 3 million float32 entries it is off by 6e-5. Sums
of rows, then of the rows' norms, are good to rounding. max|x| takes no square, and ‖x‖ = max|x| ‖x / max|x|‖
neither under- nor overflows on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["binary_scale", "frobenius_norm", "max_abs", "nonzero_or_one", "squares_in_range"]


def frobenius_norm(matrix: Tensor) -> Tensor:
    """‖X‖_F as a scalar tensor, row by row.

    >>> frobenius_norm(torch.tensor([[3.0, 0.0], [0.0, 4.0]])).item()
    5.0
    """
    return torch.linalg.vector_norm(torch.linalg.vector_norm(matrix, dim=1))


def max_abs(x: Tensor) -> Tensor:
    """max|x| as a scalar tensor; NaN where there is one.

    >>> max_abs(torch.tensor([1.0, -3.0])).item()
    3.0
    """
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)


def nonzero_or_one(x: Tensor) -> Tensor:
    """x, one where it is zero: something to divide by.

    >>> nonzero_or_one(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    return torch.where(x == 0, torch.ones_like(x), x)


def binary_scale(x: Tensor) -> Tensor:
    """A power of two about max|x| (1 where x is zero): to divide by it and multiply again changes no digit.

    >>> binary_scale(torch.tensor([1.0, -3.0])).item()
    4.0
    """
    peak = nonzero_or_one(max_abs(x))
    return peak / torch.frexp(peak).mantissa


def squares_in_range(norm: Tensor) -> bool:
    """Whether a norm is so far from the ends of its dtype's range that its square lost nothing (reads it).

    >>> [squares_in_range(torch.tensor(norm)) for norm in (1e-8, 1e-30, torch.inf)]
    [True, False, False]
    """
    limits = torch.finfo(norm.dtype)
    return (limits.tiny / limits.eps) ** 0.5 < float(norm) < float("inf")
