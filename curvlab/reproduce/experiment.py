"""An experiment of the paper: its tasks at a scale, its frames, and the page that shows them.

tasks     the pieces of work, each resumable by itself
frames    what was measured, as tidy frames: the CSV files beside the page
content   the page, with the paper's numbers or claims beside ours
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from curvlab.report.content import Answer, Content, Section
from curvlab.report.tables import mapping_table
from curvlab.report.theme import Look
from curvlab.reproduce.subjects import Options
from curvlab.reproduce.task import Task
from curvlab.studies.store import Store

__all__ = ["Experiment", "Outcome"]

ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Outcome:
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
    def tasks(self, options: Options) -> Sequence[Task]:
        """The work, in the order it is done."""

    @abstractmethod
    def frames(self, store: Store) -> dict[str, pd.DataFrame]:
        """The frames by the name of their file; empty where nothing was measured yet."""

    @abstractmethod
    def content(self, outcome: Outcome) -> Content:
        """The page."""

    def nothing(self, outcome: Outcome) -> Content:
        """The page where nothing has been measured yet."""
        answer = Answer("Nothing has been measured yet.")
        return Content(self.title, (), answer, (self.again(outcome),), lambda theme: Look(theme=theme), ())

    def again(self, outcome: Outcome) -> Section:
        """The section that every page ends with: the command, the frames and the environment."""
        links = tuple((f"{name}.csv", f"{name}.csv") for name in outcome.frames)
        tables = tuple(
            mapping_table("Environment" if index == 0 else f"Environment {index + 1}", environment)
            for index, environment in enumerate(outcome.environments)
        )
        text = "The command that makes this page, going on where it was stopped; the frames; what it ran on."
        return Section("again", "Run it again", text, folded=tables, code=outcome.command, links=links)
