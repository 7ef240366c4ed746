"""CIFAR-10 in its official binary layout, at 32×32 or enlarged to 224×224.

Six files, `data_batch_1.bin` … `data_batch_5.bin` and `test_batch.bin`, of 10,000 records each: one
label byte (0-9), then 3,072 pixel bytes (red plane, green, blue). Nothing is unpickled. The folder
is the user's (`--data-dir`, CURVLAB_DATA; the folder itself or its parent), else the cache, which
the official archive is downloaded to.

Standardised per channel by the mean and deviation of all 50,000 training images.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from curvlab.data.base import Dataset, Examples, Source
from curvlab.data.download import cache_folder, fetch, locked, unpack, user_folder
from curvlab.data.inputs import Interpolation, PixelInputs, Standardisation
from curvlab.exceptions import DataError, DataFolderError, SpecError

__all__ = ["OFFICIAL", "Cifar10", "Cifar10Enlarged", "Release", "obtain", "read"]

FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{index}.bin" for index in range(1, 6))
TEST_FILES = ("test_batch.bin",)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD = 1 + 3 * 32 * 32


@dataclass(frozen=True)
class Release:
    """An archive in CIFAR-10's layout: its address, its SHA-256, and how many records a file holds."""

    address: str
    sha256: str
    records: int = 10_000


OFFICIAL = Release(
    address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)


@dataclass(frozen=True)
class Cifar10(Source):
    """CIFAR-10 as it is: 50,000 training and 10,000 test images of 32×32×3."""

    architecture: ClassVar[str] = "cifar10-fcnn"
    release: ClassVar[Release] = OFFICIAL

    def sizes(self) -> tuple[tuple[int, ...], int]:
        """32×32 pixels of three channels, ten classes."""
        return (3, 32, 32), len(CLASSES)

    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        return _dataset(self.release, data_dir, "cifar10", 32, "bilinear", "")


@dataclass(frozen=True)
class Cifar10Enlarged(Source):
    """CIFAR-10 enlarged to `size` × `size`, a batch at a time: ImageNet's geometry without ImageNet."""

    architecture: ClassVar[str] = "imagenet10-fcnn"

    size: int = 224
    interpolation: Interpolation = "bilinear"

    release: ClassVar[Release] = OFFICIAL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise SpecError(f"size is {self.size}; use 1 or more pixels, e.g. 224")

    def sizes(self) -> tuple[tuple[int, ...], int]:
        """`size` × `size` pixels of three channels, ten classes."""
        return (3, self.size, self.size), len(CLASSES)

    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        resized = f" Enlarged from 32×32 to {self.size}×{self.size} by {self.interpolation} interpolation."
        return _dataset(self.release, data_dir, "cifar10-224", self.size, self.interpolation, resized)


def _dataset(
    release: Release, data_dir: Path | None, name: str, size: int, interpolation: Interpolation, resized: str
) -> Dataset:
    folder = obtain(data_dir, release)
    train_pixels, train_labels = read(folder, TRAIN_FILES, release.records)
    test_pixels, test_labels = read(folder, TEST_FILES, release.records)
    standardisation = Standardisation.per_channel(train_pixels.split(2000))
    return Dataset(
        name=name,
        train=Examples(PixelInputs(train_pixels, standardisation, size, interpolation), train_labels),
        test=Examples(PixelInputs(test_pixels, standardisation, size, interpolation), test_labels),
        class_names=CLASSES,
        note="CIFAR-10, its own training and test sets; each channel standardised by the mean and deviation "
        f"of all training images.{resized}",
    )


def obtain(data_dir: Path | None = None, release: Release = OFFICIAL) -> Path:
    """The folder with the files: the user's, the cache's, or the cache's after a download."""
    named = user_folder(data_dir)
    if named is not None:
        return _inside(named)
    folder = cache_folder() / FOLDER
    if folder.is_dir():
        return folder
    with locked(folder.parent):
        if not folder.is_dir():  # another process may have been first
            archive = folder.parent / release.address.rsplit("/", 1)[-1]
            fetch(release.address, archive, release.sha256)
            files = (*TRAIN_FILES, *TEST_FILES)
            unpack(archive, folder, files, limit=2 * len(files) * release.records * RECORD)
            archive.unlink()
    return folder


def _inside(named: Path) -> Path:
    for folder in (named, named / FOLDER):
        if any(folder.glob("data_batch_*.bin")):
            return folder
    raise DataFolderError(
        f"{named}: no data_batch_*.bin there nor in its folder {FOLDER}; --data-dir (or CURVLAB_DATA) names "
        "the folder that cifar-10-binary.tar.gz unpacks to, or its parent. Leave both out to download it"
    )


def read(folder: Path, files: tuple[str, ...], records: int = OFFICIAL.records) -> tuple[Tensor, Tensor]:
    """Pixels (images, 3, 32, 32) as uint8 and labels (images,) as int64 of these files, checked."""
    data = np.concatenate([_records(folder / name, records) for name in files])
    labels = torch.from_numpy(data[:, 0].astype(np.int64))
    return torch.from_numpy(np.ascontiguousarray(data[:, 1:])).reshape(-1, 3, 32, 32), labels


def _records(path: Path, records: int) -> np.ndarray:
    advice = "delete its folder so that it is downloaded again, or unpack cifar-10-binary.tar.gz again"
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except FileNotFoundError as error:
        raise DataError(f"{path}: the file is missing; {advice}") from error
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error}); {advice}") from error
    if data.size != records * RECORD:
        raise DataError(f"{path}: {data.size:,} bytes, expected {records * RECORD:,}; {advice}")
    rows = data.reshape(records, RECORD)
    wrong = (rows[:, 0] >= len(CLASSES)).nonzero()[0]
    if wrong.size:
        label = rows[wrong[0], 0]
        raise DataError(f"{path}: corrupt, record {wrong[0]} has label {label}, expected 0 to 9; {advice}")
    return rows
