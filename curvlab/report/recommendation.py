"""The answer in words: which pair of provider and solver the measurements speak for, and how firmly.

Cost is the median of estimate + prepare + apply. Accuracy is the first of four measures that is known
(`measures`). Only pairs that beat the gradient step are suggested (`controls`); where none does, the answer
is to use the gradient. A price is the time for each halving of the way to the Newton point, or the product of
time and error; of the Pareto front of those that do, the most accurate pair is suggested whose price is not
above twice the lowest: times compare a little differently whenever they are measured, and the answer must
not (`pareto.best_by_price`). Pairs whose steps are the same are one group, of which the cheapest is named.
Where training was measured, the lowest loss decides. A pair whose step is zero is never suggested.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from curvlab.report.brief import gradient_reasons, pair_reasons, short_cautions, training_reasons
from curvlab.report.controls import Evidence, control_words, damping_words
from curvlab.report.measures import Measure, measure_of
from curvlab.report.numbers import join_names
from curvlab.report.pareto import Candidate, best_by_price, candidates, front, zero_step_pairs
from curvlab.report.reasons import (
    NOISE,
    alternatives,
    cost_and_accuracy,
    curvature_alone,
    far,
    hedge,
    left_out,
    no_newton,
    off_the_front,
    same_steps,
    standing_still,
    ties,
    why,
    worst_layer,
)
from curvlab.report.training import Run, leaders, runs, training_words

__all__ = ["Recommendation", "recommend"]

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
    trained = _trained(min(pairs, key=lambda pair: pair.cost), found, measure)
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


def _trained(best: Candidate, found: Sequence[Run], measure: Measure) -> tuple[str, Pair] | None:
    """Headline and pair where training decides: the lowest loss, unless `best` is too close to it to call."""
    close = leaders(found)
    if not close:
        return None
    second_order = [run for run in close if run.provider]
    basis = _basis(best, measure)
    if not second_order:
        won = any(run.provider and run.finished for run in found)
        because = (
            "it reached a lower loss than every pair" if won else "no pair came to the end of its training"
        )
        return f"Train with {close[0].optimizer}: {because}. Of the pairs: {best.name}, by {basis}.", _key(
            best
        )
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
