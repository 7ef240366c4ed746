"""Tables of the report: text for people beside the number it stands for, so that columns sort by value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from curvlab.report.numbers import MISSING, Unit, byte_unit, digits, percent, second_unit
from curvlab.studies.train.hyperparameters import RATES

__all__ = [
    "Entry",
    "Table",
    "cell_table",
    "convergence_table",
    "error_table",
    "left_out_table",
    "mapping_table",
]


@dataclass(frozen=True)
class Entry:
    """What is shown, and the number it is sorted by (None: by its text)."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """Column heads, whether each column is numeric, and the rows."""

    caption: str
    heads: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[Entry, ...], ...]
    sortable: bool = True


Column = tuple[str, bool, Callable[[pd.Series], Entry]]  # head, whether numeric, entry of a row


def cell_table(cells: pd.DataFrame) -> Table:
    """Every measured column of every pair, one unit a column.

    >>> frame = pd.DataFrame({"provider": ["pch-1"], "solver": ["kfi"], "status": ["ok"], "flops": [2e6]})
    >>> [entry.text for entry in cell_table(frame).rows[0]]
    ['pch-1', 'kfi', 'ok', '2.00']
    """
    time = second_unit(cells.get("total_seconds", []))
    memory = byte_unit(cells.get("peak_bytes", []))
    columns = [
        ("provider", _text("provider", "provider")),
        ("solver", _text("solver", "solver")),
        ("status", _text("status", "status")),
        *(
            (f"{phase}_seconds", _spread(f"{phase} ({time.name})", f"{phase}_seconds", f"{phase}_iqr", time))
            for phase in ("total", "estimate", "prepare", "apply")
        ),
        ("peak_bytes", _number(f"peak ({memory.name})", "peak_bytes", memory)),
        ("planned_bytes", _number(f"planned ({memory.name})", "planned_bytes", memory)),
        ("held_bytes", _number(f"held ({memory.name})", "held_bytes", memory)),
        ("flops", _number("Mflop", "flops", lambda value: digits(value / 1e6))),
        ("error_total", _number("error (bias blocks, from |H|)", "error_total")),
        ("error_relative", _number("relative error (bias blocks, from |H|)", "error_relative", percent)),
        ("distance", _number("distance to the Newton step", "distance", percent)),
        ("cosine", _number("cosine to the Newton step", "cosine")),
        ("iterations", _number("iterations", "iterations", lambda value: f"{value:.0f}")),
        ("residual", _number("residual", "residual")),
        ("residual_full", _number("residual, full input factor", "residual_full")),
        ("route", _text("route", "route")),
    ]
    return _table("All pairs", cells, [column for name, column in columns if name in cells])


def error_table(errors: pd.DataFrame) -> Table:
    """The numbers behind the heat map: of bias blocks, from the absolute Hessian."""
    columns = [
        _text("layer", "layer"),
        _text("name", "layer_name"),
        _text("provider", "provider"),
        _number("error ‖B̃ − |B|‖", "error"),
        _number("relative to ‖|B|‖", "relative", percent),
    ]
    return _table("Errors by layer: bias blocks, from the absolute Hessian |H|", errors, columns)


def convergence_table(convergence: pd.DataFrame) -> Table:
    """Where each optimizer ended, with the settings it ran with where the frame has them."""
    ends = convergence.sort_values("epoch", kind="stable").groupby("optimizer", sort=False).tail(1)
    columns = [
        _text("optimizer", "optimizer"),
        *(_number(words, name, lambda value: f"{value:g}") for name, words in RATES.items() if name in ends),
        _text("status", "status"),
        _number("epochs", "epoch", lambda value: f"{value:g}"),
        _number("seconds", "seconds"),
        _number("training loss", "train_loss"),
        _number("test loss", "test_loss"),
        _number("test accuracy", "test_accuracy", percent),
    ]
    return _table("Where training ended", ends, columns)


def left_out_table(cells: pd.DataFrame) -> Table:
    """The pairs that failed or do not exist, with the reason."""
    columns = [_text(name, name) for name in ("provider", "solver", "status")]
    out = cells[cells["status"] != "ok"]
    return _table("Pairs without a result", out, [*columns, _text("reason", "message")])


def mapping_table(caption: str, values: Mapping[str, Any]) -> Table:
    """A mapping, nested or not, as two columns.

    >>> [[entry.text for entry in row] for row in mapping_table("", {"a": {"b": 1}, "c": ["x", "y"]}).rows]
    [['a.b', '1'], ['c', 'x, y']]
    """
    rows = tuple((Entry(key), Entry(_plain(value))) for key, value in _flat(values) if value is not None)
    return Table(caption, ("what", "value"), (False, False), rows, sortable=False)


def _table(caption: str, frame: pd.DataFrame, columns: list[Column]) -> Table:
    rows = tuple(tuple(entry(row) for _, _, entry in columns) for _, row in frame.iterrows())
    return Table(caption, tuple(c[0] for c in columns), tuple(c[1] for c in columns), rows)


def _text(head: str, column: str) -> Column:
    def entry(row: pd.Series) -> Entry:
        value = row[column]
        # Layers are numbers and then "Total": numbers sort as such, text behind them.
        number = float(value) if isinstance(value, int) and not isinstance(value, bool) else None
        return Entry(str(value) if pd.notna(value) and str(value) else MISSING, number)

    return head, False, entry


def _number(head: str, column: str, show: Callable[[float], str] = digits) -> Column:
    def entry(row: pd.Series) -> Entry:
        value = _float(row[column])
        return Entry(MISSING if math.isnan(value) else show(value), value)

    return head, True, entry


def _spread(head: str, column: str, spread: str, unit: Unit) -> Column:
    """A median with its interquartile range behind it."""

    def entry(row: pd.Series) -> Entry:
        value, width = _float(row[column]), _float(row.get(spread, math.nan))
        if math.isnan(value):
            return Entry(MISSING, value)
        shown = "" if math.isnan(width) else f" ({digits(width / unit.size, 2)})"
        return Entry(unit(value) + shown, value)

    return head, True, entry


def _float(value: Any) -> float:
    return float(value) if pd.notna(value) else math.nan


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return found


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
