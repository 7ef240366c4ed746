"""Whether a pair beats the gradient: its step against the control's, draw by draw at the deciding point.

A learning rate is tuned for whatever one trains with, so steps are compared at their best scale:

    angle   sine of the angle to the exact damped Newton step, where that is known      smaller is better
    loss    decrease of the batch's loss at the best step size                           larger is better
    other   decrease of another batch's loss at that step size, where there is one       not to be worse

A pair beats the gradient where, in every one of the first two that is known, it is better by more than 5 % in
the median and by more than the noise of the draws, all pairs judged together (`decisions.below_control`: of
equal methods one is said to beat the gradient in at most 5 of 100 comparisons), and its median on the other
batch is no worse. With fewer than three draws it has to be closer by a quarter in each, or, where the angle
is not known, lower the loss by a quarter more. Less is said to be no difference: with so few draws, and at
one α, no more can be claimed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from curvlab.report.numbers import digits, join_names, percent
from curvlab.report.pareto import Candidate
from curvlab.studies.compare.costs import decide_times
from curvlab.studies.compare.decisions import ALONE, Decision, below_control
from curvlab.studies.compare.settings import Point
from curvlab.studies.compare.spectra import damping_rules

if TYPE_CHECKING:
    from curvlab.studies.compare.frames import Comparison

__all__ = [
    "Against",
    "Beside",
    "Damping",
    "Evidence",
    "against_gradient",
    "control_words",
    "damping_words",
    "evidence_of",
    "point_words",
]

Pair = tuple[str, str]

MATERIAL = 0.05
CLOSE = 0.01  # an angle below this counts as this, as for pairs among themselves
FALLS = 1e-4  # a decrease of the loss below this counts as this, a rise too


@dataclass(frozen=True)
class Beside:
    """One quantity of a pair beside the gradient's: medians over the draws, NaN where it is unknown.

    `share` is that of the draws in which the pair is better, and `told` whether it is beyond the noise;
    `first` is the share of the draws in which it is the best of all pairs.
    """

    pair: float = math.nan
    gradient: float = math.nan
    share: float = math.nan
    told: bool = False
    first: float = math.nan

    @property
    def known(self) -> bool:
        """Whether it was measured."""
        return not math.isnan(self.pair)


@dataclass(frozen=True)
class Against:
    """A pair beside the gradient step, by what the module says."""

    angle: Beside
    loss: Beside
    other: Beside
    draws: int

    @property
    def known(self) -> bool:
        """Whether there is anything to compare by."""
        return self.angle.known or self.loss.known

    @property
    def beats(self) -> bool:
        """Whether the pair is better than the gradient beyond the noise, in all that is known."""
        angle, loss = self.angle, self.loss
        nearer = max(angle.pair, CLOSE) < (1 - MATERIAL) * max(angle.gradient, CLOSE)
        lower = loss.pair > 0 and loss.pair > (1 + MATERIAL) * loss.gradient
        elsewhere = not self.other.known or self.other.pair >= self.other.gradient
        closer = not angle.known or (angle.told and nearer)
        return self.known and closer and (not loss.known or (loss.told and lower)) and elsewhere


def against_gradient(draws: pd.DataFrame | None, point: str) -> dict[Pair, Against]:
    """Each pair beside `identity` at a point; empty where that was not measured.

    >>> draws = pd.DataFrame({"provider": ["identity", "pch-1"], "solver": ["", "kfi"], "point": "init",
    ...     "seed": 0, "draw": 0, "sine": [0.5, 0.1], "decrease": [0.2, 0.4], "decrease_other": [0.1, 0.2]})
    >>> against_gradient(draws, "init")["pch-1", "kfi"].beats
    True
    """
    if draws is None or draws.empty:
        return {}
    here = draws[draws["point"] == point]
    scenes = ["seed", "draw"]
    gradient = here[here["provider"] == "identity"].set_index(scenes).sort_index()
    if gradient.empty:
        return {}
    controls = gradient.add_suffix("_control")
    joined = {
        f"{provider} + {solver}": group.set_index(scenes).sort_index().join(controls, how="inner")
        for (provider, solver), group in here[here["solver"] != ""].groupby(
            ["provider", "solver"], sort=False
        )
    }
    angles = _all_beside(joined, "sine", CLOSE, smaller=True)
    # Both have to be told: a few draws need be beyond the noise in one of them alone.
    alone = 0.0 if all(angle.known for angle in angles.values()) else ALONE
    losses = _all_beside(joined, "decrease", FALLS, smaller=False, alone=alone)
    others = _all_beside(joined, "decrease_other", FALLS, smaller=False)
    return {
        (str(frame["provider"].iloc[0]), str(frame["solver"].iloc[0])): Against(
            angles[name], losses[name], others[name], len(frame)
        )
        for name, frame in joined.items()
        if len(frame)
    }


def _all_beside(
    joined: Mapping[str, pd.DataFrame], name: str, floor: float, *, smaller: bool, alone: float = ALONE
) -> dict[str, Beside]:
    """One quantity of all pairs beside the control's; what is below the floor counts as the floor."""
    both = {pair: frame[[name, f"{name}_control"]].to_numpy(float) for pair, frame in joined.items()}
    both = {pair: values[np.isfinite(values).all(axis=1)] for pair, values in both.items()}
    floored = {pair: np.maximum(values, floor) for pair, values in both.items()}
    own, control = (0, 1) if smaller else (1, 0)
    ratios = {pair: (v[:, own] / v[:, control]).tolist() for pair, v in floored.items()}
    told = below_control(ratios, alone=alone)
    first = _share_first(joined, name, smaller=smaller)
    return {
        pair: Beside(
            pair=float(np.median(values[:, 0])),
            gradient=float(np.median(values[:, 1])),
            share=float((values[:, own] < values[:, control]).mean()),
            told=told[pair],
            first=first.get(pair, math.nan),
        )
        if len(values)
        else Beside()
        for pair, values in both.items()
    }


