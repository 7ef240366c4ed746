"""Cost against a measure of error, with the Pareto front drawn: what the recommendation is read from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from curvlab.report.figures.axes import (
    FONT,
    WIDTH,
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
from curvlab.report.pareto import Candidate, candidates, front, undominated
from curvlab.report.theme import Look
from curvlab.studies.compare.decisions import Decision

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["pareto_scatter"]

WIDE = 6.0  # a range of more than this factor is drawn on a logarithmic axis


def pareto_scatter(
    cells: pd.DataFrame,
    ax: Axes | None = None,
    look: Look | None = None,
    *,
    error: str = "error_relative",
    times: Sequence[Decision] = (),
) -> Axes:
    """Median seconds (with their interquartile range) against `error`; the front is labelled.

    `times` decides which of two pairs is cheaper, from paired rounds.

    >>> cells = pd.DataFrame({"provider": ["fisher", "pch-1"], "solver": "kfi", "status": "ok",
    ...     "total_seconds": [0.001, 0.002], "total_iqr": 1e-5, "error_relative": [0.9, 0.1]})
    >>> [text.get_text() for text in pareto_scatter(cells).texts]
    ['fisher + kfi', 'pch-1 + kfi']
    """
    ax, look = get_axes(ax, WIDTH, 4.4), look_of(look, cells)
    pairs = [pair for pair in candidates(cells, error, times) if np.isfinite(pair.error)]
    if not pairs:
        return empty(ax, look, "no pair finished with a known error")
    unit = second_unit([pair.cost for pair in pairs])
    for pair in pairs:
        _point(ax, look, pair, unit)
    ahead = front(pairs)
    _staircase(ax, look, undominated(pairs), unit)
    ax.set(xlabel=f"median time of estimate + prepare + apply ({unit.name})", ylabel=_label(error))
    _scales(ax, pairs, unit)
    dress(ax, look)
    providers, solvers = (
        list(dict.fromkeys(getattr(pair, what) for pair in pairs)) for what in ("provider", "solver")
    )
    legend(ax, look, handles(look, providers, solvers, lines=False), columns=4)
    _name_points(ax, look, pairs, ahead, unit)
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


# Where a name may stand, from the point: (right, up) in points, and how it is aligned. Tried in this order.
PLACES = (
    (-9, 0, "right", "center"),
    (0, 10, "center", "bottom"),
    (0, -10, "center", "top"),
    (9, 0, "left", "center"),
    (-14, 16, "right", "bottom"),
    (14, 16, "left", "bottom"),
    (-14, -16, "right", "top"),
    (14, -16, "left", "top"),
    (0, 30, "center", "bottom"),
    (0, -30, "center", "top"),
    (30, 34, "left", "bottom"),
    (-30, -34, "right", "top"),
    (30, -34, "left", "top"),
    (0, 56, "center", "bottom"),
    (0, -56, "center", "top"),
)
FAR = 16  # points, from which a line leads from the name to its point


def _name_points(
    ax: Axes, look: Look, pairs: Sequence[Candidate], ahead: Sequence[Candidate], unit: Unit
) -> None:
    """The names on the front, each at the first place where it covers no marker, whisker, line or name."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # the legend takes its room, and the axes have their final width
    taken = [*(_extent(ax, pair, unit) for pair in pairs), *_stairs(ax, undominated(pairs), unit)]
    inside = ax.get_window_extent()
    for pair in ahead:
        best: tuple[float, Annotation] | None = None
        for right, up, horizontal, vertical in PLACES:
            text = _name(ax, look, pair, unit, (right, up), horizontal, vertical)
            box = text.get_window_extent()
            out = max(0.0, inside.x0 - box.x0) + max(0.0, box.x1 - inside.x1)
            out += max(0.0, inside.y0 - box.y0) + max(0.0, box.y1 - inside.y1)
            bad = out + sum(_overlap(box, other) for other in taken)
            if best is None or bad < best[0]:
                if best is not None:
                    best[1].remove()
                best = bad, text
            else:
                text.remove()
            if bad == 0:
                break
        assert best is not None
        taken.append(best[1].get_window_extent())


def _extent(ax: Axes, pair: Candidate, unit: Unit) -> Bbox:
    """The marker with its whisker, in pixels."""
    place = ax.transData.transform
    (left, y), (right, _) = (
        place((x / unit.size, 100 * pair.error)) for x in (_lower_end(pair), pair.cost + pair.spread / 2)
    )
    return Bbox([[left - 6, y - 6], [right + 6, y + 6]])


def _stairs(ax: Axes, ahead: Sequence[Candidate], unit: Unit) -> list[Bbox]:
    """The pieces of the dashed line, in pixels, along and then down to the next pair."""
    places = [ax.transData.transform((pair.cost / unit.size, 100 * pair.error)) for pair in ahead]
    found = []
    for (left, high), (right, low) in pairwise(places):
        found.append(Bbox([[left, high - 2], [right, high + 2]]))
        found.append(Bbox([[right - 2, min(low, high)], [right + 2, max(low, high)]]))
    return found


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width * height if width > 0 and height > 0 else 0.0


def _name(
    ax: Axes, look: Look, pair: Candidate, unit: Unit, offset: tuple[int, int], horizontal: str, vertical: str
) -> Annotation:
    far = max(map(abs, offset)) >= FAR
    return ax.annotate(
        shorten(pair.name),
        (pair.cost / unit.size, 100 * pair.error),
        xytext=offset,
        textcoords="offset points",
        ha=horizontal,
        va=vertical,
        fontsize=FONT,
        fontweight="bold",
        color=look.theme.ink,
        arrowprops={"arrowstyle": "-", "color": look.theme.muted, "shrinkB": 5} if far else None,
        parse_math=False,
        zorder=4,
    )
