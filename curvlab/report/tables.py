"""Tables of the report: text for people beside the number it stands for, so that columns sort by value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from curvlab.report.numbers import MISSING, Unit, column_unit, digits, number_words, percent
from curvlab.report.training import race_ends
from curvlab.studies.compare.columns import (
    CONVERGENCE,
    ERRORS,
    LEFT_OUT,
    POINTS,
    RACE,
    SCENES,
    SPECTRA,
    TUNING,
    cell_columns,
)
from curvlab.studies.schema import Column

if TYPE_CHECKING:
    from curvlab.report.controls import Against

__all__ = [
    "Entry",
    "Table",
    "cell_table",
    "convergence_table",
    "error_table",
    "frame_table",
    "left_out_table",
    "mapping_table",
    "point_table",
    "scene_table",
    "share_table",
    "spectrum_table",
    "table_of",
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


def cell_table(cells: pd.DataFrame, coverage: Mapping[str, float] | None = None) -> Table:
    """Every measured column of every pair, one unit per column.

    `coverage` has the shares of the parameters that errors speak for, which stand in their heads.

    >>> frame = pd.DataFrame({"provider": ["pch-1"], "solver": ["kfi"], "status": ["ok"], "flops": [2e6]})
    >>> [entry.text for entry in cell_table(frame).rows[0]]
    ['pch-1', 'kfi', 'ok', '2.00']
    """
    return table_of("All pairs", cells, _covering(cell_columns(), coverage or {}))


def _covering(columns: Sequence[Column], coverage: Mapping[str, float]) -> list[Column]:
    """The columns, those of errors with the share of the parameters that they speak for."""
    return [
        replace(one, covers=", ".join(filter(None, (one.covers, _share_words(coverage[share])))))
        if (share := SHARES.get(one.name, "")) in coverage
        else one
        for one in columns
    ]


def _share_words(share: float) -> str:
    return f"{percent(share)} of the parameters"


SHARES = {
    "error_total": "bias_share",
    "error_relative": "bias_share",
    "error": "bias_share",
    "relative": "bias_share",
    "weight_relative": "weight_share",
    "weight_error": "weight_share",
}
"""What share of the parameters each error speaks for, all layers together."""


def error_table(errors: pd.DataFrame, coverage: Mapping[str, float] | None = None) -> Table:
    """The numbers behind the heat map: of bias blocks from the absolute Hessian, of weight blocks from H."""
    caption = "Errors by layer: bias blocks from |H|, weight blocks from H, signed"
    return table_of(caption, errors, _covering(ERRORS, coverage or {}))


def point_table(points: pd.DataFrame, coverage: Mapping[str, float] | None = None) -> Table:
    """Every pair and control at every point."""
    return table_of("At every point", points, _covering(POINTS, coverage or {}))


def share_table(against: Mapping[tuple[str, str], Against]) -> Table:
    """In how many draws each pair is better than the gradient step, and in how many the best of all."""
    columns = (
        Column("provider", "text", "provider"),
        Column("solver", "text", "solver"),
        Column("draws", "count", "draws"),
        Column("angle", "percent", "closer to Newton than the gradient"),
        Column("loss", "percent", "lower loss than the gradient"),
        Column("other", "percent", "on another batch"),
        Column("first_angle", "percent", "closest of all pairs"),
        Column("first_loss", "percent", "lowest loss of all pairs"),
    )
    rows = [
        {"provider": provider, "solver": solver, "draws": one.draws}
        | {name: getattr(one, name).share for name in ("angle", "loss", "other")}
        | {f"first_{name}": getattr(one, name).first for name in ("angle", "loss")}
        for (provider, solver), one in against.items()
    ]
    caption = "In how many of the draws it holds (a draw is a seed and a batch)"
    frame = pd.DataFrame(rows, columns=[column.name for column in columns])
    known = [column for column in columns if column.is_text or frame[column.name].notna().any()]
    return table_of(caption, frame, known)


def spectrum_table(spectra: pd.DataFrame) -> Table:
    """The largest and the median eigenvalue of each layer, by provider."""
    return table_of("Eigenvalues of the curvature by layer", spectra, SPECTRA)


def scene_table(scenes: pd.DataFrame) -> Table:
    """Where was measured: points, seeds, batches."""
    return table_of("Points, seeds and batches", scenes, SCENES)


def convergence_table(convergence: pd.DataFrame) -> Table:
    """Where each optimizer ended, with the settings it ran with where the frame has them."""
    ends = race_ends(convergence)
    return table_of("Where training ended", ends, RACE if "seeds" in ends else CONVERGENCE)


def tuning_table(tuning: pd.DataFrame) -> Table:
    """Every trial: the grid of each optimizer, what came of it on the validation set, and what was chosen."""
    return table_of("The tuning: every value that was tried", tuning, TUNING)


def left_out_table(cells: pd.DataFrame) -> Table:
    """The pairs that failed or do not exist, with the reason."""
    return table_of("Pairs without a result", cells[cells["status"] != "ok"], LEFT_OUT)


def table_of(caption: str, frame: pd.DataFrame, columns: Sequence[Column]) -> Table:
    """The columns of a frame that have a heading, each with its unit.

    >>> table_of("", pd.DataFrame({"seconds": [0.002, 0.01]}), [Column("seconds", "seconds", "time")]).heads
    ('time (ms)',)
    """
    shown = [column for column in columns if column.heading and column.name in frame]
    units = [_unit_in(frame, column) for column in shown]
    entries = [_entries(frame, column, unit) for column, unit in zip(shown, units, strict=True)]
    heads = tuple(
        column.head("" if unit is None else unit.name) for column, unit in zip(shown, units, strict=True)
    )
    return Table(
        caption, heads, tuple(not column.is_text for column in shown), tuple(zip(*entries, strict=True))
    )


def _unit_in(frame: pd.DataFrame, column: Column) -> Unit | None:
    if column.is_text:
        return None
    deciding = column.unit_of if column.unit_of in frame else column.name
    return column_unit(column.kind, frame[deciding].map(_float))


def _entries(frame: pd.DataFrame, column: Column, unit: Unit | None) -> list[Entry]:
    values = frame[column.name]
    if column.is_text:
        return [_text(value) for value in values]
    spreads = frame[column.spread] if column.spread in frame else [math.nan] * len(frame)
    return [
        _number(column, _float(value), _float(spread), unit)
        for value, spread in zip(values, spreads, strict=True)
    ]


def _text(value: Any) -> Entry:
    # Layers are numbers and then "Total": numbers sort as such, text behind them.
    number = float(value) if isinstance(value, int) and not isinstance(value, bool) else None
    return Entry(str(value) if pd.notna(value) and str(value) else MISSING, number)


def _number(column: Column, value: float, spread: float, unit: Unit | None) -> Entry:
    """The number, in the column's unit, with its interquartile range behind it in brackets."""
    if math.isnan(value):
        return Entry(MISSING, value)
    if unit is None:
        around = "" if math.isnan(spread) else f" ({number_words(column.kind, spread).removesuffix(' %')})"
        return Entry(number_words(column.kind, value) + around, value)
    behind = "" if math.isnan(spread) else f" ({digits(spread / unit.size, 2)})"
    return Entry(unit(value) + behind, value)


