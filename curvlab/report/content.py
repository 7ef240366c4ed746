"""What the report says, in order, free of any format: the HTML page and the Markdown file render the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from curvlab.report.controls import evidence_of
from curvlab.report.figures import (
    convergence_curves,
    cost_bars,
    error_heatmap,
    memory_bars,
    pareto_scatter,
    residual_curves,
)
from curvlab.report.figures.axes import pairs_of
from curvlab.report.measures import CURVATURE, STEP, measure_of
from curvlab.report.recommendation import Recommendation, recommend
from curvlab.report.tables import (
    Table,
    cell_table,
    convergence_table,
    error_table,
    left_out_table,
    mapping_table,
)
from curvlab.report.theme import Look, Theme
from curvlab.report.training import runs, settings_words
from curvlab.studies.schema import extra_settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from curvlab.studies.compare.frames import Comparison

__all__ = ["Answer", "Content", "Drawing", "Section", "answer_of", "content_of"]

FACTS = (
    "arch",
    "model",
    "activation",
    "data",
    "criterion",
    "batch",
    "alpha",
    "repetitions",
    "device",
    "dtype",
)
FRONT = (
    "The dashed line is the Pareto front, its members are named; whiskers: interquartile range of the time."
)


@dataclass(frozen=True)
class Drawing:
    """A figure: what to call its file, what it shows, and how to draw it in a look."""

    name: str
    caption: str
    draw: Callable[[Look], Axes]
    half: bool = False

    @property
    def file_name(self) -> str:
        """The name of its image file: the name may have words from a store, which must not lead elsewhere.

        >>> Drawing("loss-../../x", "", draw=lambda look: look).file_name
        'loss-..-..-x.png'
        """
        return re.sub(r"[^\w.-]+", "-", self.name) + ".png"


@dataclass(frozen=True)
class Section:
    """A heading with what stands under it."""

    name: str
    title: str
    text: str = ""
    drawings: tuple[Drawing, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    code: str = ""
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a page opens with."""

    headline: str
    paragraphs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Content:
    """The whole report."""

    title: str
    facts: tuple[tuple[str, str], ...]
    answer: Answer | Recommendation
    sections: tuple[Section, ...]
    look: Callable[[Theme], Look]
    names: tuple[str, ...]


def content_of(comparison: Comparison) -> Content:
    """Everything that the frames of a comparison have to say; sections without data are left out."""
    cells, convergence = comparison.cells, comparison.convergence
    frames = [cells, comparison.errors, comparison.traces, convergence]
    sections = [
        _pareto(comparison),
        _errors(comparison),
        _costs(comparison),
        _memory(comparison),
        _training(comparison),
        _residuals(comparison),
        _all_pairs(comparison),
        _warnings(comparison),
        _left_out(comparison),
        _environment(comparison),
    ]
    return Content(
        title="Which curvature, which solver?",
        facts=_facts(comparison.config),
        answer=answer_of(comparison),
        sections=tuple(section for section in sections if section is not None),
        look=lambda theme: Look.of_frames(*frames, theme=theme),
        names=tuple(f"{provider} + {solver}" for provider, solver in pairs_of(cells)),
    )


def answer_of(comparison: Comparison) -> Recommendation:
    """What the comparison says to use, at its deciding point."""
    errors = comparison.errors
    return recommend(
        comparison.cells,
        errors[errors["point"] == comparison.point],
        comparison.convergence,
        evidence=evidence_of(comparison),
    )


