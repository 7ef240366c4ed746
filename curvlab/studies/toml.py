"""TOML files: configurations as they are written and read again."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from curvlab.exceptions import SpecError, unknown_name

__all__ = ["read_settings", "read_toml", "toml_text"]


def toml_text(fields: Mapping[str, Any], comment: str = "") -> str:
    """The text of a table under `comment`; fields that are None, which TOML does not have, are left out.

    >>> print(toml_text({"alpha": 0.05, "lr": None, "setup": {"data": "digits"}}, "What was run."), end="")
    # What was run.
    alpha = 0.05
    <BLANKLINE>
    [setup]
    data = "digits"
    """
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + tomli_w.dumps(_without_none(fields))


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in fields.items()
        if value is not None
    }


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table of a file."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not a TOML file: {error}") from error


def read_settings(path: str | Path, known: Collection[str]) -> dict[str, Any]:
    """The fields of a flat table; a key that is not among `known` is an error with the nearest match."""
    fields = read_toml(path)
    for key, value in fields.items():
        if key not in known:
            raise SpecError(f"{path}: {unknown_name('setting', key, known)}")
        if isinstance(value, dict):
            raise SpecError(f"{path}: `{key}` is a table; write `{key} = …` with a plain value")
    return fields
