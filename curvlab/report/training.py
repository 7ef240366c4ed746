"""What the races say: the loss each optimizer reached, in how many epochs and in how much processor time.

With several seeds an optimizer is judged by its test loss, seed by seed against the others
(`curvlab.studies.compare.decisions`): those that cannot be told from the lowest are named together, and then
nobody has won. With one run each there is no spread, and training losses within five per cent of each other
are called too close to call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from curvlab.report.numbers import count_words, digits, join_names, second_words, sentence
from curvlab.studies.compare.decisions import decide
from curvlab.studies.train.plan import RATES, rate_words

__all__ = [
    "CLOSE",
    "Run",
    "bands",
    "leaders",
    "lost_in_time",
    "race_ends",
    "runs",
    "settings_words",
    "training_words",
]

CLOSE = 0.05
CONFIDENCE = 0.95
"""Of the intervals between the optimizers of a race."""


@dataclass(frozen=True)
class Run:
    """One optimizer: its loss at the end, and after as much time as the others had.

    With one seed these are training losses, and the time is that of the quickest run: the loss is that of the
    last epoch finished by then, NaN for none. With several they are medians of test losses, the time is equal
    processor time (`budget` seconds), and `losses` and `losses_in_budget` have one entry per seed, NaN for
    one that failed or diverged. `settings` are its learning rate, damping and momentum in words, empty where
    they are not known; `edge` names those that tuning found at the end of their grid.
    """

    optimizer: str
    provider: str
    solver: str
    epochs: float
    seconds: float
    loss: float
    loss_in_budget: float
    settings: str = ""
    losses: tuple[float, ...] = ()
    losses_in_budget: tuple[float, ...] = ()
    epochs_in_budget: float = math.nan
    budget: float = math.nan
    tuned: bool = False
    edge: str = ""
    tuning_epochs: float = math.nan
    tuning_seconds: float = math.nan

    @property
    def finished(self) -> bool:
        """Whether it ended with a finite loss, from every seed."""
        return math.isfinite(self.loss)

    @property
    def seeds(self) -> int:
        """From how many seeds it ran."""
        return max(len(self.losses), 1)


def runs(convergence: pd.DataFrame | None) -> list[Run]:
    """One `Run` for each optimizer in the frame; one that failed or diverged has a loss of NaN."""
    if convergence is None or convergence.empty:
        return []
    groups = [
        (str(name), group.sort_values("epoch", kind="stable"))
        for name, group in convergence.groupby("optimizer", sort=False)
    ]
    if "seed" in convergence and convergence["seed"].nunique() > 1:
        return [_race_run(name, group) for name, group in groups]
    budget = min((_end(group) for _, group in groups if math.isfinite(_loss(group))), default=math.nan)
    return [_run(name, group, budget) for name, group in groups]


def leaders(found: Sequence[Run], column: str = "") -> list[Run]:
    """The runs that cannot be told from the one with the lowest loss, that one first.

    `column` is `loss` for equal epochs, or `loss_in_budget` for equal time. By default it is equal time in a
    race from several seeds, since an epoch of one optimizer may cost ten of another's; else equal epochs.
    """
    if not column:
        race = any(run.losses_in_budget and math.isfinite(run.loss_in_budget) for run in found)
        column = "loss_in_budget" if race else "loss"
    finite = [run for run in found if math.isfinite(getattr(run, column))]
    if not finite:
        return []
    values = {run.optimizer: getattr(run, _BY_SEED[column]) for run in finite}
    if all(len(losses) > 1 for losses in values.values()):
        by_name = {run.optimizer: run for run in finite}
        return [by_name[name] for name in decide(values, confidence=CONFIDENCE, independent=True).group]
    finite.sort(key=lambda run: float(getattr(run, column)))
    lowest = getattr(finite[0], column)
    return [run for run in finite if getattr(run, column) <= lowest + CLOSE * abs(lowest)]


def lost_in_time(found: Sequence[Run]) -> list[Run]:
    """The runs that made the epochs from every seed, and diverged from one before equal time was over."""
    timed = any(math.isfinite(run.loss_in_budget) for run in found)
    return [
        run
        for run in found
        if timed and run.finished and run.losses_in_budget and math.isnan(run.loss_in_budget)
    ]


_BY_SEED = {"loss": "losses", "loss_in_budget": "losses_in_budget"}


def training_words(found: Sequence[Run]) -> list[str]:
    """What the runs show, by epochs, by time and against the baselines, in sentences."""
    best = leaders(found, "loss")
    lost = [run for run in found if not run.finished]
    if not best:
        return ["In training no run ended with a finite loss."] if found else []
    race = any(run.seeds > 1 for run in found)
    words = _race_words(found) if race else [_by_epochs(best, found), _by_quickest(found)]
    if lost:
        words.append(sentence(f"{join_names([_lost(run) for run in lost])} failed or diverged in training"))
    return [" ".join(filter(None, words)), *settings_words(found)]


def settings_words(found: Sequence[Run]) -> list[str]:
    """What each run was made with, and how that was chosen: a sentence, or none where that is not known."""
    known = [run for run in found if run.settings]
    if not known:
        return []
    groups: dict[str, list[Run]] = {}
    for run in known:
        groups.setdefault(run.settings, []).append(run)
    told = "; ".join(f"{_who(group, known)} with {settings}" for settings, group in groups.items())
    if not any(run.tuned for run in known):
        return [
            "Every run had fixed settings, which curvlab did not tune, and other settings may change the "
            f"order: {told}."
        ]
    return [_tuning_words(known, told)]


def bands(convergence: pd.DataFrame, against: str, measure: str) -> pd.DataFrame:
    """The curve of one optimizer over its seeds: by epoch the median of both columns, and the range.

    >>> frame = pd.DataFrame({"seed": [0, 0, 1, 1], "epoch": [0, 1, 0, 1], "loss": [2.0, 1.0, 2.2, 0.8]})
    >>> bands(frame, "epoch", "loss")["loss"].tolist(), bands(frame, "epoch", "loss")["lower"].tolist()
    ([2.1, 0.9], [2.0, 0.8])
    """
    by_epoch = convergence.groupby("epoch")
    found = pd.DataFrame({against: by_epoch[against].median(), measure: by_epoch[measure].median()})
    found["lower"], found["upper"] = by_epoch[measure].min(), by_epoch[measure].max()
    # Where some seeds have stopped, a median of the others would jump.
    whole = by_epoch[measure].count() == by_epoch[measure].count().max()
    return found[whole].reset_index(drop=True)


def race_ends(convergence: pd.DataFrame) -> pd.DataFrame:
    """One row per optimizer, where its seeds ended: the median of each number, and the range of test losses.

    A seed that failed or diverged is told in `status` and counts in no number.
    """
    ordered = convergence.sort_values("epoch", kind="stable")
    if "seed" not in ordered or ordered["seed"].nunique() <= 1:
        return ordered.groupby("optimizer", sort=False).tail(1)
    ends = ordered.groupby(["optimizer", "seed"], sort=False).tail(1)
    order = list(dict.fromkeys(convergence["optimizer"]))
    return pd.DataFrame([_race_end(ends[ends["optimizer"] == name]) for name in order])


def _race_end(ends: pd.DataFrame) -> pd.Series[float]:
    fine = ends[ends["status"] == "ok"]
    row = ends.iloc[0].copy()
    for column in ends.columns[[pd.api.types.is_numeric_dtype(kind) for kind in ends.dtypes]]:
        if column != "tuned":
            row[column] = fine[column].median() if len(fine) else math.nan
    row["seeds"] = len(ends)
    row["test_low"], row["test_high"] = fine["test_loss"].min(), fine["test_loss"].max()
    row["status"] = "ok" if len(fine) == len(ends) else f"{len(ends) - len(fine)} of {len(ends)} failed"
    return row


def _tuning_words(known: Sequence[Run], told: str) -> str:
    epochs = {int(run.tuning_epochs) for run in known if math.isfinite(run.tuning_epochs)}
    seconds = sum(run.tuning_seconds for run in known if math.isfinite(run.tuning_seconds))
    each = f"{min(epochs)} to {max(epochs)}" if len(epochs) > 1 else f"{max(epochs, default=0)}"
    edges = [f"{run.optimizer} ({run.edge})" for run in known if run.edge]
    text = (
        "Learning rate, and α of the pairs, were chosen on a validation set by successive halving, with "
        f"{each} epochs of training for each optimizer ({second_words(seconds)} of the processor in all): "
        f"{told}."
    )
    if edges:
        text += f" At the end of the grid, so that a better value may lie beyond: {join_names(edges)}."
    return text


def _who(group: Sequence[Run], known: Sequence[Run]) -> str:
    """The runs of a group by name; all second-order runs, if they are several, as such."""
    pairs = [run for run in known if run.provider]
    if len(pairs) > 1 and all(run in group for run in pairs):
        return join_names(["every pair", *(run.optimizer for run in group if not run.provider)])
    return join_names([run.optimizer for run in group])


def _lost(run: Run) -> str:
    failed = sum(not math.isfinite(loss) for loss in run.losses)
    return f"{run.optimizer} ({failed} of {run.seeds} seeds)" if run.losses else run.optimizer


def _race_words(found: Sequence[Run]) -> list[str]:
    """The two budgets: who is lowest in each, or that nobody is."""
    first = next(run for run in found if run.finished)
    epochs = f"After {count_words(int(first.epochs), 'epoch')} from {count_words(first.seeds, 'seed')}"
    words = [_standing(epochs, leaders(found, "loss"), found, "loss")]
    timed = leaders(found, "loss_in_budget")
    if timed:
        spent = f"After {second_words(timed[0].budget)} of the processor each"
        words.append(_standing(spent, timed, found, "loss_in_budget"))
    if late := lost_in_time(found):
        told = join_names([run.optimizer for run in late])
        words.append(
            sentence(f"from one seed or more {told} diverged after these epochs and before that time")
        )
    return words


def _standing(budget: str, best: Sequence[Run], found: Sequence[Run], column: str) -> str:
    lowest = best[0]
    if best[1:]:
        names = join_names([f"{run.optimizer} ({_range(run, column)})" for run in best])
        text = f"{budget}, no difference in test loss can be told between {names}"
    else:
        text = f"{budget}, {lowest.optimizer} has the lowest test loss, {_range(lowest, column)}"
    others = [run for run in found if run not in best and math.isfinite(getattr(run, column))]
    if others:
        reached = join_names([f"{run.optimizer} {_range(run, column)}" for run in others])
        text += f"; {'higher' if best[1:] else 'the others'}: {reached}"
    return text + "."


def _range(run: Run, column: str) -> str:
    values = [value for value in getattr(run, _BY_SEED[column]) if math.isfinite(value)]
    after = "" if column == "loss" else f" in {count_words(round(run.epochs_in_budget), 'epoch')}"
    return f"{digits(getattr(run, column))} [{digits(min(values))} to {digits(max(values))}]{after}"


def _by_epochs(best: Sequence[Run], found: Sequence[Run]) -> str:
    first = best[0]
    epochs = count_words(int(first.epochs), "epoch")
    text = (
        f"In training for {epochs}, one run each, {first.optimizer} reached the lowest training loss, "
        f"{digits(first.loss)} in {second_words(first.seconds)}"
    )
    if best[1:]:
        rivals = join_names([run.optimizer for run in best[1:]])
        text += f"; {rivals} came within {100 * CLOSE:g} %, too close to call"
    text += "."
    baselines = [run for run in found if not run.provider and run.finished and run not in best]
    if baselines:
        reached = [f"{run.optimizer} {digits(run.loss)} in {second_words(run.seconds)}" for run in baselines]
        text += f" The baselines: {join_names(reached)}."
    return text


def _by_quickest(found: Sequence[Run]) -> str:
    best = leaders(found, "loss_in_budget")
    quickest = min((run for run in found if run.finished), key=lambda run: run.seconds)
    within = [run for run in found if math.isfinite(run.loss_in_budget)]
    budget = f"{second_words(quickest.seconds)} of the quickest run, {quickest.optimizer}"
    if len(within) < 2:
        return f"Within the {budget}, no other had finished an epoch." if len(found) > 1 else ""
    text = f"Within the {budget}, {len(within)} runs had finished an epoch; {best[0].optimizer} was lowest"
    if best[1:]:
        text += f", with {join_names([run.optimizer for run in best[1:]])} too close to call"
    return text + f" ({digits(best[0].loss_in_budget)})."


def _race_run(name: str, group: pd.DataFrame) -> Run:
    seeds = [seed for _, seed in group.groupby("seed")]
    losses = tuple(_loss(seed, "test_loss") for seed in seeds)
    within = tuple(float(seed["loss_in_time"].iloc[-1]) for seed in seeds)
    return Run(
        **_identity_of(name, group),
        epochs=float(group["epoch"].max()),
        seconds=float(np.median([_end(seed) for seed in seeds])),
        loss=float(np.median(losses)),
        loss_in_budget=float(np.median(within)),
        losses=losses,
        losses_in_budget=within,
        epochs_in_budget=float(group["epochs_in_time"].median()),
        budget=float(group["time_budget"].max()),
        **_tuning(group),
    )


def _run(name: str, group: pd.DataFrame, budget: float) -> Run:
    within = group[(group["seconds"] <= budget) & (group["epoch"] > 0)]
    return Run(
        **_identity_of(name, group),
        epochs=float(group["epoch"].max()),
        seconds=_end(group),
        loss=_loss(group),
        loss_in_budget=_loss(within) if len(within) else math.nan,
        **_tuning(group),
    )


def _identity_of(name: str, group: pd.DataFrame) -> dict[str, Any]:
    rates = {one.name: float(group[one.name].iloc[0]) for one in RATES if one.name in group}
    return {
        "optimizer": name,
        "provider": _text(group, "provider"),
        "solver": _text(group, "solver"),
        "settings": rate_words(rates),
    }


def _tuning(group: pd.DataFrame) -> dict[str, Any]:
    """How the settings were chosen; a frame of an older folder does not say."""
    if "tuned" not in group or not bool(group["tuned"].iloc[0]):
        return {}
    return {
        "tuned": True,
        "edge": _text(group, "at_edge"),
        "tuning_epochs": float(group["tuning_epochs"].iloc[0]),
        "tuning_seconds": float(group["tuning_seconds"].iloc[0]),
    }


def _end(group: pd.DataFrame) -> float:
    return float(group["seconds"].max())


def _loss(group: pd.DataFrame, column: str = "train_loss") -> float:
    last = group.iloc[-1]
    return float(last[column]) if last["status"] == "ok" and pd.notna(last[column]) else math.nan


def _text(group: pd.DataFrame, column: str) -> str:
    value = group[column].iloc[0]
    return str(value) if pd.notna(value) else ""
