"""The folder of a comparison: results.jsonl, results.csv, config.toml, environment.json.

The store is the truth; the other files are written from it, each as a whole, and can be written again.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from curvlab.exceptions import ResultsFolderError
from curvlab.files import write_text_atomic
from curvlab.studies.comparison import Comparison, comparison_from
from curvlab.studies.settings import Settings
from curvlab.studies.setup import Setup
from curvlab.studies.spreadsheet import csv_text
from curvlab.studies.store import Store
from curvlab.studies.toml import read_settings, toml_text

__all__ = ["command_of", "load_comparison", "study_of", "write_frames", "write_settings"]

LISTS = {"providers": "-p", "solvers": "-s", "baselines": "--baseline"}
DEFAULTS = {f.name: f.default for c in (Setup, Settings) for f in fields(c)} | {"baselines": ["sgd", "adam"]}
COMMENT = "The resolved configuration; run it again with: curvlab compare --config config.toml -o FOLDER"
OF_PROBLEM = "A problem given from Python: this file says what was compared, and cannot run it again."


def write_settings(folder: Path, config: dict[str, Any], environment: dict[str, Any], study: str) -> None:
    """Write config.toml and environment.json."""
    comment = OF_PROBLEM if "problem" in config else COMMENT
    write_text_atomic(folder / "config.toml", toml_text(config, comment))
    write_text_atomic(
        folder / "environment.json", json.dumps({"study": study, **environment}, indent=2) + "\n"
    )


def write_frames(folder: Path, comparison: Comparison) -> None:
    """Write results.csv: the cells, one row a pair."""
    write_text_atomic(folder / "results.csv", csv_text(comparison.cells))


def load_comparison(folder: str | Path) -> Comparison:
    """The comparison that a folder holds, from its store."""
    folder = Path(folder)
    rows = Store(folder, read_only=True).rows()
    key = study_of(folder)
    study = next(row for row in rows if row.get("kind") == "study" and row["key"] == key)
    config = study["config"] | _config_of(folder, study["config"])
    return comparison_from(study, config, rows, command_of(config))


def study_of(folder: Path) -> str:
    """The key of the study that a folder shows: the one it ran last."""
    store = Store(folder, read_only=True)
    keys = [row["key"] for row in store.rows("study")]
    if not keys:
        raise ResultsFolderError(
            f"{store.path} holds no comparison; name a folder that `curvlab compare` has written"
        )
    try:
        shown = json.loads((folder / "environment.json").read_text(encoding="utf-8")).get("study")
    except (OSError, ValueError, AttributeError):
        shown = None
    return str(shown) if shown in keys else str(keys[-1])


def _config_of(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """The latest configuration: a second run may have asked for other providers in the same folder."""
    path = folder / "config.toml"
    return read_settings(path, like) if path.exists() else {}


def command_of(config: dict[str, Any]) -> str:
    """The shell command that compares the same again; what is as by default is left out.

    >>> command_of({"providers": ["pch-1"], "solvers": ["cg[tol=0.1]"], "alpha": 0.1, "lr": None})
    "curvlab compare -p pch-1 -s 'cg[tol=0.1]' --alpha 0.1"
    """
    if "problem" in config:
        return "curvlab.compare(problem, …) from Python"
    words = ["curvlab", "compare"]
    for name, value in config.items():
        if value == DEFAULTS.get(name):
            continue
        if isinstance(value, list):
            words += [word for item in value for word in (LISTS[name], item)]
        elif value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
