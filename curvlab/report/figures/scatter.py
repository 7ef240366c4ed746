"""Cost against a measure of error, with the Pareto front drawn: what the recommendation is read from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from curvlab.report.figures.axes import (
    FONT,
    dress,
    empty,
    get_axes,
    handles,
    legend,
    log_axis,
    look_of,
    shorten,
)
from curvlab.report.measures import MEASURES
from curvlab.report.numbers import Unit, second_unit
from curvlab.report.pareto import Candidate, candidates, front
from curvlab.report.theme import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["pareto_scatter"]

LETTER = 6.2  # points of a bold letter, on average
WIDE = 6.0  # a range of more than this factor is drawn on a logarithmic axis


def pareto_scatter(
    cells: pd.DataFrame, ax: Axes | None = None, look: Look | None = None, *, error: str = "error_relative"
) -> Axes:
    """Median seconds (with their interquartile range) against `error`; the front is labelled.

    >>> cells = pd.DataFrame({"provider": ["fisher", "pch-1"], "solver": "kfi", "status": "ok",
    ...     "total_seconds": [0.001, 0.002], "total_iqr": 1e-5, "error_relative": [0.9, 0.1]})
    >>> [text.get_text() for text in pareto_scatter(cells).texts]
    ['fisher + kfi', 'pch-1 + kfi']
    """
    ax, look = get_axes(ax, 8.2, 4.2), look_of(look, cells)
    pairs = [pair for pair in candidates(cells, error) if np.isfinite(pair.error)]
    if not pairs:
        return empty(ax, look, "no pair finished with a known error")
    unit = second_unit([pair.cost for pair in pairs])
    for pair in pairs:
        _point(ax, look, pair, unit)
    ahead = front(pairs)
    _staircase(ax, look, ahead, unit)
    ax.set(xlabel=f"median time of estimate + prepare + apply ({unit.name})", ylabel=_label(error))
    _scales(ax, pairs, unit)
    dress(ax, look)
    providers, solvers = (
        list(dict.fromkeys(getattr(pair, what) for pair in pairs)) for what in ("provider", "solver")
    )
    legend(ax, look, handles(look, providers, solvers, lines=False))
    _name_points(ax, look, ahead, unit)
    return ax


def _label(error: str) -> str:
    return MEASURES[error].axis if error in MEASURES else error


def _point(ax: Axes, look: Look, pair: Candidate, unit: Unit) -> None:
    ax.errorbar(
        pair.cost / unit.size,
        100 * pair.error,
        xerr=pair.spread / 2 / unit.size or None,
        color=look.colour(pair.provider),
        marker=look.marker(pair.solver),
        markersize=7,
        markeredgecolor=look.theme.paper,
        markeredgewidth=0.8,
        elinewidth=1.2,
        capsize=2,
        linestyle="none",
        zorder=3,
    )


def _staircase(ax: Axes, look: Look, ahead: Sequence[Candidate], unit: Unit) -> None:
    """Between two neighbours on the front, the less accurate is the best that the time buys."""
    cost = [pair.cost / unit.size for pair in ahead]
    error = [100 * pair.error for pair in ahead]
    ax.step(cost, error, where="post", color=look.theme.muted, linewidth=1.4, linestyle=(0, (4, 2)), zorder=2)


def _scales(ax: Axes, pairs: Sequence[Candidate], unit: Unit) -> None:
    """Logarithmic axes where the range is wide, with room for a name at the left; from zero otherwise."""
    ax.margins(0.08, 0.12)
    for axis, values in (("x", [pair.cost for pair in pairs]), ("y", [pair.error for pair in pairs])):
        low, high = min(values), max(values)
        if low > 0 and high / low > WIDE:
            log_axis(ax, axis)
        else:
            (ax.set_xlim if axis == "x" else ax.set_ylim)(0, None)
    if ax.get_xscale() == "log":
        low, high = min(map(_lower_end, pairs)), max(pair.cost + pair.spread / 2 for pair in pairs)
        ax.set_xlim(low / (high / low) ** 0.3 / unit.size, high * (high / low) ** 0.06 / unit.size)


def _lower_end(pair: Candidate) -> float:
    """Where the whisker begins; a spread larger than the median itself must not reach zero on a log axis."""
    return max(pair.cost - pair.spread / 2, pair.cost / 4)


def _name_points(ax: Axes, look: Look, ahead: Sequence[Candidate], unit: Unit) -> None:
    """The names on the front, left of the whisker, where nothing is cheaper; above where there is no room."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # the legend takes its room, and the axes have their final width
    inches = ax.get_window_extent().width / figure.dpi
    for pair in ahead:
        name, error = shorten(pair.name), 100 * pair.error
        place = _lower_end(pair) / unit.size, error
        room = ax.transAxes.inverted().transform(ax.transData.transform(place))[0] * inches * 72
        left = room > LETTER * len(name) + 10
        ax.annotate(
            name,
            place if left else (pair.cost / unit.size, error),
            xytext=(-8, 0) if left else (0, 8),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center" if left else "bottom",
            fontsize=FONT,
            fontweight="bold",
            color=look.theme.ink,
            bbox={"facecolor": look.theme.paper, "edgecolor": "none", "alpha": 0.7, "pad": 1},
            parse_math=False,
            zorder=2.5,
        )
