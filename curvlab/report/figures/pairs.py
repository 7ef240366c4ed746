"""Figures with one mark per pair or provider: bars of cost and memory, errors by layer, and the Pareto front.

Costs are split in estimate, prepare and apply; memory is measured against planned; errors are those of bias
blocks, ‖B̃^t - |B^t|‖_F, layers down and providers across (Table 2). Cost against a measure of error, with
the front drawn, is what the recommendation is read from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from curvlab.report.drawing import (
    FONT,
    WIDTH,
    Look,
    dress,
    empty,
    figure_of,
    get_axes,
    handles,
    legend,
    log_axis,
    look_of,
    shorten,
    shorten_pair,
)
from curvlab.report.numbers import MISSING, Unit, byte_unit, digits, second_unit
from curvlab.report.pareto import MEASURES, Candidate, candidates, front, undominated
from curvlab.studies.compare.decisions import Decision

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["cost_bars", "error_heatmap", "memory_bars", "pareto_scatter"]

PHASES = {"estimate": 1.0, "prepare": 0.6, "apply": 0.28}
HEIGHT = 0.68


def cost_bars(cells: pd.DataFrame, ax: Axes | None = None, look: Look | None = None) -> Axes:
    """Bars of the median total, split as the medians of the phases are, which need not add up to it.

    The whisker is the interquartile range of the total.

    >>> cells = pd.DataFrame({"provider": ["pch-1"], "solver": ["kfi"], "status": ["ok"],
    ...     "estimate_seconds": [0.003], "prepare_seconds": [0.001], "apply_seconds": [0.001],
    ...     "total_seconds": [0.005], "total_iqr": [0.0002]})
    >>> cost_bars(cells).get_xlabel()
    'median time (ms)'
    """
    shown, ax, look = _start(cells, "total_seconds", ax, look)
    if shown.empty:
        return empty(ax, look, "no pair finished")
    unit = second_unit(shown["total_seconds"])
    rows, colours = np.arange(len(shown)), [look.colour(str(name)) for name in shown["provider"]]
    left = np.zeros(len(shown))
    phases = shown[[f"{phase}_seconds" for phase in PHASES]].fillna(0)
    scale = shown["total_seconds"] / phases.sum(axis=1)
    _blank(ax, look, shown["total_seconds"].to_numpy() / unit.size)
    for phase, strength in PHASES.items():
        width = (phases[f"{phase}_seconds"] * scale).to_numpy() / unit.size
        ax.barh(rows, width, HEIGHT, left, color=colours, alpha=strength)
        left += width
    total = shown["total_seconds"].to_numpy() / unit.size
    half = shown["total_iqr"].to_numpy(dtype=float) / unit.size / 2
    whiskers = _whiskers(ax, look, total, half)
    _numbers(ax, look, total + np.nan_to_num(half), total)
    _finish(ax, look, shown, f"median time ({unit.name})")
    shades = [Patch(color=look.theme.ink, alpha=strength, label=phase) for phase, strength in PHASES.items()]
    legend(ax, look, [*shades, *whiskers], columns=2)
    return ax


def _whiskers(ax: Axes, look: Look, total: np.ndarray, half: np.ndarray) -> list[Artist]:
    """Whiskers where a spread is known, and their entry in the legend: one repetition has none."""
    known = np.flatnonzero(np.isfinite(half))
    if not known.size:
        return []
    ax.errorbar(
        total[known], known, xerr=half[known], fmt="none", ecolor=look.theme.ink, elinewidth=1, capsize=2.5
    )
    return [Line2D([], [], color=look.theme.ink, linewidth=1, label="interquartile range")]


def memory_bars(cells: pd.DataFrame, ax: Axes | None = None, look: Look | None = None) -> Axes:
    """Bars of the measured peak and, darker, of what the result holds on to; a diamond where it was planned.

    >>> cells = pd.DataFrame({"provider": ["pch-1"], "solver": ["kfi"], "status": ["ok"],
    ...     "peak_bytes": [4e6], "held_bytes": [1e6], "planned_bytes": [4e6]})
    >>> memory_bars(cells).get_xlabel()
    'memory (MB)'
    """
    shown, ax, look = _start(cells, "peak_bytes", ax, look)
    if shown.empty:
        return empty(ax, look, "no memory was measured")
    unit = byte_unit(shown["peak_bytes"])
    rows, colours = np.arange(len(shown)), [look.colour(str(name)) for name in shown["provider"]]
    peak, held, planned = (_in_unit(shown[f"{name}_bytes"], unit) for name in ("peak", "held", "planned"))
    _blank(ax, look, peak)
    ax.barh(rows, peak, HEIGHT, color=colours, alpha=0.45)
    ax.barh(rows, np.nan_to_num(held), HEIGHT, color=colours)
    diamond: dict[str, Any] = {
        "marker": "D",
        "markersize": 5,
        "markerfacecolor": look.theme.paper,
        "markeredgecolor": look.theme.ink,
    }
    ax.plot(planned, rows, linestyle="none", **diamond)
    _numbers(ax, look, np.fmax(peak, planned), peak)
    _finish(ax, look, shown, f"memory ({unit.name})")
    entries: list[Artist] = [
        Patch(color=look.theme.ink, alpha=0.45, label="peak, measured"),
        Patch(color=look.theme.ink, label="held by the result"),
    ]
    if np.isfinite(planned).any():
        entries.append(Line2D([], [], linestyle="none", label="peak, planned", **diamond))
    legend(ax, look, entries, columns=3)
    return ax


def _start(
    cells: pd.DataFrame, column: str, ax: Axes | None, look: Look | None
) -> tuple[pd.DataFrame, Axes, Look]:
    shown = cells[(cells["status"] == "ok") & cells[column].notna()]
    pairs = cells[cells["solver"] != ""]
    return shown, get_axes(ax, WIDTH, 1.3 + 0.26 * max(len(shown), 3)), look_of(look, pairs)


def _blank(ax: Axes, look: Look, lengths: np.ndarray) -> None:
    """Paper under translucent bars, so that the grid does not show through."""
    ax.barh(np.arange(len(lengths)), lengths, HEIGHT, color=look.theme.paper)


def _in_unit(values: pd.Series, unit: Unit) -> np.ndarray:
    return values.to_numpy(dtype=float) / unit.size


def _numbers(ax: Axes, look: Look, ends: np.ndarray, values: np.ndarray) -> None:
    """Each total in figures behind its bar."""
    for row, (end, value) in enumerate(zip(ends, values, strict=True)):
        ax.annotate(
            digits(value),
            (end, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=look.theme.muted,
            fontsize=FONT - 1,
        )


def _finish(ax: Axes, look: Look, shown: pd.DataFrame, label: str) -> None:
    names = [
        shorten_pair(str(provider), str(solver))
        for provider, solver in zip(shown["provider"], shown["solver"], strict=True)
    ]
    ax.set_yticks(np.arange(len(shown)), names)
    ax.invert_yaxis()
    ax.margins(x=0.09, y=0.02)
    ax.set_xlim(left=0)
    ax.set_xlabel(label)
    dress(ax, look, grid="x")
    ax.tick_params(axis="y", length=0)


LABELS = {
    "error": "bias blocks: distance from the absolute Hessian |H|",
    "relative": "bias blocks: relative distance from the absolute Hessian |H|",
    "weight_error": "weight blocks: distance from the Hessian H",
    "weight_relative": "weight blocks: relative distance from the Hessian H",
}
FAINTEST = 1e-3  # of the largest: what is smaller has the lightest colour, or rounding would take all others


def error_heatmap(
    errors: pd.DataFrame, ax: Axes | None = None, look: Look | None = None, *, column: str = "error"
) -> Axes:
    """Heat map of `column` with the number in each cell; the colour is logarithmic, darker is worse.

    >>> frame = pd.DataFrame({"layer": [1, "Total"], "provider": "pch-1", "error": [0.5, 0.5]})
    >>> [text.get_text() for text in error_heatmap(frame).texts]
    ['0.500', '0.500']
    """
    table = errors.pivot_table(index="layer", columns="provider", values=column, sort=False, dropna=False)
    rows, columns = table.shape
    ax = get_axes(ax, 2.2 + 1.15 * max(columns, 3), 0.9 + 0.34 * max(rows, 2))
    look = look_of(look, errors)
    if table.empty:
        return empty(ax, look, "no error was measured")
    values = table.to_numpy(dtype=float)
    _draw(ax, look, values)
    ax.set_xticks(np.arange(columns) + 0.5, [_in_lines(str(name)) for name in table.columns])
    ax.set_yticks(np.arange(rows) + 0.5, [str(layer) for layer in table.index], rotation=0)
    ax.set(xlabel=LABELS.get(column, column), ylabel="layer")
    dress(ax, look, grid="none")
    ax.xaxis.tick_top()
    ax.tick_params(which="both", length=0, labelsize=FONT)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if "Total" in table.index:
        ax.axhline(list(table.index).index("Total"), color=look.theme.paper, linewidth=6)
    return ax


def _in_lines(name: str) -> str:
    """A column's head: fields in brackets have lines of their own, other long names are broken somewhere."""
    return "\n".join(fill(part, 18) for part in re.split(r"(?=\[)|(?<=,)", shorten(name)))


