"""The paper's averages of the errors along a trajectory.

For each provider and layer, the mean over the points θ⁰, θ^s, … of one seed; "Total" is the root of the sum
of squares of the layers' means (which reproduces every Total that the paper prints), and `Total without the
last layer` the same over t < k: at the output the empirical Fisher's error is mostly label noise. Then the
mean and the standard deviation over the seeds. Relative errors are averaged as they are: the mean of
‖B̃ - |B|‖ / ‖|B|‖, at a layer or for all of them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.studies.small.errors import TOTAL
from curvlab.studies.train.plateau import LEFT

__all__ = ["INNER", "PHASES", "ROUNDING", "averages", "phase_of", "with_phases"]

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