def _facts(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What was studied, in a line: the fields that tell one study from another, wherever they are nested."""
    names = (*FACTS, *(one.name for one in extra_settings()))
    rows = mapping_table("", config).rows
    known = {row[0].text.rpartition(".")[2]: row[1].text for row in rows}
    return tuple((name, known[name]) for name in names if known.get(name))


def _pareto(comparison: Comparison) -> Section:
    cells = comparison.cells
    curvature = Drawing(
        "pareto",
        "Every pair by its cost and the distance of its provider's bias blocks from the absolute Hessian "
        f"|H|, in which the solver does not count. {FRONT}",
        lambda look: pareto_scatter(cells, look=look),
    )
    if measure_of(cells) is CURVATURE:
        return Section("front", "Cost against error", drawings=(curvature,))
    step = Drawing(
        "newton",
        "Every pair by its cost and the distance of its step from the exact damped Newton step, which the "
        f"answer above goes by. {FRONT}",
        lambda look: pareto_scatter(cells, look=look, error=STEP.column),
    )
    return Section("front", "Cost against error", drawings=(step, curvature))


def _errors(comparison: Comparison) -> Section | None:
    errors = comparison.errors
    if errors.empty:
        return None
    caption = (
        "Distance of each layer's bias block B̃ from that of the absolute Hessian |H|, ‖B̃ − |B|‖ in the "
        "Frobenius norm. The colour is logarithmic: darker is further. Total: the root of the sum of squares."
    )
    drawing = Drawing("errors", caption, lambda look: error_heatmap(errors, look=look))
    return Section(
        "errors",
        "Error by layer",
        CURVATURE.definition,
        drawings=(drawing,),
        folded=(error_table(errors),),
    )


def _costs(comparison: Comparison) -> Section:
    caption = (
        "Median time of one step: estimate the curvature, prepare the solver (all that needs only the "
        "matrix), apply it to a gradient; bars are split as the medians of the three are. "
        "Repetitions are interleaved over the pairs."
    )
    return Section(
        "time",
        "Time",
        drawings=(Drawing("time", caption, lambda look: cost_bars(comparison.cells, look=look)),),
    )


def _memory(comparison: Comparison) -> Section | None:
    if not comparison.cells["peak_bytes"].notna().any():
        return None
    caption = (
        "Peak of live tensor bytes, what the result holds on to, and the peak that planning on fake tensors "
        "predicts."
    )
    return Section(
        "memory",
        "Memory",
        drawings=(Drawing("memory", caption, lambda look: memory_bars(comparison.cells, look=look)),),
    )


def _training(comparison: Comparison) -> Section | None:
    convergence = comparison.convergence
    if convergence.empty:
        return None
    measures = [("train_loss", "Training loss")]
    if convergence["test_accuracy"].notna().any():
        measures.append(("test_accuracy", "Test accuracy"))
    elif convergence["test_loss"].notna().any():
        measures.append(("test_loss", "Test loss"))

    def drawing(measure: str, title: str, against: str) -> Drawing:
        caption = f"{title} by {'wall clock' if against == 'seconds' else 'epoch'}, one run each."
        return Drawing(
            f"{measure.replace('_', '-')}-{against}",
            caption,
            lambda look: convergence_curves(convergence, look=look, against=against, measure=measure),
            half=True,
        )

    drawings = tuple(drawing(*measure, against) for measure in measures for against in ("epoch", "seconds"))
    text = " ".join(settings_words(runs(convergence)))
    return Section("training", "Convergence", text, drawings, (convergence_table(convergence),))


def _residuals(comparison: Comparison) -> Section | None:
    traces = comparison.traces
    if traces.empty:
        return None
    caption = (
        "Relative residual of each iterative solver in its own system, the largest over the blocks: the one "
        "it carries along, which goes on falling where the true one has come to the rounding of the dtype. "
        "Systems differ between solvers; the table has the true residual in one common system."
    )
    drawing = Drawing("residuals", caption, lambda look: residual_curves(traces, look=look))
    return Section("residuals", "Residual by iteration", drawings=(drawing,))


def _all_pairs(comparison: Comparison) -> Section:
    text = f"Medians, with the interquartile range in brackets. {CURVATURE.definition} {STEP.definition}"
    return Section("pairs", "All numbers", text, tables=(cell_table(comparison.cells),))


def _warnings(comparison: Comparison) -> Section | None:
    notes = tuple(str(warning) for warning in comparison.warnings)
    return Section("warnings", "Warnings", notes=notes) if notes else None


def _left_out(comparison: Comparison) -> Section | None:
    table = left_out_table(comparison.cells)
    listed = {f"{row[0].text} + {row[1].text}: {row[3].text}" for row in table.rows}
    others = tuple(failure for failure in comparison.failures if failure not in listed)
    if not table.rows and not others:
        return None
    text = "A pair that does not exist is skipped and is no failure; a failed one did not stop the others."
    return Section(
        "left-out", "Failed and skipped", text, tables=(table,) if table.rows else (), notes=others
    )


def _environment(comparison: Comparison) -> Section:
    tables = (
        mapping_table("Configuration", comparison.config),
        mapping_table("Environment", comparison.environment),
    )
    return Section(
        "again",
        "Run it again",
        "The command that reproduces this report, and what it ran on.",
        folded=tuple(table for table in tables if table.rows),
        code=comparison.command,
    )
