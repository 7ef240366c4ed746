"""The tasks of a comparison, in the order they are measured, and the scenes in which they are.

A scene is one point on the way of a training (`settings`), one seed and one batch; every number of a
comparison is of one scene, or of all of a point. Training begins at the checkpoint where there is one. Its
states are kept while its points are measured one after the other, and are the same whoever trains: the seed
decides.

Repetitions go round: every pair once, then every pair again from the next one on, so that a slow moment of
the machine falls on neighbours and not on one pair's whole sample. The tasks of training follow from what was
measured before, and are in `race`.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from curvlab import imports
from curvlab.exceptions import CurvlabError
from curvlab.measure.environment import source_hash
from curvlab.measure.operations import counting
from curvlab.problem import Problem
from curvlab.providers import Provider
from curvlab.providers.registry import providers as provider_registry
from curvlab.solvers import Solver
from curvlab.solvers.registry import solvers as solver_registry
from curvlab.specs import Registry
from curvlab.studies.compare.costs import CONTROLS, TIMED, fresh
from curvlab.studies.compare.directions import backpropagate
from curvlab.studies.compare.settings import GIVEN, Point, Settings, build
from curvlab.studies.setup import Setup, load_weights
from curvlab.studies.store import Row

__all__ = [
    "Kind",
    "Scene",
    "SceneProblems",
    "Task",
    "cost_tasks",
    "first_tasks",
    "further_tasks",
    "head_of",
    "labels",
    "scenes_of",
]

TRAINED_STEPS, TRAINED_OPERATIONS = 100, 5e11


@dataclass(frozen=True)
class Scene:
    """One point, one seed and one batch: the first of the epoch whose number it is, in the seed's order."""

    point: str
    seed: int
    batch: int

    def fields(self) -> dict[str, Any]:
        """As rows say it of themselves."""
        return {"point": self.point, "seed": self.seed, "draw": self.batch}


def scenes_of(settings: Settings) -> list[Scene]:
    """All scenes of a comparison: the last point first, which decides, and of each all draws.

    So the first row of a pair is that of the first draw at the deciding point.
    """
    first = getattr(settings.subject, "seed", 0)
    points = (*settings.at[-1:], *settings.at[:-1])
    draws = itertools.product(points, range(first, first + settings.seeds), range(settings.batches))
    return [Scene(*draw) for draw in draws]


class SceneProblems:
    """The problems of a comparison by scene; the states of one training are kept, those of the last seed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._states: dict[tuple[int, str], tuple[dict[str, Tensor], int]] = {}

    def problem(self, scene: Scene) -> Problem:
        """The model at the scene's point with the scene's batch."""
        return self._at(scene, 0)

    def other(self, scene: Scene) -> Problem | None:
        """The same with the next batch of that epoch; None where there is none, or data are the user's."""
        subject = self.settings.subject
        if not isinstance(subject, Setup) or imports.is_address(subject.data):
            return None
        if len(subject.load_data().batches(subject.examples)) < 2:
            return None
        return self._at(scene, 1)

    def steps(self, scene: Scene) -> int:
        """How many steps of Adam lead to the point."""
        return self._state(scene)[1] if Point.read(scene.point).kind not in (GIVEN, "init") else 0

    def _at(self, scene: Scene, start: int) -> Problem:
        subject = self.settings.subject
        if Point.read(scene.point).kind == GIVEN:
            return build(subject)
        problem = build(_seeded(subject, scene.seed), scene.batch, start)
        if Point.read(scene.point).kind == "init":
            return problem
        problem.model.load_state_dict(self._state(scene)[0])
        return fresh(problem)

    def _state(self, scene: Scene) -> tuple[dict[str, Tensor], int]:
        if (scene.seed, scene.point) not in self._states:
            self._states = {(scene.seed, name): state for name, state in self._train(scene.seed).items()}
        return self._states[scene.seed, scene.point]

    def _train(self, seed: int) -> dict[str, tuple[dict[str, Tensor], int]]:
        """The state at each point, from one training."""
        setup = _seeded(self.settings.subject, seed)
        problem = build(setup)
        if self.settings.checkpoint is not None:
            load_weights(problem.model, self.settings.checkpoint)
        training = _Training(setup, problem, self.settings)
        points = [Point.read(name) for name in self.settings.at if name not in ("init", GIVEN)]
        wanted = {point.name: training.steps_to(point) for point in points}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return {
                name: (training.state_after(steps), steps)
                for name, steps in sorted(wanted.items(), key=lambda item: item[1])
            }


class _Training:
    """Adam on the training set, or on the user's own batches, as far as it is asked for."""

    def __init__(self, setup: Setup, problem: Problem, settings: Settings) -> None:
        self.problem, self.setup = problem, setup
        self.size = min(settings.train_batch, setup.examples)
        self.optimizer = torch.optim.Adam(list(problem.network.parameters.values()), lr=settings.at_lr)
        self.batches = self._endless()
        self.done = 0

    def steps_to(self, point: Point) -> int:
        """How many steps lead to the point."""
        if point.kind == "epoch":
            return point.count * self._epoch_length()
        if point.kind == "trained":
            return max(1, min(TRAINED_STEPS, int(TRAINED_OPERATIONS / self._operations())))
        return point.count

    def state_after(self, steps: int) -> dict[str, Tensor]:
        """A copy of the model's state after so many steps in all."""
        while self.done < steps:
            loss = self._step(*next(self.batches))
            if not math.isfinite(loss):
                raise CurvlabError(
                    f"the training to the points of --at diverged at step {self.done}: the loss is {loss}. "
                    f"Give a smaller learning rate, --at-lr, or other points"
                )
        return copy.deepcopy(self.problem.model.state_dict())

    def _step(self, inputs: Any, targets: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = backpropagate(self.problem, inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss

    def _operations(self) -> float:
        """Of one step."""
        with counting() as counted:
            backpropagate(self.problem, *next(self._endless()))
        self.optimizer.zero_grad()
        return max(counted.total, 1)

    def _epoch_length(self) -> int:
        if imports.is_address(self.setup.data):
            return sum(1 for _ in self.problem.batches())
        return len(self.setup.load_data().batches(self.size))

    def _endless(self) -> Iterator[tuple[Any, Tensor]]:
        """Batches without end: an epoch of a data set in its own order, a user's own batches as they are."""
        if imports.is_address(self.setup.data):
            while True:
                for batch in self.problem.batches():
                    yield batch.inputs, batch.targets
        data = self.setup.load_data().to(self.problem.network.example.device, self.setup.torch_dtype)
        for epoch in itertools.count():
            yield from data.batches(self.size, self.setup.seed, epoch)


def _seeded(subject: Setup | Problem, seed: int) -> Setup:
    assert isinstance(subject, Setup)
    return replace(subject, seed=seed)


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
