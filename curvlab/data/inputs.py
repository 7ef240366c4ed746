"""Where the inputs of examples come from: a tensor, tokens, 8-bit images in memory, or image files.

All give rows by index, flattened to (examples, features), or the same values in their own shape,
(examples, channels, height, width) for images; in floating point, except tokens. The last two
standardise, and enlarge or decode, only what is asked for: CIFAR-10 at 224×224 would be 36 GB as
float32, and is 184 MB as the 32×32 pixels it is kept in.

Standardisation is by the training set: x ↦ (x - mean) / deviation. The deviation is the population's (no
correction); where it is 0 (a pixel that is always blank) the feature is centred and divided by 1. Moments are
accumulated in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate

from curvlab.exceptions import DataError
from curvlab.measure.device import send

__all__ = [
    "FileInputs",
    "Inputs",
    "Interpolation",
    "PixelInputs",
    "Standardisation",
    "TensorInputs",
    "TokenInputs",
    "decode",
    "resize",
]

Interpolation = Literal["bilinear", "nearest"]


class Inputs(ABC):
    """Rows of inputs by index."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of one example before it is flattened."""

    @property
    def features(self) -> int:
        """Length of one row."""
        return prod(self.shape)

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def place(self) -> torch.device:
        """Where indices are looked up: the device of what is held, the host for files."""
        return torch.device("cpu")

    @abstractmethod
    def rows(self, indices: Tensor) -> Tensor:
        """The inputs of these examples, (examples, features)."""

    def begin(self, indices: Tensor) -> Callable[[], Tensor]:
        """Do what of `rows` is the host's work, ahead of time; the call returned does the rest.

        >>> begun = TensorInputs(torch.ones(3, 2)).begin(torch.tensor([0, 2]))
        >>> begun().shape
        torch.Size([2, 2])
        """
        return partial(self.rows, indices)

    def shaped(self, indices: Tensor) -> Tensor:
        """The inputs of these examples in their own shape, (examples, *shape)."""
        return self.rows(indices).reshape(len(indices), *self.shape)

    @abstractmethod
    def select(self, indices: Tensor) -> Inputs:
        """The inputs of these examples, as a source of their own."""

    @abstractmethod
    def to(self, device: torch.device | str, dtype: torch.dtype) -> Inputs:
        """The same source with rows on `device` in `dtype`."""


@dataclass(frozen=True, eq=False)
class TensorInputs(Inputs):
    """Inputs that are a tensor, (examples, …), already in floating point.

    >>> TensorInputs(torch.ones(3, 2, 2)).rows(torch.tensor([0, 2])).shape
    torch.Size([2, 4])
    """

    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's own, without the examples."""
        return tuple(self.values.shape[1:])

    def __len__(self) -> int:
        return len(self.values)

    @property
    def place(self) -> torch.device:
        """That of the tensor."""
        return self.values.device

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the tensor, flattened."""
        return self.values[send(indices, self.place)].flatten(1)

    def select(self, indices: Tensor) -> TensorInputs:
        """These examples as a source of their own."""
        return TensorInputs(self.values[send(indices, self.place)])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TensorInputs:
        """The tensor on `device` in `dtype`."""
        return TensorInputs(self.values.to(device=device, dtype=dtype))


@dataclass(frozen=True, eq=False)
class TokenInputs(Inputs):
    """Sequences of tokens, (examples, length), which stay integers in every dtype.

    >>> TokenInputs(torch.zeros(3, 5, dtype=torch.int64)).to("cpu", torch.float64).rows(torch.arange(2)).dtype
    torch.int64
    """

    tokens: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of a sequence."""
        return (self.tokens.shape[1],)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def place(self) -> torch.device:
        """That of the tokens."""
        return self.tokens.device

    def rows(self, indices: Tensor) -> Tensor:
        """The sequences of these examples."""
        return self.tokens[send(indices, self.place)]

    def select(self, indices: Tensor) -> TokenInputs:
        """These examples as a source of their own."""
        return TokenInputs(self.tokens[send(indices, self.place)])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TokenInputs:
        """The tokens on `device`."""
        return TokenInputs(self.tokens.to(device))


