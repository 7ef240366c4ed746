"""Rows of a frame by attribute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

__all__ = ["rows_of"]


def rows_of(frame: pd.DataFrame) -> Iterator[Any]:
    """Each row as a named tuple; its fields are whatever the columns hold, which no type can say.

    >>> [row.name for row in rows_of(pd.DataFrame({"name": ["a", "b"]}))]
    ['a', 'b']
    """
    return frame.itertuples(index=False)
