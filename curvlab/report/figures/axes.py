"""What all figures share: axes of their own, dressing in a theme, legends by provider and by solver.

Nothing here touches pyplot or matplotlib's global settings: each artist is given its colours and sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from curvlab.report.numbers import digits
from curvlab.report.theme import Look

__all__ = [
    "FONT",
    "WIDTH",
    "dress",
    "empty",
    "get_axes",
    "handles",
    "legend",
    "log_axis",
    "look_of",
    "pairs_of",
    "shorten",
]

FONT = 9.0
WIDTH = 6.2  # inches of a figure that stands by itself: whole, and legible, on a phone too
LONGEST = 34


def get_axes(ax: Axes | None, width: float, height: float) -> Axes:
    """The axes given, or new ones on a figure of their own, in inches."""
    if ax is not None:
        return ax
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def look_of(look: Look | None, *frames: pd.DataFrame) -> Look:
    """The look given, or that of the frames alone."""
    return Look.of_frames(*frames) if look is None else look


def dress(ax: Axes, look: Look, *, grid: str = "both") -> Axes:
    """Put on the theme: paper, ink, a light grid on the axes named and two spines."""
    theme = look.theme
    ax.set_facecolor(theme.paper)
    figure = ax.get_figure(root=True)
    if figure is not None and len(figure.axes) == 1:
        figure.set_facecolor(theme.paper)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.muted)
    ax.tick_params(which="both", colors=theme.muted, labelcolor=theme.ink, labelsize=FONT, length=3)
    ax.set_axisbelow(True)
    ax.grid(False, which="both")
    if grid in ("x", "y", "both"):
        ax.grid(True, which="major", axis=grid, color=theme.grid, linewidth=0.8)  # type: ignore[arg-type]
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set(color=theme.ink, fontsize=FONT)
    ax.yaxis.labelpad = 7
    for text in ax.findobj(Text):
        text.set_parse_math(False)  # a name of the user's may have dollars in it
    return ax


def empty(ax: Axes, look: Look, reason: str) -> Axes:
    """Axes that say why there is nothing to draw."""
    dress(ax, look, grid="none")
    ax.set(xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.text(
        0.5,
        0.5,
        reason,
        transform=ax.transAxes,
        ha="center",
        va="center",
        color=look.theme.muted,
        fontsize=FONT,
    )
    return ax


def log_axis(ax: Axes, axis: str) -> None:
    """A logarithmic axis whose ticks are plain numbers: browsers set mathematical text badly."""
    (ax.set_xscale if axis == "x" else ax.set_yscale)("log")
    which = ax.xaxis if axis == "x" else ax.yaxis
    low, high = sorted(ax.get_xlim() if axis == "x" else ax.get_ylim())
    decades = high / max(low, 1e-300)
    if decades < 100:
        which.set_major_locator(LogLocator(subs=(1, 2, 5) if decades > 4 else (1, 1.5, 2, 3, 4, 5, 6, 8)))
    which.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    which.set_minor_formatter(NullFormatter())


def handles(look: Look, providers: Iterable[str], solvers: Iterable[str], *, lines: bool) -> list[Artist]:
    """Legend entries: one swatch per provider, then one line or marker per solver."""
    ink = look.theme.ink
    swatches: list[Artist] = [Patch(color=look.colour(name), label=shorten(name)) for name in providers]
    marks: list[Artist] = [
        Line2D(
            [],
            [],
            color=ink,
            marker=look.marker(name),
            markersize=4.5,
            linestyle=look.line(name) if lines else "none",  # type: ignore[arg-type]
            linewidth=1.4,
            label=shorten(name),
        )
        for name in solvers
    ]
    return swatches + marks


def legend(ax: Axes, look: Look, entries: Sequence[Artist], *, columns: int = 0) -> None:
    """A legend where it covers nothing: to the right of the axes, or below them in `columns`."""
    height = ax.get_figure(root=True).get_figheight()  # type: ignore[union-attr]
    under = -0.6 / max(height - 0.9, 0.5)  # the ticks and the label of the axis, in heights of the axes
    below = {"loc": "upper left", "bbox_to_anchor": (0.0, under), "ncols": columns, "columnspacing": 1.4}
    beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    box = ax.legend(
        handles=list(entries),
        **(below if columns else beside),
        frameon=False,
        fontsize=FONT,
        labelcolor=look.theme.ink,
        handlelength=2.6,
        borderaxespad=0.0,
    )
    for text in box.get_texts():
        text.set_parse_math(False)


def pairs_of(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """The pairs (provider, solver) of the frame, in its order."""
    return list(dict.fromkeys(zip(frame["provider"].astype(str), frame["solver"].astype(str), strict=True)))


def shorten(name: str) -> str:
    """A name that fits a legend or an axis, on one line."""
    name = " ".join(name.split())
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _tick(value: float) -> str:
    text = digits(value, 2)
    return (
        text.rstrip("0").rstrip(".")
        if "." in text and "e" not in text
        else text.replace(".0e", "e").replace("e-0", "e-")
    )