def frame_table(caption: str, frame: pd.DataFrame) -> Table:
    """A frame as it is: numbers to five digits, whole ones whole, names of columns in words.

    >>> [row[0].text for row in frame_table("Ends", pd.DataFrame({"largest_value": [0.5, 2778.0]})).rows]
    ['0.50000', '2,778']
    """
    numeric = tuple(pd.api.types.is_numeric_dtype(frame[name]) for name in frame)
    rows = tuple(
        tuple(_plain_entry(value) for value in row) for row in frame.itertuples(index=False, name=None)
    )
    return Table(caption, tuple(str(name).replace("_", " ") for name in frame), numeric, rows)


def _plain_entry(value: object) -> Entry:
    if isinstance(value, int | float):
        whole = float(value).is_integer() and abs(value) < 1e15
        return Entry(f"{int(value):,}" if whole else digits(value, 5), float(value))
    return Entry(str(value))


def mapping_table(caption: str, values: Mapping[str, Any]) -> Table:
    """A mapping, nested or not, as two columns.

    >>> [[entry.text for entry in row] for row in mapping_table("", {"a": {"b": 1}, "c": ["x", "y"]}).rows]
    [['a.b', '1'], ['c', 'x, y']]
    """
    rows = tuple((Entry(key), Entry(_plain(value))) for key, value in _flat(values) if value is not None)
    return Table(caption, ("what", "value"), (False, False), rows, sortable=False)


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
