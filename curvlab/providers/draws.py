"""Random numbers keyed by what an example is, not by where it stands: labels, signs and positions.

Each number is a hash of (seed, stream, the example's content, index), the same whatever the batching, the
order of the examples, the number of ranks or the machine; no generator state exists to disturb. Two equal
examples share their draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.staleness import logical_shift, mix

if TYPE_CHECKING:
    from curvlab.model.recording import Recording

__all__ = ["draw_positions", "draw_signs", "uniforms"]

BITS = 23  # k + ½ for k < 2²³ is exact in float32: every dtype and device draws the same numbers
POSITIONS, SIGNS = 1 << 40, 1 << 41  # streams apart from those of labels


def hashes(seed: int, stream: int, keys: Tensor, count: int) -> Tensor:
    """A hash of each (key, index), (keys, count), in int64."""
    index = torch.arange(count, dtype=torch.int64, device=keys.device)
    key = mix(torch.full((1, 1), seed, dtype=torch.int64, device=keys.device))
    return mix(mix(mix(key ^ stream) ^ keys[:, None]) ^ index)


def uniforms(seed: int, draw: int, keys: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers in (0, 1), `count` for each example.

    >>> keys = torch.tensor([5, 7, 9])
    >>> a = uniforms(0, 0, keys, 4, torch.float32)
    >>> bool((a.flip(0) == uniforms(0, 0, keys.flip(0), 4, torch.float32)).all())
    True
    """
    bits = logical_shift(hashes(seed, draw, keys, count), 64 - BITS)
    return (bits.to(dtype) + 0.5).mul_(2.0**-BITS)


def draw_signs(seed: int, draw: int, keys: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Independent signs ±1, `count` for each example: every bit of a hash is one.

    >>> signs = draw_signs(0, 0, torch.tensor([5, 7]), 3, torch.float64)
    >>> signs.shape, bool((signs.abs() == 1).all())
    (torch.Size([2, 3]), True)
    """
    found = hashes(seed, SIGNS + draw, keys, -(-count // 64))
    values = torch.arange(256, device=keys.device)[:, None] >> torch.arange(8, device=keys.device)
    table = ((values & 1) * 2 - 1).to(dtype)
    # Eight signs are looked up by each byte of a hash (little-endian), instead of one shift for every sign.
    octets = found.view(torch.uint8).int().flatten()
    return table.index_select(0, octets).reshape(len(keys), -1)[:, :count]


def draw_positions(recording: Recording, seed: int, place: int, positions: int, count: int) -> Tensor:
    """`count` of so many positions of each example, without replacement: (examples, count).

    `place` is the layer's, so that layers draw apart from each other.
    """
    order = hashes(seed, POSITIONS + place, recording.example_keys, positions)
    return order.topk(count, dim=1).indices
