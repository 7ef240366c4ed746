"""What the convergence runs say: the loss each reached, in how many epochs and seconds.

There is one run for each optimizer, so no spread is measured: losses within five per cent of each other are
called too close to call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from curvlab.report.numbers import digits, second_words
from curvlab.report.words import count_words, join_names, sentence
from curvlab.studies.train.columns import RATES, rate_words

__all__ = ["CLOSE", "Run", "leaders", "runs", "settings_words", "training_words"]

CLOSE = 0.05


@dataclass(frozen=True)
class Run:
    """One optimizer's run: its loss at the end, and when the quickest run of all was done.

    The latter is that of the last epoch it had finished by then, NaN for none. `settings` are its learning
    rate, damping and momentum in words, empty where they are not known.
    """

    optimizer: str
    provider: str
    solver: str
    epochs: float
    seconds: float
    loss: float
    loss_in_budget: float
    settings: str = ""

    @property
    def finished(self) -> bool:
        """Whether it ended with a finite loss."""
        return math.isfinite(self.loss)


def runs(convergence: pd.DataFrame | None) -> list[Run]:
    """One `Run` for each optimizer in the frame; a run that failed or diverged has a loss of NaN."""
    if convergence is None or convergence.empty:
        return []
    groups = [
        (str(name), group.sort_values("epoch"))
        for name, group in convergence.groupby("optimizer", sort=False)
    ]
    budget = min((_end(group) for _, group in groups if math.isfinite(_loss(group))), default=math.nan)
    return [_run(name, group, budget) for name, group in groups]


def leaders(found: Sequence[Run], column: str = "loss") -> list[Run]:
    """The runs whose loss is within five per cent of the lowest, the lowest first."""
    finite = sorted(
        (run for run in found if math.isfinite(getattr(run, column))), key=lambda run: getattr(run, column)
    )
    if not finite:
        return []
    lowest = getattr(finite[0], column)
    return [run for run in finite if getattr(run, column) <= lowest + CLOSE * abs(lowest)]


def training_words(found: Sequence[Run]) -> list[str]:
    """What the runs show, by epochs, by wall clock and against the baselines, in sentences."""
    best = leaders(found)
    if not best:
        return ["In training no run ended with a finite loss."] if found else []
    words = [_by_epochs(best, found), _by_seconds(leaders(found, "loss_in_budget"), found)]
    lost = [run.optimizer for run in found if not run.finished]
    if lost:
        words.append(sentence(f"{join_names(lost)} failed or diverged in training"))
    return [" ".join(filter(None, words)), *settings_words(found)]


def settings_words(found: Sequence[Run]) -> list[str]:
    """What each run was made with, and that none was tuned: a sentence, or none where that is not known."""
    known = [run for run in found if run.settings]
    if not known:
        return []
    groups: dict[str, list[Run]] = {}
    for run in known:
        groups.setdefault(run.settings, []).append(run)
    told = "; ".join(f"{_who(group, known)} with {settings}" for settings, group in groups.items())
    return [
        "Every run had fixed settings, which curvlab did not tune, and other settings may change the order: "
        f"{told}."
    ]


def _who(group: Sequence[Run], known: Sequence[Run]) -> str:
    """The runs of a group by name; all second-order runs, if they are several, as such."""
    pairs = [run for run in known if run.provider]
    if len(pairs) > 1 and all(run in group for run in pairs):
        return join_names(["every pair", *(run.optimizer for run in group if not run.provider)])
    return join_names([run.optimizer for run in group])


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


def _by_seconds(best: Sequence[Run], found: Sequence[Run]) -> str:
    quickest = min((run for run in found if run.finished), key=lambda run: run.seconds)
    within = [run for run in found if math.isfinite(run.loss_in_budget)]
    budget = f"{second_words(quickest.seconds)} of the quickest run, {quickest.optimizer}"
    if len(within) < 2:
        return f"Within the {budget}, no other had finished an epoch." if len(found) > 1 else ""
    text = f"Within the {budget}, {len(within)} runs had finished an epoch; {best[0].optimizer} was lowest"
    if best[1:]:
        text += f", with {join_names([run.optimizer for run in best[1:]])} too close to call"
    return text + f" ({digits(best[0].loss_in_budget)})."


def _run(name: str, group: pd.DataFrame, budget: float) -> Run:
    within = group[(group["seconds"] <= budget) & (group["epoch"] > 0)]
    return Run(
        optimizer=name,
        provider=_text(group, "provider"),
        solver=_text(group, "solver"),
        epochs=float(group["epoch"].max()),
        seconds=_end(group),
        loss=_loss(group),
        loss_in_budget=_loss(within) if len(within) else math.nan,
        settings=rate_words({one.name: float(group[one.name].iloc[0]) for one in RATES if one.name in group}),
    )


def _end(group: pd.DataFrame) -> float:
    return float(group["seconds"].max())


def _loss(group: pd.DataFrame) -> float:
    last = group.iloc[-1]
    return float(last["train_loss"]) if last["status"] == "ok" and pd.notna(last["train_loss"]) else math.nan


def _text(group: pd.DataFrame, column: str) -> str:
    value = group[column].iloc[0]
    return str(value) if pd.notna(value) else ""
