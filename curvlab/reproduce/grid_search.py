"""The grid search as an experiment: its runs, ranked.

The paper does not say what it selected by. Its figures are read by training loss first, so that is what
settings are ranked by here, at the last epoch; the test accuracy stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from math import inf, nan

import pandas as pd

from curvlab import specs
from curvlab.report.content import Answer, Content, Section
from curvlab.report.drawing import Look
from curvlab.report.numbers import digits, join_names, percent
from curvlab.report.tables import Entry, Table
from curvlab.reproduce.curve_figures import TrainingRun, curves_frame
from curvlab.reproduce.experiment import Experiment, ExperimentOutcome, ExperimentTask, rows_of
from curvlab.reproduce.grid_study import GridStudy
from curvlab.reproduce.subjects import Options
from curvlab.studies.store import Store
from curvlab.studies.train.optimizers import SecondOrderSpec, optimizers

__all__ = ["GridSearch", "embedded_study", "ranked_frame"]

SHOWN = 10


@dataclass(frozen=True)
class GridSearch(Experiment):
    """The paper's search, or the user's own study file."""

    def tasks(self, options: Options) -> Sequence[ExperimentTask]:
        """One run for each combination of settings."""
        study = options.study or embedded_study(options.scale)
        return [TrainingRun(plan) for plan in study.plans(device=options.device, data_dir=options.data_dir)]

    def frames(self, store: Store) -> dict[str, pd.DataFrame]:
        """`grid`: one row per run, ranked within its pair; `curves`: all epochs."""
        curves = curves_frame(store)
        return {} if curves.empty else {"grid": ranked_frame(curves), "curves": curves}

    def content(self, outcome: ExperimentOutcome) -> Content:
        """The best settings of each pair, and all of them in order."""
        if not outcome.frames:
            return self.nothing(outcome)
        grid = outcome.frames["grid"]
        best = grid[grid["rank"] == 1].sort_values("train_loss")
        words = [f"{row.pair} with {_settings(row)}" for row in rows_of(best)]
        sections = (
            Section("best", "The best of each", tables=(_table("Best settings", best),)),
            Section(
                "all",
                "All settings, ranked",
                f"By training loss at the last epoch within each pair; the first {SHOWN} of each here, all "
                "in the frame.",
                tables=(_table("Ranked settings", grid[grid["rank"] <= SHOWN]),),
            ),
            self.again(outcome),
        )
        return Content(
            title=self.title,
            facts=(
                ("data", str(grid["data"].iloc[0])),
                ("criterion", str(grid["criterion"].iloc[0])),
                ("runs", str(len(grid))),
                ("epochs", str(int(grid["epoch"].max()))),
            ),
            answer=Answer(f"Selected by training loss: {join_names(words)}."),
            sections=sections,
            look=lambda theme: Look(theme=theme),
            names=(),
        )


def embedded_study(scale: str) -> GridStudy:
    """The study file that comes with a scale."""
    with resources.as_file(resources.files("curvlab.reproduce").joinpath("grids", f"{scale}.toml")) as path:
        return GridStudy.read(path)


def ranked_frame(curves: pd.DataFrame) -> pd.DataFrame:
    """The last epoch of every run with its settings, ranked by training loss within its pair.

    A run that did not finish is ranked behind all that did.
    """
    runs = ["spec", "batch", "seed", "data", "criterion"]
    ends = curves.sort_values("epoch", kind="stable").groupby(runs, sort=False).tail(1)
    settings = pd.DataFrame([_fields(spec) for spec in ends["spec"]], index=ends.index)
    kept = ["data", "criterion", "seed", "batch", "epoch", "train_loss", "test_accuracy", "cpu_seconds"]
    frame = settings.join(ends[[*kept, "status"]])
    order = frame["train_loss"].where(frame["status"] == "ok", inf).fillna(inf)
    frame["rank"] = order.groupby(frame["pair"]).rank(method="first").astype(int)
    return frame.sort_values(["pair", "rank"], ignore_index=True)


def _fields(text: str) -> dict[str, object]:
    spec = optimizers.make(text)
    if not isinstance(spec, SecondOrderSpec):
        blank = {"alpha": nan, "max_iter": nan, "tol": nan}
        return {"pair": specs.parse(text).name, "lr": getattr(spec, "lr", nan), **blank}
    solver = specs.parse(spec.solver)
    return {
        "pair": f"{spec.provider} + {solver.name}",
        "lr": spec.lr,
        "alpha": spec.alpha,
        "max_iter": float(solver.fields.get("max_iter", nan)),
        "tol": float(solver.fields.get("tol", nan)),
    }


def _settings(row: object) -> str:
    names = {"lr": "lr", "batch": "batch", "alpha": "α", "max_iter": "max CG", "tol": "tolerance"}
    values = {shown: getattr(row, name) for name, shown in names.items()}
    return ", ".join(f"{shown} {value:g}" for shown, value in values.items() if pd.notna(value))


def _table(caption: str, frame: pd.DataFrame) -> Table:
    numbers = ("lr", "batch", "alpha", "max_iter", "tol")
    heads = ("pair", "rank", *numbers, "training loss", "test accuracy", "seconds", "status")
    rows = tuple(
        (
            Entry(row["pair"]),
            Entry(str(row["rank"]), float(row["rank"])),
            *(Entry("–" if pd.isna(row[name]) else f"{row[name]:g}", row[name]) for name in numbers),
            Entry(digits(row["train_loss"]), row["train_loss"]),
            Entry(percent(row["test_accuracy"]), row["test_accuracy"]),
            Entry(digits(row["cpu_seconds"]), row["cpu_seconds"]),
            Entry(row["status"]),
        )
        for _, row in frame.iterrows()
    )
    return Table(caption, heads, (False, *(True,) * 9, False), rows)
