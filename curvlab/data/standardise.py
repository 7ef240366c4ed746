"""Standardisation by the training set: x ↦ (x - mean) / deviation.

The deviation is the population's (no correction); where it is 0 (a pixel that is always blank) the
feature is centred and divided by 1. Moments are accumulated in float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.measure.device import send

__all__ = ["Standardisation"]


@dataclass(frozen=True, eq=False)
class Standardisation:
    """Mean and deviation, broadcast against the inputs they are applied to."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def per_feature(cls, inputs: Tensor) -> Standardisation:
        """Of each column of `inputs` (examples, features).

        >>> x = torch.tensor([[0.0, 5.0], [2.0, 5.0]])
        >>> Standardisation.per_feature(x).apply(x)
        tensor([[-1.,  0.],
                [ 1.,  0.]])
        """
        wide = inputs.double()
        return cls._of(wide.mean(0), wide.var(0, correction=0))

    @classmethod
    def per_channel(cls, chunks: Iterable[Tensor]) -> Standardisation:
        """Of each channel of 8-bit images, over chunks of shape (images, channels, height, width).

        The moments are those of a histogram of 256 counts, so the order of the chunks does not matter.

        >>> images = torch.tensor([[0, 2], [10, 10]], dtype=torch.uint8).reshape(1, 2, 1, 2)
        >>> Standardisation.per_channel([images]).mean.flatten()
        tensor([ 1., 10.], dtype=torch.float64)
        """
        counts = torch.zeros((), dtype=torch.int64)
        for chunk in chunks:
            channels = chunk.transpose(0, 1).flatten(1)
            counts = counts + torch.stack([channel.bincount(minlength=256) for channel in channels])
        shares = counts.double() / counts.sum(1, keepdim=True)
        levels = torch.arange(256, dtype=torch.float64)
        mean = shares @ levels
        variance = (shares * (levels - mean[:, None]).square()).sum(1)
        return cls._of(mean.reshape(-1, 1, 1), variance.reshape(-1, 1, 1))

    @classmethod
    def _of(cls, mean: Tensor, variance: Tensor) -> Standardisation:
        deviation = variance.sqrt()
        return cls(mean, torch.where(deviation > 0, deviation, torch.ones_like(deviation)))

    def apply(self, inputs: Tensor) -> Tensor:
        """The standardised inputs, in their own dtype and on their own device."""
        mean, deviation = (
            send(value.to(inputs.dtype), inputs.device) for value in (self.mean, self.deviation)
        )
        return (inputs - mean) / deviation
