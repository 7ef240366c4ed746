"""Errors along a trajectory: the paper's averages, how often its orderings hold, and its claims about both.

Averages: for each provider and layer, the mean over the points θ⁰, θ^s, … of one seed; "Total" is the root of
the sum of squares of the layers' means (which reproduces every Total that the paper prints), and `Total
without the last layer` the same over t < k: at the output the empirical Fisher's error is mostly label noise.
Then the mean and the standard deviation over the seeds. Relative errors are averaged as they are: the mean of
‖B̃ - |B|‖ / ‖|B|‖, at a layer or for all of them.

Orderings: points of one run are not independent, and runs from different seeds are: the interval of the share
of points is a two-stage bootstrap that draws seeds, then blocks of consecutive points within them. The
interval of the number of seeds whose average obeys the ordering is Clopper and Pearson's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil, nan, sqrt

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from curvlab.report.numbers import digits, percent
from curvlab.reproduce.experiment import Claim, Frames, Judgement, Verdict, not_measured, rows_of, verdict_of
from curvlab.studies.small.errors import TOTAL
from curvlab.studies.train.plateau import LEFT

__all__ = [
    "INNER",
    "PHASES",
    "ROUNDING",
    "Share",
    "accumulation_claim",
    "averages",
    "ordering_claim",
    "ordering_name",
    "phase_of",
    "share_of",
    "with_phases",
]

INNER = "Total without the last layer"
ROUNDING = 1e-5  # below it an error is that of an exact block in float32
PHASES = ("plateau", "escape", "late")
LATE = 0.90
"""A run is late in training when its loss is below this share of the plateau's height."""


def averages(errors: pd.DataFrame) -> pd.DataFrame:
    """Mean over points, then mean and deviation over seeds, of the errors of one measured batch size.

    Returns a row for each provider and layer (and the two totals): `error`, `error_deviation`, `relative`,
    `relative_deviation` (NaN with one seed) and `seeds`.

    >>> frame = pd.DataFrame({"provider": "fisher", "seed": 0, "step": [0, 0, 0, 1, 1, 1],
    ...     "layer": [1, 2, "Total"] * 2, "error": [3.0, 4.0, 5.0, 3.0, 4.0, 5.0], "relative": 1.0})
    >>> averages(frame).set_index("layer")["error"].to_dict()
    {1: 3.0, 2: 4.0, 'Total': 5.0, 'Total without the last layer': 3.0}
    """
    columns = ["error", "relative"]
    by_seed = errors.groupby(["provider", "seed", "layer"], sort=False)[columns].mean().reset_index()
    seeds = pd.concat([_of_seed(group) for _, group in by_seed.groupby(["provider", "seed"], sort=False)])
    grouped = seeds.groupby(["provider", "layer"], sort=False)
    means, deviations = grouped[columns].mean(), grouped[columns].std()
    joined = means.join(deviations.add_suffix("_deviation")).join(grouped["seed"].nunique().rename("seeds"))
    return joined.reset_index()


def _of_seed(group: pd.DataFrame) -> pd.DataFrame:
    """One provider and seed, with its totals made of the layers' means."""
    layers = group[group["layer"] != TOTAL]
    last = max(layers["layer"])
    head = group.iloc[0][["provider", "seed"]].to_dict()
    relative = group.loc[group["layer"] == TOTAL, "relative"]
    totals = [
        head | {"layer": TOTAL, "error": _root(layers), "relative": float(relative.iloc[0])},
        head | {"layer": INNER, "error": _root(layers[layers["layer"] != last]), "relative": np.nan},
    ]
    return pd.concat([layers, pd.DataFrame(totals)], ignore_index=True)


def _root(layers: pd.DataFrame) -> float:
    return float(np.sqrt((layers["error"] ** 2).sum()))


def phase_of(losses: pd.Series, uninformed: float) -> list[str]:
    """The phase of each point of a run, from its losses in order of the updates.

    `plateau` until the loss first falls below 98 % of `uninformed`, that of the uniform prediction;
    `escape` until it first falls below 90 %; `late` from then on.

    >>> phase_of(pd.Series([2.31, 2.2, 2.0, 2.1]), 2.3)
    ['plateau', 'escape', 'late', 'late']
    """
    lowest = np.minimum.accumulate(losses.to_numpy(dtype=float)) / uninformed
    return [PHASES[int(low < LEFT) + int(low < LATE)] for low in lowest]


