"""What the report says, in order, free of any format: the HTML page and the Markdown file render the same."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from curvlab.report.controls import damping_words, evidence_of, point_words
from curvlab.report.drawing import Look, Theme, pairs_of
from curvlab.report.figures import (
    convergence_curves,
    cost_bars,
    damping_curves,
    eigenvalue_points,
    error_heatmap,
    memory_bars,
    pareto_scatter,
    point_curves,
    residual_curves,
)
from curvlab.report.numbers import byte_words, digits, percent, second_words
from curvlab.report.pareto import ANGLE, CURVATURE, LOSS, STEP, candidates, front, measure_of
from curvlab.report.recommendation import Recommendation, recommend
from curvlab.report.tables import (
    Table,
    cell_table,
    convergence_table,
    error_table,
    left_out_table,
    mapping_table,
    point_table,
    scene_table,
    share_table,
    spectrum_table,
    tuning_table,
)
from curvlab.report.training import runs, settings_words
from curvlab.studies.compare.costs import disturbance_words
from curvlab.studies.compare.decisions import Decision
from curvlab.studies.compare.spectra import damping_rules
from curvlab.studies.schema import extra_settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from curvlab.studies.compare.frames import Comparison

__all__ = ["Answer", "Content", "Drawing", "Section", "answer_of", "content_of", "spectrum_section"]

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
BETTER = {"train_loss": "lowest training loss", "test_loss": "lowest test loss"} | {
    "test_accuracy": "highest test accuracy"
}
FRONT = (
    "Nothing measured is both cheaper and better than the dashed line; named are those on it that are cheaper"
    " than the next better one beyond the noise. Whiskers: interquartile range of the time."
)


@dataclass(frozen=True)
class Drawing:
    """A figure: what to call its file, what it shows, and how to draw it in a look.

    The question that it answers stands above it, the answer and then the caption below.
    """

    name: str
    caption: str
    draw: Callable[[Look], Axes]
    half: bool = False
    question: str = ""
    answer: str = ""

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
    """What a page opens with: the answer, why, and what limits it; `details` are folded below."""

    headline: str
    paragraphs: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Recommendation) -> Answer:
        """A recommendation in short, with its whole account as details."""
        if not found.reasons:
            return cls(found.headline, found.paragraphs)
        return cls(found.headline, (" ".join(found.reasons),), found.cautions, found.paragraphs)


@dataclass(frozen=True)
class Content:
    """The whole report."""

    title: str
    facts: tuple[tuple[str, str], ...]
    answer: Answer
    sections: tuple[Section, ...]
    look: Callable[[Theme], Look]
    names: tuple[str, ...]


def content_of(comparison: Comparison) -> Content:
    """Everything that the frames of a comparison have to say; sections without data are left out."""
    cells, convergence = comparison.cells, comparison.convergence
    frames = [cells, comparison.errors, comparison.traces, convergence]
    sections = [
        _pareto(comparison),
        _dampings(comparison),
        _spectra(comparison),
        _points(comparison),
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
        facts=(*_facts(comparison.config), *_coverage(comparison)),
        answer=Answer.of(answer_of(comparison)),
        sections=tuple(section for section in sections if section is not None),
        look=lambda theme: Look.of_frames(*frames, theme=theme),
        names=tuple(f"{provider} + {solver}" for provider, solver in pairs_of(cells)),
    )


def answer_of(comparison: Comparison) -> Recommendation:
    """What the comparison says to use, at its deciding point, and whether its times are trusted."""
    found = recommend(
        comparison.cells,
        comparison.at_point("errors"),
        comparison.convergence,
        evidence=evidence_of(comparison),
    )
    doubt = disturbance_words(comparison.repetitions)
    if not doubt:
        return found
    *paragraphs, small_print = found.paragraphs or ("",)
    brief, _, _ = doubt.partition(" (each made")
    cautions = (f"{brief} (--fresh measures again).", *found.cautions)
    return replace(found, paragraphs=(*paragraphs, doubt, small_print), cautions=cautions)


def _facts(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What was studied, in a line: the fields that tell one study from another, wherever they are nested."""
    names = (*FACTS, *(one.name for one in extra_settings()))
    rows = mapping_table("", config).rows
    known = {row[0].text.rpartition(".")[2]: row[1].text for row in rows}
    return tuple((name, known[name]) for name in names if known.get(name))


