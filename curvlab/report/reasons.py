"""The sentences behind a recommendation: why this pair, what else there is, and what is not known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from curvlab.report.controls import Evidence
from curvlab.report.measures import ANGLE, CURVATURE, LOSS, STEP, Measure, curvature_words
from curvlab.report.numbers import count_words, digits, join_names, percent, second_words, sentence
from curvlab.report.pareto import Candidate, candidates, zero_step_pairs
from curvlab.studies.compare.timing import ROUNDS

__all__ = [
    "NOISE",
    "alternatives",
    "cost_and_accuracy",
    "curvature_alone",
    "far",
    "hedge",
    "left_out",
    "no_newton",
    "off_the_front",
    "same_steps",
    "standing_still",
    "ties",
    "why",
    "worst_layer",
]

NOISE = "no difference beyond the noise"


def cost_and_accuracy(pair: Candidate, measure: Measure) -> str:
    """What a pair costs and how far off it is, without a full stop."""
    cost = f"{pair.name} takes {_cost(pair)} for estimate, prepare and apply"
    if math.isnan(pair.error):
        return cost
    if measure is STEP:
        return f"{cost}, and its step is {percent(pair.error)} from the exact damped Newton step"
    if measure is ANGLE:
        away = f"{percent(pair.error)} from the exact damped Newton step"
        return f"{cost}, and its step is, at the best scale, {away}"
    if measure is LOSS:
        return f"{cost}, and its step leaves {percent(pair.error)} of the loss of its batch"
    return f"{cost}, and {curvature_words(pair.provider, pair.error)}"


def why(best: Candidate, ahead: Sequence[Candidate], pairs: Sequence[Candidate], measure: Measure) -> str:
    """Why `best`, of those on the front."""
    text = cost_and_accuracy(best, measure)
    if math.isnan(best.error):
        return f"{text}, the least of all; no error is known, so only cost is compared."
    if len(pairs) == 1:
        return f"{text}."
    if len(ahead) == 1:
        cheaper = [pair for pair in pairs if pair.cost < best.cost and not pair.same_cost(best)]
        none = (
            "None" if cheaper else f"No other of the {len(pairs)} pairs is cheaper beyond the noise, and none"
        )
        return f"{text}. {none} {measure.closer}."
    rest = f"Of the {len(ahead)} pairs on the Pareto front of time against {measure.noun} ({_front(ahead)})"
    rule = measure.rule if math.isfinite(measure.price(best)) else f"has the smallest {measure.noun}"
    return f"{text}. {rest} it {rule}."


def far(best: Candidate, measure: Measure) -> list[str]:
    """That not even the best step is closer to Newton's than standing still."""
    if measure not in (STEP, ANGLE) or best.error < 1:
        return []
    return [
        "No step at all would be as close to the Newton step (100 %): at this damping the distance speaks "
        "for none of the pairs."
    ]


def ties(best: Candidate, level: Sequence[Candidate], measure: Measure) -> list[str]:
    """The pairs that `best` cannot be told from."""
    if not level:
        return []
    names = join_names([f"{pair.name} ({second_words(pair.cost)})" for pair in level])
    accuracy = "" if math.isnan(best.error) else f", and the {measure.noun} is no larger"
    return [f"Between {best.name} and {names} there is {NOISE} in cost{accuracy}."]


def alternatives(best: Candidate, ahead: Sequence[Candidate]) -> list[str]:
    """The two ends of the front."""
    words = []
    cheapest, finest = ahead[0], ahead[-1]
    if cheapest != best:
        ratio = digits(best.cost / cheapest.cost, 2)
        words.append(
            f"If time is all that counts: {cheapest.name}, {ratio} × cheaper, {percent(cheapest.error)} off."
        )
    if finest != best:
        off = f"{percent(finest.error)} off at {digits(finest.cost / best.cost, 2)} × the time"
        words.append(f"If accuracy is all that counts: {finest.name}, {off}.")
    return [" ".join(words)] if words else []


def curvature_alone(best: Candidate, cells: pd.DataFrame, measure: Measure) -> list[str]:
    """How far the curvature of `best` is from |H|, beside the closest, where the step was compared."""
    of = {pair.provider: pair.error for pair in candidates(cells, CURVATURE.column)}
    known = {name: error for name, error in of.items() if not math.isnan(error)}
    if measure is CURVATURE or best.provider not in known:
        return []
    words = curvature_words(best.provider, known[best.provider])
    closest = min(known, key=lambda name: known[name])
    more = "" if closest == best.provider else f"; closest are those of {closest}, {percent(known[closest])}"
    return [f"Of {best.provider} alone, whatever the solver: {words}{more}."]


