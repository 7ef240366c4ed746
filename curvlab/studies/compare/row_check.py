"""What a row of a comparison must be for its frames to be made: the fields it is known by, and their types.

A store is a file that anybody may have edited. A row that is not as curvlab writes them is set aside like a
torn line, with the reason, and its cell is measured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from curvlab.studies.compare.columns import BLOCKS, CONVERGENCE, ERRORS, REPETITIONS, cell_columns
from curvlab.studies.schema import Column
from curvlab.studies.store import Row

__all__ = ["row_problem"]

NAMES: dict[str, tuple[str, ...]] = {
    "error": ("study", "provider", "status", "message"),
    "solve": ("study", "provider", "solver", "status", "message"),
    "cost": ("study", "provider", "solver", "status", "message"),
    "convergence": ("study", "optimizer", "provider", "solver", "status", "message"),
}
CONTAINERS: dict[str, type] = {
    "config": dict,
    "environment": dict,
    "warnings": list,
    "notes": list,
    "traces": dict,
    "layers": list,
    "blocks": list,
    "epochs": list,
}
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
    held = {name: expected for name, expected in CONTAINERS.items() if name in row}
    for name, expected in (needed | held).items():
        if not isinstance(row.get(name), expected):
            return f"`{name}` is {_words(row.get(name))}, expected {WORDS[expected]}"
    if kind == "cost" and type(row.get("repetition")) is not int:
        return f"`repetition` is {_words(row.get('repetition'))}, expected an integer"
    if kind == "cost":
        return _wrong_number(row, REPETITIONS, needed=row["status"] == "ok")
    return _wrong_number(row, cell_columns() if kind == "solve" else ()) or _wrong_part(row)


def _wrong_part(row: Row) -> str:
    """What is wrong with the lists inside a row."""
    for name, columns in (("layers", ERRORS), ("blocks", BLOCKS), ("epochs", CONVERGENCE)):
        for part in row.get(name, ()):
            if not isinstance(part, dict):
                return f"`{name}` has {_words(part)}, expected objects"
            if name == "layers" and "layer" not in part:
                return "`layers` has an entry without its `layer`"
            if problem := _wrong_number(part, columns):
                return f"{problem} (in `{name}`)"
    traces = row.get("traces", {}).values()
    if not all(isinstance(values, list) for values in traces) or len({len(values) for values in traces}) > 1:
        return "`traces` are not lists of one length"
    texts = (text for name in ("warnings", "notes") for text in row.get(name, ()))
    return "" if all(isinstance(text, str) for text in texts) else "`warnings` or `notes` are not texts"


def _wrong_number(row: Row, columns: Sequence[Column], needed: bool = False) -> str:
    """The first column of numbers that holds something else, or, where it is needed, nothing."""
    for column in columns:
        value = row.get(column.name)
        missing = value is None and not needed
        if not column.is_text and not missing and not isinstance(value, (int, float)):
            return f"`{column.name}` is {_words(value)}, expected a number"
    return ""


def _words(value: Any) -> str:
    if value is None:
        return "missing"
    kind = "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
    return f"{value!r}" if isinstance(value, (str, int, float)) else kind
