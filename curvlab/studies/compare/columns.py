"""The columns of a comparison's frames, and what a row must be for its frames to be made.

Names, kinds and heads are written once: frames, results.csv, the terminal's table, the page and the Markdown
file are made from these; see `Column`.

A store is a file that anybody may have edited. A row that is not as curvlab writes them is set aside like a
torn line, with the reason, and its cell is measured again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from curvlab.studies.schema import Column, ColumnKind, extra_columns
from curvlab.studies.store import Row
from curvlab.studies.train.plan import EPOCH, RATES

__all__ = [
    "BLOCKS",
    "BY_TIME",
    "CELLS",
    "CONVERGENCE",
    "DAMPINGS",
    "DRAWN",
    "DRAWS",
    "ERRORS",
    "LEFT_OUT",
    "PHASES",
    "POINTS",
    "RACE",
    "REPETITIONS",
    "SCENES",
    "SPECTRA",
    "TRACES",
    "TUNING",
    "cell_columns",
    "row_problem",
]


PHASES = ("estimate", "prepare", "apply")
PAIR = (
    Column("provider", "text", "provider", short="Provider"),
    Column("solver", "text", "solver", short="Solver"),
)
STATUS = Column("status", "text", "status")
OF_BIASES = "bias blocks, from |H|"
OF_WEIGHTS = "weight blocks, signed, from H"
SCENE = (
    Column("point", "text", "point"),
    Column("seed", "plain", "seed"),
    Column("draw", "plain", "batch"),
)


def _seconds(phase: str, short: str = "") -> tuple[Column, Column]:
    """The median of a phase over the repetitions, and its interquartile range."""
    spread = Column(f"{phase}_iqr", "seconds")
    median = Column(
        f"{phase}_seconds", "seconds", phase, short=short, spread=spread.name, unit_of="total_seconds"
    )
    return median, spread


def _drawn(
    name: str, kind: ColumnKind, heading: str, *, short: str = "", covers: str = "", legend: str = ""
) -> tuple[Column, Column]:
    """The median over the draws, and its interquartile range."""
    spread = Column(f"{name}_iqr", kind)
    return Column(name, kind, heading, short, covers, spread.name, legend=legend), spread


def _bytes(name: str, heading: str, short: str = "") -> Column:
    return Column(name, "bytes", heading, short=short, unit_of="peak_bytes")


CELLS = (
    *PAIR,
    STATUS,
    Column("message", "text"),
    *_seconds("total", short="Time"),
    *(column for phase in PHASES for column in _seconds(phase)),
    _bytes("peak_bytes", "peak", short="Peak"),
    _bytes("planned_bytes", "planned"),
    _bytes("held_bytes", "held"),
    Column("flops", "operations", "operations"),
    *_drawn(
        "sine",
        "percent",
        "angle to the Newton step, sine",
        short="Angle",
        legend="Angle: the distance that is left at the best scale, the sine of the angle between the steps.",
    ),
    *_drawn(
        "decrease",
        "percent",
        "decrease of the loss, best step size",
        short="Loss",
        legend="Loss: by how much the step lowers the loss of its batch, at the best step size.",
    ),
    Column("loss_left", "percent"),
    *_drawn("decrease_full", "percent", "decrease at step size 1"),
    *_drawn("decrease_other", "percent", "decrease on another batch"),
    *_drawn("rate", "number", "best step size"),
    *_drawn("predicted", "percent", "decrease that its own model predicts, step size 1"),
    *_drawn("error_total", "number", "error", covers=OF_BIASES),
    *_drawn(
        "error_relative",
        "percent",
        "relative error",
        short="vs |H|",
        covers=OF_BIASES,
        legend="vs |H|: how far the provider's bias blocks are from those of the absolute Hessian, "
        "‖B − |H|‖ / ‖|H|‖ (the paper's error; the same for every solver; of `hessian` itself no error but "
        "negative curvature).",
    ),
    *_drawn(
        "weight_relative",
        "percent",
        "relative error",
        short="Weight",
        covers=OF_WEIGHTS,
        legend="Weight: the same of its weight blocks, against H with its signs.",
    ),
    *_drawn(
        "distance",
        "percent",
        "distance to the Newton step",
        short="Step",
        legend="Step: how far the pair's step is from the exact damped Newton step, ‖d − n‖ / ‖n‖.",
    ),
    *_drawn("cosine", "number", "cosine to the Newton step"),
    Column("newton_reason", "text"),
    Column("zero_step", "flag"),
    Column("iterations", "count", "iterations"),
    Column("residual", "number", "residual"),
    Column("residual_full", "number", "residual, full input factor"),
    Column("route", "text", "route"),
    Column("point", "text"),
    Column("draws", "count"),
)
"""One row per provider and solver, at the deciding point: medians over the draws, interquartile ranges."""

DRAWN = (
    "distance",
    "sine",
    "cosine",
    "decrease",
    "decrease_full",
    "decrease_other",
    "rate",
    "predicted",
)
"""The columns of a cell that differ from draw to draw."""

DRAWS = (
    *PAIR,
    *SCENE,
    *(replace(column, short="", spread="") for column in CELLS if column.name in DRAWN),
    Column("newton_reason", "text"),
)
"""One row per pair or control (which has no solver) and scene."""

AT_POINTS = ("error_relative", "weight_relative", "distance", "sine", "decrease", "decrease_other")

POINTS = (
    *PAIR,
    Column("point", "text", "point"),
    *(replace(column, short="") for column in CELLS if column.name.removesuffix("_iqr") in AT_POINTS),
    *(replace(column, short="") for column in CELLS if column.name in ("total_seconds", "total_iqr")),
)
"""One row per pair or control and point: medians over the draws."""

DAMPINGS = (
    *PAIR,
    *SCENE,
    Column("asked", "text"),
    Column("alpha", "number"),
    *(Column(name, "percent") for name in ("distance", "sine", "decrease", "decrease_full", "predicted")),
    Column("rate"),
    Column("message", "text"),
)
"""One row per pair or control, scene and damping."""

SPECTRA = (
    PAIR[0],
    *SCENE,
    Column("layer", "text", "layer"),
    Column("largest", "number", "largest eigenvalue"),
    Column("median", "number", "median eigenvalue"),
    Column("exact", "flag", "exact"),
)
"""One row per provider, scene and layer."""

SCENES = (
    *SCENE,
    Column("steps", "count", "steps of Adam"),
    Column("loss", "loss", "loss"),
    Column("largest_eigenvalue", "number", "largest eigenvalue of the Hessian"),
    Column("largest_of", "text"),
    Column("examples", "count", "examples"),
    Column("parameters", "count"),
    Column("covered_parameters", "count"),
    Column("second_batch", "flag"),
)
"""One row per point, seed and batch."""

LEFT_OUT = (*PAIR, STATUS, Column("message", "text", "reason"))
"""The pairs without a result, as the page lists them."""

REPETITIONS = (
    *PAIR,
    Column("point", "text"),
    Column("repetition", "count"),
    Column("run", "text"),
    *(Column(f"{phase}_seconds", "seconds") for phase in PHASES),
    Column("wall_seconds", "seconds"),
    Column("cpu_seconds", "seconds"),
    Column("waited", "percent"),
    Column("load", "number"),
    Column("attempts", "count"),
)
"""One row per pair or control (which has no solver), point and repetition, with the run that measured it and
what other programs did meanwhile (`timing`)."""

ERRORS = (
    Column("layer", "label", "layer"),
    Column("layer_name", "text", "name"),
    PAIR[0],
    Column("error", "number", "error ‖B̃ − |B|‖"),
    Column("relative", "percent", "relative to ‖|B|‖"),
    Column("weight_error", "number", "error of the weight block ‖Ã − H‖"),
    Column("weight_relative", "percent", "relative to ‖H‖"),
    *SCENE,
)
"""One row per provider, scene and layer, and one whose layer is "Total"."""

TRACES = (*PAIR, Column("block", "text"), Column("iteration", "count"), Column("residual"))
"""One row per pair, block and iteration of the solver."""

BLOCKS = (
    *PAIR,
    Column("block", "text"),
    STATUS,
    Column("iterations", "count"),
    Column("residual"),
    Column("residual_full"),
    Column("rank", "count"),
    Column("route", "text"),
    Column("cosine"),
    Column("distance", "percent"),
    Column("newton_reason", "text"),
)
"""One row per pair and block."""

CONVERGENCE = (
    Column("optimizer", "text", "optimizer", short="Optimizer"),
    Column("provider", "text"),
    Column("solver", "text"),
    *RATES,
    Column("at_edge", "text", "at the end of its grid"),
    Column("tuned", "flag"),
    Column("tuning_epochs", "count"),
    Column("tuning_seconds", "number"),
    Column("seed", "count"),
    *EPOCH,
    Column("cpu_seconds", "number", "processor seconds"),
    Column("time_budget", "number"),
    Column("epochs_in_time", "count", "epochs in equal time"),
    Column("loss_in_time", "loss", "test loss in equal time", short="Equal time"),
)
"""One row per optimizer, seed and epoch; the last three say where the run was after equal processor time."""

BY_TIME = CONVERGENCE[:-3]
"""The same rows of the longer runs that equal processor time needs."""

RACE = (
    *CONVERGENCE[:3],
    *RATES,
    Column("at_edge", "text", "at the end of its grid"),
    Column("seeds", "count", "seeds", short="Seeds"),
    EPOCH[0],
    *(replace(column, short="") for column in EPOCH[1:3]),  # the terminal has no room for them
    Column("test_loss", "loss", "test loss, median", short="Test loss"),
    Column("test_low", "loss", "lowest", short="Low"),
    Column("test_high", "loss", "highest", short="High"),
    *CONVERGENCE[-6:],
)
"""One row per optimizer: where its seeds ended, the median of each column."""

TUNING = (
    *CONVERGENCE[:3],
    *RATES[:2],
    Column("epochs", "count", "epochs"),
    Column("validation_loss", "loss", "validation loss"),
    Column("cpu_seconds", "number", "processor seconds"),
    Column("chosen", "flag", "chosen"),
    Column("at_edge", "text", "at the end of its grid"),
)
"""One row per trial of a tuning."""


def cell_columns() -> tuple[Column, ...]:
    """The columns of a cell: curvlab's own, then those that others have registered."""
    return (*CELLS, *extra_columns())