def _draw(ax: Axes, look: Look, values: np.ndarray) -> None:
    import seaborn

    positive = values[np.isfinite(values) & (values > 0)]
    high = float(positive.max()) if positive.size else 1.0
    low = max(float(positive.min()), high * FAINTEST) if positive.size else high / 10
    norm = LogNorm(low, high if high > low else low * 10, clip=True)
    seaborn.heatmap(
        np.clip(values, low, None),
        ax=ax,
        norm=norm,
        cmap="crest",
        annot=np.vectorize(digits)(values),
        fmt="",
        annot_kws={"fontsize": FONT, "parse_math": False},
        linewidths=1.5,
        linecolor=look.theme.paper,
        cbar=False,
    )
    for row, column in np.argwhere(np.isnan(values)):
        ax.text(
            column + 0.5, row + 0.5, MISSING, ha="center", va="center", color=look.theme.muted, fontsize=FONT
        )


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
    """Logarithmic axes where the range is wide, with room for a name at the left; times from zero otherwise.

    Errors that differ little are not shown from zero: nothing would be seen of what the answer goes by.
    """
    ax.margins(0.08, 0.12)
    for axis, values in (("x", [pair.cost for pair in pairs]), ("y", [pair.error for pair in pairs])):
        low, high = min(values), max(values)
        if low > 0 and high / low > WIDE:
            log_axis(ax, axis)
        elif axis == "x":
            ax.set_xlim(0, None)
        elif high > low > high / 2:
            ax.set_ylim(100 * (low - 0.3 * (high - low)), 100 * (high + 0.2 * (high - low)))
        else:
            ax.set_ylim(0, 112 * high if high > 0 else None)
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
    figure = figure_of(ax)
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
        shorten_pair(pair.provider, pair.solver),
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
