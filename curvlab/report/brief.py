"""The answer in short: why, in two or three sentences, and what to be careful with, one sentence each.

A reader of the terminal or of the page's head wants these first; `curvlab.report.reasons` has the whole
account, which stands on the page under "Behind the answer".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from curvlab.report.controls import Against, Evidence
from curvlab.report.measures import ANGLE, LOSS, STEP, Measure
from curvlab.report.numbers import count_words, digits, join_names, percent, second_words
from curvlab.report.pareto import Candidate
from curvlab.report.training import Run, leaders

__all__ = ["gradient_reasons", "pair_reasons", "short_cautions", "training_reasons"]

Pair = tuple[str, str]


def pair_reasons(
    best: Candidate, ahead: Sequence[Candidate], measure: Measure, against: Mapping[Pair, Against]
) -> list[str]:
    """What the pair costs and does, beside the gradient, and the cheapest that is worth its price."""
    text = f"{best.name} takes {second_words(best.cost)} a step"
    if not math.isnan(best.error):
        text += f" and {_does(best.error, measure)}{_gradient_beside(best, measure, against)}"
    words = [f"{text}."]
    cheapest = ahead[0]
    if cheapest != best and not math.isnan(cheapest.error):
        ratio = digits(best.cost / cheapest.cost, 2)
        words.append(f"Cheaper: {cheapest.name}, {ratio} × less time, {percent(cheapest.error)}.")
    return words


def _does(error: float, measure: Measure) -> str:
    if measure is LOSS:
        return f"leaves {percent(error)} of the loss of its batch"
    if measure in (STEP, ANGLE):
        scale = "at its best scale " if measure is ANGLE else ""
        return f"ends {scale}{percent(error)} from the exact damped Newton step"
    return f"has bias blocks {percent(error)} from those of the absolute Hessian"


def _gradient_beside(best: Candidate, measure: Measure, against: Mapping[Pair, Against]) -> str:
    found = against.get((best.provider, best.solver))
    if found is None:
        return ""
    value = found.angle.gradient if measure is ANGLE else 1 - found.loss.gradient
    known = measure in (ANGLE, LOSS) and not math.isnan(value)
    return f"; the gradient step: {percent(value)}" if known else ""


def gradient_reasons(against: Mapping[Pair, Against]) -> list[str]:
    """Where the gradient step stands, and the pair that comes closest to beating it."""
    known = {pair: one for pair, one in against.items() if one.known}
    if not known:
        return []
    first = next(iter(known.values()))
    words = []
    if first.angle.known:
        pair = min(known, key=lambda name: known[name].angle.pair)
        words.append(
            f"At its best scale the gradient step is {percent(first.angle.gradient)} from the exact damped "
            f"Newton step; the closest pair, {' + '.join(pair)}, {percent(known[pair].angle.pair)}."
        )
    if first.loss.known:
        pair = max(known, key=lambda name: known[name].loss.pair)
        step = "It" if words else "The gradient step"
        words.append(
            f"{step} lowers the loss of its batch by {percent(first.loss.gradient)}; the most by a pair, "
            f"{' + '.join(pair)}: {percent(known[pair].loss.pair)}."
        )
    return words


def training_reasons(found: Sequence[Run]) -> list[str]:
    """Who is ahead after equal processor time, or equal epochs where that is all there is."""
    ahead = leaders(found)
    if not ahead:
        return []
    timed = math.isfinite(ahead[0].loss_in_budget) and bool(ahead[0].losses_in_budget)
    column = "loss_in_budget" if timed else "loss"
    ranked = sorted(
        (run for run in found if math.isfinite(getattr(run, column))), key=lambda run: getattr(run, column)
    )
    kind = "test loss" if ahead[0].losses else "training loss"
    spent = (
        f"After {second_words(ahead[0].budget)} of the processor each"
        if timed
        else f"After {count_words(int(ahead[0].epochs), 'epoch')}"
    )
    told = join_names([f"{run.optimizer} {digits(getattr(run, column))}" for run in ranked[:4]])
    rest = f" (of {len(found)})" if len(found) > 4 else ""
    seeds = f", median of {ahead[0].seeds} seeds" if ahead[0].seeds > 1 else ""
    return [f"{spent}, the lowest {kind}{seeds}{rest}: {told}."]


def short_cautions(
    cells: pd.DataFrame, found: Sequence[Run], measure: Measure, evidence: Evidence
) -> list[str]:
    """What limits the answer: damping, missing references, edges of a grid, few draws, missing pairs."""
    words = []
    damping = evidence.damping
    if damping is not None and damping.rules:
        words.append(
            f"The damping rules: α = {damping.alpha:g} is more than the largest eigenvalue, "
            f"{digits(damping.largest)}, so that distances measure the damping. Compare at a smaller α."
        )
    if measure is LOSS:
        words.append("The exact Newton step is not known here: pairs are judged by what their steps do.")
    elif measure not in (STEP, ANGLE):
        words.append("The exact Newton step is not known here: between solvers only time decides.")
    edges = [f"{run.optimizer} ({run.edge})" for run in found if run.edge]
    if edges:
        words.append(f"At the end of the tuning's grid, a better value may lie beyond: {join_names(edges)}.")
    if any(run.settings and not run.tuned for run in found):
        words.append("The training runs were not tuned; other settings may change their order.")
    lost = [run.optimizer for run in found if not run.finished]
    if lost:
        words.append(f"Failed or diverged in training: {join_names(lost)}.")
    spread = cells.loc[cells["status"] == "ok", "total_iqr"]
    if spread.isna().all() or (spread.fillna(0) == 0).all():
        words.append("The spread of the times is not known, so small differences mean nothing.")
    drawn = "one batch" if evidence.draws < 2 else f"{evidence.draws} batches or seeds"
    words.append(f"Steps are those of {drawn} at one set of parameters{_point(evidence)}.")
    for status in ("failed", "skipped"):
        if count := int((cells["status"] == status).sum()):
            words.append(f"{count_words(count, 'pair')} {status}; the page says why.")
    return words


def _point(evidence: Evidence) -> str:
    return f", {evidence.point}" if evidence.point else ""
