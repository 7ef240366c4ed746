"""Which of several contestants is smallest, decided from measurements that were taken in rounds.

In every round each contestant is measured once, one after the other, so that a slow moment of the machine, a
hard batch or a lucky seed falls on all of them. What is compared is therefore the difference within a round,
here of logarithms (`scale="ratio"`: times, losses, distances) or of the values themselves:

    x_ab = log t_a − log t_b               one value per round
    m_ab = trimmed mean of x_ab            a fifth is cut off at either end, from 10 rounds on
    interval = m_ab ± c · √f · s_ab        s_ab: Yuen's standard error, from the winsorised variance

Two differ where the interval of their difference leaves out 0. The factor c makes all intervals hold together
with probability `confidence`: rounds are drawn again with replacement, the same ones for all pairs, and the
largest deviation of a draw tells how many independent comparisons the pairs are worth, at most their number
(Bonferroni's). Student's t with the degrees of freedom of the trimmed mean then gives c, because with few
rounds the draws alone are too narrow. `confidence` is 0.975 by default: of two equal contestants one is
preferred in about 2 of 100 comparisons, and heavy tails leave that below 5.

What slows a whole round falls on all, and does no harm. Where a contestant's own slowness goes on into the
next round, n rounds say less than n independent ones, and f makes the intervals wider. With r the correlation
of a contestant's place in its round with that in the round before, the mean over all k of them, winsorised,

    ρ = (r + 1/n) / (1 − 3/n) + 1 / (√n (k − 1)^¾)        at least 0, at most 0.8
    f = v / (1 − (v − 1)/(n − 1)),     v = 1 + 2 Σ (1 − j/n) ρ^j

The first part of ρ corrects the bias of a correlation of few values. The second, about its standard error, is
there since the estimate may be too low; and the degrees of freedom are divided by f^¼, since f is estimated.
The two powers are set by trial: among 2, 8 and 16 equal contestants some are told apart in 3 to 6 of 100
comparisons at a correlation of 0.6, and in 15 to 32 without f; a planted 15 % is found in 91 to 98 of 100
where rounds are independent, and in as many without f but for two contestants (95 to 98 for 99). It is one
correlation for all: a single contestant that drifts among many goes unseen. With fewer than ten rounds r is
not known, and f is 1, as it is for independent draws (seeds, batches). Where the noise is heavy (20 %
lognormal, bimodal, spikes) a difference of 15 % is found in 10 to 30 of 100 of two, and in fewer of many.

Against a control (`below_control`) rounds are draws, of which there are often three, too few for each
contestant's own spread. With x_i the logarithms of contestant i over the control, n of them, and K of those

    s_i² = variance of x_i,   s² = mean of s_i² over the contestants
    i is below the control where   mean x_i < − t · max(s, s_i) / √n,   t = Student's t of K(n − 1) at 2 % / K

Where the contestants' noise is independent, this is Bonferroni's bound on naming any of them by chance. Where
all move together there is one comparison in truth, and s has n − 1 degrees of freedom instead of K(n − 1):
the two errors cancel nearly. What lies between costs up to twice that, so that of equal methods one is
named in at most 5 of 100 comparisons (`tests/test_decisions.py` plants all of these).
With fewer than three rounds nothing is known of the noise: each has to be below by a quarter (`ALONE`), which
draws of equal methods that scatter by 10 % are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from curvlab.exceptions import ArgumentError

__all__ = ["ALONE", "CONFIDENCE", "Decision", "Difference", "below_control", "decide"]

CONFIDENCE = 0.975
DRAWS = 1000
TRIMMED = 0.2
TRIMS_FROM = 10  # rounds: with fewer, what is cut off costs more than outliers do
ERROR_RATE = 0.02
ALONE = 0.25
FEW = 3  # rounds: with fewer, their spread says nothing
CHUNK = 4_000_000  # numbers that are drawn at a time
STRONGEST = 0.8  # a stronger correlation is taken for this: there is hardly one independent round left

Scale = Literal["ratio", "difference"]
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """How much larger one contestant is than another: `value` with its interval, over the same rounds.

    On the scale of ratios these are quotients, and 1 means equal; on that of differences 0 does. `share` is
    the share of draws in which the first was the smaller one.
    """

    value: float
    lower: float
    upper: float
    share: float
    neutral: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out that both are equal."""
        return not self.lower <= self.neutral <= self.upper


