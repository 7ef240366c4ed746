"""What each pair costs: time split in estimate, prepare and apply, and memory measured against planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from curvlab.report.figures.axes import FONT, WIDTH, dress, empty, get_axes, legend, look_of, shorten
from curvlab.report.numbers import Unit, byte_unit, digits, second_unit
from curvlab.report.theme import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["cost_bars", "memory_bars"]

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
        shorten(f"{provider} + {solver}" if solver else str(provider))
        for provider, solver in zip(shown["provider"], shown["solver"], strict=True)
    ]
    ax.set_yticks(np.arange(len(shown)), names)
    ax.invert_yaxis()
    ax.margins(x=0.09, y=0.02)
    ax.set_xlim(left=0)
    ax.set_xlabel(label)
    dress(ax, look, grid="x")
    ax.tick_params(axis="y", length=0)
