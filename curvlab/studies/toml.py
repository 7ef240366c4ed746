"""Flat TOML files: configurations as they are written and read again."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from curvlab import specs
from curvlab.exceptions import SpecError

__all__ = ["read_toml", "write_toml"]


def write_toml(fields: Mapping[str, Any], comment: str = "") -> str:
    """The text of a flat table; fields that are None are left out.

    >>> print(write_toml({"alpha": 0.05, "solvers": ["cg"], "lr": None}))
    alpha = 0.05
    solvers = ["cg"]
    """
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"{key} = {_value(value)}" for key, value in fields.items() if value is not None]
    return "\n".join(lines)


def _value(value: Any) -> str:
    """JSON's numbers, booleans, strings and lists are TOML's, but for a character that must be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def read_toml(path: str | Path, known: Collection[str]) -> dict[str, Any]:
    """The fields of a flat table; a key that is not among `known` is an error with the nearest match."""
    try:
        with Path(path).open("rb") as file:
            fields = tomllib.load(file)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not a TOML file: {error}") from error
    for key, value in fields.items():
        if key not in known:
            raise SpecError(f"{path}: {specs.unknown('setting', key, known)}")
        if isinstance(value, dict):
            raise SpecError(f"{path}: `{key}` is a table; write `{key} = …` with a plain value")
    return fields
