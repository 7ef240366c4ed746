"""The answer in words: which pair of provider and solver the measurements speak for, how firmly, and why.

Cost is the median of estimate + prepare + apply. Accuracy is the first of four measures that is known
(`pareto`). Only pairs that beat the gradient step are suggested (`controls`); where none does, the answer
is to use the gradient. A price is the time for each halving of the way to the Newton point, or the product of
time and error; of the Pareto front of those that do, the most accurate pair is suggested whose price is not
above twice the lowest: times compare a little differently whenever they are measured, and the answer must
not (`pareto.best_by_price`). Pairs whose steps are the same are one group, of which the cheapest is named.
Where training was measured, the lowest loss decides. A pair whose step is zero is never suggested.

The answer is told twice: in short (why, in two or three sentences, and what to be careful with, one sentence
each), for the terminal and the head of the page; and whole, for what stands there under "Behind the answer".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from curvlab.report.controls import Against, Evidence, control_words, damping_words
from curvlab.report.numbers import count_words, digits, join_names, percent, second_words, sentence
from curvlab.report.pareto import (
    ANGLE,
    CURVATURE,
    LOSS,
    STEP,
    Candidate,
    Measure,
    best_by_price,
    candidates,
    curvature_words,
    front,
    measure_of,
    zero_step_pairs,
)
from curvlab.report.training import Run, leaders, lost_in_time, runs, training_words
from curvlab.studies.compare.costs import ROUNDS

__all__ = [
    "NOISE",
    "Recommendation",
    "alternatives",
    "cost_and_accuracy",
    "curvature_alone",
    "far",
    "gradient_reasons",
    "hedge",
    "left_out",
    "no_newton",
    "off_the_front",
    "pair_reasons",
    "recommend",
    "same_steps",
    "short_cautions",
    "standing_still",
    "ties",
    "training_reasons",
    "why",
    "worst_layer",
]

Pair = tuple[str, str]


@dataclass(frozen=True)
class Recommendation:
    """What the report opens with.

    `best` and the members of `front` (cheapest first) and `level` (those that `best` cannot be told from) are
    pairs (provider, solver); `best` is None where nothing finished. `measure` is the column of the cells that
    accuracy was read from: `distance` or `error_relative`, empty where neither is known.

    `paragraphs` is the whole account; `reasons` and `cautions` say the same in a few sentences.
    """

    headline: str
    paragraphs: tuple[str, ...]
    best: Pair | None
    front: tuple[Pair, ...] = ()
    level: tuple[Pair, ...] = ()
    measure: str = ""
    reasons: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Headline and paragraphs, one a line: the whole account."""
        return "\n".join((self.headline, *self.paragraphs))

    @property
    def brief(self) -> str:
        """The answer, why, and what to be careful with, in a few lines."""
        lines = (self.headline, " ".join(self.reasons), *(f"- {caution}" for caution in self.cautions))
        return "\n".join(line for line in lines if line)