def _coverage(comparison: Comparison) -> list[tuple[str, str]]:
    """Which parameters the numbers speak for, where and on what they were measured."""
    found = []
    scenes = comparison.scenes
    if len(scenes):
        every, own = int(scenes["parameters"].iloc[0]), int(scenes["covered_parameters"].iloc[0])
        found.append(("parameters with curvature", f"{own:,} of {every:,} ({percent(own / every)})"))
    if comparison.coverage:
        bias, weight = comparison.coverage["bias_share"], comparison.coverage["weight_share"]
        found.append(("errors of bias blocks", f"{percent(bias)} of the parameters"))
        probes = int(comparison.coverage["weight_probes"])
        by = f", estimated by {probes} random products" if probes else ""
        found.append(("errors of weight blocks", f"{percent(weight)}{by}"))
    if point := point_words(comparison):
        found.append(("deciding point", point))
        draws = len(comparison.at_point("scenes"))
        seeds = int(comparison.config.get("seeds", 1))
        found.append(("draws", f"{draws} ({seeds} × {draws // seeds}: seeds × batches)"))
    return found


def _pareto(comparison: Comparison) -> Section:
    cells, measure = comparison.cells, measure_of(comparison.cells)
    times = evidence_of(comparison).times
    curvature = Drawing(
        "pareto",
        "Every pair by its cost and the distance of its provider's bias blocks from the absolute Hessian "
        f"|H|, in which the solver does not count. {FRONT}",
        lambda look: pareto_scatter(cells, look=look, times=times),
        question="Which provider is closest to the absolute Hessian for its cost?",
        answer=_front_words(cells, CURVATURE.column, times),
    )
    if measure is CURVATURE:
        return Section("front", "Cost against error", drawings=(curvature,))
    step = Drawing(
        "newton",
        f"Every pair by its cost and its {measure.noun}, which the answer above goes by. "
        f"{_gradient_words(comparison)}{FRONT}",
        lambda look: pareto_scatter(cells, look=look, error=measure.column, times=times),
        question=f"Which pair is best by time and {measure.basis}?",
        answer=_front_words(cells, measure.column, times),
    )
    return Section("front", "Cost against error", measure.definition, drawings=(step, curvature))


def _front_words(cells: pd.DataFrame, column: str, times: Sequence[Decision]) -> str:
    """The members of the front."""
    ahead = front([pair for pair in candidates(cells, column, times) if not math.isnan(pair.error)])
    if not ahead:
        return ""
    return f"On the front, cheapest first: {', '.join(pair.name for pair in ahead)}."


def _gradient_words(comparison: Comparison) -> str:
    """Where the control would stand."""
    found = comparison.controls[comparison.controls["provider"] == "identity"]
    known = [name for name in ("sine", "loss_left") if name in found and found[name].notna().any()]
    if found.empty or not known:
        return ""
    column = measure_of(comparison.cells).column
    value = float(found[column].iloc[0]) if column in found else math.nan
    return (
        "" if math.isnan(value) else f"The gradient step, which costs least, would be at {percent(value)}. "
    )


def _dampings(comparison: Comparison) -> Section | None:
    """The steps at several dampings, on the first draw of the deciding point."""
    held = comparison.at_point("dampings")
    if held.empty:
        return None
    draws = comparison.at_point("draws")
    first = draws.drop_duplicates(["provider", "solver"]).assign(alpha=float(comparison.config["alpha"]))
    frame = pd.concat([held, first[first["provider"].isin(held["provider"])]], ignore_index=True)
    measures = (
        ("sine", "How far is each step from the Newton step of its own α?"),
        ("decrease", "How much does each step lower the loss, at its best step size?"),
        ("predicted", "What does the pair's own quadratic model promise of a full step?"),
        ("decrease_full", "And what does a full step do?"),
    )
    drawings = tuple(
        Drawing(
            f"alpha-{measure}",
            "One batch; the gradient step is the grey line.",
            functools.partial(_damping_drawing, frame, measure),
            half=True,
            question=question,
            answer=_best_alpha_words(frame, measure),
        )
        for measure, question in measures
        if frame[measure].notna().any()
    )
    evidence = evidence_of(comparison)
    return Section(
        "damping",
        "Damping",
        " ".join(damping_words(evidence.damping)),
        drawings,
        folded=(scene_table(comparison.scenes),),
    )


def _spectra(comparison: Comparison) -> Section | None:
    """Eigenvalues of every layer's curvature beside the damping, on the first draw of the deciding point."""
    spectra = comparison.at_point("spectra")
    return None if spectra.empty else spectrum_section(spectra, float(comparison.config["alpha"]))


