"""A fingerprint of a pass over batches: the same however the examples are ordered or batched.

Each example is hashed by itself, with its target, and the hashes are summed:

    digest = Σ_i mix(Σ_j bits_ij + Σ_j∈S key_j bits_ij, target_i)    in 64-bit integers, wrapping

The plain sum sees a change of any entry; the keyed one, over a few hundred entries S, sees entries
that changed places, as a random flip or crop does to an image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab import device
from curvlab.hashing import mix

__all__ = ["Fingerprint"]

KEYED_ENTRIES = 512
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """How many examples a pass had, and the sum of their hashes.

    >>> x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 1])
    >>> Fingerprint.of(x, y) == Fingerprint.of(x[:1], y[:1]) + Fingerprint.of(x[1:], y[1:])
    True
    >>> Fingerprint.of(x, y) == Fingerprint.of(x, y.flip(0))
    False
    """

    examples: int = 0
    digest: int = 0

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> Fingerprint:
        """The fingerprint of one batch; without values (fake tensors) only the count."""
        if not device.readable(inputs) or not device.readable(targets):
            return cls(len(inputs))
        hashes = mix(_row_hashes(inputs) + mix(_row_hashes(targets)))
        return cls(len(inputs), int(hashes.sum()) % (1 << 64))

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.examples + other.examples, (self.digest + other.digest) % (1 << 64))


def _row_hashes(tensor: Tensor) -> Tensor:
    bits = _bits(tensor.detach()).reshape(len(tensor), -1)
    few = bits[:, :: bits.shape[1] // KEYED_ENTRIES + 1].long()
    keys = mix(torch.arange(few.shape[1], device=bits.device))
    return mix(bits.sum(1, dtype=torch.int64)) + mix((few * keys).sum(1))


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])
