"""An experiment of the paper: its tasks at a scale, its frames, its claims, and the page that shows them.

tasks     the pieces of work, each resumable by itself
frames    what was measured, as tidy frames: the CSV files beside the page
claims    what the paper says of them, and the rule by which a verdict is reached
content   the page, with the paper's numbers or claims beside ours

A task writes its rows to the store of its experiment's folder itself, because it may take an hour and must
not lose what it has when it is interrupted. The store is safe to share between processes.

Verdicts are computed from the frames by rules that stand beside them in words, so that a reader can disagree
with the rule and not only with the result. Losses and times within five per cent of each other are level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import pandas as pd

from curvlab.report.content import Answer, Content, Section
from curvlab.report.drawing import Look
from curvlab.report.tables import mapping_table
from curvlab.reproduce.subjects import Options
from curvlab.studies.store import Row, Store

__all__ = [
    "CLOSE",
    "Claim",
    "Experiment",
    "ExperimentOutcome",
    "ExperimentTask",
    "Frames",
    "Judgement",
    "Places",
    "Row",
    "ShowShare",
    "Verdict",
    "not_measured",
    "rows_of",
    "verdict_of",
]


def rows_of(frame: pd.DataFrame) -> Iterator[Any]:
    """Each row as a named tuple; its fields are whatever the columns hold, which no type can say.

    >>> [row.name for row in rows_of(pd.DataFrame({"name": ["a", "b"]}))]
    ['a', 'b']
    """
    return frame.itertuples(index=False)


ShowShare = Callable[[float, str], None]
"""Told the share of the task that is done, and what it is doing."""


@dataclass(frozen=True)
class Places:
    """Where a task writes: the folder of its experiment's store, and that of all training runs.

    Experiments share runs: the same plan is trained once, whichever of them asks for it, unless the work is
    done `fresh`: then a run that is there is set aside and trained again.
    """

    store: Path
    runs: Path
    fresh: bool = False


class ExperimentTask(Protocol):
    """A frozen, picklable piece of work."""

    @property
    def label(self) -> str:
        """What to call it in progress and messages."""

    def finished(self, store: Store) -> bool:
        """Whether the store has all of its rows."""

    def prepare(self) -> None:
        """Load the data and build the model as `run` will, and keep nothing; raises what `run` would."""

    def run(self, places: Places, show: ShowShare) -> None:
        """Bring the rows that are missing into the store."""


Verdict = Literal["holds", "does not hold", "mixed", "not measured"]
Frames = Mapping[str, pd.DataFrame]
"""The frames of one experiment by name."""
CLOSE = 0.05


@dataclass(frozen=True)
class Judgement:
    """What was measured, in a sentence or two, and the verdict."""

    measured: str
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    """What the paper says, in our words, the rule of the verdict, and the function that applies it."""

    says: str
    rule: str
    judge: Callable[[Frames], Judgement]


def verdict_of(outcomes: Sequence[bool]) -> Verdict:
    """Of the cases of a claim: all of them, some or none.

    >>> verdict_of([True, False])
    'mixed'
    """
    return "holds" if all(outcomes) else "mixed" if any(outcomes) else "does not hold"


def not_measured(reason: str = "Not measured here yet.") -> Judgement:
    """Where the frames that a claim needs are not there."""
    return Judgement(reason, "not measured")


ENVIRONMENT = "environment"


@dataclass(frozen=True)
class ExperimentOutcome:
    """What an experiment has so far, and how it was asked for."""

    store: Store
    options: Options
    command: str
    frames: dict[str, pd.DataFrame]

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Where its tasks ran, each once."""
        return [row["environment"] for row in self.store.rows(ENVIRONMENT)]


@dataclass(frozen=True)
class Experiment(ABC):
    """One table, figure or comparison of the paper."""

    name: str
    title: str

    @abstractmethod
    def tasks(self, options: Options) -> Sequence[ExperimentTask]:
        """The work, in the order it is done."""

    @abstractmethod
    def frames(self, store: Store) -> dict[str, pd.DataFrame]:
        """The frames by the name of their file; empty where nothing was measured yet."""

    @abstractmethod
    def content(self, outcome: ExperimentOutcome) -> Content:
        """The page."""

    def nothing(self, outcome: ExperimentOutcome) -> Content:
        """The page where nothing has been measured yet."""
        answer = Answer("Nothing has been measured yet.")
        return Content(self.title, (), answer, (self.again(outcome),), lambda theme: Look(theme=theme), ())

    def again(self, outcome: ExperimentOutcome) -> Section:
        """The section that every page ends with: the command, the frames and the environment."""
        links = tuple((f"{name}.csv", f"{name}.csv") for name in outcome.frames)
        tables = tuple(
            mapping_table("Environment" if index == 0 else f"Environment {index + 1}", environment)
            for index, environment in enumerate(outcome.environments)
        )
        text = "The command that makes this page, going on where it was stopped; the frames; what it ran on."
        return Section("again", "Run it again", text, folded=tables, code=outcome.command, links=links)
