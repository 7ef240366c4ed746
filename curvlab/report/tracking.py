"""The page of a run's curvature along training: a figure for each measure."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from curvlab.report.content import Answer, Content, Drawing, Section
from curvlab.report.drawing import SMALL, Look, dress, get_axes, legend, shorten
from curvlab.report.numbers import digits
from curvlab.report.pages import write_pages
from curvlab.report.tables import frame_table

__all__ = ["tracking_content", "write_tracking"]

QUESTIONS = {
    "top-eigenvalue": "How sharp is the loss along training?",
    "trace": "How large is the Hessian's trace along training?",
    "density": "How many eigenvalues stand apart, and where are the ends of the spectrum?",
    "errors": "How far are the providers' blocks from those of the absolute Hessian?",
}
# Counts, shares and eigenvalues stand in figures of their own.
PANELS = {
    "density": {
        "outliers": ("outliers",),
        "negative mass": ("negative mass",),
        "eigenvalue": ("smallest", "largest"),
    }
}


def write_tracking(frame: pd.DataFrame, facts: tuple[tuple[str, str], ...], folder: str | Path) -> Path:
    """The page, curvature.html, from the rows of a `curvlab.Tracker`; returns its path."""
    return write_pages(tracking_content(frame, facts), folder, "curvature")


def tracking_content(frame: pd.DataFrame, facts: tuple[tuple[str, str], ...]) -> Content:
    """What the page says."""
    measures = list(frame["measure"].unique())
    return Content(
        title="How does curvature change along training?",
        facts=facts,
        answer=Answer(_headline(frame)),
        sections=(*(_section(frame, name) for name in measures), _numbers(frame)),
        look=lambda theme: Look.of([], theme=theme),
        names=(),
    )


def _headline(frame: pd.DataFrame) -> str:
    """From where to where the first measure went."""
    name = frame["measure"].iloc[0]
    rows = frame[(frame["measure"] == name) & (frame["of"] == frame["of"].iloc[0])]
    first, last = rows.iloc[0], rows.iloc[-1]
    return (
        f"The {str(name).replace('-', ' ')} goes from {digits(first['value'])} at step {first['step']} to "
        f"{digits(last['value'])} at step {last['step']}"
    )


def _section(frame: pd.DataFrame, name: str) -> Section:
    shown = frame[frame["measure"] == name]
    if name == "errors":
        drawings = [_errors_drawing(shown)]
    else:
        panels = PANELS.get(name) or {name.replace("-", " "): tuple(shown["of"].unique())}
        drawings = [_drawing(shown[shown["of"].isin(panel)], label) for label, panel in panels.items()]
    return Section(
        name, name.replace("-", " ").capitalize(), text=QUESTIONS.get(name, ""), drawings=tuple(drawings)
    )


def _drawing(shown: pd.DataFrame, label: str) -> Drawing:
    def draw(look: Look) -> Axes:
        axes, colours = get_axes(None, SMALL, 3.0), look.theme.series
        entries: list[Artist] = []
        for place, (of, rows) in enumerate(shown.groupby("of", sort=False)):
            colour = colours[place % len(colours)]
            ends = (rows["value"] - 2 * rows["standard_error"], rows["value"] + 2 * rows["standard_error"])
            axes.fill_between(rows["step"], *ends, color=colour, alpha=0.25, linewidth=0)
            entries += axes.plot(
                rows["step"], rows["value"], color=colour, marker="o", markersize=3, label=str(of)
            )
        return _along_steps(axes, look, label, entries)

    estimated = bool((shown["standard_error"] > 0).any())
    caption = "Estimates, with two standard errors." if estimated else "One mark for each measurement."
    return Drawing(label.replace(" ", "-"), caption, draw, half=True)


def _errors_drawing(shown: pd.DataFrame) -> Drawing:
    """Each provider in one colour: its total, and its layers as thin lines below it."""
    named = shown["of"].str.rpartition(", layer ")
    rows = shown.assign(provider=named[0], layer=named[2])

    def draw(look: Look) -> Axes:
        axes, colours = get_axes(None, SMALL, 3.4), look.theme.series
        entries: list[Artist] = []
        for place, (provider, own) in enumerate(rows.groupby("provider", sort=False)):
            colour = colours[place % len(colours)]
            for layer, values in own.groupby("layer", sort=False):
                total = layer == "Total"
                (line,) = axes.plot(
                    values["step"],
                    values["value"],
                    color=colour,
                    linewidth=1.8 if total else 0.7,
                    linestyle="-" if total else (0, (1.2, 1.6)),
                    marker="o" if total else "",
                    markersize=3,
                    label=shorten(str(provider)),
                )
                if total:
                    entries.append(line)
        return _along_steps(axes, look, "error", entries)

    return Drawing("errors", "Solid: the total over all layers; dotted: single layers.", draw, half=True)


def _along_steps(axes: Axes, look: Look, label: str, entries: list[Artist]) -> Axes:
    """The axes by step, with a legend below them where there is more than one line."""
    axes.set(xlabel="step", ylabel=label)
    if label == "outliers":
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    dress(axes, look)
    if len(entries) > 1:
        legend(axes, look, entries, columns=3)
    return axes


def _numbers(frame: pd.DataFrame) -> Section:
    return Section(
        "numbers",
        "Numbers",
        folded=(frame_table("Every number", frame),),
        links=(("data", "curvature.csv"),),
    )
