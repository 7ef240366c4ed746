"""What commands print: tables on standard output, progress, messages and warnings on standard error.

Progress shows only on a terminal. Tables fit 80 columns: prose folds at words, a long name goes on in the
next line after a bracket or a comma, numbers stay whole. A warning is one line, once. Ctrl-C in a command
whose folder keeps what was measured ends it, and says how to go on.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from curvlab.studies.schema import Column

__all__ = [
    "INTERRUPTED",
    "Show",
    "break_name",
    "kept_when_interrupted",
    "paragraph",
    "plain_warnings",
    "print_json",
    "progress_bar",
    "records",
    "say",
    "show_rows",
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
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(done: float, total: float, label: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{label or what:<32.32}")

        yield show


def paragraph(text: str) -> None:
    """Print text wrapped at words."""
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(text))


def table(columns: dict[str, str], rows: list[list[str]], *, title: str = "") -> None:
    """Print rows under headers; a column's value is `left`, `right`, `name` or `fold`.

    Names are as long as the terminal allows, and `broken` where it does not; where that is not enough,
    columns move together. `fold` is for prose.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False)
    for gap, width in itertools.product((1, 0), NAME_WIDTHS):
        made = _table(columns, rows, title, width, gap)
        needed = Measurement.get(console, console.options.update(width=1000), made).minimum
        if needed <= console.width:
            break
    # Where nothing helps, lines that are too long lose less than cells that are cut.
    console.print(made, width=max(console.width, needed), soft_wrap=needed > console.width)


def show_rows(
    columns: Sequence[Column], rows: Sequence[Mapping[Any, Any]], heads: Mapping[str, str] | None = None
) -> None:
    """Print the columns that have a short head; a row without a result has its status for its time.

    `heads` are those of this table where they differ from the columns' own.
    """
    shown = [column for column in columns if column.short]
    names = {column.name: (heads or {}).get(column.name, column.short) for column in shown}
    styles = {names[column.name]: "name" if column.is_text else "right" for column in shown}
    table(styles, [[_cell(column, row) for column in shown] for row in rows])


def _cell(column: Column, row: Mapping[Any, Any]) -> str:
    from curvlab.report.numbers import number_words, with_spread

    value = row.get(column.name)
    if column.is_text:
        return str(value)
    number = math.nan if value is None else float(value)
    if column.spread and column.kind == "seconds":
        failed = row.get("status", "ok") != "ok"
        return str(row["status"]) if failed else with_spread(number, float(row[column.spread]))
    return number_words(column.kind, number)


def _table(columns: dict[str, str], rows: list[list[str]], title: str, width: int, gap: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    made = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False, padding=(0, gap))
    shown = []
    for index, (header, style) in enumerate(columns.items()):
        cells = [break_name(row[index], width) if style == "name" else row[index] for row in rows]
        justify: Literal["left", "right"] = "right" if style == "right" else "left"
        whole = None if style == "fold" else max(cell_len(line) for line in _lines([header, *cells]))
        made.add_column(header, justify=justify, min_width=whole, no_wrap=whole is not None)
        shown.append(cells)
    for row in zip(*shown, strict=True):
        made.add_row(*map(Text, row))
    return made


def _lines(cells: list[str]) -> list[str]:
    return [line for cell in cells for line in cell.split("\n")]


def break_name(name: str, width: int) -> str:
    """A name in lines of at most `width`, where it can be broken: after a bracket, a comma or a width.

    >>> break_name("ea-cg[max_iter=20,tol=1e-10]", 20).split("\\n")
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


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each warning once, without the file and the line of source, which say nothing to a user."""
    said: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        text = " ".join(str(message).split())
        if text not in said:
            click.echo(f"Warning: {text}", err=True)
        said.add(text)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended."""


@contextmanager
def kept_when_interrupted(folder: Path, fresh: bool) -> Iterator[Callable[[], None]]:
    """End with the exit code of Ctrl-C, and say how to go on.

    Python drops an exception that is raised inside a finalizer, where a run that counts memory often is. The
    function given raises it again, and is to be called now and then.
    """
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    except KeyboardInterrupt:
        again = " without --fresh" if fresh else ""
        say(f"Interrupted; what was measured is in {folder}, and the same command{again} goes on from there.")
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, before)
