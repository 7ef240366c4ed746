"""A task: one piece of a reproduction that runs on its own, anywhere, and goes on where it was stopped.

A task writes its rows to the store of its experiment's folder itself, because a piece may take an hour and
must not lose what it has when it is interrupted. The store is safe to share between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from curvlab.studies.store import Row, Store

__all__ = ["Places", "Row", "Show", "Task"]

Show = Callable[[float, str], None]
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


class Task(Protocol):
    """A frozen, picklable piece of work."""

    @property
    def label(self) -> str:
        """What to call it in progress and messages."""

    def finished(self, store: Store) -> bool:
        """Whether the store has all of its rows."""

    def prepare(self) -> None:
        """Load the data and build the model as `run` will, and keep nothing; raises what `run` would."""

    def run(self, places: Places, show: Show) -> None:
        """Bring the rows that are missing into the store."""
