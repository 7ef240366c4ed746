"""Random numbers keyed by the row: the same whatever the batching, the order of calls or the machine.

Each number is a hash (splitmix64) of (seed, draw, row, output), so no generator state exists to
disturb, and a row gets the same draws in one batch, in a stream or on another worker.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["uniforms"]

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own on int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _hash(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniforms(seed: int, draw: int, first_row: int, like: Tensor) -> Tensor:
    """Numbers in (0, 1), one for each entry of `like` (rows × outputs); its first row is row `first_row`.

    >>> a = uniforms(0, 0, 0, torch.empty(4, 3))
    >>> b = uniforms(0, 0, 2, torch.empty(2, 3))
    >>> bool((a[2:] == b).all())
    True
    """
    rows, outputs = like.shape
    device = like.device
    row = torch.arange(first_row, first_row + rows, dtype=torch.int64, device=device)[:, None]
    output = torch.arange(outputs, dtype=torch.int64, device=device)
    key = _hash(torch.full((1, 1), seed, dtype=torch.int64, device=device))
    key = _hash(key ^ draw)
    key = _hash(_hash(key ^ row) ^ output)
    return ((_shift_right(key, 11)).to(torch.float64 if device.type != "mps" else torch.float32) + 0.5).mul_(2.0**-53).to(like.dtype).clamp_(min=torch.finfo(like.dtype).tiny, max=1 - torch.finfo(like.dtype).eps)
