"""The page of a run's curvature along training: a figure for each measure."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from curvlab.report.content import Answer, Content, Drawing, Section
from curvlab.report.drawing import WIDTH, Look, dress, get_axes
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
    panels = PANELS.get(name) or {name.replace("-", " "): tuple(shown["of"].unique())}
    drawings = [_drawing(shown[shown["of"].isin(panel)], label) for label, panel in panels.items()]
    return Section(
        name, name.replace("-", " ").capitalize(), text=QUESTIONS.get(name, ""), drawings=tuple(drawings)
    )


def _drawing(shown: pd.DataFrame, label: str) -> Drawing:
    def draw(look: Look) -> Axes:
        axes, colours = get_axes(None, WIDTH, 3.0), look.theme.series
        for place, (of, rows) in enumerate(shown.groupby("of", sort=False)):
            colour = colours[place % len(colours)]
            ends = (rows["value"] - 2 * rows["standard_error"], rows["value"] + 2 * rows["standard_error"])
            axes.fill_between(rows["step"], *ends, color=colour, alpha=0.25, linewidth=0)
            axes.plot(rows["step"], rows["value"], color=colour, marker="o", markersize=3, label=str(of))
        axes.set(xlabel="step", ylabel=label)
        if shown["of"].nunique() > 1:
            axes.legend(frameon=False, fontsize="small")
        return dress(axes, look)

    estimated = bool((shown["standard_error"] > 0).any())
    caption = "Estimates, with two standard errors." if estimated else "One mark for each measurement."
    return Drawing(label.replace(" ", "-"), caption, draw)


def _numbers(frame: pd.DataFrame) -> Section:
    return Section(
        "numbers",
        "Numbers",
        folded=(frame_table("Every number", frame),),
        links=(("data", "curvature.csv"),),
    )
