"""Data sets by name: deterministic, standardised by their training set.

Inputs come flattened, as rows; images keep their shape with `given_as("images")`, `characters` are tokens.
Other packages add theirs through the entry-point group `curvlab.datasets`.

>>> digits = dataset("digits[train=1000]").load(seed=0)
>>> inputs, targets = next(iter(digits.batches(100, seed=0, epoch=0)))
>>> inputs.shape, targets.dtype
(torch.Size([100, 64]), torch.int64)
"""

from __future__ import annotations

from curvlab.data.base import Batches, Dataset, Examples, InputKind, Source, dataset, datasets
from curvlab.data.characters import Characters
from curvlab.data.cifar10 import Cifar10, Cifar10Enlarged
from curvlab.data.digits import Digits
from curvlab.data.image_folder import ImageFolder
from curvlab.data.inputs import FileInputs, Inputs, PixelInputs, Standardisation, TensorInputs, TokenInputs
from curvlab.data.synthetic import Synthetic, SyntheticImages, SyntheticRegression

__all__ = [
    "Batches",
    "Characters",
    "Cifar10",
    "Cifar10Enlarged",
    "Dataset",
    "Digits",
    "Examples",
    "FileInputs",
    "ImageFolder",
    "InputKind",
    "Inputs",
    "PixelInputs",
    "Source",
    "Standardisation",
    "Synthetic",
    "SyntheticImages",
    "SyntheticRegression",
    "TensorInputs",
    "TokenInputs",
    "dataset",
    "datasets",
]

datasets.register("digits", Digits, "scikit-learn's 8×8 digits, embedded")
datasets.register("cifar10", Cifar10, "CIFAR-10, downloaded once or from --data-dir")
datasets.register("cifar10-224", Cifar10Enlarged, "CIFAR-10 enlarged to ImageNet's 224×224")
datasets.register("image-folder", ImageFolder, "a folder of images for each class, from --data-dir")
datasets.register("imagenet10", ImageFolder, "ten classes of an ImageNet folder, by the seed", classes=10)
datasets.register("synthetic", Synthetic, "classes by a teacher network, any shape")
datasets.register("synthetic-regression", SyntheticRegression, "real targets by a teacher network, any shape")
datasets.register("synthetic-images", SyntheticImages, "images with classes by a teacher network, any shape")
datasets.register("characters", Characters, "generated text, every next character to be predicted")
