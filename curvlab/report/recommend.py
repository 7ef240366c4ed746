"""The answer in words: which pair of provider and solver the measurements speak for, and how firmly.

Cost is the median of estimate + prepare + apply, error the provider's total relative error against the exact
Hessian. Of the Pareto front the pair with the smallest product cost × max(error, 1 %) is suggested: twice
the time for half the error is an even trade. Where training was measured, the lowest loss decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from curvlab.report.numbers import digits, percent, second_words
from curvlab.report.pareto import Candidate, candidates, front, level_with
from curvlab.report.training import leaders, runs, training_words
from curvlab.report.words import counted, listed, sentence

__all__ = ["Recommendation", "recommend"]

ERROR_FLOOR = 0.01
NOISE = "no difference beyond the noise"


@dataclass(frozen=True)
class Recommendation:
    """What the report opens with.

    `best` and the members of `front` (cheapest first) and `level` (those that `best` cannot be told from) are
    pairs (provider, solver); `best` is None where nothing finished.
    """

    headline: str
    paragraphs: tuple[str, ...]
    best: tuple[str, str] | None
    front: tuple[tuple[str, str], ...] = ()
    level: tuple[tuple[str, str], ...] = ()
    direction_front: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """Headline and paragraphs, one a line."""
        return "\n".join((self.headline, *self.paragraphs))


def recommend(
    cells: pd.DataFrame, errors: pd.DataFrame | None = None, convergence: pd.DataFrame | None = None
) -> Recommendation:
    """Read the frames of a comparison and say what to use.

    Args:
        cells: one row a pair: `provider`, `solver`, `status`, `message`, `total_seconds`, `total_iqr`,
            `error_relative`, `distance`, `cosine`, `newton_reason`.
        errors: one row a provider and layer; tells at which layer the suggested provider is furthest off.
        convergence: one row an optimizer and epoch, if training was measured.

    >>> cells = pd.DataFrame({
    ...     "provider": ["fisher", "pch-1"], "solver": "ea-cg", "status": "ok", "message": "",
    ...     "total_seconds": [0.001, 0.002], "total_iqr": 1e-5, "error_relative": [0.9, 0.1],
    ...     "distance": float("nan"), "cosine": float("nan"), "newton_reason": "indefinite"})
    >>> recommend(cells).headline
    'Use pch-1 + ea-cg.'
    """
    pairs = candidates(cells)
    if not pairs:
        return Recommendation(*_nothing(cells), best=None)
    ahead = front(pairs) or [min(pairs, key=lambda pair: pair.cost)]
    best = min(ahead, key=_product)
    level = level_with(best, pairs)
    trained = _trained(best, convergence)
    directions = front(candidates(cells, "distance"))
    paragraphs = [
        *_chosen(best, pairs, convergence),
        _why(best, ahead, pairs),
        *_ties(best, level),
        *_alternatives(best, ahead),
        *_worst_layer(best, errors),
        _directions(cells, directions),
        *_unknown_errors(pairs),
        *_left_out(cells),
        _hedge(cells),
    ]
    headline = _headline(best, level, pairs) if trained is None else trained[0]
    return Recommendation(
        headline=headline,
        paragraphs=tuple(paragraphs),
        best=_key(best) if trained is None else trained[1],
        front=tuple(map(_key, ahead)),
        level=tuple(map(_key, level)),
        direction_front=tuple(map(_key, directions)),
    )


def _product(pair: Candidate) -> float:
    return pair.cost * (1.0 if math.isnan(pair.error) else max(pair.error, ERROR_FLOOR))


def _key(pair: Candidate) -> tuple[str, str]:
    return pair.provider, pair.solver


def _nothing(cells: pd.DataFrame) -> tuple[str, tuple[str, ...]]:
    return "Nothing can be recommended: no pair finished.", tuple(_left_out(cells))


def _headline(best: Candidate, level: Sequence[Candidate], pairs: Sequence[Candidate]) -> str:
    if len(pairs) == 1:
        return f"Only {best.name} finished: there is nothing to compare it with."
    if level:
        return (
            f"Use {listed([best.name, *(pair.name for pair in level)], 'or')}: there is {NOISE} between them."
        )
    return f"Use {best.name}."


def _trained(best: Candidate, convergence: pd.DataFrame | None) -> tuple[str, tuple[str, str]] | None:
    """Headline and pair where training decides: the lowest loss, unless `best` is too close to it to call."""
    close = leaders(runs(convergence))
    if not close:
        return None
    second_order = [run for run in close if run.provider]
    if not second_order:
        return (
            f"Train with {close[0].optimizer}: it reached a lower loss than every pair. "
            f"Of the pairs, cost and error speak for {best.name}.",
            _key(best),
        )
    chosen = next((run for run in second_order if (run.provider, run.solver) == _key(best)), second_order[0])
    pair = (chosen.provider, chosen.solver)
    text = f"Use {chosen.provider} + {chosen.solver}"
    rivals = [run.optimizer for run in close if run != chosen]
    if rivals:
        return f"{text}: in training it is too close to call against {listed(rivals)}.", pair
    if pair == _key(best):
        return f"{text}: it has the best trade of cost against error, and the lowest loss in training.", pair
    return (
        f"{text}: it trained to the lowest loss, though {best.name} has the better trade of cost and error.",
        pair,
    )


def _chosen(best: Candidate, pairs: Sequence[Candidate], convergence: pd.DataFrame | None) -> list[str]:
    """What training shows and, where it decides for another pair than `best`, what that one costs."""
    words = training_words(runs(convergence))
    trained = _trained(best, convergence)
    if trained is None or trained[1] == _key(best):
        return words
    chosen = [f"{_cost_and_error(pair)}." for pair in pairs if _key(pair) == trained[1]]
    return [*words, *chosen, "By cost and error alone it would be another pair:"]


def _cost_and_error(pair: Candidate) -> str:
    cost = f"{pair.name} takes {_cost(pair)} for estimate, prepare and apply"
    if math.isnan(pair.error):
        return cost
    return f"{cost}, and its curvature is {percent(pair.error)} from the exact Hessian"


def _why(best: Candidate, ahead: Sequence[Candidate], pairs: Sequence[Candidate]) -> str:
    if math.isnan(best.error):
        return f"{_cost_and_error(best)}, the least of all; no error is known, so only cost is compared."
    text = f"{_cost_and_error(best)}."
    if len(pairs) == 1:
        return text
    if len(ahead) == 1:
        cheaper = [pair for pair in pairs if pair.cost < best.cost and not pair.same_cost(best)]
        none = (
            "None" if cheaper else f"No other of the {len(pairs)} pairs is cheaper beyond the noise, and none"
        )
        return f"{text} {none} is more accurate."
    rest = f"Of the {len(ahead)} pairs on the Pareto front of cost against error ({_front_words(ahead)})"
    return f"{text} {rest} it has the smallest product of the two (errors under 1 % count as 1 %)."


def _front_words(ahead: Sequence[Candidate]) -> str:
    return "; ".join(f"{pair.name}: {second_words(pair.cost)}, {percent(pair.error)}" for pair in ahead)


def _ties(best: Candidate, level: Sequence[Candidate]) -> list[str]:
    if not level:
        return []
    listing = listed([f"{pair.name} ({second_words(pair.cost)})" for pair in level])
    error = "" if math.isnan(best.error) else ", and the error is no larger"
    return [f"Between {best.name} and {listing} there is {NOISE} in cost{error}."]


def _alternatives(best: Candidate, ahead: Sequence[Candidate]) -> list[str]:
    words = []
    cheapest, finest = ahead[0], ahead[-1]
    if cheapest != best:
        ratio = digits(best.cost / cheapest.cost, 2)
        words.append(
            f"If time is all that counts: {cheapest.name}, {ratio} × cheaper, {percent(cheapest.error)} off."
        )
    if finest != best:
        ratio = digits(finest.cost / best.cost, 2)
        words.append(
            f"If accuracy is all that counts: {finest.name}, {percent(finest.error)} off at {ratio} × "
            "the time."
        )
    return [" ".join(words)] if words else []


def _worst_layer(best: Candidate, errors: pd.DataFrame | None) -> list[str]:
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
    return [f"The error of {best.provider} is largest at {where}."]


def _directions(cells: pd.DataFrame, directions: Sequence[Candidate]) -> str:
    finished = cells[cells["status"] == "ok"]
    if not directions:
        reasons = sorted({str(reason) for reason in finished["newton_reason"].dropna() if str(reason)})
        because = f": {listed(reasons)}" if reasons else ""
        return sentence(f"The exact damped Newton direction is not known here{because}")
    finest = directions[-1]
    row = finished[(finished["provider"] == finest.provider) & (finished["solver"] == finest.solver)].iloc[0]
    text = (
        f"Closest to the exact damped Newton direction is {finest.name}: relative distance "
        f"{digits(finest.error)}, cosine {digits(float(row['cosine']))}, {second_words(finest.cost)}."
    )
    if len(directions) > 1:
        text += f" The front of cost against that distance: {listed([pair.name for pair in directions])}."
    return text


def _unknown_errors(pairs: Sequence[Candidate]) -> list[str]:
    unknown = [pair.name for pair in pairs if math.isnan(pair.error)]
    if not unknown or len(unknown) == len(pairs):
        return []
    return [f"Not on the front for want of a known error: {listed(unknown)}."]


def _left_out(cells: pd.DataFrame) -> list[str]:
    words = []
    for status in ("failed", "skipped"):
        rows = cells[cells["status"] == status]
        if len(rows):
            names = [f"{row['provider']} + {row['solver']}" for _, row in rows.iterrows()]
            words.append(f"{counted(len(rows), 'pair')} {status} ({listed(names)}).")
    return [" ".join(words) + " The reasons are at the end."] if words else []


def _hedge(cells: pd.DataFrame) -> str:
    spread = cells.loc[cells["status"] == "ok", "total_iqr"]
    if spread.isna().all() or (spread.fillna(0) == 0).all():
        return (
            "The spread of the times is not known (one repetition?), so small differences between them mean "
            "nothing. Errors are those of one batch at one set of parameters."
        )
    return (
        "Times are medians on this machine; two count as different only where the medians differ by more "
        "than the larger interquartile range. Errors are those of one batch at one set of parameters."
    )


def _cost(pair: Candidate) -> str:
    spread = f" (interquartile range {second_words(pair.spread)})" if pair.spread > 0 else ""
    return f"{second_words(pair.cost)}{spread}"
