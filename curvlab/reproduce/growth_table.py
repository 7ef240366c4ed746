"""Table 1: what grows how fast, measured, and whether KFI fits the card; page, figure and claims.

The figure has one panel per variable, on logarithmic axes, with curvatures above and solves below. A colour
and a marker is a provider or a solver; the textbook's form is dashed with open markers, the sample space's
solid with filled ones. A number beside a line is its exponent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from curvlab.measure.environment import source_hash
from curvlab.report.content import Answer, Content, Drawing, Section
from curvlab.report.drawing import FONT, LIGHT, MARKERS, Look, Theme, dress, figure_of, log_axis
from curvlab.report.numbers import digits, join_names
from curvlab.report.tables import Entry, Table
from curvlab.reproduce.experiment import (
    Claim,
    Experiment,
    ExperimentOutcome,
    ExperimentTask,
    Frames,
    Judgement,
    Places,
    ShowShare,
    not_measured,
    rows_of,
    verdict_of,
)
from curvlab.reproduce.growth_orders import exponent_table, fits
from curvlab.reproduce.growth_points import CARD, KIND, card_frame, growth_tasks
from curvlab.reproduce.growth_sweeps import SAMPLE_SPACE, SYMBOLS, TEXTBOOK, VARIABLES
from curvlab.reproduce.subjects import Options
from curvlab.studies.store import Store, key_of

__all__ = ["CardQuestion", "GrowthTable", "card_claim", "growth_claim", "growth_figure"]

WITHIN = 0.25


def card_claim() -> Claim:
    """That KFI runs out of memory at 150,528 inputs."""
    return Claim(
        f"KFI does not fit a card of {CARD} at 150,528 inputs.",
        "of the textbook's KFI, by the planned peak; that of the sample space is given beside it",
        _judge_card,
    )


def _judge_card(frames: Frames) -> Judgement:
    if "card" not in frames:
        return not_measured()
    card = frames["card"]
    forms = {row.form: row for row in rows_of(card[card["solver"] == "kfi"])}
    textbook, reduced = forms["textbook"], forms["sample-space"]
    measured = (
        f"Textbook KFI: {digits(textbook.peak_gb)} GB. The same step in the sample space: "
        f"{digits(reduced.peak_gb)} GB, which {'fits' if reduced.fits else 'does not fit'}."
    )
    return Judgement(measured, "does not hold" if textbook.fits else "holds")


def growth_claim(solver: str) -> Claim:
    """That the solver's operations grow as the paper's order."""
    return Claim(
        f"The time of {solver} grows as Table 1 says.",
        f"by counted operations of the textbook's form, slope against the slope of the paper's O(·) over the "
        f"same ladder; holds: within {WITHIN} in every size, mixed: in some",
        partial(_judge_growth, solver),
    )


def _judge_growth(solver: str, frames: Frames) -> Judgement:
    if "exponents" not in frames:
        return not_measured()
    fitted = frames["exponents"]
    counted = fitted[(fitted["subject"] == solver) & (fitted["measure"] == "operations")]
    timed = fitted[(fitted["subject"] == solver) & (fitted["measure"] == "seconds")]
    kept, words = [], []
    for row in rows_of(counted[counted["formulation"] == TEXTBOOK]):
        kept.append(abs(row.exponent - row.paper_ladder) <= WITHIN)
        seconds = timed[(timed["variable"] == row.variable) & (timed["formulation"] == TEXTBOOK)].iloc[0]
        reduced = counted[(counted["variable"] == row.variable) & (counted["formulation"] == SAMPLE_SPACE)]
        own = f", in the sample space {reduced['exponent'].iloc[0]:.2f}" if len(reduced) else ""
        words.append(
            f"in {SYMBOLS[row.variable]}: operations {row.exponent:.2f}, time {seconds['exponent']:.2f} "
            f"({seconds['low']:.2f} to {seconds['high']:.2f}), the paper's order {row.paper_ladder:.2f}{own}"
        )
    if not kept:
        return not_measured("The frames do not have it.")
    return Judgement(f"Exponents {'; '.join(words)}.", verdict_of(kept))


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
    figure = figure_of(ax)
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


CARD_KIND = "card"
NAMES = {"seconds": "Processor time", "operations": "Operations", "peak_bytes": "Peak bytes"}


@dataclass(frozen=True)
class CardQuestion:
    """Ask `curvlab plan` what fits the paper's card."""

    card: str = CARD

    @property
    def label(self) -> str:
        """What is asked."""
        return f"what fits {self.card}"

    @property
    def key(self) -> str:
        """The key of the answer."""
        return key_of({"kind": CARD_KIND, "card": self.card})

    def finished(self, store: Store) -> bool:
        """Whether it was answered."""
        return store.has(self.key)

    def prepare(self) -> None:
        """Nothing is needed: no data are read and no model is built."""

    def run(self, places: Places, show: ShowShare) -> None:
        """Plan, and keep the answer as one row."""
        show(0.0, self.label)
        rows = card_frame(card=self.card).to_dict("records")
        answer = {"kind": CARD_KIND, "key": self.key, "source": source_hash(), "rows": rows}
        Store(places.store).append(answer)


