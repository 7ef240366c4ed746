"""The digits: 1,797 images of 8×8 pixels that scikit-learn carries, so nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from sklearn.datasets import load_digits

from curvlab.data.base import Dataset, Examples, Source, stratified_split
from curvlab.data.inputs import Standardisation, TensorInputs

__all__ = ["Digits"]

TEST_FRACTION = 0.2


@dataclass(frozen=True)
class Digits(Source):
    """scikit-learn's digits, 80 % for training and 20 % for testing, class by class.

    >>> Digits(train=500).load().train.features
    64
    """

    architecture: ClassVar[str] = "digits-fcnn"

    def sizes(self) -> tuple[tuple[int, ...], int]:
        """8×8 pixels of one channel, ten digits."""
        return (1, 8, 8), 10

    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        pixels, labels = load_digits(return_X_y=True)
        inputs, targets = torch.from_numpy(pixels), torch.from_numpy(labels).long()
        train, test = stratified_split(targets, TEST_FRACTION, seed)
        inputs = Standardisation.per_feature(inputs[train]).apply(inputs).float().reshape(-1, 1, 8, 8)
        return Dataset(
            name="digits",
            train=Examples(TensorInputs(inputs[train]), targets[train]),
            test=Examples(TensorInputs(inputs[test]), targets[test]),
            class_names=tuple(str(digit) for digit in range(10)),
            note="scikit-learn's digits (the test part of UCI's optical recognition set); 80/20 split by "
            "class and seed; each pixel standardised by its training mean and deviation (a constant one is "
            "only centred).",
        )
