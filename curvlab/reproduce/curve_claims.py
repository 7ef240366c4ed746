"""The paper's claims about training, judged by the frames of its figures.

`loss at equal time` is the training loss, between epochs on a straight line, when the quickest of the runs
compared was done. With several seeds a run's numbers are their means. Runs that have not left the plateau say
nothing of each other: a pair of them is left out, and where no run has left it a claim is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd

from curvlab.report.numbers import digits, percent
from curvlab.reproduce.experiment import CLOSE, Claim, Frames, Judgement, Verdict, not_measured, verdict_of
from curvlab.reproduce.subjects import uninformed
from curvlab.studies.train.plateau import LEFT

__all__ = [
    "Choice",
    "best_claim",
    "level_claim",
    "no_dearer_claim",
    "run_table",
    "same_time_claim",
    "solver_claim",
]

Numbers = pd.DataFrame
Choice = Callable[[Numbers], Numbers]
ACCURACY_CLOSE = 0.01
ON_PLATEAU = "No run has left the plateau here, so this says nothing."
MEASURES = {
    "loss": "training loss at the end",
    "loss_at_time": "training loss at equal time",
    "accuracy": "test accuracy at the end",
    "cpu_seconds": "processor time",
}


def run_table(curves: pd.DataFrame) -> Numbers:
    """One row an optimizer: `loss`, `loss_at_time`, `accuracy`, `cpu_seconds`, means over seeds, and `left`.

    A run that did not finish has an infinite loss and no accuracy; `left` is whether it left the plateau.

    >>> curves = pd.DataFrame({"criterion": "robust", "seed": 0, "optimizer": ["x", "x", "y", "y"],
    ...     "epoch": [0, 1] * 2, "provider": "", "solver": "", "status": "ok",
    ...     "train_loss": [2.0, 1.0, 2.0, 1.5],
    ...     "test_accuracy": 0.5, "cpu_seconds": [0.0, 4.0, 0.0, 2.0]})
    >>> run_table(curves)["loss_at_time"].tolist()
    [1.5, 1.5]
    """
    rows = []
    for (criterion, seed), part in curves.groupby(["criterion", "seed"], sort=False):
        budget = part.groupby("optimizer")["cpu_seconds"].max().min()
        for optimizer, run in part.groupby("optimizer", sort=False):
            ordered = run.sort_values("epoch")
            last = ordered.iloc[-1]
            finished = last["status"] == "ok"
            at_time = np.interp(budget, ordered["cpu_seconds"], ordered["train_loss"])
            rows.append(
                {
                    "criterion": criterion,
                    "optimizer": optimizer,
                    "provider": last["provider"] or "",
                    "solver": last["solver"] or "",
                    "seed": seed,
                    "loss": float(last["train_loss"]) if finished else np.inf,
                    "loss_at_time": float(at_time) if finished else np.inf,
                    "accuracy": float(last["test_accuracy"]) if finished else np.nan,
                    "cpu_seconds": float(ordered["cpu_seconds"].max()),
                }
            )
    frame = pd.DataFrame(rows)
    runs = ["criterion", "optimizer", "provider", "solver"]
    means = frame.groupby(runs, sort=False)[list(MEASURES)].mean().reset_index()
    heights = means["criterion"].map(lambda criterion: uninformed(str(criterion)))
    return means.assign(left=means["loss"] < LEFT * heights)


def solver_claim(says: str, measure: str, better: str, than: str) -> Claim:
    """That one solver has the better `measure` than another, with the same curvature."""
    rule = (
        f"compared with the same curvature by {MEASURES[measure]}; holds: for every provider; does not hold: "
        f"for none; mixed: for some. Within {_close(measure)} is level and counts as not better"
    )
    return Claim(says, rule, partial(_judge_solvers, measure, better, than))


def _judge_solvers(measure: str, better: str, than: str, frames: Frames) -> Judgement:
    if "curves" not in frames:
        return not_measured()
    table = run_table(frames["curves"])
    left = table.groupby("provider")["left"].transform("any")
    found = _judge_pairs(table[left], measure, better, than, partial(_beats, measure=measure))
    return found or not_measured("No curvature was run with both solvers and left the plateau with one.")


def _judge_pairs(
    table: Numbers, measure: str, one: str, other: str, holds: Callable[[float, float], bool]
) -> Judgement | None:
    """Whether `holds` of two solvers, curvature by curvature; None where no curvature has both."""
    outcomes, words, shown = [], [], _show(measure)
    for provider, group in table.groupby("provider", sort=False):
        values = group.set_index("solver")[measure]
        if one in values and other in values:
            outcomes.append(holds(values[one], values[other]))
            words.append(f"{provider}: {one} {shown(values[one])}, {other} {shown(values[other])}")
    if not outcomes:
        return None
    return Judgement(f"{MEASURES[measure].capitalize()}. {'; '.join(words)}.", verdict_of(outcomes))


def best_claim(says: str, measure: str, optimizers: Sequence[str], among: Choice) -> Claim:
    """That one of `optimizers` has the best `measure` of those that `among` leaves."""
    rule = f"by {MEASURES[measure]}; mixed: level with the best, within {_close(measure)}"
    return Claim(says, rule, partial(_judge_best, measure, tuple(optimizers), among))


def _judge_best(measure: str, optimizers: tuple[str, ...], among: Choice, frames: Frames) -> Judgement:
    if "curves" not in frames:
        return not_measured()
    runs = among(run_table(frames["curves"]))
    if not runs["left"].any():
        return not_measured(ON_PLATEAU)
    table = runs.set_index("optimizer")[measure]
    ranked = table.sort_values(ascending=measure != "accuracy")
    named = [name for name in ranked.index if name in optimizers]
    if not named:
        return not_measured("The frames do not have it.")
    best = ranked.index[0]
    verdict: Verdict = "does not hold"
    if best in optimizers:
        verdict = "holds"
    elif not _beats(ranked[best], ranked[named[0]], measure):
        verdict = "mixed"
    words = "; ".join(f"{name} {_show(measure)(value)}" for name, value in ranked.items())
    return Judgement(f"{MEASURES[measure].capitalize()}, the best first: {words}.", verdict)


def level_claim(says: str, measure: str, among: Choice) -> Claim:
    """That the runs which `among` leaves are alike in `measure`."""
    rule = f"by {MEASURES[measure]}; holds: all within {_close(measure)} of the best"
    return Claim(says, rule, partial(_judge_level, measure, among))


def _judge_level(measure: str, among: Choice, frames: Frames) -> Judgement:
    if "curves" not in frames:
        return not_measured()
    runs = among(run_table(frames["curves"]))
    if len(runs) < 2:
        return not_measured("The frames do not have two of them.")
    if not runs["left"].any():
        return not_measured(ON_PLATEAU)
    values = runs.set_index("optimizer")[measure]
    best = values.max() if measure == "accuracy" else values.min()
    level = not any(_beats(best, value, measure) for value in values)
    words = "; ".join(f"{name} {_show(measure)(value)}" for name, value in values.items())
    return Judgement(f"{MEASURES[measure].capitalize()}: {words}.", "holds" if level else "does not hold")


def same_time_claim(says: str, one: str, other: str) -> Claim:
    """That two solvers take the same time with the same curvature."""
    rule = f"by processor time with the same curvature, within {percent(CLOSE)}; mixed: for some curvatures"
    return Claim(says, rule, partial(_judge_same_time, one, other))


def _judge_same_time(one: str, other: str, frames: Frames) -> Judgement:
    if "curves" not in frames:
        return not_measured()
    found = _judge_pairs(run_table(frames["curves"]), "cpu_seconds", one, other, _same)
    return found or not_measured("No curvature was run with both solvers.")


def _same(one: float, other: float) -> bool:
    return bool(abs(one - other) <= CLOSE * max(one, other))


def no_dearer_claim(says: str, baseline: str) -> Claim:
    """That no second-order run takes longer than the baseline."""
    rule = f"by processor time of as many updates: at most {percent(CLOSE)} longer; mixed: for some"
    return Claim(says, rule, partial(_judge_no_dearer, baseline))


def _judge_no_dearer(baseline: str, frames: Frames) -> Judgement:
    if "curves" not in frames:
        return not_measured()
    values = run_table(frames["curves"]).set_index("optimizer")["cpu_seconds"]
    if baseline not in values or len(values) < 2:
        return not_measured(f"The frames do not have {baseline} and another.")
    others = values.drop(baseline)
    words = "; ".join(f"{name} {digits(value / values[baseline])}" for name, value in others.items())
    outcomes = [bool(value <= (1 + CLOSE) * values[baseline]) for value in others]
    return Judgement(f"Processor time over that of {baseline}: {words}.", verdict_of(outcomes))


def _beats(one: float, other: float, measure: str) -> bool:
    """Whether `one` is better by more than counts as level."""
    if measure == "accuracy":
        return bool(np.isnan(other) or one > other + ACCURACY_CLOSE)
    return bool(one < other * (1 - CLOSE))


def _close(measure: str) -> str:
    return "one percentage point" if measure == "accuracy" else percent(CLOSE)


def _show(measure: str) -> Callable[[float], str]:
    if measure == "accuracy":
        return percent
    return (lambda value: f"{digits(value)} s") if measure == "cpu_seconds" else digits