@dataclass(frozen=True, eq=False)
class Decision:
    """What the rounds say of the contestants; see the module for how.

    Attributes:
        names: the contestants, the smallest first.
        group: those that cannot be told from the smallest, itself first.
        rounds: how many rounds had a value of every contestant.
        best_share: the share of draws in which each was the smallest.
        order_share: the share of draws in which all were in the order of `names`.
    """

    names: tuple[str, ...]
    group: tuple[str, ...]
    rounds: int
    best_share: dict[str, float]
    order_share: float
    confidence: float
    _differences: dict[tuple[str, str], Difference] = field(repr=False)

    @property
    def best(self) -> str:
        """The smallest; it is preferred only where `group` has no other."""
        return self.names[0]

    @property
    def preferred(self) -> str | None:
        """The smallest where it is smaller than every other beyond the noise; None where nobody is."""
        return self.best if len(self.group) == 1 else None

    def difference(self, name: str, other: str) -> Difference:
        """How much larger `name` is than `other`."""
        if (name, other) in self._differences:
            return self._differences[name, other]
        known = sorted({one for pair in self._differences for one in pair})
        raise ArgumentError(
            f"`{name}` against `{other}` was not compared; compared were {', '.join(known) or 'none'}"
        )

    def same(self, name: str, other: str) -> bool:
        """Whether the two cannot be told apart."""
        return name == other or not self.difference(name, other).differs

    def smaller(self, name: str, other: str) -> bool:
        """Whether `name` is smaller than `other` beyond the noise."""
        return name != other and self.difference(other, name).lower > self.difference(other, name).neutral

    def frame(self) -> pd.DataFrame:
        """One row per contestant, the smallest first: against the smallest, and how often it was smallest."""
        rows = []
        for name in self.names:
            against = self._differences.get((name, self.best))
            rows.append(
                {
                    "name": name,
                    "against_best": math.nan if against is None else against.value,
                    "lower": math.nan if against is None else against.lower,
                    "upper": math.nan if against is None else against.upper,
                    "in_group": name in self.group,
                    "best_share": self.best_share[name],
                }
            )
        return pd.DataFrame(rows)


def decide(
    measured: Mapping[str, Sequence[float]],
    *,
    scale: Scale = "ratio",
    confidence: float = CONFIDENCE,
    draws: int = DRAWS,
    seed: int = 0,
    independent: bool = False,
) -> Decision:
    """Compare contestants by what was measured of each in the same rounds; smaller is better.

    Args:
        measured: by name the values round by round; NaN where a round has none. Rounds in which one is
            missing are left out for all, and with fewer than two left nothing is told apart.
        scale: `ratio` compares logarithms of numbers above zero, `difference` the numbers themselves.
        confidence: of all intervals together.
        draws: how often the rounds are drawn again.
        seed: of the draws; equal data and seed give equal answers.
        independent: whether rounds have nothing to do with each other, as seeds have not; moments of a
            machine may have.

    >>> rounds = np.array([1.0, 1.3, 1.1, 0.9, 1.0, 1.2])
    >>> noise = np.array([1.01, 0.99, 1.0, 1.02, 0.98, 1.0])
    >>> found = decide({"slow": 1.5 * rounds * noise, "quick": rounds, "twin": rounds * noise})
    >>> found.group, found.smaller("quick", "slow")
    (('twin', 'quick'), True)
    >>> round(found.difference("slow", "twin").value, 6)
    1.5
    """
    names, values = _complete_rounds(measured, scale)
    if not 0 < confidence < 1:
        raise ArgumentError(f"confidence={confidence}: use a number between 0 and 1, such as {CONFIDENCE}")
    if draws < 1:
        raise ArgumentError(f"draws={draws}: use 1 or more")
    rounds, count = values.shape
    if not rounds:
        return Decision(names, names, 0, dict.fromkeys(names, math.nan), math.nan, confidence, {})
    drawn = np.random.default_rng(seed).integers(0, rounds, (draws, rounds))
    place = values - np.median(values, axis=1, keepdims=True)  # in its round
    located = _location(place, axis=0)
    order = np.argsort(located, kind="stable")
    ranked = _location(place[drawn], axis=1)
    first, second = np.triu_indices(count, 1)
    inflation = 1.0 if independent else _inflation(values)
    differences = _differences(names, values, first, second, drawn, confidence, scale, inflation)
    ordered = tuple(names[i] for i in order)
    best = ordered[0]
    smallest = np.bincount(ranked.argmin(axis=1), minlength=count) / draws
    return Decision(
        names=ordered,
        group=tuple(n for n in ordered if n == best or not differences[n, best].differs),
        rounds=rounds,
        best_share={names[i]: float(smallest[i]) for i in order},
        order_share=float((np.diff(ranked[:, order], axis=1) >= 0).all(axis=1).mean()),
        confidence=confidence,
        _differences=differences,
    )