@dataclass(frozen=True, eq=False)
class PixelInputs(Inputs):
    """Square images kept as 8-bit pixels (examples, channels, height, height), worked up by the batch.

    They are standardised, and resized to `size` × `size` where that is not their own height. In
    this order, as it is less work: interpolation weights sum to 1, so the result is the same.
    """

    pixels: Tensor
    standardisation: Standardisation
    size: int
    interpolation: Interpolation = "bilinear"
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width after resizing."""
        return (self.pixels.shape[1], self.size, self.size)

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def place(self) -> torch.device:
        """That of the pixels."""
        return self.pixels.device

    def rows(self, indices: Tensor) -> Tensor:
        """Pixels standardised, resized and flattened."""
        images = self.standardisation.apply(self.pixels[send(indices, self.place)].to(self.dtype))
        if images.shape[-1] != self.size:
            images = resize(images, self.size, self.interpolation)
        return images.flatten(1)

    def select(self, indices: Tensor) -> PixelInputs:
        """These examples as a source of their own."""
        return replace(self, pixels=self.pixels[send(indices, self.place)])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> PixelInputs:
        """The pixels on `device`, still 8-bit; rows in `dtype`."""
        return replace(self, pixels=self.pixels.to(device), dtype=dtype)


@dataclass(frozen=True, eq=False)
class FileInputs(Inputs):
    """Image files, decoded to `size` × `size` × 3 when they are asked for, in threads."""

    paths: tuple[Path, ...]
    standardisation: Standardisation
    size: int
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    @property
    def shape(self) -> tuple[int, ...]:
        """Three channels, height and width."""
        return (3, self.size, self.size)

    def __len__(self) -> int:
        return len(self.paths)

    def rows(self, indices: Tensor) -> Tensor:
        """Images decoded, standardised and flattened."""
        return self.begin(indices)()

    def begin(self, indices: Tensor) -> Callable[[], Tensor]:
        """Decode the images; what is left is to send and to standardise them."""
        pixels = decode([self.paths[index] for index in indices.tolist()], self.size)

        def finish() -> Tensor:
            return self.standardisation.apply(send(pixels, self.device).to(self.dtype)).flatten(1)

        return finish

    def select(self, indices: Tensor) -> FileInputs:
        """These examples as a source of their own."""
        return replace(self, paths=tuple(self.paths[index] for index in indices.tolist()))

    def to(self, device: torch.device | str, dtype: torch.dtype) -> FileInputs:
        """Rows on `device` in `dtype`; the files stay where they are."""
        return replace(self, device=device, dtype=dtype)


def resize(images: Tensor, size: int, interpolation: Interpolation) -> Tensor:
    """Square images (…, height, height) at size × size, as R X Rᵀ with R the interpolation in one dimension.

    The same as `torch.nn.functional.interpolate` (corners not aligned), and three times as fast on a CPU.

    >>> resize(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), 4, "bilinear")[0]
    tensor([0.0000, 0.2500, 0.7500, 1.0000])
    """
    unit = torch.eye(images.shape[-1], dtype=images.dtype, device=images.device)[None]
    matrix = interpolate(unit, size=size, mode="linear" if interpolation == "bilinear" else "nearest")[0].T
    return matrix @ images @ matrix.T


def decode(paths: list[Path], size: int) -> Tensor:
    """The images at `paths` as 8-bit pixels, (images, 3, size, size).

    Each is cut to a centred square and resized to size × size by Pillow's bilinear filter.
    """
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(lambda path: _decode_one(path, size), paths))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def _decode_one(path: Path, size: int) -> np.ndarray:
    try:
        with Image.open(path) as image:
            square = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path}: not a readable image ({error}); replace the file or take it out of the folder"
        ) from error
    return np.asarray(square)


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
