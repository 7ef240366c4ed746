"""Warnings as a user of the command line reads them: one line on standard error, once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

__all__ = ["plain_warnings"]


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
