"""What can be loaded: a frozen configuration with one method, `load(seed, data_dir) -> Dataset`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from curvlab.data.dataset import Dataset
from curvlab.exceptions import SpecError

__all__ = ["Source"]


@dataclass(frozen=True)
class Source(ABC):
    """A data set by its settings.

    `train` and `test` limit how many examples are used, drawn by the seed with each class in
    proportion; standardisation is always that of the whole training set.
    """

    architecture: ClassVar[str] = "fcnn"
    """The name of the architecture that fits; `fcnn` takes its inputs and outputs from the data."""

    train: int | None = None
    test: int | None = None

    def __post_init__(self) -> None:
        for field in ("train", "test"):
            count = getattr(self, field)
            if count is not None and count < 1:
                raise SpecError(f"{field} is {count}; use 1 or more examples, or leave it out for all")

    def load(self, seed: int = 0, data_dir: str | Path | None = None) -> Dataset:
        """The data set; `seed` fixes splits, subsets and synthetic draws, `data_dir` is where files are."""
        folder = None if data_dir is None else Path(data_dir).expanduser()
        found = self._load(seed, folder)
        for field, examples in (("train", found.train), ("test", found.test)):
            count = getattr(self, field)
            if count is not None and count > len(examples):
                raise SpecError(
                    f"{field} is {count}; `{found.name}` has {len(examples)} such examples: use that many or "
                    f"fewer, or leave it out for all"
                )
        return found.subset(self.train, self.test, seed)

    def sizes(self) -> tuple[tuple[int, ...], int] | None:
        """Shape of an example and outputs of a network for it; None where only loading it tells.

        >>> from curvlab.data import dataset
        >>> dataset("cifar10").sizes()
        ((3, 32, 32), 10)
        """
        return None

    @abstractmethod
    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        """The whole data set."""