@dataclass(frozen=True)
class GrowthTable(Experiment):
    """Growth exponents beside the paper's O(·)."""

    def tasks(self, options: Options) -> Sequence[ExperimentTask]:
        """One task a point of every ladder, and the question of the card."""
        return [CardQuestion(), *growth_tasks(options.scale)]

    def frames(self, store: Store) -> dict[str, pd.DataFrame]:
        """`points`: every measured point; `exponents`: the fits; `card`: what fits."""
        points = store.frame(KIND).drop(columns=["kind", "key"], errors="ignore")
        found = {} if points.empty else {"points": points, "exponents": fits(points)}
        answers = store.rows(CARD_KIND)
        return found | ({"card": pd.DataFrame(answers[-1]["rows"])} if answers else {})

    def content(self, outcome: ExperimentOutcome) -> Content:
        """Exponents of time and space, the log-log points, and the card."""
        if "points" not in outcome.frames or "card" not in outcome.frames:
            return self.nothing(outcome)
        points, fitted, card = (outcome.frames[name] for name in ("points", "exponents", "card"))
        return Content(
            title=self.title,
            facts=(("points", str(len(points))), ("fits", str(len(fitted))), ("card", CARD)),
            answer=_answer(card),
            sections=(
                _card_section(card),
                _exponents("time", "Time", fitted),
                _exponents("space", "Memory", fitted),
                _figures(points, fitted),
                self.again(outcome),
            ),
            look=lambda theme: Look(theme=theme),
            names=(),
        )


def _answer(card: pd.DataFrame) -> Answer:
    words = [
        f"{row.solver} ({row.form}) needs {digits(row.peak_gb)} GB and "
        f"{'fits' if row.fits else 'does not fit'}"
        for row in rows_of(card)
    ]
    return Answer(
        f"At 150,528 inputs and batch 100, on a card of {CARD}: {join_names(words)}.",
        (
            "Exponents are slopes of log-log fits over a ladder of sizes while all else stays. The paper's "
            "O(·) is a sum of terms, so over a finite ladder its own slope is below its highest power: both "
            "are given.",
        ),
    )


def _card_section(card: pd.DataFrame) -> Section:
    heads = ("solver", "form", "peak (GB)", "largest tensor", "its size (GB)", f"fits {CARD}")
    rows = tuple(
        (
            Entry(f"{row.provider} + {row.solver}" if row.provider else row.solver),
            Entry(row.form),
            Entry(digits(row.peak_gb), row.peak_gb),
            Entry(row.largest),
            Entry(digits(row.largest_gb), row.largest_gb),
            Entry("yes" if row.fits else "no"),
        )
        for row in rows_of(card)
    )
    text = (
        "Planned on fake tensors by `curvlab plan`, with the parameters and the batch: the paper's network "
        "150528-1024-512-256-128-64-32-16-10, batch 100, float32."
    )
    numeric = (False, False, True, False, True, False)
    return Section(
        "card", "What fits the paper's card", text, tables=(Table("Memory", heads, numeric, rows),)
    )


def _exponents(resource: str, title: str, fitted: pd.DataFrame) -> Section:
    text = (
        "`3 (2.84)` is an order's highest power and, in parentheses, its slope over the ladder; "
        "`2.91 [2.85, 2.97]` a measured slope with its 95 % interval. Operations and bytes are counted, so "
        "their intervals are about how straight the line is, not about noise."
    )
    words = exponent_table(fitted, resource).fillna("–")
    rows = tuple(tuple(Entry(str(value)) for value in row) for row in rows_of(words))
    table = Table(f"{title}: exponents", tuple(words.columns), (False,) * len(words.columns), rows)
    return Section(resource, title, text, tables=(table,))


def _figures(points: pd.DataFrame, fitted: pd.DataFrame) -> Section:
    drawings = tuple(
        Drawing(
            f"growth-{measure.replace('_', '-')}",
            f"{name} against each size: curvatures above, solves below. Dashed: the paper's equations; "
            "solid: curvlab's own form. The number beside a line is its exponent.",
            partial(_draw, points, fitted, measure),
        )
        for measure, name in NAMES.items()
    )
    return Section("growth", "Points and fits", drawings=drawings)


def _draw(points: pd.DataFrame, fitted: pd.DataFrame, measure: str, look: Look) -> Axes:
    return growth_figure(points, fitted, measure=measure, theme=look.theme).axes[0]
