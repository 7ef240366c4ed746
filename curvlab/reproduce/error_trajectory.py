"""The paper's layer-wise errors along a training run: the task behind Tables 2 to 5.

At the parameters θ⁰, θ^s, θ^2s, … that a run visits, ‖B̃^t - |B^t|‖_F of every provider at every layer, on
examples drawn once by the seed and the same along the whole run, so that only the parameters change. Each
size of the measured batch has a stride s of its own: the exact Hessian's cost grows with the batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd
from torch import Tensor

from curvlab.measure.environment import source_hash
from curvlab.problem import Problem
from curvlab.reproduce.experiment import Places, Row, ShowShare
from curvlab.studies.small.errors import TOTAL, errors
from curvlab.studies.store import Store, key_of
from curvlab.studies.train.folder import steps_in
from curvlab.studies.train.plan import TrainPlan
from curvlab.studies.train.run import TrainProgress, TrainRun, train

__all__ = ["PROVIDERS", "Sampling", "Trajectory", "errors_frame"]

PROVIDERS = ("fisher", "gauss-newton", "pch-1", "pch-2", "fisher[kind=exact]", "gauss-newton[kind=exact]")
POINT, END = "errors", "trajectory"


@dataclass(frozen=True)
class Sampling:
    """Errors on `batch` examples, at every `stride`-th update."""

    batch: int
    stride: int


@dataclass(frozen=True)
class Trajectory:
    """One training run of `updates` steps, and the errors at the points of its samplings.

    >>> from curvlab.studies.setup import Setup
    >>> task = Trajectory(TrainPlan(Setup(batch=100)), updates=20, samplings=(Sampling(50, 10),))
    >>> task.points
    [(0, 50), (10, 50)]
    """

    plan: TrainPlan
    updates: int
    samplings: tuple[Sampling, ...]
    providers: tuple[str, ...] = PROVIDERS

    @property
    def label(self) -> str:
        """The seed tells one trajectory of an experiment from another."""
        return f"seed {self.plan.setup.seed}"

    @property
    def points(self) -> list[tuple[int, int]]:
        """The updates measured at, each with the size of the measured batch, in the order of the run."""
        found = [(step, s.batch) for s in self.samplings for step in range(0, self.updates, s.stride)]
        return sorted(found)

    def point_key(self, step: int, batch: int) -> str:
        """The key of a point's row: all that its numbers depend on."""
        return key_of(
            {"kind": POINT, "plan": self.identity, "step": step, "batch": batch, "providers": self.providers}
        )

    @cached_property
    def identity(self) -> str:
        """The key of the run, whatever its length."""
        return self.plan.key

    @property
    def run_key(self) -> str:
        """The key of the run with what is measured along it: other points need the parameters again."""
        return key_of({"plan": self.identity, "samplings": [asdict(s) for s in self.samplings]})

    @property
    def end_key(self) -> str:
        """The key of the row that says how the run ended."""
        return key_of({"kind": END, "run": self.run_key, "updates": self.updates})

    def finished(self, store: Store) -> bool:
        """Whether every point is measured, or the run ended before."""
        keys = store.keys()
        return self.end_key in keys and (
            _ended_early(store, self.end_key) or all(self.point_key(*point) in keys for point in self.points)
        )

    def prepare(self) -> None:
        """Load the data, build the model and the optimizer."""
        TrainRun(self.plan)

    def run(self, places: Places, show: ShowShare) -> None:
        """Train, measure at the points that the store lacks, and say how the run ended."""
        store = Store(places.store)
        observer = _Observer(self, store)
        folder = places.runs / self.run_key

        def progress(state: TrainProgress) -> None:
            done = state.epoch * state.steps + state.step
            show(min(done / self.updates, 1.0), f"{self.label}, update {done} of {self.updates}")

        frame = train(
            replace(self.plan, epochs=self.updates),  # more than there are: the updates end the run
            folder,
            fresh=places.fresh or self._passed_a_missing_point(store, folder),
            on_progress=progress,
            observe=observer,
            should_stop=lambda: observer.step >= self.updates,
        )
        last = frame.iloc[-1]
        if not store.has(self.end_key):
            store.append(
                {
                    "kind": END,
                    "key": self.end_key,
                    "source": source_hash(),
                    "seed": self.plan.setup.seed,
                    "criterion": self.plan.setup.criterion,
                    "steps": observer.step,
                    "status": last["status"],
                    "message": last["message"],
                    "plan": self.plan.canonical(),
                    "samplings": [asdict(sampling) for sampling in self.samplings],
                }
            )

    def _passed_a_missing_point(self, store: Store, folder: Path) -> bool:
        """Whether the run is past a point that the store lacks, so that its parameters are needed again.

        A point is stored before the checkpoint after it, so this is a store that has begun anew.
        """
        keys, reached = store.keys(), steps_in(folder)
        return any(step < reached and self.point_key(step, batch) not in keys for step, batch in self.points)


