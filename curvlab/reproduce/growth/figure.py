"""The figure of Table 1: measured points and their fitted powers, one panel a variable, on logarithmic axes.

Curvatures above, solves below. A colour and a marker is a provider or a solver; the textbook's form is dashed
with open markers, the sample space's solid with filled ones. A number beside a line is its exponent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from curvlab.report.figures.axes import FONT, dress, log_axis
from curvlab.report.theme import LIGHT, MARKERS, Look, Theme
from curvlab.reproduce.growth.sweeps import SAMPLE_SPACE, SYMBOLS, TEXTBOOK, VARIABLES

__all__ = ["growth_figure"]

QUANTITIES = ("curvature", "solve")
SOLVER_COLOURS = ("ea-cg", "kfi", "sm-kfi", "cg")
LABELS = {
    "seconds": "processor time (s)",
    "operations": "operations",
    "peak_bytes": "peak tensor memory (B)",
}
DASHES = {TEXTBOOK: (0, (4, 2)), SAMPLE_SPACE: (0, ())}
SIZE = (11.5, 6.4)
APART = 11.0  # points between two exponents written beneath each other


def growth_figure(
    rows: pd.DataFrame, fitted: pd.DataFrame, *, measure: str = "seconds", theme: Theme = LIGHT
) -> Figure:
    """Points and fits of one measure: `"seconds"`, `"operations"` or `"peak_bytes"`."""
    figure = Figure(figsize=SIZE, layout="constrained", facecolor=theme.paper)
    grid = figure.subplots(len(QUANTITIES), len(VARIABLES), sharey="row")
    look = Look.of(_subjects(rows, "curvature"), _subjects(rows, "solve"), theme)
    ends: list[tuple[Axes, list[_End]]] = []
    for panels, quantity in zip(grid, QUANTITIES, strict=True):
        chosen = rows[rows["quantity"] == quantity]
        legend = _entries(chosen, quantity, look)
        for ax, variable in zip(panels, VARIABLES, strict=True):
            points = chosen[(chosen["variable"] == variable) & (chosen[measure] > 0)]
            if points.empty:
                _put_legend(ax, legend, quantity, look)
            else:
                ends.append((ax, _panel(ax, points, fitted[fitted["measure"] == measure], measure, look)))
        panels[0].set_ylabel(f"{quantity}: {LABELS[measure]}")
        if all(ax.has_data() for ax in panels):
            _put_legend(panels[-1], legend, quantity, look, outside=True)
    figure.draw_without_rendering()  # all panels of a row have their common limits and their final size now
    for ax, written in ends:
        _write_exponents(ax, written, theme.paper)
    return figure


@dataclass(frozen=True)
class _End:
    """Where a fitted line ends, and the exponent to be written there."""

    x: float
    y: float
    exponent: float
    colour: str


def _panel(ax: Axes, points: pd.DataFrame, fitted: pd.DataFrame, measure: str, look: Look) -> list[_End]:
    ends: list[_End] = []
    for (subject, formulation), ladder in points.groupby(["subject", "formulation"], sort=False):
        style = _style(str(subject), str(formulation), look)
        found = _fit_of(fitted, ladder.iloc[0])
        x = ladder["value"].to_numpy(dtype=float)
        ax.plot(x, ladder[measure], **style | {"linestyle": "none"})
        if np.isfinite(found["exponent"]):
            line = found["constant"] * x ** found["exponent"]
            ax.plot(x, line, **style | {"marker": ""})
            ends.append(_End(float(x[-1]), float(line[-1]), float(found["exponent"]), style["color"]))
    variable = str(points["variable"].iloc[0])
    ax.set_xlabel(f"{variable} {SYMBOLS[variable]}")
    for axis in ("x", "y"):
        log_axis(ax, axis)
    ax.margins(x=0.16)
    dress(ax, look)
    return ends


def _fit_of(fitted: pd.DataFrame, point: pd.Series) -> pd.Series:
    names = ["quantity", "subject", "formulation", "variable"]
    same = (fitted[names] == point[names]).all(axis=1)
    found: pd.Series = fitted[same].iloc[0]
    return found


def _style(subject: str, formulation: str, look: Look) -> dict[str, Any]:
    if subject in look.providers:
        colour, marker = look.colour(subject), MARKERS[look.providers[subject] % len(MARKERS)]
    else:
        colour, marker = look.theme.series[SOLVER_COLOURS.index(subject)], look.marker(subject)
    return {
        "color": colour,
        "marker": marker,
        "markersize": 4.5,
        "markerfacecolor": colour if formulation == SAMPLE_SPACE else look.theme.paper,
        "linestyle": DASHES[formulation],
        "linewidth": 1.4,
    }


def _write_exponents(ax: Axes, ends: list[_End], paper: str) -> None:
    """At the lines' ends, moved apart where they would cover each other."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    points = 72 / figure.dpi
    ends = sorted(ends, key=lambda end: end.y)
    heights = [float(ax.transData.transform((end.x, end.y))[1]) * points for end in ends]
    for end, height, place in zip(
        ends, heights, _apart(heights, ax.bbox.y1 * points - APART / 2), strict=True
    ):
        ax.annotate(
            f"{end.exponent:z.1f}",
            (end.x, end.y),
            xytext=(6, place - height),
            textcoords="offset points",
            color=end.colour,
            fontsize=FONT - 1,
            va="center",
            annotation_clip=False,
            bbox={"facecolor": paper, "edgecolor": "none", "alpha": 0.7, "pad": 0.6},
        ).set_in_layout(False)


def _apart(heights: list[float], top: float) -> list[float]:
    """Ascending heights moved up until they are `APART`, then down again where they are above the `top`.

    >>> _apart([0.0, 1.0, 50.0], top=45.0)
    [0.0, 11.0, 45.0]
    """
    places: list[float] = []
    for height in heights:
        places.append(max([height, *(place + APART for place in places[-1:])]))
    for index in range(len(places) - 1, -1, -1):
        places[index] = min(places[index], top)
        top = places[index] - APART
    return places


def _subjects(rows: pd.DataFrame, quantity: str) -> list[str]:
    return list(dict.fromkeys(rows.loc[rows["quantity"] == quantity, "subject"]))


def _entries(chosen: pd.DataFrame, quantity: str, look: Look) -> list[Artist]:
    """One entry a subject, in the sample space's look where it has that form, then the two forms."""
    subjects: list[Artist] = [
        Line2D([], [], **_style(subject, SAMPLE_SPACE, look), label=subject)
        for subject in _subjects(chosen, quantity)
    ]
    forms: list[Artist] = [
        Line2D(
            [],
            [],
            color=look.theme.ink,
            linestyle=DASHES[form],
            marker="o",
            markersize=4.5,
            markerfacecolor=look.theme.ink if form == SAMPLE_SPACE else look.theme.paper,
            linewidth=1.4,
            label=form,
        )
        for form in (TEXTBOOK, SAMPLE_SPACE)
    ]
    return subjects + forms


def _put_legend(ax: Axes, entries: list[Artist], quantity: str, look: Look, *, outside: bool = False) -> None:
    """In an empty panel, or to the right of a drawn one."""
    if not outside:
        ax.set_axis_off()
    box = ax.legend(
        handles=entries,
        title=quantity,
        loc="center left" if outside else "center",
        bbox_to_anchor=(1.02, 0.5) if outside else None,
        frameon=False,
        fontsize=FONT,
        labelcolor=look.theme.ink,
        handlelength=3.0,
    )
    box.get_title().set(color=look.theme.ink, fontsize=FONT)
