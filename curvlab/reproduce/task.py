"""A task: one piece of a reproduction that runs on its own, anywhere, and goes on where it was stopped.

A task writes its rows to the store of its experiment's folder itself, because a piece may take an hour and
must not lose what it has when it is interrupted. The store is safe to share between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from curvlab.studies.store import Store

__all__ = ["Row", "Show", "Task"]

Row = dict[str, Any]
Show = Callable[[float, str], None]
"""Told the share of the task that is done, and what it is doing."""


class Task(Protocol):
    """A frozen, picklable piece of work."""

    @property
    def label(self) -> str:
        """What to call it in progress and messages."""

    def finished(self, store: Store) -> bool:
        """Whether the store has all of its rows."""

    def run(self, folder: Path, show: Show) -> None:
        """Bring the rows that are missing into the store of `folder`."""
