"""What commands print: tables on standard output, progress and messages on standard error.

Progress shows only on a terminal. Tables fit 80 columns: prose folds at words, a long name goes on in the
next line after a bracket or a comma, numbers stay whole.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import click
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

__all__ = [
    "broken",
    "bytes_text",
    "loss_text",
    "paragraph",
    "percent_text",
    "print_json",
    "progress_bar",
    "records",
    "say",
    "seconds_text",
    "table",
]

Show = Callable[[float, float, str], None]
BREAKS = re.compile(r"(?<=[\[, ])|(?<=\d-)(?=\d)")
NAME_WIDTHS = (80, 40, 32, 28, 24, 20, 16, 12)


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
    """Print rows under headers; a column's value is `left`, `right`, `name` or `fold`.

    Names are as long as the terminal allows, and `broken` where it does not; `fold` is for prose.
    """
    console = Console(highlight=False)
    for width in NAME_WIDTHS:
        made = _table(columns, rows, title, width)
        needed = Measurement.get(console, console.options.update(width=1000), made).minimum
        if needed <= console.width:
            break
    # Where nothing helps, lines that are too long lose less than cells that are cut.
    console.print(made, width=max(console.width, needed), soft_wrap=needed > console.width)


def _table(columns: dict[str, str], rows: list[list[str]], title: str, width: int) -> Table:
    made = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False, padding=(0, 1))
    shown = []
    for index, (header, style) in enumerate(columns.items()):
        cells = [broken(row[index], width) if style == "name" else row[index] for row in rows]
        justify: Literal["left", "right"] = "right" if style == "right" else "left"
        whole = None if style == "fold" else max(cell_len(line) for line in _lines([header, *cells]))
        made.add_column(header, justify=justify, min_width=whole, no_wrap=whole is not None)
        shown.append(cells)
    for row in zip(*shown, strict=True):
        made.add_row(*map(Text, row))
    return made


def _lines(cells: list[str]) -> list[str]:
    return [line for cell in cells for line in cell.split("\n")]


def broken(name: str, width: int) -> str:
    """A name in lines of at most `width`, where it can be broken: after a bracket, a comma or a width.

    >>> broken("ea-cg[max_iter=20,tol=1e-10]", 20).split("\\n")
    ['ea-cg[max_iter=20,', 'tol=1e-10]']
    """
    lines = [""]
    for piece in BREAKS.split(name):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


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
    """A median with its interquartile range, where that is known, in one unit.

    >>> seconds_text(0.0123, 0.0004)
    '12.3 ± 0.4 ms'
    >>> seconds_text(0.0123, math.nan)
    '12.3 ms'
    """
    if math.isnan(seconds):
        return "–"
    factor, unit = next(
        (f, u) for f, u in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if seconds * f >= 1 or u == "µs"
    )
    value = seconds * factor
    places = max(0, 2 - int(math.log10(max(value, 1))))
    spread = "" if math.isnan(iqr) else f" ± {iqr * factor:.{places}f}"
    return f"{value:.{places}f}{spread} {unit}"


def loss_text(value: float) -> str:
    """A loss with four places, or with three digits and an exponent where these would hide it.

    >>> loss_text(0.64881), loss_text(0.0000123), loss_text(1.5e9)
    ('0.6488', '1.23e-05', '1.50e+09')
    """
    if math.isnan(value):
        return "–"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 or math.isinf(value) else f"{value:.2e}"


def percent_text(share: float, places: int = 1) -> str:
    """A share in percent.

    >>> percent_text(0.872), percent_text(0.0259, places=2)
    ('87.2%', '2.59%')
    """
    return "–" if math.isnan(share) else f"{share:.{places}%}"
