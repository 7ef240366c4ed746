"""What an experiment of the paper runs on, at each scale: data, network and how they stand in.

    smoke    the embedded digits with a small network: the same pages within minutes, no download
    laptop   the paper's networks on real CIFAR-10, fewer updates: hours on two cores
    paper    the paper's 200 epochs

The paper's ten ImageNet classes are read from a folder of images where the user has one; CIFAR-10 enlarged to
224×224 has the same 150,528 inputs and stands in otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from curvlab.exceptions import SpecError
from curvlab.reproduce.grid_study import GridStudy
from curvlab.studies.setup import Setup, check_seed

__all__ = ["SCALES", "SMOKE", "Options", "Role", "Scale", "subject", "uninformed"]

Scale = Literal["smoke", "laptop", "paper"]
Role = Literal["cifar10", "imagenet10"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "paper")
SMOKE: Scale = "smoke"
SMOKE_ARCH = "fcnn[widths=64-48-32-16-10]"
CLASSES = 10


@dataclass(frozen=True)
class Options:
    """What the user chooses for any experiment.

    Args:
        scale: `smoke`, `laptop` or `paper`.
        seeds: other seeds than the scale's own.
        imagenet: folder with a folder of images for each class; None: CIFAR-10 enlarged stands in.
        data_dir: folder of CIFAR-10, where it is not to be downloaded.
        device: `auto`, `cpu`, `cuda`, `mps`, …
        study: the grid that `grid` searches, instead of the scale's own.
    """

    scale: Scale = "laptop"
    seeds: tuple[int, ...] = ()
    imagenet: str | None = None
    data_dir: str | None = None
    device: str = "auto"
    study: GridStudy | None = None

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise SpecError(f"scale is `{self.scale}`; use one of {', '.join(SCALES)}")
        from curvlab.measure import device as devices  # torch, which the help page does without

        for seed in self.seeds:
            check_seed(seed)
        devices.resolve(self.device)


def subject(role: Role, criterion: str, seed: int, options: Options, limits: str = "") -> tuple[Setup, str]:
    """The setup of an experiment and, where it is not the paper's own, a sentence on that.

    `limits` are the fields that cut a large data set: `train=…,test=…`.

    >>> setup, note = subject("cifar10", "robust", 0, Options("smoke"))
    >>> setup.data, note
    ('digits', "On scikit-learn's 8×8 digits with a network 64-48-32-16-10, not on the paper's data.")
    """
    common = {"criterion": criterion, "batch": 100, "seed": seed, "device": options.device}
    if options.scale == SMOKE:
        note = "On scikit-learn's 8×8 digits with a network 64-48-32-16-10, not on the paper's data."
        return Setup(data="digits", arch=SMOKE_ARCH, **common), note  # type: ignore[arg-type]
    name = role
    folder, note = options.data_dir, ""
    if role == "imagenet10" and options.imagenet is not None:
        folder = options.imagenet
        note = (
            "On ten classes of the given folder of images, drawn by the seed; the paper's ten are not known."
        )
    elif role == "imagenet10":
        name = "cifar10-224"  # type: ignore[assignment]
        note = "On CIFAR-10 enlarged to 224×224, which stands in for ten classes of ImageNet."
    data = f"{name}[{limits}]" if limits else name
    return Setup(data=data, data_dir=folder, **common), note  # type: ignore[arg-type]


@cache
def uninformed(criterion: str) -> float:
    """The height of the plateau with ten equally frequent classes, as CIFAR-10 has (digits nearly so).

    >>> round(uninformed("cross-entropy"), 4), round(uninformed("robust"), 4)
    (2.3026, 0.6225)
    """
    import torch

    from curvlab.criteria.registry import criterion_named
    from curvlab.studies.train.plateau import Plateau

    labels, counts = torch.arange(CLASSES), torch.ones(CLASSES, dtype=torch.float64)
    return Plateau.of_classes(criterion_named(criterion), labels, counts, outputs=CLASSES).height
