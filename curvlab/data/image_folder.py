"""Images in folders, one folder per class, as ImageNet is kept.

`classes=10` draws that many of the folders by the seed: ImageNet-10 is ten classes of an ImageNet
training folder. Each class is split into training and test images by the seed. Images are decoded
when a batch needs them, cut to a centred square and resized (no augmentation, orientation tags
ignored). Standardised per channel by the mean and deviation of the training images, or of 1,000 of
them where there are more: to decode all of ImageNet-10 first would take minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from PIL import Image

from curvlab.data.base import Dataset, Examples, Source, permutation, stratified_split, stratified_subset
from curvlab.data.download import user_folder
from curvlab.data.inputs import FileInputs, Standardisation, decode
from curvlab.exceptions import DataFolderError, SpecError

__all__ = ["ImageFolder"]

MOMENT_IMAGES = 1000
SPLIT_NAMES = {"train", "val", "valid", "validation", "test"}


@dataclass(frozen=True)
class ImageFolder(Source):
    """Images in a folder for each class, `classes` of which are used (all by default).

    They are resized to `size` × `size`; `test_fraction` of each class is held out.
    """

    architecture: ClassVar[str] = "imagenet10-fcnn"

    classes: int | None = None
    size: int = 224
    test_fraction: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes is not None and self.classes < 2:
            raise SpecError(f"classes is {self.classes}; use 2 or more, or leave it out for all")
        if self.size < 1:
            raise SpecError(f"size is {self.size}; use 1 or more pixels, e.g. 224")
        if not 0 < self.test_fraction < 1:
            raise SpecError(f"test_fraction is {self.test_fraction}; use a number between 0 and 1, e.g. 0.2")

    def sizes(self) -> tuple[tuple[int, ...], int] | None:
        """`size` × `size` pixels of three channels, where it is said how many classes there are."""
        return None if self.classes is None else ((3, self.size, self.size), self.classes)

    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        root = user_folder(data_dir)
        if root is None:
            raise DataFolderError(
                "image-folder: no folder was named; --data-dir (or CURVLAB_DATA) names the folder that holds "
                "one folder of images for each class"
            )
        names = self._draw_classes(_class_names(root), seed, root)
        files = [_images(root / name) for name in names]
        paths = tuple(path for group in files for path in group)
        labels = torch.tensor([label for label, group in enumerate(files) for _ in group])
        train, test = stratified_split(labels, self.test_fraction, seed)
        sample = train[stratified_subset(labels[train], len(train), min(MOMENT_IMAGES, len(train)), seed)]
        standardisation = Standardisation.per_channel(
            decode([paths[index] for index in chunk.tolist()], self.size) for chunk in sample.split(100)
        )
        images = Examples(FileInputs(paths, standardisation, self.size), labels)
        return Dataset(
            name="image-folder",
            train=images.select(train),
            test=images.select(test),
            class_names=names,
            note=f"{len(names)} classes of an image folder, {self.test_fraction:.0%} of each held out for "
            f"testing by the seed; centre square resized to {self.size}×{self.size}; each channel "
            f"standardised by the mean and deviation of {len(sample):,} of {len(train):,} training images.",
        )

    def _draw_classes(self, names: list[str], seed: int, root: Path) -> tuple[str, ...]:
        wanted = len(names) if self.classes is None else self.classes
        if not 2 <= wanted <= len(names):
            raise DataFolderError(
                f"{root}: {len(names)} class folders, {max(wanted, 2)} are needed; name another folder by "
                "--data-dir, or set classes= to fewer"
            )
        drawn = permutation(len(names), seed, "classes")[:wanted]
        return tuple(names[index] for index in drawn.sort().values.tolist())


def _class_names(root: Path) -> list[str]:
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if names and set(names) <= SPLIT_NAMES:
        raise DataFolderError(
            f"{root}: its folders {', '.join(names)} look like splits, not classes; name the one that holds "
            f"the class folders, e.g. --data-dir {root / names[0]}"
        )
    return names


def _images(folder: Path) -> list[Path]:
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in known and not path.name.startswith(".") and path.is_file()
    )
    if len(files) < 2:
        raise DataFolderError(
            f"{folder}: {len(files)} images; a class needs at least two, one to train and one to test: "
            "add images or take the folder away"
        )
    return files