NAMES: dict[str, tuple[str, ...]] = {
    "error": ("study", "provider", "status", "message"),
    "solve": ("study", "provider", "solver", "status", "message"),
    "cost": ("study", "provider", "solver", "status", "message"),
    "convergence": ("study", "optimizer", "provider", "solver", "status", "message"),
    "scene": ("study", "point", "status", "message"),
    "control": ("study", "control", "point", "status", "message"),
    "tuning": ("study", "spec", "status", "message"),
}
OPTIONAL: dict[str, type] = {
    "point": str,
    "run": str,
    "control": str,
    "spec": str,
    "config": dict,
    "environment": dict,
    "resolved": dict,
    "warnings": list,
    "notes": list,
    "traces": dict,
    "layers": list,
    "blocks": list,
    "epochs": list,
    "dampings": list,
    "spectra": list,
}
"""What a row of its kind or of an earlier release may lack: its type where it is there."""
WHOLE = ("seed", "draw", "run_seed", "epochs_asked")
TRIAL = (Column("loss"), Column("cpu_seconds"))
SHARES = ("bias_share", "weight_share", "weight_probes")
PARTS: dict[str, tuple[Sequence[Column], str]] = {
    "layers": (ERRORS, "layer"),
    "blocks": (BLOCKS, ""),
    "epochs": (CONVERGENCE, "epoch"),
    "dampings": (DAMPINGS, ""),
    "spectra": (SPECTRA, ""),
}
"""The lists inside a row: the columns of their entries, and the one that every entry has."""
LARGEST = 10**300
WORDS: dict[type, str] = {str: "text", dict: "an object", list: "a list"}


