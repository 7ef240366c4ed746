"""Where a comparison measures: points on the way of one training, several seeds, several batches.

A scene is one point (`points`), one seed and one batch; every number of a comparison is of one scene, or of
all of a point. Training begins at the checkpoint where there is one. Its states are kept while its points are
measured one after the other, and are the same whoever trains: the seed decides.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from curvlab import imports
from curvlab.exceptions import CurvlabError
from curvlab.studies.compare.points import GIVEN, Point
from curvlab.studies.compare.settings import Settings, build
from curvlab.studies.setup import Setup
from curvlab.studies.weights import load_weights

if TYPE_CHECKING:
    from torch import Tensor

    from curvlab.problem import Problem

__all__ = ["Scene", "SceneProblems", "scenes_of"]

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
        return _again(problem)

    def _state(self, scene: Scene) -> tuple[dict[str, Tensor], int]:
        if (scene.seed, scene.point) not in self._states:
            self._states = {(scene.seed, name): state for name, state in self._train(scene.seed).items()}
        return self._states[scene.seed, scene.point]

    def _train(self, seed: int) -> dict[str, tuple[dict[str, Tensor], int]]:
        """The state at each point, from one training."""
        import torch

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
        import torch

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
        from curvlab.studies.compare.descent import backpropagate

        self.optimizer.zero_grad()
        loss = backpropagate(self.problem, inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss

    def _operations(self) -> float:
        """Of one step."""
        from curvlab.measure.flops import counting
        from curvlab.studies.compare.descent import backpropagate

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


def _again(problem: Problem) -> Problem:
    """The same problem without what was computed of it before its parameters changed."""
    if problem.streamed:
        return problem
    batch = next(problem.batches())
    return problem.with_data(batch.inputs, batch.targets)
