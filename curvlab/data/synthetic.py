"""Synthetic data of any shape from a teacher network.

x ~ N(0, I), f(x) = W₂ tanh(W₁ x / √n₀) / √n₁ with W₁, W₂ ~ N(0, 1), each output of f standardised over
the examples, and ε ~ N(0, I). A label is argmax_k (f(x) + noise · ε)_k; a value is f(x) + noise · ε.
Inputs have mean 0 and deviation 1 by construction and are not standardised again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from curvlab.data.dataset import Dataset, Examples
from curvlab.data.inputs import TensorInputs
from curvlab.data.source import Source
from curvlab.data.splits import generator
from curvlab.data.standardise import Standardisation
from curvlab.exceptions import SpecError

__all__ = ["Synthetic", "SyntheticRegression"]

TEST_FRACTION = 0.2
HIDDEN = 32


@dataclass(frozen=True)
class Teacher(Source):
    """What the two kinds of synthetic data share: 80 % of `examples` train, 20 % test."""

    features: int = 64
    examples: int = 2000
    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least in (("features", 1), ("examples", 2), ("noise", 0)):
            value = getattr(self, field)
            if not least <= value < float("inf"):
                raise SpecError(f"{field} is {value}; use {least} or more")

    def _drawn(self, seed: int, outputs: int) -> tuple[Tensor, Tensor]:
        draws = generator(seed, "teacher")
        inputs = torch.randn(self.examples, self.features, generator=draws)
        hidden = torch.randn(HIDDEN, self.features, generator=draws) / self.features**0.5
        top = torch.randn(outputs, HIDDEN, generator=draws) / HIDDEN**0.5
        values = torch.tanh(inputs @ hidden.T) @ top.T
        values = Standardisation.per_feature(values).apply(values)
        return inputs, values + self.noise * torch.randn(values.shape, generator=draws)

    def _dataset(self, name: str, inputs: Tensor, targets: Tensor, class_names: tuple[str, ...]) -> Dataset:
        cut = self.examples - max(round(TEST_FRACTION * self.examples), 1)
        return Dataset(
            name=name,
            train=Examples(TensorInputs(inputs[:cut]), targets[:cut]),
            test=Examples(TensorInputs(inputs[cut:]), targets[cut:]),
            class_names=class_names,
            note="Synthetic: inputs N(0, 1), not standardised further; targets of a tanh teacher with "
            f"{HIDDEN} hidden units, noise of deviation {self.noise} on its standardised outputs; 80/20.",
        )


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

    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        inputs, values = self._drawn(seed, self.classes)
        names = tuple(str(index) for index in range(self.classes))
        return self._dataset("synthetic", inputs, values.argmax(1), names)


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

    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        return self._dataset("synthetic-regression", *self._drawn(seed, self.outputs), ())