class _Observer:
    """Measures the run at the points that are not in the store."""

    def __init__(self, task: Trajectory, store: Store) -> None:
        self.task, self.store, self.step = task, store, 0
        self._batches: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, run: TrainRun) -> None:
        self.step = run.steps
        for sampling in self.task.samplings:
            due = run.steps % sampling.stride == 0 and run.steps < self.task.updates
            new = due and not self.store.has(self.task.point_key(run.steps, sampling.batch))
            # The update before a loss that is not finite: the next step ends the run with that reason.
            if new and all(bool(p.isfinite().all()) for p in run.model.parameters()):
                self.store.append(self._point(run, sampling.batch))

    def _point(self, run: TrainRun, batch: int) -> Row:
        started = perf_counter()
        problem = Problem(run.model, run.criterion, *self._examples(run, batch))
        frame = errors(problem, self.task.providers)
        return {
            "kind": POINT,
            "key": self.task.point_key(run.steps, batch),
            "source": source_hash(),
            "criterion": self.task.plan.setup.criterion,
            "data": self.task.plan.setup.data,
            "seed": self.task.plan.setup.seed,
            "step": run.steps,
            "batch": batch,
            "loss": float(problem.loss()),
            "seconds": perf_counter() - started,
            "layers": [str(layer) for layer in frame["layer"].unique()],
            "error": _by_provider(frame, "error"),
            "relative": _by_provider(frame, "relative"),
        }

    def _examples(self, run: TrainRun, batch: int) -> tuple[Tensor, Tensor]:
        if batch not in self._batches:
            self._batches[batch] = run.data.train.at_most(batch, self.task.plan.setup.seed).all()
        return self._batches[batch]


def _by_provider(frame: pd.DataFrame, column: str) -> dict[str, list[float]]:
    return {str(name): list(group[column]) for name, group in frame.groupby("provider", sort=False)}


def _ended_early(store: Store, key: str) -> bool:
    return any(row["key"] == key and row["status"] != "ok" for row in store.rows(END))


def errors_frame(store: Store) -> pd.DataFrame:
    """The points of a store as rows: seed, step, batch, loss, provider, layer, error, relative.

    `layer` is a number, 1 next to the input, or `Total`.
    """
    rows: list[dict[str, Any]] = []
    for point in store.rows(POINT):
        head = {name: point[name] for name in ("criterion", "data", "seed", "step", "batch", "loss")}
        for provider, values in point["error"].items():
            relative = point["relative"][provider]
            for layer, error, ratio in zip(point["layers"], values, relative, strict=True):
                number = layer if layer == TOTAL else int(layer)
                rows.append(head | {"provider": provider, "layer": number, "error": error, "relative": ratio})
    return pd.DataFrame(rows).sort_values(["seed", "batch", "step"], kind="stable", ignore_index=True)
