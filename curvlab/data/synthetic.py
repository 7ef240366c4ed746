"""Synthetic data of any shape from a teacher network.

x ~ N(0, I), f(x) = W₂ tanh(W₁ x / √n₀) / √n₁ with W₁, W₂ ~ N(0, 1), each output of f standardised over
the examples, and ε ~ N(0, I). A label is argmax_k (f(x) + noise · ε)_k; a value is f(x) + noise · ε.
Inputs have mean 0 and deviation 1 by construction and are not standardised again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.data.base import Dataset, Examples, Source, generator
from curvlab.data.inputs import Standardisation, TensorInputs
from curvlab.exceptions import SpecError

__all__ = ["Synthetic", "SyntheticImages", "SyntheticRegression"]

TEST_FRACTION = 0.2
HIDDEN = 32


@dataclass(frozen=True)
class Teacher(Source):
    """What rows of synthetic data share: 80 % of `examples` train, 20 % test."""

    features: int = 64
    examples: int = 2000
    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_least(self, features=1, examples=2, noise=0)

    def _draw_examples(self, seed: int, outputs: int) -> tuple[Tensor, Tensor]:
        return _draw(seed, self.examples, self.features, outputs, self.noise)


@dataclass(frozen=True)
class Synthetic(Teacher):
    """Classes by a teacher network.

    >>> Synthetic(features=12, classes=3, examples=50).load(seed=1).outputs
    3
    """

    classes: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 2:
            raise SpecError(f"classes is {self.classes}; use 2 or more")

    def sizes(self) -> tuple[tuple[int, ...], int]:
        """The features and the classes."""
        return (self.features,), self.classes

    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        inputs, values = self._draw_examples(seed, self.classes)
        names = tuple(str(index) for index in range(self.classes))
        return _split("synthetic", inputs, values.argmax(1), names, self.noise)


@dataclass(frozen=True)
class SyntheticImages(Source):
    """Images of independent pixels, of any channels, height and width, with classes by a teacher network.

    The teacher sees an image as a row: `synthetic` with that many features, in another shape.

    >>> SyntheticImages(image=(3, 8, 8), classes=4, examples=50).load().shape
    (3, 8, 8)
    """

    architecture: ClassVar[str] = "cnn"

    image: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    examples: int = 2000
    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_least(self, classes=2, examples=2, noise=0)
        if len(self.image) != 3 or min(self.image) < 1:
            raise SpecError(
                f"image is {'-'.join(map(str, self.image))}; give channels, height and width, e.g. 3-32-32"
            )

    def sizes(self) -> tuple[tuple[int, ...], int]:
        """The shape of an image and the classes."""
        return self.image, self.classes

    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        inputs, values = _draw(seed, self.examples, prod(self.image), self.classes, self.noise)
        names = tuple(str(index) for index in range(self.classes))
        images = inputs.reshape(-1, *self.image)
        return _split("synthetic-images", images, values.argmax(1), names, self.noise)


@dataclass(frozen=True)
class SyntheticRegression(Teacher):
    """Real targets, (examples, outputs), by a teacher network.

    >>> SyntheticRegression(features=12, outputs=2, examples=50).load().train.targets.shape
    torch.Size([40, 2])
    """

    outputs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outputs < 1:
            raise SpecError(f"outputs is {self.outputs}; use 1 or more")

    def sizes(self) -> tuple[tuple[int, ...], int]:
        """The features and the outputs."""
        return (self.features,), self.outputs

    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        return _split("synthetic-regression", *self._draw_examples(seed, self.outputs), (), self.noise)


def _draw(seed: int, examples: int, features: int, outputs: int, noise: float) -> tuple[Tensor, Tensor]:
    """Inputs (examples, features) and the noisy values of the teacher, (examples, outputs)."""
    draws = generator(seed, "teacher")
    inputs = torch.randn(examples, features, generator=draws)
    hidden = torch.randn(HIDDEN, features, generator=draws) / features**0.5
    top = torch.randn(outputs, HIDDEN, generator=draws) / HIDDEN**0.5
    values = torch.tanh(inputs @ hidden.T) @ top.T
    values = Standardisation.per_feature(values).apply(values)
    return inputs, values + noise * torch.randn(values.shape, generator=draws)


def _split(name: str, inputs: Tensor, targets: Tensor, class_names: tuple[str, ...], noise: float) -> Dataset:
    cut = len(inputs) - max(round(TEST_FRACTION * len(inputs)), 1)
    return Dataset(
        name=name,
        train=Examples(TensorInputs(inputs[:cut]), targets[:cut]),
        test=Examples(TensorInputs(inputs[cut:]), targets[cut:]),
        class_names=class_names,
        note="Synthetic: inputs N(0, 1), not standardised further; targets of a tanh teacher with "
        f"{HIDDEN} hidden units, noise of deviation {noise} on its standardised outputs; 80/20.",
    )


def _check_least(source: Source, **least: int) -> None:
    for field, smallest in least.items():
        value = getattr(source, field)
        if not smallest <= value < float("inf"):
            raise SpecError(f"{field} is {value}; use {smallest} or more")
