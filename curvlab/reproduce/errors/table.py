"""Tables 2 to 5: layer-wise errors of the curvature matrices, averaged along training.

The paper leaves open the optimizer behind the trajectory, the number of updates s, the examples behind E, the
pre-processing and the variant of Xavier's initialisation. Here: PCH-1 with EA-CG, and in tables of their own
PCH-1 with KFI, which leaves the plateau sooner (lr 0.2, α 0.01, batch 100); inputs standardised by channel,
Xavier uniform, zero biases; the updates, the stride along the trajectory and the measured batches are the
scale's, below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from curvlab.report.content import Content, Drawing, Section
from curvlab.report.theme import Look
from curvlab.reproduce.errors.averages import PHASES, averages, with_phases
from curvlab.reproduce.errors.figures import errors_by_layer, errors_by_update
from curvlab.reproduce.errors.orderings import share_of
from curvlab.reproduce.errors.trajectory import PROVIDERS, Sampling, Trajectory, errors_frame
from curvlab.reproduce.errors.words import average_table, error_answer, share_table
from curvlab.reproduce.experiment import Experiment, Outcome
from curvlab.reproduce.paper import paper_errors
from curvlab.reproduce.subjects import Options, Role, Scale, subject, uninformed
from curvlab.reproduce.task import Task
from curvlab.studies.small.errors import TOTAL
from curvlab.studies.store import Store
from curvlab.studies.train.plan import TrainPlan

__all__ = ["EA_CG", "KFI", "ErrorTable", "Length", "shares_frame"]

EA_CG = "second-order[provider=pch-1,solver=ea-cg,lr=0.2,alpha=0.01]"
KFI = "second-order[provider=pch-1,solver=kfi,lr=0.2,alpha=0.01]"
EVALUATED = {"cifar10": 10_000, "imagenet10": 200}  # for the run's own rows, which the table does not use
LIMITS = {"cifar10": "", "imagenet10": "test=200"}


@dataclass(frozen=True)
class Length:
    """How far a scale goes: updates, what is measured along them, and the seeds."""

    updates: int
    samplings: tuple[Sampling, ...]
    seeds: tuple[int, ...]


LENGTHS: dict[tuple[Scale, Role], Length] = {  # along EA-CG
    ("smoke", "cifar10"): Length(60, (Sampling(100, 6), Sampling(1000, 20)), (0, 1)),
    ("smoke", "imagenet10"): Length(60, (Sampling(100, 6), Sampling(1000, 20)), (2, 3)),
    ("laptop", "cifar10"): Length(2000, (Sampling(100, 100), Sampling(1000, 500)), (0, 1, 2, 3, 4)),
    ("laptop", "imagenet10"): Length(200, (Sampling(100, 20), Sampling(1000, 100)), (0, 1)),
    ("paper", "cifar10"): Length(100_000, (Sampling(100, 500), Sampling(1000, 5000)), (0, 1, 2, 3, 4)),
    ("paper", "imagenet10"): Length(26_000, (Sampling(100, 130), Sampling(1000, 1300)), (0, 1, 2)),
}
KFI_LENGTHS: dict[tuple[Scale, Role], Length] = LENGTHS | {
    ("laptop", "cifar10"): Length(800, (Sampling(100, 50), Sampling(1000, 200)), (0, 1)),
}


@dataclass(frozen=True)
class ErrorTable(Experiment):
    """One of the tables: a network and a criterion.

    >>> table = ErrorTable("table2", "Table 2", "cifar10", "cross-entropy", (("pch-2", "pch-1"),))
    >>> [task.label for task in table.tasks(Options("smoke"))]
    ['seed 0', 'seed 1']
    """

    role: Role
    criterion: str
    orderings: tuple[tuple[str, ...], ...]
    optimizer: str = EA_CG
    printed: str = ""
    """The table of the paper that is set beside it; by default the one of the same name."""

    def length(self, scale: Scale) -> Length:
        """How far a scale goes along this trajectory."""
        return (LENGTHS if self.optimizer == EA_CG else KFI_LENGTHS)[scale, self.role]

    def tasks(self, options: Options) -> Sequence[Task]:
        """One trajectory a seed."""
        length = self.length(options.scale)
        plans = [
            TrainPlan(
                subject(self.role, self.criterion, seed, options, LIMITS[self.role])[0],
                self.optimizer,
                evaluate_examples=EVALUATED[self.role],
            )
            for seed in options.seeds or length.seeds
        ]
        return [Trajectory(plan, length.updates, length.samplings, PROVIDERS) for plan in plans]

    def frames(self, store: Store) -> dict[str, pd.DataFrame]:
        """`errors`: every point; `averages`: the paper's averages; `orderings`: where they hold."""
        if not store.rows("errors"):
            return {}
        errors = with_phases(errors_frame(store), self.uninformed)
        return {
            "errors": errors,
            "averages": _averages(errors),
            "orderings": shares_frame(errors, self.orderings),
        }

    @property
    def uninformed(self) -> float:
        """The loss of the uniform prediction over ten classes: the height of the plateau."""
        return uninformed(self.criterion)

    def content(self, outcome: Outcome) -> Content:
        """Averages beside the paper's, orderings with their intervals, and the trajectories."""
        frames, printed = outcome.frames, paper_errors(self.printed or self.name)
        length = self.length(outcome.options.scale)
        if not frames:
            return self.nothing(outcome)
        if outcome.options.scale == "smoke":  # another network: its layers are not the paper's
            printed = printed[printed["layer"] == TOTAL]
        errors = frames["errors"]
        smallest = min(errors["batch"])
        shown = errors[errors["batch"] == smallest]
        sections = [
            *self._average_sections(frames["averages"], printed),
            _ordering_section(frames["orderings"]),
            self._trajectory_section(shown),
            _settings_section(self, outcome, length),
            self.again(outcome),
        ]
        means = frames["averages"].query("batch == @smallest and phase == 'all'")
        return Content(
            title=self.title,
            facts=_facts(self, errors, smallest),
            answer=error_answer(means, printed, frames["orderings"], smallest),
            sections=tuple(sections),
            look=lambda theme: Look.of_frames(errors, theme=theme),
            names=tuple(errors["provider"].unique()),
        )

    def _average_sections(self, means: pd.DataFrame, printed: pd.DataFrame) -> list[Section]:
        sections = []
        for batch, of_batch in means[means["phase"] == "all"].groupby("batch"):
            drawing = Drawing(
                f"layers-{batch}",
                f"Mean errors by layer, measured on {batch} examples. Left: absolute, with the paper's "
                "(hollow, dotted). Right: relative to the norm of the exact block.",
                partial(errors_by_layer, of_batch, printed),
            )
            absolute = average_table(of_batch, printed, "error", f"Mean errors, {batch} examples measured")
            relative = average_table(
                of_batch, printed.iloc[:0], "relative", f"Mean relative errors, {batch} examples measured"
            )
            title = f"Errors by layer, measured on {batch} examples"
            sections.append(
                Section(f"layers-{batch}", title, drawings=(drawing,), tables=(absolute, relative))
            )
        return sections

    def _trajectory_section(self, shown: pd.DataFrame) -> Section:
        caption = (
            "Total {} by update, a panel a seed. The grey line is the loss on the measured examples, as a "
            "share of the uniform prediction's: 1 is the plateau."
        )
        drawings = tuple(
            Drawing(
                f"{column}-by-update",
                caption.format(name),
                partial(errors_by_update, shown, column, self.uninformed),
            )
            for column, name in (("error", "error"), ("relative", "relative error"))
        )
        return Section("trajectory", "Along the trajectory", drawings=drawings)


