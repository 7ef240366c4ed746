"""How often an ordering of the providers' errors holds along training, with intervals.

Points of one run are not independent, and runs from different seeds are: the interval of the share of points
is a two-stage bootstrap that draws seeds, then blocks of consecutive points within them. The interval of the
number of seeds whose average obeys the ordering is Clopper and Pearson's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, nan, sqrt

import numpy as np
import pandas as pd
from scipy.stats import binomtest

__all__ = ["Share", "ordering_name", "share_of"]

DRAWS = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Share:
    """Where an ordering holds: share of points, and the seeds whose average obeys it."""

    ordering: str
    points: int
    share: float
    low: float
    high: float
    seeds: int
    seeds_holding: int
    seeds_low: float
    seeds_high: float


def ordering_name(providers: Sequence[str]) -> str:
    """The ordering as it is written.

    >>> ordering_name(("pch-2", "pch-1"))
    'pch-2 < pch-1'
    """
    return " < ".join(providers)


def share_of(totals: pd.DataFrame, providers: Sequence[str], value: str = "error") -> Share:
    """How often `value` of the first provider is below that of the second, and so on, strictly.

    Args:
        totals: one row for each seed, step and provider: `seed`, `step`, `provider`, `value`.
        providers: from the smallest to the largest.
        value: the column compared.

    >>> frame = pd.DataFrame({"seed": 0, "step": [0, 0, 1, 1], "provider": ["a", "b"] * 2,
    ...     "error": [1.0, 2.0, 3.0, 2.0]})
    >>> share_of(frame, ("a", "b")).share
    0.5
    """
    table = totals.pivot_table(index=["seed", "step"], columns="provider", values=value, sort=True)
    table = table.reindex(columns=list(providers)).dropna()
    name = ordering_name(providers)
    if table.empty:
        return Share(name, 0, nan, nan, nan, 0, 0, nan, nan)
    runs = [_holds(run, providers) for _, run in table.groupby(level="seed")]
    seeds = _holds(table.groupby(level="seed").mean(), providers)
    holding = int(seeds.sum())
    of_seeds = binomtest(holding, len(seeds)).proportion_ci(LEVEL)
    low, high = _bootstrap(runs)
    return Share(
        name,
        len(table),
        float(np.concatenate(runs).mean()),
        low,
        high,
        len(seeds),
        holding,
        float(of_seeds.low),
        float(of_seeds.high),
    )


def _holds(table: pd.DataFrame, providers: Sequence[str]) -> np.ndarray:
    values = table[list(providers)].to_numpy()
    steps = [values[:, left] < values[:, right] for left, right in pairwise(range(len(providers)))]
    return np.logical_and.reduce(steps)


def _bootstrap(runs: list[np.ndarray]) -> tuple[float, float]:
    """Percentile interval of the share; the generator is fixed, so that a page says the same twice."""
    generator = np.random.default_rng(0)
    held = np.zeros(DRAWS)
    counted = np.zeros(DRAWS)
    for _ in runs:
        chosen = generator.integers(len(runs), size=DRAWS)
        for index, run in enumerate(runs):
            drawn = chosen == index
            held[drawn] += _resampled(run, int(drawn.sum()), generator).sum(axis=1)
            counted[drawn] += len(run)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(held / counted, [tail, 1 - tail])
    return float(low), float(high)


def _resampled(run: np.ndarray, draws: int, generator: np.random.Generator) -> np.ndarray:
    """`draws` samples of as many points, in circular blocks of √n consecutive ones."""
    length = ceil(sqrt(len(run)))
    starts = generator.integers(len(run), size=(draws, ceil(len(run) / length)))
    indices = (starts[:, :, None] + np.arange(length)).reshape(draws, -1)[:, : len(run)] % len(run)
    return run[indices]
