"""Learning-rate schedules: the factor of the learning rate as a function of the progress of a run.

A schedule has no state, so a resumed run needs none of it restored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import cos, pi
from typing import ClassVar

from curvlab.exceptions import SpecError
from curvlab.specs import Registry

__all__ = ["Constant", "Cosine", "Schedule", "Steps", "schedules"]


@dataclass(frozen=True)
class Schedule(ABC):
    """A factor of the learning rate, after `epoch` epochs (fractions count) of `epochs`."""

    needs_total: ClassVar[bool] = False

    @abstractmethod
    def factor(self, epoch: float, epochs: int) -> float:
        """What the learning rate is multiplied by."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The learning rate as it is.

    >>> Constant().factor(3.0, 10)
    1.0
    """

    def factor(self, epoch: float, epochs: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from 1 down to `floor` over the whole run.

    >>> Cosine().factor(5.0, 10)
    0.5
    """

    needs_total: ClassVar[bool] = True
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise SpecError(f"floor={self.floor}: expected a number from 0 to 1, the factor at the end")

    def factor(self, epoch: float, epochs: int) -> float:
        return self.floor + (1 - self.floor) * (1 + cos(pi * epoch / epochs)) / 2


@dataclass(frozen=True)
class Steps(Schedule):
    """Multiplied by `gamma` after every `every` epochs.

    >>> Steps(every=2, gamma=0.5).factor(4.5, 10)
    0.25
    """

    every: int = 10
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise SpecError(f"every={self.every}: expected 1 or more epochs")
        if not 0 < self.gamma <= 1:
            raise SpecError(f"gamma={self.gamma}: expected a number above 0, at most 1, such as 0.1")

    def factor(self, epoch: float, epochs: int) -> float:
        return float(self.gamma ** (int(epoch) // self.every))


schedules: Registry[Schedule] = Registry("schedule")
schedules.register("constant", Constant)
schedules.register("cosine", Cosine)
schedules.register("steps", Steps)
