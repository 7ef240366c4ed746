"""How far off a pair is: four measures, what each is in words, and how it is traded against time.

    angle       min_t ‖t d − n‖ / ‖n‖     the pair's step d at its best scale; n: the exact damped Newton step
    step        ‖d − n‖ / ‖n‖             the same as the step is taken
    loss        L(θ + ηd) / L(θ)          what a step leaves of the loss, at the best step size η
    curvature   ‖B̃ − |B|‖ / ‖|B|‖         the provider's bias blocks against the absolute Hessian's

Pairs are compared by the first of these that is known: the first two need the Newton step, the third exists
for every network, and the last, the paper's yardstick, is the same for every solver: by it only time tells
solvers apart. (Folders of earlier releases have the second and the last.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd

from curvlab.report.numbers import percent
from curvlab.report.pareto import BARGAIN, Candidate, candidates

__all__ = ["ANGLE", "CURVATURE", "LOSS", "MEASURES", "STEP", "Measure", "curvature_words", "measure_of"]

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
