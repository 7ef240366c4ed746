"""The folder of a comparison: results.jsonl, results.csv, config.toml, environment.json.

The store is the truth; the other files are written from it, each as a whole, and can be written again.
Several folders join into one (`merge_comparisons`), which then reports as one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from curvlab.exceptions import ResultsFolderError
from curvlab.files import write_text_atomic
from curvlab.studies.compare.columns import row_problem
from curvlab.studies.compare.frames import Comparison, comparison_from
from curvlab.studies.compare.settings import all_settings
from curvlab.studies.run_lock import run_lock
from curvlab.studies.schema import Setting, read_values
from curvlab.studies.spreadsheet import csv_text
from curvlab.studies.store import Merged, Store, merge
from curvlab.studies.toml import read_settings, toml_text

__all__ = [
    "MergedComparisons",
    "command_of",
    "load_comparison",
    "merge_comparisons",
    "study_of",
    "write_frames",
    "write_settings",
]

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
    """Write results.csv: the cells, one row per pair."""
    write_text_atomic(folder / "results.csv", csv_text(comparison.cells))


def load_comparison(folder: str | Path) -> Comparison:
    """The comparison that a folder holds, from its store."""
    folder = Path(folder)
    rows = Store(folder, read_only=True, check=row_problem).rows()
    key = study_of(folder)
    study = next(row for row in rows if row.get("kind") == "study" and row["key"] == key)
    config = study["config"] | _config_of(folder, study["config"])
    return comparison_from(study, config, rows, command_of(config))


def study_of(folder: Path) -> str:
    """The key of the study that a folder shows: the one it ran last."""
    store = Store(folder, read_only=True, check=row_problem)
    keys = [row["key"] for row in store.rows("study")]
    if not keys:
        raise ResultsFolderError(
            f"{store.path} holds no comparison; name a folder that `curvlab compare` has written"
        )
    try:
        shown = json.loads((folder / "environment.json").read_text(encoding="utf-8")).get("study")
    except (OSError, ValueError, AttributeError, RecursionError):
        shown = None
    return str(shown) if shown in keys else str(keys[-1])


def _config_of(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """The latest configuration: a second run may have asked for other providers in the same folder."""
    path = folder / "config.toml"
    if not path.exists():
        return {}
    found = read_settings(path, like)
    known = [one for one in all_settings() if one.name in found]
    read_values({one.name: found[one.name] for one in known}, known, str(path))
    return found


def command_of(config: dict[str, Any]) -> str:
    """The shell command that compares the same again; what is as by default is left out.

    >>> command_of({"providers": ["pch-1"], "solvers": ["cg[tol=0.1]"], "alpha": 0.1, "lr": None})
    "curvlab compare -p pch-1 -s 'cg[tol=0.1]' --alpha 0.1"
    """
    if "problem" in config:
        return "curvlab.compare(problem, …) from Python"
    known = {one.name: one for one in all_settings()}
    words = ["curvlab", "compare"]
    for name, value in config.items():
        # A folder may have been written with a setting that is not registered here.
        one = known.get(name) or Setting(name, str, None, "", many=isinstance(value, list))
        words += one.words(value)
    return shlex.join(words)


@dataclass(frozen=True)
class MergedComparisons:
    """What a merge did, the folder whose comparison shows in the new one, and the rows that do not show.

    `shown` is None where no folder holds a comparison. `others` counts, by folder, rows of another problem
    or environment than the one shown; `apart` rows of folders that hold no comparison, training runs say.
    """

    merged: Merged
    shown: Path | None
    others: dict[Path, int]
    apart: dict[Path, int]


def merge_comparisons(folders: Sequence[str | Path], into: str | Path) -> MergedComparisons:
    """Join the stores; the new folder shows the first comparison with the choices of all that share it.

    Rows that belong to other studies are kept in the store, and a comparison of their configuration in that
    folder finds them.
    """
    with run_lock(into, "merge") as target:
        return _merge(folders, target)


def _merge(folders: Sequence[str | Path], into: Path) -> MergedComparisons:
    paths = [Path(folder) for folder in folders]
    held = {path: Store(path, read_only=True, check=row_problem).rows() for path in paths}
    for path, rows in held.items():
        if not rows and (path / "results.jsonl").is_file():
            raise ResultsFolderError(
                f"{path}/results.jsonl has no row that curvlab has written: it is of another program, or "
                f"damaged. Leave the folder out"
            )
    done = merge(paths, into)
    done = replace(done, conflicts=[c for c in done.conflicts if not _differs_anyway(c.kept)])
    compared = [path for path, rows in held.items() if any(row.get("kind") == "study" for row in rows)]
    apart = {path: len(rows) for path, rows in held.items() if path not in compared}
    if not compared:
        return MergedComparisons(done, None, {}, apart)
    first = _show(compared, into)
    counts = {path: sum(row.get("study") != first for row in held[path]) for path in compared}
    return MergedComparisons(done, compared[0], {path: n for path, n in counts.items() if n}, apart)


def _differs_anyway(row: Mapping[str, Any]) -> bool:
    """Whether every folder has a row of its own: when a study began, and the seconds of a control.

    Every comparison times the controls, so that two of them would be in conflict whatever they compare.
    """
    return row.get("kind") == "study" or (row.get("kind") == "cost" and not row.get("solver"))


def _show(compared: Sequence[Path], into: Path) -> str:
    """Write what the new folder shows, the first folder's study; its key."""
    studies = {row["key"]: row for row in Store(into, check=row_problem).rows("study")}
    first = _study(compared[0], studies)
    configs = [load_comparison(folder).config for folder in compared if _study(folder, studies) is first]
    write_settings(into, _union(configs), first["environment"], first["key"])
    write_frames(into, load_comparison(into))
    return str(first["key"])


def _study(folder: str | Path, studies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The study that a folder shows."""
    return studies[study_of(Path(folder))]


def _union(configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    joined = dict(configs[0])
    known = {name for config in configs for name in config}  # an earlier release had fewer settings
    for name in (one.name for one in all_settings() if one.many and one.name in known):
        joined[name] = list(dict.fromkeys(item for config in configs for item in config.get(name, ())))
    joined["repetitions"] = max(config["repetitions"] for config in configs)
    return joined
