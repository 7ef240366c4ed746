"""What steps do as the damping changes, and as training goes on: one line per pair, the gradient in grey."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.lines import Line2D

from curvlab.report.figures.axes import dress, empty, get_axes, handles, legend, log_axis, look_of
from curvlab.report.theme import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["damping_curves", "point_curves"]

SIZE = (5.0, 4.0)
GRADIENT = "identity"
LABELS = {
    "sine": "distance to the Newton step (%)",
    "decrease": "decrease, best step size (%)",
    "decrease_full": "decrease, step size 1 (%)",
    "predicted": "predicted decrease, step size 1 (%)",
    "weight_relative": "weight blocks: distance from H (%)",
    "error_relative": "bias blocks: distance from |H| (%)",
}


def damping_curves(
    dampings: pd.DataFrame, ax: Axes | None = None, look: Look | None = None, *, measure: str = "sine"
) -> Axes:
    """`measure` in per cent against α, one line per pair; the control is grey.

    >>> frame = pd.DataFrame({"provider": "pch-1", "solver": "kfi", "alpha": [0.01, 0.1], "sine": [0.5, 0.2]})
    >>> damping_curves(frame).get_xlabel()
    'damping α'
    """
    ax, look = get_axes(ax, *SIZE), look_of(look, dampings[dampings["solver"] != ""])
    known = dampings[np.isfinite(dampings[measure].astype(float))]
    if known.empty:
        return empty(ax, look, "not known at any damping")
    for (provider, solver), group in known.groupby(["provider", "solver"], sort=False):
        ordered = group.sort_values("alpha")
        _line(ax, look, ordered["alpha"], 100 * ordered[measure], str(provider), str(solver))
    if measure in ("decrease_full", "predicted"):
        _cut_below(ax, 100 * known[measure].astype(float))
    ax.set(xlabel="damping α", ylabel=LABELS.get(measure, measure))
    log_axis(ax, "x")
    return _finish(ax, look, known)


def _cut_below(ax: Axes, values: pd.Series[float]) -> None:
    """End the axis at -100 %: what raises the loss further is as useless, and would hide all the rest."""
    if ax.get_ylim()[0] < -100:
        high = max(float(values.max()), 0.0)
        ax.set_ylim(-100, high + 0.05 * (high + 100))


def point_curves(
    points: pd.DataFrame, ax: Axes | None = None, look: Look | None = None, *, measure: str = "sine"
) -> Axes:
    """`measure` in per cent at each point of the training, in the order in which they were asked for.

    >>> frame = pd.DataFrame({"provider": "pch-1", "solver": "kfi", "point": ["init", "epoch:1"],
    ...     "sine": [0.5, 0.2]})
    >>> [label.get_text() for label in point_curves(frame).get_xticklabels()]
    ['init', 'epoch:1']
    """
    ax, look = get_axes(ax, *SIZE), look_of(look, points[points["solver"] != ""])
    names = list(dict.fromkeys(points["point"]))
    known = points[np.isfinite(points[measure].astype(float))]
    if known.empty:
        return empty(ax, look, "not known at any point")
    if measure in ("weight_relative", "error_relative"):  # of a provider, whatever the solver
        known = known.drop_duplicates(["provider", "point"]).assign(solver=known["solver"].iloc[0])
    for (provider, solver), group in known.groupby(["provider", "solver"], sort=False):
        places = [names.index(point) for point in group["point"]]
        _line(ax, look, places, 100 * group[measure], str(provider), str(solver))
    ax.set_xticks(range(len(names)), names)
    ax.set(ylabel=LABELS.get(measure, measure), ylim=(min(0, ax.get_ylim()[0]), None))
    return _finish(ax, look, known)


def _line(ax: Axes, look: Look, x: object, y: object, provider: str, solver: str) -> None:
    if provider == GRADIENT:
        ax.plot(x, y, color=look.theme.muted, linewidth=3, alpha=0.8, zorder=1)  # type: ignore[arg-type]
        return
    ax.plot(
        x,  # type: ignore[arg-type]
        y,  # type: ignore[arg-type]
        color=look.colour(provider),
        linestyle=look.line(solver) if solver else "-",
        marker=look.marker(solver) if solver else "o",
        markersize=4,
        linewidth=1.4,
    )


def _finish(ax: Axes, look: Look, known: pd.DataFrame) -> Axes:
    dress(ax, look)
    pairs = known[(known["solver"] != "") & (known["provider"] != GRADIENT)]
    providers, solvers = (list(dict.fromkeys(pairs[name].astype(str))) for name in ("provider", "solver"))
    entries: list[Artist] = handles(look, providers, solvers, lines=True)
    if (known["provider"] == GRADIENT).any():
        entries.append(Line2D([], [], color=look.theme.muted, linewidth=3, label="gradient"))
    legend(ax, look, entries, columns=3)
    return ax
