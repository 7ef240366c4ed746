"""The tasks of a comparison, in the order they are measured.

Repetitions go round: every pair once, then every pair again from the next one on, so that a slow moment of
the machine falls on neighbours and not on one pair's whole sample. The tasks of training follow from what was
measured before, and are in `race`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from curvlab.measure.source import source_hash
from curvlab.providers import Provider
from curvlab.providers.registry import providers as provider_registry
from curvlab.registry import Registry
from curvlab.solvers import Solver
from curvlab.solvers.registry import solvers as solver_registry
from curvlab.studies.compare.settings import Settings
from curvlab.studies.store import Row

__all__ = ["Kind", "Task", "cost_tasks", "first_tasks", "head_of", "labels"]


Kind = Literal["error", "solve", "cost", "tuning", "convergence"]


@dataclass(frozen=True)
class Task:
    """One cell: what to measure, and what its row says of itself (`head`: key, study, labels)."""

    kind: Kind
    settings: Settings
    head: Row = field(hash=False)
    provider: str | Provider = ""
    solver: str | Solver = ""
    optimizer: str = ""


def first_tasks(settings: Settings, left_out: Collection[tuple[str, str]] = ()) -> Iterator[Task]:
    """Errors, and all that is measured of a pair once; none is left out, since these find out which to."""
    for provider in settings.providers:
        yield _task(settings, "error", {"provider": provider})
    for provider, solver in settings.pairs:
        choice = {"provider": provider, "solver": solver}
        yield _task(settings, "solve", choice)


def cost_tasks(settings: Settings, left_out: Collection[tuple[str, str]] = ()) -> Iterator[Task]:
    """The rounds of timing of the pairs that are not `left_out`."""
    pairs = [pair for pair in settings.pairs if labels(*pair) not in left_out]
    for repetition in range(settings.repetitions):
        turn = repetition % max(len(pairs), 1)
        for provider, solver in pairs[turn:] + pairs[:turn]:
            task = _task(settings, "cost", {"provider": provider, "solver": solver})
            task.head["repetition"] = repetition
            yield task


def labels(provider: Any, solver: Any) -> tuple[str, str]:
    """The short names of a pair, as rows have them."""
    return provider_registry.label(provider), solver_registry.label(solver)


def _task(settings: Settings, kind: Kind, choice: dict[str, Any]) -> Task:
    names: dict[str, Registry[Any]] = {"provider": provider_registry, "solver": solver_registry}
    key = settings.key(kind, **{what: names[what].identity(spec) for what, spec in choice.items()})
    shown = {what: names[what].label(spec) for what, spec in choice.items()}
    head = head_of(settings, kind, key) | shown
    return Task(kind, settings, head, **choice)


def head_of(settings: Settings, kind: Kind, key: str) -> Row:
    """What every row of a comparison says of itself first."""
    return {"key": key, "kind": kind, "study": settings.study, "source": source_hash()}