def _share_first(joined: Mapping[str, pd.DataFrame], name: str, *, smaller: bool) -> dict[str, float]:
    """The share of the draws in which each is the best, of those in which all are known; equal ones share."""
    values = pd.DataFrame({pair: frame[name] for pair, frame in joined.items()})
    values = values.dropna(axis=1, how="all").dropna()
    ranks = (values if smaller else -values).rank(axis=1, method="min")
    ahead = ranks.eq(1)
    shares = ahead.div(ahead.sum(axis=1), axis=0).mean()
    return {str(pair): float(share) for pair, share in shares.items()}


def control_words(pairs: Sequence[Candidate], against: Mapping[Pair, Against]) -> list[str]:
    """What the gradient step does beside the pairs, and which of them do not beat it."""
    known = {(p.provider, p.solver): against.get((p.provider, p.solver)) for p in pairs}
    beside = {pair: one for pair, one in known.items() if one is not None and one.known}
    if not beside:
        return []
    first = next(iter(beside.values()))
    words = ["The control is the gradient step at its best scale: it "]
    parts = []
    if not math.isnan(first.angle.gradient):
        nearest = min(beside, key=lambda pair: beside[pair].angle.pair)
        closest = f"the closest pair, {' + '.join(nearest)}, {percent(beside[nearest].angle.pair)}"
        parts.append(f"is {percent(first.angle.gradient)} from the exact damped Newton step ({closest})")
    if not math.isnan(first.loss.gradient):
        most = max(beside, key=lambda pair: beside[pair].loss.pair)
        largest = f"the most by a pair, {' + '.join(most)}: {percent(beside[most].loss.pair)}"
        parts.append(f"lowers the loss of its batch by {percent(first.loss.gradient)} ({largest})")
        if not math.isnan(first.other.gradient):
            there = (
                f"{percent(first.other.gradient)} ({' + '.join(most)}: {percent(beside[most].other.pair)})"
            )
            parts.append(f"that of another batch by {there}")
    words.append(join_names(parts) + ".")
    losers = [" + ".join(pair) for pair, one in beside.items() if not one.beats]
    if losers and len(losers) < len(beside):
        words.append(f" No better than it beyond the noise: {join_names(losers)}.")
    return ["".join(words)]


@dataclass(frozen=True)
class Damping:
    """α beside the Hessian's largest eigenvalue at the deciding point (medians over draws).

    Where even the largest is below zero, all curvature is negative, and at least as large as its magnitude.
    """

    alpha: float
    largest: float
    of: str = "blocks"

    @property
    def rules(self) -> bool:
        """Whether α outweighs every eigenvalue, so that every damped step is nearly the gradient's."""
        return damping_rules(abs(self.largest), self.alpha)


def damping_words(damping: Damping | None) -> list[str]:
    """What the damping does to the comparison.

    >>> damping_words(Damping(0.05, 0.039))[0][:67]
    'The damping rules: α = 0.05 is more than the largest eigenvalue of '
    """
    if damping is None or math.isnan(damping.largest):
        return []
    of = "the Hessian's blocks" if damping.of == "blocks" else "the Hessian"
    value = digits(damping.largest)
    if damping.rules:
        return [
            f"The damping rules: α = {damping.alpha:g} is more than the largest eigenvalue of {of} here, "
            f"{value}. The damped matrix (1−α)C + αI is then mostly αI, every step is nearly −g/α, and "
            "distances of steps measure the damping, not the curvature. Compare at a smaller α."
        ]
    return [f"The largest eigenvalue of {of} is {value} here, beside α = {damping.alpha:g}."]


@dataclass(frozen=True)
class Evidence:
    """What a recommendation takes into account besides the cells.

    `against` has each pair beside the gradient step; a pair of which nothing is known there is allowed, as in
    folders of earlier releases. `point` names where all of it was measured.
    """

    against: Mapping[Pair, Against] = field(default_factory=dict)
    damping: Damping | None = None
    times: tuple[Decision, ...] = ()
    point: str = ""
    draws: int = 1

    def allows(self, pair: Pair) -> bool:
        """Whether the pair may be suggested."""
        found = self.against.get(pair)
        return found is None or not found.known or found.beats


def evidence_of(comparison: Comparison) -> Evidence:
    """What a comparison knows besides its cells, at its deciding point."""
    point = comparison.point
    scenes = comparison.at_point("scenes")
    damping = None
    if len(scenes):
        largest = float(scenes["largest_eigenvalue"].median())
        damping = Damping(float(comparison.config["alpha"]), largest, str(scenes["largest_of"].iloc[0]))
    rounds = comparison.at_point("repetitions")
    rounds = rounds[rounds["solver"] != ""] if len(rounds) else rounds
    return Evidence(
        against_gradient(comparison.draws, point),
        damping,
        decide_times(rounds) if len(rounds) else (),
        point_words(comparison),
        max(len(scenes), 1),
    )


def point_words(comparison: Comparison) -> str:
    """The deciding point in words, with the steps that led there; empty for a folder without any."""
    scenes = comparison.at_point("scenes")
    if scenes.empty:
        return ""
    steps = int(scenes["steps"].iloc[0])
    words = Point.read(comparison.point).words
    return f"after {steps} steps of Adam" if comparison.point == "trained" else words
