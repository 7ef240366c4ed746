"""Table 1: what grows how fast, measured, and whether KFI fits the paper's card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd

from curvlab.measure.source import source_hash
from curvlab.report.content import Answer, Content, Drawing, Section
from curvlab.report.numbers import digits
from curvlab.report.tables import Entry, Table
from curvlab.report.theme import Look
from curvlab.report.words import listed
from curvlab.reproduce.experiment import Experiment, Outcome
from curvlab.reproduce.growth.card import CARD, card_frame
from curvlab.reproduce.growth.figure import growth_figure
from curvlab.reproduce.growth.fit import exponent_table, fits
from curvlab.reproduce.growth.points import KIND, growth_tasks
from curvlab.reproduce.rows import rows_of
from curvlab.reproduce.subjects import Options
from curvlab.reproduce.task import Places, Show, Task
from curvlab.studies.store import Store, key_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["CardQuestion", "GrowthTable"]

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

    def run(self, places: Places, show: Show) -> None:
        """Plan, and keep the answer as one row."""
        show(0.0, self.label)
        rows = card_frame(card=self.card).to_dict("records")
        answer = {"kind": CARD_KIND, "key": self.key, "source": source_hash(), "rows": rows}
        Store(places.store).append(answer)


@dataclass(frozen=True)
class GrowthTable(Experiment):
    """Growth exponents beside the paper's O(·)."""

    def tasks(self, options: Options) -> Sequence[Task]:
        """One task a point of every ladder, and the question of the card."""
        return [CardQuestion(), *growth_tasks(options.scale)]

    def frames(self, store: Store) -> dict[str, pd.DataFrame]:
        """`points`: every measured point; `exponents`: the fits; `card`: what fits."""
        points = store.frame(KIND).drop(columns=["kind", "key"], errors="ignore")
        found = {} if points.empty else {"points": points, "exponents": fits(points)}
        answers = store.rows(CARD_KIND)
        return found | ({"card": pd.DataFrame(answers[-1]["rows"])} if answers else {})

    def content(self, outcome: Outcome) -> Content:
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
        f"At 150,528 inputs and batch 100, on a card of {CARD}: {listed(words)}.",
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
