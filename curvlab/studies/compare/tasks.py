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
from curvlab.solvers import Solver
from curvlab.solvers.registry import solvers as solver_registry
from curvlab.specs import Registry
from curvlab.studies.compare.controls import CONTROLS, TIMED
from curvlab.studies.compare.scenes import Scene, scenes_of
from curvlab.studies.compare.settings import Settings
from curvlab.studies.store import Row

__all__ = [
    "Kind",
    "Task",
    "cost_tasks",
    "first_tasks",
    "further_tasks",
    "head_of",
    "labels",
]


Kind = Literal["scene", "error", "solve", "control", "cost", "tuning", "convergence"]

UNTRAINED = Scene("init", 0, 0)


@dataclass(frozen=True)
class Task:
    """One cell: what to measure, and what its row says of itself (`head`: key, study, labels)."""

    kind: Kind
    settings: Settings
    head: Row = field(hash=False)
    provider: str | Provider = ""
    solver: str | Solver = ""
    optimizer: str = ""
    control: str = ""
    scene: Scene = UNTRAINED

    @property
    def first(self) -> bool:
        """Whether its scene is the first of all, where bytes and operations are counted: they do not vary."""
        return self.scene == scenes_of(self.settings)[0]

    @property
    def first_draw(self) -> bool:
        """Whether its scene is the first of its point: times and further dampings are measured there."""
        return _first_draw(self.settings, self.scene)


def first_tasks(settings: Settings, left_out: Collection[tuple[str, str]] = ()) -> Iterator[Task]:
    """All that is measured once in the first scene; no pair is left out, since this finds out which to."""
    yield from _scene_tasks(settings, scenes_of(settings)[0], ())


def further_tasks(settings: Settings, left_out: Collection[tuple[str, str]] = ()) -> Iterator[Task]:
    """The same in all other scenes, of the pairs that are not `left_out`."""
    for scene in scenes_of(settings)[1:]:
        yield from _scene_tasks(settings, scene, left_out)


def _scene_tasks(settings: Settings, scene: Scene, left_out: Collection[tuple[str, str]]) -> Iterator[Task]:
    yield _task(settings, "scene", {}, scene)
    for control in CONTROLS:
        # SGD's step is the gradient's: only its cost is its own, and is measured once.
        if control != "sgd" or scene == scenes_of(settings)[0]:
            yield _task(settings, "control", {"control": control}, scene)
    pairs = [pair for pair in settings.pairs if labels(*pair) not in left_out]
    for provider in dict.fromkeys(provider for provider, _ in pairs):
        yield _task(settings, "error", {"provider": provider}, scene)
    for provider, solver in pairs:
        yield _task(settings, "solve", {"provider": provider, "solver": solver}, scene)


def cost_tasks(settings: Settings, left_out: Collection[tuple[str, str]] = ()) -> Iterator[Task]:
    """The rounds of timing at each point, of the controls and of the pairs that are not `left_out`."""
    pairs = [pair for pair in settings.pairs if labels(*pair) not in left_out]
    if not pairs:
        return
    choices: list[dict[str, Any]] = [{"control": control} for control in TIMED]
    choices += [{"provider": provider, "solver": solver} for provider, solver in pairs]
    for scene in (scene for scene in scenes_of(settings) if _first_draw(settings, scene)):
        for repetition in range(settings.repetitions):
            turn = repetition % len(choices)
            for choice in choices[turn:] + choices[:turn]:
                task = _task(settings, "cost", choice, scene)
                task.head["repetition"] = repetition
                yield task


def _first_draw(settings: Settings, scene: Scene) -> bool:
    first = scenes_of(settings)[0]
    return (scene.seed, scene.batch) == (first.seed, first.batch)


def labels(provider: Any, solver: Any) -> tuple[str, str]:
    """The short names of a pair, as rows have them."""
    return provider_registry.label(provider), solver_registry.label(solver)


def _task(settings: Settings, kind: Kind, choice: dict[str, Any], scene: Scene) -> Task:
    names: dict[str, Registry[Any]] = {"provider": provider_registry, "solver": solver_registry}
    of = {what: names[what].identity(spec) if what in names else spec for what, spec in choice.items()}
    key = settings.key(kind, **of, **scene.fields())
    shown = {what: names[what].label(spec) if what in names else spec for what, spec in choice.items()}
    if "control" in choice:
        shown |= {"provider": choice["control"], "solver": ""}  # rows of the store have both
    head = head_of(settings, kind, key) | shown | scene.fields()
    return Task(kind, settings, head, **choice, scene=scene)


def head_of(settings: Settings, kind: Kind, key: str) -> Row:
    """What every row of a comparison says of itself first."""
    return {"key": key, "kind": kind, "study": settings.study, "source": source_hash()}