def _parts(errors: pd.DataFrame) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The points of each measured batch: all of them, then those of each phase that has any."""
    for batch, of_batch in errors.groupby("batch"):
        for phase in ("all", *PHASES):
            chosen = of_batch if phase == "all" else of_batch[of_batch["phase"] == phase]
            if not chosen.empty:
                yield {"batch": batch, "phase": phase}, chosen


def _averages(errors: pd.DataFrame) -> pd.DataFrame:
    """The averages by measured batch and phase."""
    parts = []
    for names, chosen in _parts(errors):
        points = chosen[["seed", "step"]].drop_duplicates()
        parts.append(averages(chosen).assign(**names, points=len(points)))
    return pd.concat(parts, ignore_index=True)


def shares_frame(errors: pd.DataFrame, orderings: Sequence[Sequence[str]]) -> pd.DataFrame:
    """Where each ordering of the Totals holds, by measured batch and phase."""
    totals = errors[errors["layer"] == TOTAL]
    return pd.DataFrame(
        [
            names | vars(share_of(chosen, ordering))
            for names, chosen in _parts(totals)
            for ordering in orderings
        ]
    )


def _ordering_section(shares: pd.DataFrame) -> Section:
    text = (
        "In what share of the measured points each of the paper's orderings of the Totals holds. Points of "
        "one run are not independent: the interval (95 %) is a bootstrap over seeds and blocks of points. "
        "Seeds: how many have averages that obey the ordering, with Clopper and Pearson's interval."
    )
    return Section("orderings", "The paper's orderings", text, tables=(share_table(shares),))


def _settings_section(table: ErrorTable, outcome: Outcome, length: Length) -> Section:
    _, note = subject(table.role, table.criterion, 0, outcome.options)
    measured = "; ".join(
        f"{s.batch} examples at every {s.stride}th update" if s.stride > 1 else f"{s.batch} at every update"
        for s in length.samplings
    )
    notes = (
        "Error: ‖B̃ − |B|‖_F of a layer's bias block, from the absolute Hessian |H|; relative: over ‖|B|‖_F.",
        f"Trajectory: `{table.optimizer}`, batch 100, {length.updates} updates from each seed.",
        f"Errors measured on {measured}; the examples are drawn from the training set by the seed, each "
        "class in proportion, and are the same along a run.",
        "Network as built from the seed: sigmoid, Xavier uniform, zero biases; standardised inputs.",
        "`fisher` is the empirical Fisher of the given labels, as in the paper; `fisher[kind=exact]` takes "
        "the expectation over the model's own labels, `gauss-newton[kind=exact]` has no expectation "
        "approximation (for cross-entropy the two are equal).",
        "plateau: until the loss first falls below 98 % of the uniform prediction's; escape: until 90 %; "
        "late: after.",
    )
    return Section("settings", "What was run", notes=(*((note,) if note else ()), *notes))


def _facts(table: ErrorTable, errors: pd.DataFrame, batch: int) -> tuple[tuple[str, str], ...]:
    seeds = sorted(errors["seed"].unique())
    points = errors[errors["batch"] == batch][["seed", "step"]].drop_duplicates()
    return (
        ("data", str(errors["data"].iloc[0])),
        ("criterion", table.criterion),
        ("seeds", ", ".join(str(seed) for seed in seeds)),
        ("points", str(len(points))),
        ("updates", str(int(errors["step"].max()))),
    )
