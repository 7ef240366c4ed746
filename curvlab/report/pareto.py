"""What a pair costs and how far off it is: the Pareto front of cost against a measure of error.

Four measures of error, by the first of which that is known pairs are compared:

    angle       min_t ‖t d − n‖ / ‖n‖     the pair's step d at its best scale; n: the exact damped Newton step
    step        ‖d − n‖ / ‖n‖             the same as the step is taken
    loss        L(θ + ηd) / L(θ)          what a step leaves of the loss, at the best step size η
    curvature   ‖B̃ − |B|‖ / ‖|B|‖         the provider's bias blocks against the absolute Hessian's

The first two need the Newton step, the third exists for every network, and the last, the paper's yardstick,
is the same for every solver: by it only time tells solvers apart. (Folders of earlier releases have the
second and the last.)

Ties on the front respect the measured spread. Two times differ where the interval of their paired
differences, round by round, leaves out zero; with fewer than three rounds, where their medians differ by more
than the larger of the two interquartile ranges. Otherwise there is no difference beyond the noise. Errors are
computed, not sampled: two are the same when they agree to one part in a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from curvlab.report.numbers import percent
from curvlab.studies.compare.costs import ROUNDS
from curvlab.studies.compare.decisions import Decision

__all__ = [
    "ANGLE",
    "BARGAIN",
    "CURVATURE",
    "LOSS",
    "MEASURES",
    "STEP",
    "Candidate",
    "Measure",
    "best_by_price",
    "candidates",
    "curvature_words",
    "front",
    "level_with",
    "measure_of",
    "undominated",
    "zero_step_pairs",
]

SAME_ERROR = 1e-3
BARGAIN = 2.0
"""Up to this multiple of the lowest price a pair is as good a bargain, and accuracy decides."""
SAME_COST = 0.1
"""Costs that differ by less are no reason for one of two equally accurate pairs, however surely they do."""
ROUNDING = 1e-9  # relative errors below this are rounding, not error


@dataclass(frozen=True)
class Candidate:
    """One pair of a provider and a solver that finished: what it costs and how far off it is."""

    provider: str
    solver: str
    cost: float
    spread: float
    error: float
    times: tuple[Decision, ...] = field(default=(), repr=False, compare=False)

    @property
    def name(self) -> str:
        """The pair as it is called throughout the report."""
        return f"{self.provider} + {self.solver}"

    def same_cost(self, other: Candidate) -> bool:
        """Whether the two cost the same beyond the noise: by paired rounds where there are enough of them.

        Otherwise, whether the difference of the two medians is within the larger interquartile range.

        >>> a, b = (Candidate("p", "s", cost, 0.2, 0.1) for cost in (1.0, 1.1))
        >>> a.same_cost(b)
        True
        """
        for decided in self.times:
            if {self.name, other.name} <= set(decided.names):
                return decided.same(self.name, other.name)
        return abs(self.cost - other.cost) <= max(self.spread, other.spread)

    def bargain(self, lowest: Candidate, price: Callable[[Candidate], float]) -> bool:
        """Whether the price is not above `BARGAIN` times that of `lowest`.

        Prices are in proportion to the time: that of the paired rounds, times the ratio of both prices of a
        second. It is the estimate that is asked, not its interval: with that, whether a pair is suggested
        would depend on how noisy the times are. An infinite price is none.

        >>> a, b = (Candidate("p", "s", cost, 0.0, error) for cost, error in ((1.0, 0.2), (2.8, 0.1)))
        >>> b.bargain(a, lambda pair: pair.cost * pair.error)
        True
        """
        own, least = price(self), price(lowest)
        if not (math.isfinite(own) and math.isfinite(least)):
            return False
        for decided in self.times:
            if {self.name, lowest.name} <= set(decided.names):
                of_a_second = (own / self.cost) / (least / lowest.cost)
                return decided.difference(self.name, lowest.name).value * of_a_second <= BARGAIN
        return own <= BARGAIN * least

    def better_error(self, other: Candidate) -> bool:
        """Whether this error is smaller by more than the tolerance; an unknown one never is."""
        return self.error < other.error * (1 - SAME_ERROR) - ROUNDING


def candidates(
    cells: pd.DataFrame, error: str = "error_relative", times: Sequence[Decision] = ()
) -> list[Candidate]:
    """The cells that finished with a step and a known cost, with the column `error` as their error.

    `times` decides between costs, from paired rounds (`curvlab.studies.compare.costs.decide_times`).
    """
    finished = cells[(cells["status"] == "ok") & cells["total_seconds"].notna() & ~_zero(cells)]
    return [
        Candidate(
            str(row["provider"]),
            str(row["solver"]),
            float(row["total_seconds"]),
            _known(row["total_iqr"]),
            float(row[error]) if error in row and pd.notna(row[error]) else math.nan,
            tuple(decision for decision in times if decision.rounds >= ROUNDS),
        )
        for _, row in finished.iterrows()
    ]


def zero_step_pairs(cells: pd.DataFrame) -> list[tuple[str, str]]:
    """The pairs (provider, solver) that finished with a step of zero: whatever they cost, they do nothing."""
    still = cells[(cells["status"] == "ok") & _zero(cells)]
    return list(zip(still["provider"].astype(str), still["solver"].astype(str), strict=True))


def front(pairs: Sequence[Candidate]) -> list[Candidate]:
    """The pairs that no other beats on both axes, cheapest first.

    A pair that is cheaper only within the noise than a more accurate one is not on the front: walking from
    the most accurate to the cheapest, each must be cheaper than the last kept by more than the noise.

    >>> front([Candidate("a", "s", 1.0, 0.1, 0.5), Candidate("b", "s", 1.05, 0.1, 0.2)])
    [Candidate(provider='b', solver='s', cost=1.05, spread=0.1, error=0.2)]
    """
    known = [pair for pair in pairs if not math.isnan(pair.error)]
    kept: list[Candidate] = []
    for pair in sorted(undominated(known), key=lambda pair: (pair.error, pair.cost)):
        if not kept or not pair.same_cost(kept[-1]):
            kept.append(pair)
    return kept[::-1]


def best_by_price(
    pairs: Sequence[Candidate], ahead: Sequence[Candidate], price: Callable[[Candidate], float]
) -> list[Candidate]:
    """The pair to suggest, then those that are level with it.

    Of the front, the most accurate is suggested whose price is not more than `BARGAIN` times the lowest. How
    two times compare depends on what else the machine does (by 20 % and more, where processors share caches
    and units), so that the very lowest price is another one each time it is measured. Of pairs that are level
    the most accurate is named first, to four digits, and only of equals the cheapest: errors are the same
    whenever they are measured. Of 84 timings of 12 comparisons, half of them beside busy processes, all of
    one comparison gave one answer (tests/test_compare_load.py); a price within 15 % of the factor may not.

    >>> a, b = Candidate("a", "s", 1.0, 0.1, 0.20), Candidate("b", "s", 2.1, 0.1, 0.10)
    >>> [pair.provider for pair in best_by_price([a, b], [a, b], lambda pair: pair.cost * pair.error)]
    ['b']
    """
    lowest = min(ahead, key=lambda pair: (price(pair), pair.error))
    bargains = [pair for pair in ahead if pair == lowest or pair.bargain(lowest, price)]
    best = min(bargains, key=_place)
    best = min([best, *level_with(best, pairs)], key=_place)
    return [best, *level_with(best, pairs)]


def _place(pair: Candidate) -> tuple[float, float]:
    """By the error, which is the same whenever it is measured; equal ones by cost."""
    return 0.0 if math.isnan(pair.error) else float(f"{pair.error:.4g}"), pair.cost


def level_with(pair: Candidate, pairs: Sequence[Candidate]) -> list[Candidate]:
    """The other pairs that cost the same, within the noise or a tenth, and have no larger error."""
    return [
        other
        for other in pairs
        if other != pair
        and (other.same_cost(pair) or abs(other.cost - pair.cost) <= SAME_COST * pair.cost)
        and not pair.better_error(other)
        and _comparable(pair, other)
    ]


def undominated(pairs: Sequence[Candidate]) -> list[Candidate]:
    """The front of the medians alone: by rising cost, each with a smaller error than all before it."""
    kept: list[Candidate] = []
    for pair in sorted(pairs, key=lambda pair: (pair.cost, pair.error)):
        if not kept or pair.better_error(kept[-1]):
            kept.append(pair)
    return kept


def _comparable(pair: Candidate, other: Candidate) -> bool:
    return math.isnan(pair.error) == math.isnan(other.error)


def _zero(cells: pd.DataFrame) -> pd.Series[bool]:
    """Which steps are zero; none, where that was not recorded."""
    if "zero_step" not in cells:
        return pd.Series(False, index=cells.index)
    return cells["zero_step"].astype(bool)


def _known(spread: float) -> float:
    return float(spread) if pd.notna(spread) else 0.0


FLOOR = 0.01  # what is closer counts as this: an exact solve must not win at any price
NOTICEABLE = 1e-3  # less between H and |H| is rounding, not an indefinite Hessian


@dataclass(frozen=True)
class Measure:
    """A measure of accuracy: its column in the frame of cells, its words, and its price of a pair.

    `noun` is what it is called for short, `basis` after "by time and", `closer` after "none", `rule` after
    "of the pairs on the front it", `axis` on a figure.
    """

    column: str
    noun: str
    basis: str
    closer: str
    rule: str
    axis: str
    definition: str
    price: Callable[[Candidate], float]


def measure_of(cells: pd.DataFrame) -> Measure:
    """What pairs are compared by: the first measure that is known of any pair.

    >>> frame = pd.DataFrame({"provider": ["a"], "solver": ["s"], "status": ["ok"], "total_seconds": [1.0],
    ...     "total_iqr": [0.1], "distance": [float("nan")]})
    >>> measure_of(frame).noun
    'error'
    """
    for measure in (ANGLE, STEP, LOSS):
        if any(not math.isnan(pair.error) for pair in candidates(cells, measure.column)):
            return measure
    return CURVATURE


def curvature_words(provider: str, error: float) -> str:
    """How far a provider's blocks are from |H|; of the exact Hessian that is no error of its own.

    >>> curvature_words("pch-1", 0.034)
    'its bias blocks are 3.40 % from those of the absolute Hessian |H|'
    >>> curvature_words("hessian", 1.93)
    'its blocks are exact, and indefinite: 193 % from their own absolute values |H|, which is no error'
    """
    if provider.partition("[")[0] != "hessian":
        return f"its bias blocks are {percent(error)} from those of the absolute Hessian |H|"
    if error < NOTICEABLE:
        return "its blocks are exact"
    apart = f"{percent(error)} from their own absolute values |H|"
    return f"its blocks are exact, and indefinite: {apart}, which is no error"


def _time_per_halving(pair: Candidate) -> float:
    """Seconds for each halving of the way to the Newton point, of which a step at distance δ leaves δ.

    >>> _time_per_halving(Candidate("p", "s", cost=3.0, spread=0.0, error=0.125))
    1.0
    """
    distance = max(pair.error, FLOOR)
    return pair.cost / math.log2(1 / distance) if distance < 1 else math.inf


def _product(pair: Candidate) -> float:
    """Seconds times error: twice the time for half the error is an even trade."""
    return pair.cost * max(pair.error, FLOOR)


STEP = Measure(
    column="distance",
    noun="distance",
    basis="distance to the Newton step",
    closer="is closer to the Newton step",
    rule=f"is the most accurate that needs up to {BARGAIN:g} × the least time for each halving of the way to "
    "the Newton point (a step at distance 25 % halves it twice; under 1 % counts as 1 %)",
    axis="distance to the Newton step (%)",
    definition="Distance to the Newton step: ‖d − n‖ / ‖n‖ of the pair's step d and the step n that solves "
    "((1−α)H + αI) n = −g with the exact Hessian, block by block. It depends on the provider and on the "
    "solver; no step at all is at 100 %.",
    price=_time_per_halving,
)
ANGLE = replace(
    STEP,
    column="sine",
    noun="angle",
    basis="angle to the Newton step",
    axis="distance to the Newton step, best scale (%)",
    definition="Angle: min over t of ‖t d − n‖ / ‖n‖, the distance that is left at the best scale of the "
    "pair's step d, the sine of its angle to the exact damped Newton step n: learning rates are tuned.",
)
LOSS = Measure(
    column="loss_left",
    noun="loss that is left",
    basis="decrease of the loss",
    closer="lowers the loss more",
    rule=f"is the most accurate that needs up to {BARGAIN:g} × the least time for each halving of the loss",
    axis="loss that a step leaves, best step size (%)",
    definition="Decrease of the loss: 1 − L(θ + ηd) / L(θ) on the batch that the step d is from, at the best "
    "step size η; on another batch at that same η.",
    price=_time_per_halving,
)
CURVATURE = Measure(
    column="error_relative",
    noun="error",
    basis="error of the curvature (bias blocks, from the absolute Hessian |H|)",
    closer="has a smaller error",
    rule=f"is the most accurate of those whose product of the two is up to {BARGAIN:g} × the smallest "
    "(errors under 1 % count as 1 %)",
    axis="bias blocks: distance from |H| (%)",
    definition="Error: ‖B̃ − |B|‖ / ‖|B|‖ in the Frobenius norm, how far the provider's bias blocks B̃ are "
    "from those of the absolute Hessian |H|, which has the absolute eigenvalues of the exact blocks B (the "
    "paper's yardstick). It is the same for every solver; of hessian, whose blocks are exact, it shows "
    "negative curvature.",
    price=_product,
)
MEASURES = {measure.column: measure for measure in (ANGLE, STEP, LOSS, CURVATURE)}