def row_problem(row: Row) -> str:
    """Why a row cannot be used; empty where it can. Rows of other studies are not judged.

    >>> row_problem({"key": "a1", "kind": "cost", "study": "s", "provider": "fisher", "solver": ["kfi"]})
    '`solver` is a list, expected text'
    """
    kind = row.get("kind")
    if kind == "study":
        needed: dict[str, type] = {"config": dict, "environment": dict}
    elif isinstance(kind, str) and kind in NAMES:
        needed = dict.fromkeys(NAMES[kind], str)
    else:
        return ""
    held = {name: expected for name, expected in OPTIONAL.items() if name in row}
    for name, expected in (needed | held).items():
        if not isinstance(row.get(name), expected):
            return f"`{name}` is {_words(row.get(name))}, expected {WORDS[expected]}"
    whole = {name for name in WHOLE if name in row} | ({"repetition"} if kind == "cost" else set())
    for name in sorted(whole):
        if type(row.get(name)) is not int or not _is_number(row[name]):
            return f"`{name}` is {_words(row.get(name))}, expected an integer"
    return _wrong_number(row, _columns(row), _needed_columns(row)) or _wrong_part(row)


def _columns(row: Row) -> Sequence[Column]:
    """The columns whose numbers a row holds itself."""
    if row["kind"] == "error":
        return [Column(name) for name in SHARES]
    own = {"solve": cell_columns(), "control": cell_columns(), "scene": SCENES, "cost": REPETITIONS}
    return {**own, "convergence": CONVERGENCE, "tuning": TRIAL}.get(row["kind"], ())