def spectrum_section(spectra: pd.DataFrame, alpha: float) -> Section:
    """The largest and the median eigenvalue of every layer, and where α outweighs them all."""
    own = _first_draw(spectra)
    drawing = Drawing(
        "eigenvalues",
        "One batch. Solid: the largest eigenvalue of the layer's blocks; dotted: the median one.",
        lambda look: eigenvalue_points(own, look=look, alpha=alpha),
        question="How large are the eigenvalues of each layer's curvature, beside the damping?",
        answer=_ruled_words(own, alpha),
    )
    return Section(
        "spectrum", "Spectrum", _spectrum_words(spectra), (drawing,), folded=(spectrum_table(spectra),)
    )


def _first_draw(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first seed and batch, where there are several."""
    if "draw" not in frame:
        return frame
    return frame[(frame["draw"] == frame["draw"].min()) & (frame["seed"] == frame["seed"].min())]


def _spectrum_words(spectra: pd.DataFrame) -> str:
    """The largest and the median eigenvalues of the layers, over all of them, by provider."""
    named = []
    for provider, own in spectra.groupby("provider", sort=False):
        largest, middle = float(own["largest"].max()), float(own["median"].median())
        named.append(f"{provider} {digits(largest)} and {digits(middle)}")
    draws = "" if spectra.equals(_first_draw(spectra)) else ", over all batches"
    return f"The largest eigenvalue of a layer's curvature, and the median one{draws}: {'; '.join(named)}."


def _ruled_words(spectra: pd.DataFrame, alpha: float) -> str:
    """In how many layers the damping is larger than every eigenvalue, by provider."""
    told = []
    for provider, own in spectra.groupby("provider", sort=False):
        ruled = sum(damping_rules(float(largest), alpha) for largest in own["largest"])
        told.append(f"{provider} in {ruled} of {len(own)}")
    return f"Layers in which the damping is larger than every eigenvalue: {'; '.join(told)}."


def _damping_drawing(frame: pd.DataFrame, measure: str, look: Look) -> Axes:
    return damping_curves(frame, look=look, measure=measure)


def _best_alpha_words(frame: pd.DataFrame, measure: str) -> str:
    """The pair and the damping with the best value."""
    pairs = frame[(frame["solver"] != "") & frame[measure].notna()]
    if pairs.empty:
        return ""
    values = pairs[measure].to_numpy(float)
    row = pairs.iloc[int(values.argmin() if measure == "sine" else values.argmax())]
    what = "Closest" if measure == "sine" else "Most"
    name, value = f"{row['provider']} + {row['solver']}", percent(float(row[measure]))
    return f"{what}: {name} at α = {digits(float(row['alpha']))}, {value}."


def _points(comparison: Comparison) -> Section | None:
    """The same at every point of the training."""
    points = comparison.points
    if points.empty or points["point"].nunique() < 2:
        return None
    step = "sine" if points["sine"].notna().any() else "decrease"
    measures = [
        ("weight_relative", "Do the weight blocks stay as close to the Hessian as training goes on?"),
        ("error_relative", "And the bias blocks to the absolute Hessian?"),
        (step, "Do the steps stay as good?"),
    ]
    drawings = tuple(
        Drawing(
            f"points-{measure.replace('_', '-')}",
            "Medians over the draws.",
            functools.partial(_point_drawing, points[points["provider"] != "newton"], measure),
            half=True,
            question=question,
            answer=_change_words(points, measure),
        )
        for measure, question in measures
        if points[measure].notna().any()
    )
    return Section(
        "points", "On the way of training", "", drawings, folded=(point_table(points, comparison.coverage),)
    )


def _change_words(points: pd.DataFrame, measure: str) -> str:
    """The best at the first point and at the last; of a provider where the solver does not count."""
    pairs = points[(points["solver"] != "") & points[measure].notna()]
    ends = [pairs[pairs["point"] == point] for point in (points["point"].iloc[0], points["point"].iloc[-1])]
    if any(end.empty for end in ends):
        return ""
    told = []
    for end in ends:
        values = end[measure].to_numpy(float)
        row = end.iloc[int(values.argmax() if measure == "decrease" else values.argmin())]
        of_provider = measure in ("weight_relative", "error_relative")
        name = row["provider"] if of_provider else f"{row['provider']} + {row['solver']}"
        told.append(f"at {row['point']} {name}, {percent(float(row[measure]))}")
    return f"{'Most' if measure == 'decrease' else 'Closest'}: {told[0]}; {told[1]}."


def _point_drawing(points: pd.DataFrame, measure: str, look: Look) -> Axes:
    return point_curves(points, look=look, measure=measure)


def _errors(comparison: Comparison) -> Section | None:
    errors = comparison.at_point("errors")
    if errors.empty:
        return None
    several = errors[["seed", "draw"]].drop_duplicates().shape[0] > 1 if "draw" in errors else False
    errors = _first_draw(errors)
    of = "Of the first batch alone; the table of all numbers has the medians. " if several else ""
    caption = of + (
        "Distance of each layer's bias block B̃ from that of the absolute Hessian |H|, ‖B̃ − |B|‖ in the "
        "Frobenius norm. The colour is logarithmic: darker is further. Total: the root of the sum of squares."
    )
    drawings = [
        Drawing(
            "errors",
            caption,
            lambda look: error_heatmap(errors, look=look),
            question="At which layer is each provider furthest from the absolute Hessian?",
            answer=_closest_words(errors, "relative"),
        )
    ]
    if "weight_error" in errors and errors["weight_error"].notna().any():
        drawings.append(
            Drawing(
                "weight-errors",
                f"{of}Distance of each layer's weight block from the exact Hessian's, signed, over its norm.",
                lambda look: error_heatmap(errors, look=look, column="weight_relative"),
                question="And the weight blocks, which have most of the parameters?",
                answer=_closest_words(errors, "weight_relative"),
            )
        )
    return Section(
        "errors",
        "Error by layer",
        CURVATURE.definition,
        drawings=tuple(drawings),
        folded=(error_table(errors, comparison.coverage),),
    )


def _closest_words(errors: pd.DataFrame, column: str) -> str:
    total = errors[(errors["layer"] == "Total") & errors[column].notna()]
    if total.empty:
        return ""
    row = total.iloc[int(total[column].to_numpy(float).argmin())]
    return f"Closest in total: {row['provider']}, {percent(float(row[column]))} off."


def _with_controls(comparison: Comparison) -> pd.DataFrame:
    """The cells and the controls as one frame."""
    frames = [frame for frame in (comparison.cells, comparison.controls) if len(frame)]
    return pd.concat(frames, ignore_index=True) if len(frames) > 1 else comparison.cells


def _costs(comparison: Comparison) -> Section:
    caption = (
        "Median time of one step: estimate the curvature, prepare the solver (all that needs only the "
        "matrix), apply it to a gradient; bars are split as the medians of the three are. "
        "Repetitions are interleaved over the pairs and the controls, which are grey."
    )
    drawing = Drawing(
        "time",
        caption,
        lambda look: cost_bars(_with_controls(comparison), look=look),
        question="What does a step cost, beside a plain one?",
        answer=_cheapest_words(comparison, "total_seconds", second_words),
    )
    return Section("time", "Time", drawings=(drawing,))


def _cheapest_words(comparison: Comparison, column: str, words: Callable[[float], str]) -> str:
    cells = comparison.cells[comparison.cells[column].notna() & (comparison.cells["status"] == "ok")]
    if cells.empty:
        return ""
    row = cells.iloc[int(cells[column].to_numpy(float).argmin())]
    text = f"The least: {row['provider']} + {row['solver']}, {words(float(row[column]))}"
    plain = comparison.controls[comparison.controls["provider"] == "sgd"][column].dropna()
    if plain.empty:
        return f"{text}."
    ratio = digits(float(row[column]) / float(plain.iloc[0]), 2)
    return f"{text}, {ratio} × that of a plain SGD step ({words(float(plain.iloc[0]))})."


def _memory(comparison: Comparison) -> Section | None:
    if not comparison.cells["peak_bytes"].notna().any():
        return None
    caption = (
        "Peak of live tensor bytes, what the result holds on to, and the peak that planning on fake tensors "
        "predicts."
    )
    drawing = Drawing(
        "memory",
        caption,
        lambda look: memory_bars(_with_controls(comparison), look=look),
        question="What memory does a step take, beside a plain one?",
        answer=_cheapest_words(comparison, "peak_bytes", byte_words),
    )
    return Section("memory", "Memory", drawings=(drawing,))


def _training(comparison: Comparison) -> Section | None:
    convergence = comparison.convergence
    if convergence.empty:
        return None
    measures = [("train_loss", "Training loss")]
    if convergence["test_accuracy"].notna().any():
        measures.append(("test_accuracy", "Test accuracy"))
    elif convergence["test_loss"].notna().any():
        measures.append(("test_loss", "Test loss"))

    race = "seed" in convergence and convergence["seed"].nunique() > 1
    frames = {"epoch": convergence, "seconds": convergence, "cpu_seconds": comparison.by_time}
    budgets = {"epoch": "epochs", "seconds": "wall clock", "cpu_seconds": "processor time"}
    each = "the median of the seeds, and from the lowest to the highest of them" if race else "one run each"

    def drawing(measure: str, title: str, against: str) -> Drawing:
        return Drawing(
            f"{measure.replace('_', '-')}-{against.replace('_', '-')}",
            f"{title} by {budgets[against]}: {each}.",
            lambda look: convergence_curves(frames[against], look=look, against=against, measure=measure),
            half=True,
            question=f"Which has the {BETTER[measure]} for equal {budgets[against]}?",
            answer=_ahead_words(frames[against], measure),
        )

    axes = ("epoch", "cpu_seconds") if race and not comparison.by_time.empty else ("epoch", "seconds")
    drawings = tuple(drawing(*measure, against) for measure in measures for against in axes)
    text = " ".join(settings_words(runs(convergence)))
    tried = (tuning_table(comparison.tuning),) if len(comparison.tuning) else ()
    return Section("training", "Convergence", text, drawings, (convergence_table(convergence),), tried)


def _ahead_words(frame: pd.DataFrame, measure: str) -> str:
    """The two that are ahead where the curves end, by the median over their seeds."""
    known = frame[frame[measure].notna() & (frame["status"] == "ok")]
    if known.empty:
        return ""
    runs_of = [name for name in ("optimizer", "seed") if name in known]  # an earlier release had one seed
    last = known.sort_values("epoch", kind="stable").groupby(runs_of, sort=False).tail(1)
    ends = last.groupby("optimizer", sort=False)[measure].median().sort_values(kind="stable")
    highest = measure == "test_accuracy"
    ends = ends[::-1] if highest else ends
    first, second = ends.index[0], ends.index[1] if len(ends) > 1 else None
    words = percent if highest else digits
    beside = f", before {second}, {words(float(ends.iloc[1]))}" if second is not None else ""
    return f"{first}, {words(float(ends.iloc[0]))}{beside}."


def _residuals(comparison: Comparison) -> Section | None:
    traces = comparison.traces
    if traces.empty:
        return None
    caption = (
        "Relative residual of each iterative solver in its own system, the largest over the blocks: the one "
        "it carries along, which goes on falling where the true one has come to the rounding of the dtype. "
        "Systems differ between solvers; the table has the true residual in one common system."
    )
    drawing = Drawing(
        "residuals",
        caption,
        lambda look: residual_curves(traces, look=look),
        question="How fast do the iterative solvers converge?",
        answer=_iterations_words(traces),
    )
    return Section("residuals", "Residual by iteration", drawings=(drawing,))


def _iterations_words(traces: pd.DataFrame) -> str:
    """The pairs with the fewest and the most iterations until their last block was done."""
    counts = traces.groupby(["provider", "solver"], sort=False)["iteration"].max().sort_values(kind="stable")
    if counts.empty:
        return ""
    if int(counts.iloc[0]) == int(counts.iloc[-1]):
        return f"Iterations: {int(counts.iloc[0])} of each."
    told = [f"{' + '.join(counts.index[place])} ({int(counts.iloc[place])})" for place in (0, -1)]
    return f"Iterations: the fewest {told[0]}, the most {told[1]}."


def _all_pairs(comparison: Comparison) -> Section:
    words = " ".join(measure.definition for measure in (CURVATURE, STEP, ANGLE, LOSS))
    text = f"Medians, with the interquartile range in brackets; the last rows are the controls. {words}"
    tables = [cell_table(_with_controls(comparison), comparison.coverage)]
    against = evidence_of(comparison).against
    if any(one.draws > 1 for one in against.values()):
        tables.append(share_table(against))
    return Section("pairs", "All numbers", text, tables=tuple(tables))


def _warnings(comparison: Comparison) -> Section | None:
    said = disturbance_words(comparison.repetitions)  # beside the answer
    notes = tuple(str(warning) for warning in comparison.warnings if warning != said)
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