def no_newton(best: Candidate, cells: pd.DataFrame, measure: Measure) -> list[str]:
    """Why steps cannot be compared, and what that means for the answer."""
    if measure in (STEP, ANGLE):
        return []
    finished = cells[(cells["status"] == "ok") & cells["distance"].isna()]
    reasons = sorted({str(reason) for reason in finished["newton_reason"].dropna() if str(reason)})
    because = f": {join_names(reasons)}" if reasons else ""
    text = sentence(f"The exact damped Newton step is not known here{because}")
    if math.isnan(best.error) or measure is LOSS:
        return [f"{text} Pairs are compared by what their steps do to the loss." if measure is LOSS else text]
    return [
        f"{text} The error of the curvature is the same for every solver: between solvers only time decides."
    ]


def worst_layer(best: Candidate, errors: pd.DataFrame | None) -> list[str]:
    """Where the curvature of `best` is furthest off."""
    if errors is None or errors.empty:
        return []
    own = errors[
        (errors["provider"] == best.provider) & (errors["layer"] != "Total") & errors["error"].notna()
    ]
    if len(own) < 2 or float(own["error"].max()) == 0:
        return []
    worst = own.iloc[int(own["error"].to_numpy().argmax())]
    share = float(worst["error"]) ** 2 / float((own["error"] ** 2).sum())
    where = f"layer {worst['layer']}, which has {percent(share)} of the squared total"
    return [f"The bias blocks of {best.provider} are furthest from |H| at {where}."]


def off_the_front(pairs: Sequence[Candidate], measure: Measure) -> list[str]:
    """The pairs of which only the cost is known, where more is known of others."""
    unknown = [pair.name for pair in pairs if math.isnan(pair.error)]
    if not unknown or len(unknown) == len(pairs):
        return []
    return [f"Not on the front for want of a known {measure.noun}: {join_names(unknown)}."]


def standing_still(cells: pd.DataFrame) -> list[str]:
    """The pairs whose step is zero."""
    names = [f"{provider} + {solver}" for provider, solver in zero_step_pairs(cells)]
    return [f"Not compared, since the step is zero: {join_names(names)}."] if names else []


def left_out(cells: pd.DataFrame) -> list[str]:
    """The pairs without a result; their reasons are told apart."""
    words = []
    for status in ("failed", "skipped"):
        rows = cells[cells["status"] == status]
        if len(rows):
            names = [f"{row['provider']} + {row['solver']}" for _, row in rows.iterrows()]
            words.append(f"{count_words(len(rows), 'pair')} {status} ({join_names(names)}).")
    return [" ".join(words)] if words else []


def same_steps(best: Candidate, pairs: Sequence[Candidate], cells: pd.DataFrame) -> list[str]:
    """The providers whose steps with the same solver are the same as that of `best`: one group."""
    if "sine" not in cells:
        return []
    of = {(row["provider"], row["solver"]): row for _, row in cells.iterrows()}
    mine = of[best.provider, best.solver]
    group = [
        pair
        for pair in pairs
        if pair != best
        and pair.solver == best.solver
        and all(_alike(mine[name], of[pair.provider, pair.solver][name]) for name in ("sine", "decrease"))
    ]
    if not group:
        return []
    names = join_names([best.provider, *(pair.provider for pair in group)])
    costs = ", ".join(f"{pair.provider} {second_words(pair.cost)}" for pair in group)
    return [f"{names} are one group here: with {best.solver} their steps are the same ({costs})."]


def _alike(one: float, other: float) -> bool:
    return bool(abs(one - other) <= 1e-4 + 1e-3 * max(abs(one), abs(other)))


def hedge(cells: pd.DataFrame, evidence: Evidence) -> str:
    """How far times and errors can be trusted, and where they were measured."""
    spread = cells.loc[cells["status"] == "ok", "total_iqr"]
    drawn = "one batch" if evidence.draws < 2 else f"{evidence.draws} batches or seeds"
    at = f"Errors and distances are those of {drawn} at one set of parameters"
    at += f": {evidence.point}." if evidence.point else "."
    if spread.isna().all() or (spread.fillna(0) == 0).all():
        return (
            "The spread of the times is not known (one repetition?), so small differences between them mean "
            f"nothing. {at}"
        )
    how = (
        "where the interval of their paired differences, round by round, leaves out zero"
        if any(decision.rounds >= ROUNDS for decision in evidence.times)
        else "where the medians differ by more than the larger interquartile range"
    )
    return f"Times are medians on this machine; two count as different only {how}. {at}"


def _front(ahead: Sequence[Candidate]) -> str:
    return "; ".join(f"{pair.name}: {second_words(pair.cost)}, {percent(pair.error)}" for pair in ahead)


def _cost(pair: Candidate) -> str:
    spread = f" (interquartile range {second_words(pair.spread)})" if pair.spread > 0 else ""
    return f"{second_words(pair.cost)}{spread}"
