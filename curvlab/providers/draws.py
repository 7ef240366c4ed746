"""Random numbers keyed by the row: the same whatever the batching, the order of calls or the machine.

Each number is a hash of (seed, draw, row, output), so no generator state exists to disturb, and a
row gets the same draws in one batch, in a stream or on another worker.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlab.staleness import logical_shift, mix

__all__ = ["uniforms"]

BITS = 23  # k + ½ for k < 2²³ is exact in float32: every dtype and device draws the same numbers


def uniforms(seed: int, draw: int, first_row: int, like: Tensor) -> Tensor:
    """Numbers in (0, 1), one for each entry of `like` (rows × outputs); its first row is row `first_row`.

    >>> a = uniforms(0, 0, 0, torch.empty(4, 3))
    >>> b = uniforms(0, 0, 2, torch.empty(2, 3))
    >>> bool((a[2:] == b).all())
    True
    """
    rows, outputs = like.shape
    row = torch.arange(first_row, first_row + rows, dtype=torch.int64, device=like.device)[:, None]
    output = torch.arange(outputs, dtype=torch.int64, device=like.device)
    key = mix(torch.full((1, 1), seed, dtype=torch.int64, device=like.device))
    key = mix(mix(mix(key ^ draw) ^ row) ^ output)
    return (logical_shift(key, 64 - BITS).to(like.dtype) + 0.5).mul_(2.0**-BITS)