def below_control(
    ratios: Mapping[str, Sequence[float]], *, error_rate: float = ERROR_RATE, alone: float = ALONE
) -> dict[str, bool]:
    """Which contestants are below the control beyond the noise, all of them judged together.

    Args:
        ratios: by name the contestant's value over the control's, above 0, round by round; NaN where a round
            has none.
        error_rate: how often one of contestants that equal the control may be named.
        alone: by how much each round has to be below where there are fewer than three.

    >>> below_control({"better": [0.5, 0.55, 0.52], "equal": [0.97, 1.05, 1.01]})
    {'better': True, 'equal': False}
    """
    logs = {name: np.log(_finite(values)) for name, values in ratios.items()}
    several = {name: x for name, x in logs.items() if len(x) >= FEW}
    freedom = sum(len(x) - 1 for x in several.values())
    pooled = sum(float(((x - x.mean()) ** 2).sum()) for x in several.values()) / max(freedom, 1)
    factor = float(-stdtrit(freedom, error_rate / len(several))) if several else math.inf
    found = {}
    for name, x in logs.items():
        if name in several:
            noise = math.sqrt(max(pooled, float(x.var(ddof=1))) / len(x))
            found[name] = float(x.mean()) < -factor * noise
        else:
            found[name] = bool(len(x)) and float(x.max()) < math.log1p(-alone)
    return found


def _finite(values: Sequence[float]) -> Numbers:
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    if (known <= 0).any():
        raise ArgumentError("a ratio to the control needs numbers above 0; put a floor under both")
    return known