def _needed_columns(row: Row) -> Collection[str]:
    """The numbers that a row must have. What other programs did is not known of rows of earlier releases."""
    if row["kind"] == "cost" and row["status"] == "ok":
        return [f"{phase}_seconds" for phase in PHASES]
    return SHARES if any(name in row for name in SHARES) else ()


def _wrong_part(row: Row) -> str:
    """What is wrong with the lists inside a row."""
    for name, (columns, needed) in PARTS.items():
        for part in row.get(name, ()):
            if not isinstance(part, dict):
                return f"`{name}` has {_words(part)}, expected objects"
            if needed and part.get(needed) is None:
                return f"`{name}` has an entry without its `{needed}`"
            if problem := _wrong_number(part, columns):
                return f"{problem} (in `{name}`)"
    if problem := _wrong_traces(row.get("traces", {})):
        return problem
    texts = [text for name in ("warnings", "notes") for text in row.get(name, ())]
    texts += row.get("resolved", {}).values()
    known = all(isinstance(text, str) for text in texts)
    return "" if known else "`warnings`, `notes` or `resolved` are not texts"


def _wrong_traces(traces: Row) -> str:
    """What is wrong with the residuals by block and iteration, which a row holds column by column."""
    columns = list(traces.values())
    if not all(isinstance(values, list) for values in columns) or len({len(one) for one in columns}) > 1:
        return "`traces` are not lists of one length"
    entries = (dict(zip(traces, values, strict=True)) for values in zip(*columns, strict=True))
    problems = (_wrong_number(entry, TRACES) for entry in entries)
    return next((f"{problem} (in `traces`)" for problem in problems if problem), "")


def _wrong_number(row: Row, columns: Sequence[Column], needed: Collection[str] = ()) -> str:
    """The first column of numbers that holds something else, or, where it is needed, nothing."""
    for column in columns:
        value = row.get(column.name)
        if value is None and column.name not in needed:
            continue
        if not _is_number(value) and not column.is_text:
            return f"`{column.name}` is {_words(value)}, expected a number"
    return ""


def _is_number(value: Any) -> bool:
    """Whether it is one that a column can hold: JSON knows integers of any length."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= LARGEST)


def _words(value: Any) -> str:
    if value is None:
        return "missing"
    kind = "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
    return _short(f"{value!r}") if isinstance(value, (str, int, float)) else kind


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
