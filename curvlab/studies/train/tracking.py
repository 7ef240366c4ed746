"""Curvature along a training run: what `curvlab train --track` measures.

A `curvlab.Tracker` looks at the model after every so many steps, on a part of the training set that stays the
same. The numbers are rows of the run: they are kept in its checkpoint, so that a run that was killed and
resumed has each of them once, and the folder has them as curvature.csv. Training goes on as without it, to
the bit, and its seconds do not count the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from curvlab.criteria import Criterion
from curvlab.data import Dataset
from curvlab.exceptions import SpecError
from curvlab.problem import Problem
from curvlab.studies.small.tracker import MEASURES, Tracker
from curvlab.studies.store import Row
from curvlab.studies.train.plan import TrainPlan

__all__ = ["Tracking"]


class TrackedRun(Protocol):
    """What is read of a run, and where its rows go."""

    plan: TrainPlan
    data: Dataset
    model: nn.Module
    criterion: Criterion
    steps: int
    tracked: list[Row]


@dataclass(frozen=True)
class Tracking:
    """What to measure along a run.

    Args:
        measures: names that `curvlab.Tracker` knows.
        every: steps between two measurements.
        examples: how many of the training set they are measured on, each class in proportion.

    >>> Tracking(["trace"], every=10).every
    10
    """

    measures: Sequence[str] = ("top-eigenvalue", "trace")
    every: int = 50
    examples: int = 500

    def __post_init__(self) -> None:
        unknown = [name for name in self.measures if name not in MEASURES]
        if unknown or not self.measures:
            raise SpecError(
                f"track={','.join(self.measures)}: expected measures among {', '.join(MEASURES)}, joined by "
                f"commas"
            )
        for name in ("every", "examples"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)} of tracking: expected a number of at least 1")

    def observer(self, run: TrackedRun) -> Callable[[TrackedRun], None]:
        """What is to look at the run after each of its steps, and before the first."""
        seen = run.data.train.at_most(self.examples, run.plan.setup.seed)
        tracker = Tracker(Problem(run.model, run.criterion, *seen.all()), self.every, self.measures)

        def observe(run: TrackedRun) -> None:
            tracker(run.steps)
            if tracker.rows:
                # A resumed run is at its checkpoint's step once more.
                run.tracked = [row for row in run.tracked if row["step"] < run.steps] + tracker.rows
                tracker.rows = []

        return observe