def recommend(
    cells: pd.DataFrame,
    errors: pd.DataFrame | None = None,
    convergence: pd.DataFrame | None = None,
    *,
    evidence: Evidence | None = None,
) -> Recommendation:
    """Read the frames of a comparison and say what to use.

    Args:
        cells: one row per pair: `provider`, `solver`, `status`, `message`, `total_seconds`, `total_iqr`,
            `error_relative`, `distance`, `newton_reason` and, if known, `zero_step`.
        errors: one row per provider and layer; tells at which layer the suggested provider is furthest off.
        convergence: one row per optimizer and epoch, if training was measured.
        evidence: the controls, what is known of the damping, and paired decisions on the times.

    >>> cells = pd.DataFrame({
    ...     "provider": ["fisher", "pch-1"], "solver": "ea-cg", "status": "ok", "message": "",
    ...     "total_seconds": [0.001, 0.002], "total_iqr": 1e-5, "error_relative": [0.9, 0.1],
    ...     "distance": [0.8, 0.2], "newton_reason": ""})
    >>> recommend(cells).headline
    'Use pch-1 + ea-cg, by time and distance to the Newton step.'
    """
    evidence = evidence or Evidence()
    measure = measure_of(cells)
    everyone = candidates(cells, measure.column, evidence.times)
    if not everyone:
        return Recommendation(_nothing(cells), (*standing_still(cells), *left_out(cells)), best=None)
    pairs = [pair for pair in everyone if evidence.allows(_key(pair))]
    if not pairs:
        return _gradient(everyone, cells, convergence, measure, evidence)
    ahead = front(pairs) or [min(pairs, key=lambda pair: pair.cost)]
    best, *level = best_by_price(pairs, ahead, measure.price)
    # One that is level with the member of the front may have been named in its place.
    ahead = list(dict.fromkeys(best if pair in level else pair for pair in ahead))
    found = [run for run in runs(convergence) if (run.provider, run.solver) not in zero_step_pairs(cells)]
    trained = _trained(best, found, measure)
    paragraphs = [
        *_chosen(best, pairs, found, measure),
        *(damping_words(evidence.damping) if evidence.damping and evidence.damping.rules else []),
        why(best, ahead, pairs, measure),
        *same_steps(best, pairs, cells),
        *control_words(everyone, evidence.against),
        *far(best, measure),
        *ties(best, level, measure),
        *alternatives(best, ahead),
        *curvature_alone(best, cells, measure),
        *no_newton(best, cells, measure),
        *worst_layer(best, errors),
        *off_the_front(pairs, measure),
        *standing_still(cells),
        *left_out(cells),
        hedge(cells, evidence),
    ]
    return Recommendation(
        headline=_headline(best, level, pairs, cells, measure) if trained is None else trained[0],
        paragraphs=tuple(paragraphs),
        best=_key(best) if trained is None else trained[1],
        front=tuple(map(_key, ahead)),
        level=tuple(map(_key, level)),
        measure="" if math.isnan(best.error) else measure.column,
        reasons=(*training_reasons(found), *pair_reasons(best, ahead, measure, evidence.against)),
        cautions=tuple(short_cautions(cells, found, measure, evidence)),
    )


def _gradient(
    pairs: Sequence[Candidate],
    cells: pd.DataFrame,
    convergence: pd.DataFrame | None,
    measure: Measure,
    evidence: Evidence,
) -> Recommendation:
    """The answer where no pair beats the gradient step."""
    found = [run for run in runs(convergence) if (run.provider, run.solver) not in zero_step_pairs(cells)]
    rules = evidence.damping is not None and evidence.damping.rules
    because = "the damping rules, and " if rules else ""
    headline = f"None of them: use the gradient. {because}no pair beats the scaled gradient beyond the noise."
    trained = _trained(min(pairs, key=lambda pair: pair.cost), found, measure, beaten=True)
    paragraphs = [
        *training_words(found),
        *damping_words(evidence.damping),
        *control_words(pairs, evidence.against),
        *no_newton(pairs[0], cells, measure),
        *standing_still(cells),
        *left_out(cells),
        hedge(cells, evidence),
    ]
    return Recommendation(
        headline=_sentence_case(headline) if trained is None else trained[0],
        paragraphs=tuple(paragraphs),
        best=None if trained is None else trained[1],
        measure=measure.column,
        reasons=(*training_reasons(found), *gradient_reasons(evidence.against)),
        cautions=tuple(short_cautions(cells, found, measure, evidence)),
    )


def _sentence_case(text: str) -> str:
    """Each sentence begun with a capital letter."""
    return re.sub(r"(?<=\. )[a-z]", lambda letter: letter[0].upper(), text)


def _key(pair: Candidate) -> Pair:
    return pair.provider, pair.solver


def _nothing(cells: pd.DataFrame) -> str:
    because = "the step of every pair that finished is zero" if zero_step_pairs(cells) else "no pair finished"
    return f"Nothing can be recommended: {because}."


def _basis(best: Candidate, measure: Measure) -> str:
    return "time alone" if math.isnan(best.error) else f"time and {measure.basis}"


