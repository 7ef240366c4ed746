"""What commands print: tables on standard output, progress and messages on standard error.

Progress shows only on a terminal. Tables fit 80 columns: names fold, numbers do not.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

__all__ = ["bytes_text", "paragraph", "print_json", "progress_bar", "records", "say", "seconds_text", "table"]

Show = Callable[[float, float, str], None]


def say(text: str) -> None:
    """A message on standard error."""
    click.echo(text, err=True)


@contextmanager
def progress_bar(shown: bool, what: str) -> Iterator[Show]:
    """A bar with cells done and time left, on standard error, if that is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda done, total, label: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(done: float, total: float, label: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{label or what:<32.32}")

        yield show


def paragraph(text: str) -> None:
    """Print text wrapped at words."""
    Console(highlight=False).print(Text(text))


def table(columns: dict[str, str], rows: list[list[str]], *, title: str = "") -> None:
    """Print rows under headers; a column's value is how it is aligned, `left`, `right` or `fold`."""
    made = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False, padding=(0, 1))
    for header, style in columns.items():
        folds = style == "fold"
        made.add_column(header, justify="right" if style == "right" else "left",
                        overflow="fold" if folds else "ellipsis", no_wrap=not folds)  # fmt: skip
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(made)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as JSON has them: null for NaN."""
    rows = frame.to_dict("records")
    return [{str(key): _plain(value) for key, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False))


def bytes_text(count: float) -> str:
    """Bytes with three digits and a decimal unit.

    >>> bytes_text(919_360), bytes_text(90.6e9)
    ('919 kB', '90.6 GB')
    """
    if math.isnan(count):
        return "–"
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    power = min(max(int(math.log10(count) / 3), 0), len(units) - 1) if count >= 1 else 0
    value = count / 1000**power
    return (
        f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {units[power]}"
        if power
        else f"{value:.0f} B"
    )


def seconds_text(seconds: float, iqr: float) -> str:
    """A median with its interquartile range, in one unit.

    >>> seconds_text(0.0123, 0.0004)
    '12.3 ± 0.4 ms'
    """
    if math.isnan(seconds):
        return "–"
    factor, unit = next(
        (f, u) for f, u in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if seconds * f >= 1 or u == "µs"
    )
    value, spread = seconds * factor, iqr * factor
    places = max(0, 2 - int(math.log10(max(value, 1))))
    return f"{value:.{places}f} ± {spread:.{places}f} {unit}"
