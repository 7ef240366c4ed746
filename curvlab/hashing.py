"""A hash of 64-bit integers, element by element (splitmix64): pseudo-random numbers without a state."""

from __future__ import annotations

from torch import Tensor

__all__ = ["logical_shift", "mix"]

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_FACTOR_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_FACTOR_2 = -7723592293110705685  # 0x94D049BB133111EB


def logical_shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros: torch's own shift of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """A hash of each entry of an int64 tensor.

    >>> import torch
    >>> mix(torch.tensor([0, 1])).tolist()
    [-2152535657050944081, -7995527694508729151]
    """
    x = x + _GOLDEN
    x = (x ^ logical_shift(x, 30)) * _FACTOR_1
    x = (x ^ logical_shift(x, 27)) * _FACTOR_2
    return x ^ logical_shift(x, 31)