def _complete_rounds(
    measured: Mapping[str, Sequence[float]], scale: Scale
) -> tuple[tuple[str, ...], Numbers]:
    """The names, and one row per round that has a value of every contestant, as logarithms for ratios."""
    if not measured:
        raise ArgumentError("there is nothing to decide between: `measured` is empty")
    lengths = {name: len(values) for name, values in measured.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ArgumentError(f"contestants have different numbers of rounds ({told}); fill gaps with NaN")
    values = np.column_stack([np.asarray(one, dtype=float) for one in measured.values()])
    values = values[np.isfinite(values).all(axis=1)]
    if scale == "ratio":
        if (values <= 0).any():
            raise ArgumentError("a ratio needs numbers above 0; use scale='difference' for others")
        values = np.log(values)
    return tuple(measured), values


def _differences(
    names: tuple[str, ...],
    values: Numbers,
    first: NDArray[np.intp],
    second: NDArray[np.intp],
    drawn: NDArray[np.int64],
    confidence: float,
    scale: Scale,
    inflation: float,
) -> dict[tuple[str, str], Difference]:
    """Both directions of every pair."""
    if not len(first):
        return {}
    apart = values[:, first] - values[:, second]
    rounds, pairs = apart.shape
    middle, error = _location(apart, axis=0), _standard_error(apart)
    chunk = max(1, CHUNK // apart.size)
    draws = [drawn[i : i + chunk] for i in range(0, len(drawn), chunk)]
    located = np.concatenate([_location(apart[rows], axis=1) for rows in draws])
    factor = _factor(located, middle, rounds, pairs, confidence, inflation)
    width = factor * math.sqrt(inflation) * error
    found: dict[tuple[str, str], Difference] = {}
    shares = (located < 0).mean(axis=0) + (located == 0).mean(axis=0) / 2
    for a, b, m, w, share in zip(first, second, middle, width, shares, strict=True):
        found[names[a], names[b]] = _difference(m, w, share, scale)
        found[names[b], names[a]] = _difference(-m, w, 1 - share, scale)
    return found


def _difference(middle: float, width: float, share: float, scale: Scale) -> Difference:
    shown = _exp if scale == "ratio" else float
    return Difference(
        value=shown(middle),
        lower=shown(middle - width),
        upper=shown(middle + width),
        share=float(share),
        neutral=1.0 if scale == "ratio" else 0.0,
    )


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _factor(
    located: Numbers, middle: Numbers, rounds: int, pairs: int, confidence: float, inflation: float
) -> float:
    """How many standard errors wide all intervals are, so that they hold together."""
    freedom = rounds - 2 * _cut(rounds) - 1
    if freedom < 1:
        return math.inf
    freedom = max(freedom / inflation**0.25, 1)
    deviation = located.std(axis=0)
    moving = deviation > 0
    worth = 1.0
    if moving.any():
        largest = (np.abs(located - middle)[:, moving] / deviation[moving]).max(axis=1)
        reached = 2 * ndtr(-np.quantile(largest, confidence))
        worth = float(np.clip((1 - confidence) / max(reached, 1e-300), 1, pairs))
    return float(-stdtrit(freedom, (1 - confidence) / worth / 2))


def _inflation(values: Numbers) -> float:
    """By how much the correlation of successive rounds makes the variance of a mean larger than it looks."""
    rounds, count = values.shape
    if rounds < TRIMS_FROM:
        return 1.0
    place = _winsorised(values - np.median(values, axis=1, keepdims=True))
    place = place - place.mean(axis=0)
    moving = place.any(axis=0)
    if not moving.any():
        return 1.0
    products, squares = (place[1:] * place[:-1]).sum(axis=0), (place**2).sum(axis=0)
    measured = float((products[moving] / squares[moving]).mean())
    known = (measured + 1 / rounds) / (1 - 3 / rounds) + 1 / (math.sqrt(rounds) * (count - 1) ** 0.75)
    correlation = min(max(known, 0.0), STRONGEST)
    apart = np.arange(1, rounds)
    variance = 1 + 2 * float(((1 - apart / rounds) * correlation**apart).sum())
    return variance / (1 - (variance - 1) / (rounds - 1))


def _cut(rounds: int) -> int:
    """How many values are cut off at either end."""
    return int(TRIMMED * rounds) if rounds >= TRIMS_FROM else 0


def _location(values: Numbers, axis: int) -> Numbers:
    """The trimmed mean along an axis."""
    cut = _cut(values.shape[axis])
    ordered = np.moveaxis(np.sort(values, axis=axis), axis, 0) if cut else np.moveaxis(values, axis, 0)
    middle: Numbers = ordered[cut : len(ordered) - cut].mean(axis=0)
    return middle


def _standard_error(values: Numbers) -> Numbers:
    """Yuen's: the winsorised deviation over the share that is kept, of values with one row per round."""
    rounds = len(values)
    if rounds < 2:
        return np.full(values.shape[1], np.inf)
    kept = 1 - 2 * _cut(rounds) / rounds
    error: Numbers = _winsorised(values).std(axis=0, ddof=1) / (kept * math.sqrt(rounds))
    return error


def _winsorised(values: Numbers) -> Numbers:
    """Each column with what a trimmed mean would cut off moved to the nearest value that it keeps."""
    cut = _cut(len(values))
    ordered = np.sort(values, axis=0)
    bounded: Numbers = np.clip(values, ordered[cut], ordered[len(values) - 1 - cut])
    return bounded
