"""Frames as CSV files that a spreadsheet opens without running anything.

Texts come from rows of a store, which may be anybody's: names of layers, messages of errors, specs. A
spreadsheet takes a cell that begins with `=`, `+`, `-` or `@` for a formula, which can fetch addresses or
start programs; a tab or a line break in front is dropped before it looks. Such a text gets an apostrophe in
front, as OWASP's "CSV Injection" advises. Numbers are never changed, those written as text included. A
carriage return becomes a newline, which is quoted: bare it would begin a new row, and with it a new cell.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

__all__ = ["csv_text", "plain_cell"]

OPENINGS = tuple("=+-@\t\n＝＋－＠")  # the wide forms are those of East Asian keyboards


def csv_text(frame: pd.DataFrame, float_format: str | None = None) -> str:
    """The frame as CSV, without its index; see the module on cells that look like formulas.

    >>> print(csv_text(pd.DataFrame({"layer": ["=1+1", "-1", "0"], "error": [-1.5, 2.0, 0.0]})), end="")
    layer,error
    '=1+1,-1.5
    -1,2.0
    0,0.0
    """
    shown = frame.rename(columns=plain_cell)
    texts = [i for i, dtype in enumerate(frame.dtypes) if not pd.api.types.is_numeric_dtype(dtype)]
    for index in texts:
        shown.isetitem(index, [plain_cell(value) for value in frame.iloc[:, index]])
    text: str = shown.to_csv(index=False, float_format=float_format)
    return text


def plain_cell(value: Any) -> Any:
    """A text that no spreadsheet takes for a formula; anything but a text as it is.

    >>> plain_cell("@SUM(A1)"), plain_cell("-0.5"), plain_cell("pch-1"), plain_cell(-2)
    ("'@SUM(A1)", '-0.5', 'pch-1', -2)
    """
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(OPENINGS) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip() and text[0] in "+-"
