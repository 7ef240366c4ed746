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
    from curvlab.model.recording import GraphRecording

__all__ = ["draw_positions", "draw_signs", "uniforms"]

BITS = 23  # k + ½ for k < 2²³ is exact in float32: every dtype and device draws the same numbers
POSITIONS, SIGNS = 1 << 40, 1 << 41  # streams apart from those of labels


def hashes(seed: int, stream: int, keys: Tensor, count: int) -> Tensor:
    """A hash of each (key, index), (keys, count), in int64."""
    index = torch.arange(count, dtype=torch.int64, device=keys.device)
    return mix(mix(_stream_key(seed, stream, keys) ^ keys[:, None]) ^ index)


def _stream_key(seed: int, stream: int | Tensor, keys: Tensor) -> Tensor:
    """A hash of the seed and of a stream, or of several."""
    return mix(mix(torch.full((1, 1), seed, dtype=torch.int64, device=keys.device)) ^ stream)


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


def draw_positions(recording: GraphRecording, seed: int, place: int, positions: int, count: int) -> Tensor:
    """`count` of so many positions of each example, without replacement: (examples, count).

    `place` is the layer's, so that layers draw apart from each other. Both sides of a layer ask for the same:
    what was drawn of a batch is kept, and what is hashed of its examples is hashed for all layers at once.
    """
    kept, asked = recording.draws, (seed, place, positions, count)
    if asked not in kept:
        if seed not in kept:
            keys = recording.example_keys
            streams = POSITIONS + torch.arange(len(recording.layout), dtype=torch.int64, device=keys.device)
            kept[seed] = mix(_stream_key(seed, streams[:, None, None], keys) ^ keys[:, None])
        index = torch.arange(positions, dtype=torch.int64, device=kept[seed].device)
        kept[asked] = mix(kept[seed][place] ^ index).topk(count, dim=1).indices
    return kept[asked]
