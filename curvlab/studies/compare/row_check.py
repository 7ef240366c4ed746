"""What a row of a comparison must be for its frames to be made: the fields it is known by, and their types.

A store is a file that anybody may have edited. A row that is not as curvlab writes them is set aside like a
torn line, with the reason, and its cell is measured again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from curvlab.studies.compare.columns import (
    BLOCKS,
    CONVERGENCE,
    DAMPINGS,
    ERRORS,
    PHASES,
    REPETITIONS,
    SCENES,
    SPECTRA,
    TRACES,
    cell_columns,
)
from curvlab.studies.schema import Column
from curvlab.studies.store import Row

__all__ = ["row_problem"]

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
    return _wrong_number(row, _columns(row), _needed(row)) or _wrong_part(row)


def _columns(row: Row) -> Sequence[Column]:
    """The columns whose numbers a row holds itself."""
    if row["kind"] == "error":
        return [Column(name) for name in SHARES]
    own = {"solve": cell_columns(), "control": cell_columns(), "scene": SCENES, "cost": REPETITIONS}
    return {**own, "convergence": CONVERGENCE, "tuning": TRIAL}.get(row["kind"], ())


def _needed(row: Row) -> Collection[str]:
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
    texts = (text for name in ("warnings", "notes") for text in row.get(name, ()))
    return "" if all(isinstance(text, str) for text in texts) else "`warnings` or `notes` are not texts"


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