def _headline(
    best: Candidate,
    level: Sequence[Candidate],
    pairs: Sequence[Candidate],
    cells: pd.DataFrame,
    measure: Measure,
) -> str:
    if len(pairs) == 1 and len(candidates(cells, measure.column)) > 1:
        return f"Use {best.name}: no other pair beats the gradient step beyond the noise."
    if len(pairs) == 1:
        finished = "finished with a step" if zero_step_pairs(cells) else "finished"
        return f"Only {best.name} {finished}: there is nothing to compare it with."
    names, basis = [best.name, *(pair.name for pair in level)], _basis(best, measure)
    if level:
        return f"Use {join_names(names, 'or')}, by {basis}: there is {NOISE} between them."
    return f"Use {best.name}, by {basis}."


def _baseline_headline(
    best: Candidate | None, close: Sequence[Run], found: Sequence[Run], measure: Measure
) -> tuple[str, Pair | None]:
    """The baselines that no pair comes near, together where none of them has won, and the best of the pairs.

    That is the pair with the best steps, unless training tells it from the pair that trained best; without
    `best`, where no pair beats the gradient step, the latter.
    """
    names = join_names([run.optimizer for run in close], "or")
    if any(run.provider and run.finished for run in found):
        they, losses = ("they", "lower losses") if close[1:] else ("it", "a lower loss")
        because = f"{they} reached {losses} than every pair"
    else:
        because = "no pair came to the end of its training"
    text = f"Train with {names}: {because}."
    if close[1:]:
        text += " There is no difference beyond the noise between them."
    ahead = leaders([run for run in found if run.provider])
    keys = [(run.provider, run.solver) for run in ahead]
    if best is not None and (not ahead or _key(best) in keys):
        return f"{text} Of the pairs: {best.name}, by {_basis(best, measure)}.", _key(best)
    if not ahead:
        return text, None
    trained = join_names([run.optimizer for run in ahead], "or")
    return f"{text} Of the pairs {trained} trained to the lowest loss.", keys[0]


def _trained(
    best: Candidate, found: Sequence[Run], measure: Measure, *, beaten: bool = False
) -> tuple[str, Pair | None] | None:
    """Headline and pair where training decides: the lowest loss, unless `best` is too close to it to call.

    `beaten` is where no pair beats the gradient step, so that `best` is only the cheapest.
    """
    close = leaders(found)
    if not close:
        return None
    second_order = [run for run in close if run.provider]
    basis = _basis(best, measure)
    if not second_order:
        return _baseline_headline(None if beaten else best, close, found, measure)
    chosen = next((run for run in second_order if (run.provider, run.solver) == _key(best)), second_order[0])
    pair = (chosen.provider, chosen.solver)
    text = f"Use {chosen.provider} + {chosen.solver}"
    rivals = [run.optimizer for run in close if run != chosen]
    if rivals:
        by = f", by {basis}" if pair == _key(best) else ""
        return f"{text}{by}: in training it is too close to call against {join_names(rivals)}.", pair
    if pair == _key(best):
        return f"{text}: it trained to the lowest loss, and is the best by {basis} too.", pair
    return f"{text}: it trained to the lowest loss, though by {basis} it would be {best.name}.", pair


def _chosen(best: Candidate, pairs: Sequence[Candidate], found: Sequence[Run], measure: Measure) -> list[str]:
    """What training shows and, where it decides for another pair than `best`, what that one costs."""
    words = training_words(found)
    trained = _trained(best, found, measure)
    if trained is None or trained[1] == _key(best):
        return words
    chosen = [f"{cost_and_accuracy(pair, measure)}." for pair in pairs if _key(pair) == trained[1]]
    return [*words, *chosen, "Without training it would be another pair:"]


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
        if known[pair].other.pair < first.other.gradient:
            words.append(
                f"On another batch the loss goes {_change(known[pair].other.pair)} along that same step, "
                f"{_change(first.other.gradient)} along the gradient step."
            )
    return words


def _change(decrease: float) -> str:
    return f"{'up' if decrease < 0 else 'down'} by {percent(abs(decrease))}"


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
    lost += [f"{run.optimizer} (before the time was over)" for run in lost_in_time(found)]
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
