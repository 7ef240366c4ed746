"""One training run of a figure: the task whose rows are its epochs."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from curvlab.reproduce.task import Places, Show
from curvlab.studies.store import Store
from curvlab.studies.train.folder import frame_of
from curvlab.studies.train.run import TrainPlan, TrainProgress, TrainRun, train

__all__ = ["TrainingRun", "curves_frame"]

EPOCH = "epoch"


@dataclass(frozen=True)
class TrainingRun:
    """A plan, trained once and recorded by epoch.

    >>> from curvlab.studies.setup import Setup
    >>> TrainingRun(TrainPlan(Setup(seed=3), "sgd", epochs=2)).label
    'sgd, seed 3'
    """

    plan: TrainPlan

    @property
    def label(self) -> str:
        """The optimizer and the seed."""
        return f"{self.plan.labels()['optimizer']}, seed {self.plan.setup.seed}"

    def finished(self, store: Store) -> bool:
        """Whether the last epoch is there, or the run ended before it."""
        return any(
            row["plan"] == self.plan.key and (row["epoch"] >= self.plan.epochs or row["status"] != "ok")
            for row in store.rows(EPOCH)
        )

    def prepare(self) -> None:
        """Load the data, build the model and the optimizer."""
        TrainRun(self.plan)

    def run(self, places: Places, show: Show) -> None:
        """Train, or take the run as another experiment left it, and record the epochs."""

        def progress(state: TrainProgress) -> None:
            done = (state.epoch + state.step / state.steps) / max(state.epochs, 1)
            show(min(done, 1.0), f"{self.label}, epoch {state.epoch} of {state.epochs}")

        folder = places.runs / self.plan.key
        frame = train(self.plan, folder, fresh=places.fresh, on_progress=progress, draw=False)
        store = Store(places.store)
        setup = self.plan.setup
        head = {"kind": EPOCH, "plan": self.plan.key, "criterion": setup.criterion, "data": setup.data,
                "seed": setup.seed, "batch": setup.batch, "spec": self.plan.optimizer}  # fmt: skip
        for row in frame.to_dict("records"):
            key = self.plan.row_key(int(row["epoch"]))
            if not store.has(key):
                store.append(head | {"key": key} | {str(name): value for name, value in row.items()})


def curves_frame(store: Store) -> pd.DataFrame:
    """The epochs of all runs, in the order of the runs and epochs."""
    return frame_of(store.rows(EPOCH)).drop(columns="plan", errors="ignore")