def with_phases(errors: pd.DataFrame, uninformed: float) -> pd.DataFrame:
    """The frame with the phase of every point; each seed and batch size is a run of its own."""
    points = errors.drop_duplicates(["seed", "batch", "step"])[["seed", "batch", "step", "loss"]]
    points = points.sort_values(["seed", "batch", "step"])
    labels = pd.Series(index=points.index, dtype=object)
    for _, run in points.groupby(["seed", "batch"]):
        labels.loc[run.index] = phase_of(run["loss"], uninformed)
    points["phase"] = labels
    return errors.merge(points.drop(columns="loss"), on=["seed", "batch", "step"], how="left")


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
            held[drawn] += _resample_blocks(run, int(drawn.sum()), generator).sum(axis=1)
            counted[drawn] += len(run)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(held / counted, [tail, 1 - tail])
    return float(low), float(high)


def _resample_blocks(run: np.ndarray, draws: int, generator: np.random.Generator) -> np.ndarray:
    """`draws` samples of as many points, in circular blocks of √n consecutive ones."""
    length = ceil(sqrt(len(run)))
    starts = generator.integers(len(run), size=(draws, ceil(len(run) / length)))
    indices = (starts[:, :, None] + np.arange(length)).reshape(draws, -1)[:, : len(run)] % len(run)
    return run[indices]


MOSTLY, RARELY = 0.9, 0.5
PAPERS_OWN = ("fisher", "gauss-newton", "pch-1", "pch-2")


def ordering_claim(providers: Sequence[str], says: str) -> Claim:
    """That the Totals are ordered so, from the smallest error to the largest."""
    rule = (
        f"holds: in at least {percent(MOSTLY)} of the points of the smaller measured batch, and in every "
        f"seed's average; does not hold: in fewer than {percent(RARELY)}; mixed: between"
    )
    return Claim(says, rule, partial(_judge_ordering, ordering_name(providers)))


def _judge_ordering(ordering: str, frames: Frames) -> Judgement:
    if "orderings" not in frames:
        return not_measured()
    shares = frames["orderings"]
    found = shares[(shares["ordering"] == ordering) & (shares["phase"] == "all")]
    if found.empty:
        return not_measured("The frames do not have both.")
    first = found.sort_values("batch").iloc[0]
    words = [
        f"on {row.batch} examples {ordering} in {percent(row.share)} of {row.points} points "
        f"({percent(row.low)} to {percent(row.high)}), {row.seeds_holding} of {row.seeds} seeds"
        for row in rows_of(found.sort_values("batch"))
    ]
    of_ordering = shares[(shares["ordering"] == ordering) & (shares["batch"] == first["batch"])]
    words += [
        f"in the {row.phase} phase in {percent(row.share)} of {row.points} points ({row.seeds} of "
        f"{first['seeds']} seeds have one)"
        for row in rows_of(of_ordering)
        if row.phase in ("plateau", "late")
    ]
    verdict: Verdict = "mixed"
    if first["share"] >= MOSTLY and first["seeds_holding"] == first["seeds"]:
        verdict = "holds"
    elif first["share"] < RARELY:
        verdict = "does not hold"
    return Judgement(f"{'; '.join(words)}.", verdict)


def accumulation_claim() -> Claim:
    """That errors do not accumulate from layer to layer towards the input."""
    return Claim(
        "Errors do not accumulate with the layers, for any of the matrices.",
        "holds: the mean relative error next to the input is at most that at the last inner layer, for every "
        "provider that the paper measures; does not hold: for none of them; mixed: for some",
        _judge_accumulation,
    )


def _judge_accumulation(frames: Frames) -> Judgement:
    if "averages" not in frames:
        return not_measured()
    means = frames["averages"]
    means = means[(means["phase"] == "all") & (means["batch"] == means["batch"].min())]
    inner = means[[not isinstance(layer, str) for layer in means["layer"]]]
    last = int(max(inner["layer"])) - 1
    kept, words = [], []
    for provider, group in inner.groupby("provider", sort=False):
        if provider not in PAPERS_OWN:
            continue
        by_layer = group.set_index("layer")
        ends = (by_layer.loc[last], by_layer.loc[1])
        kept.append(bool(ends[1]["relative"] <= ends[0]["relative"]))
        words.append(
            f"{provider} {_pair(ends, 'relative', percent)} relative, {_pair(ends, 'error', digits)} absolute"
        )
    return Judgement(f"At layer {last} and at layer 1: {'; '.join(words)}.", verdict_of(kept))


def _pair(ends: tuple[pd.Series, pd.Series], column: str, show: Callable[[float], str]) -> str:
    return " and ".join(show(float(end[column])) for end in ends)
