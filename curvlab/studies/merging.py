"""Joining comparisons: the stores of several folders into one folder that reports as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from curvlab.studies.folder import load_comparison, study_of, write_frames, write_settings
from curvlab.studies.run_lock import run_lock
from curvlab.studies.store import Merged, Store, merge

__all__ = ["MergedComparisons", "merge_comparisons"]

LISTS = ("providers", "solvers", "baselines")


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
    done = merge(paths, into)
    # What a study is, is the same in both; when and with which commit it began need not be.
    done = replace(done, conflicts=[c for c in done.conflicts if c.kept.get("kind") != "study"])
    held = {path: Store(path, read_only=True).rows() for path in paths}
    compared = [path for path, rows in held.items() if any(row.get("kind") == "study" for row in rows)]
    apart = {path: len(rows) for path, rows in held.items() if path not in compared}
    if not compared:
        return MergedComparisons(done, None, {}, apart)
    first = _show(compared, into)
    counts = {path: sum(row.get("study") != first for row in held[path]) for path in compared}
    return MergedComparisons(done, compared[0], {path: n for path, n in counts.items() if n}, apart)


def _show(compared: Sequence[Path], into: Path) -> str:
    """Write what the new folder shows, the first folder's study; its key."""
    studies = {row["key"]: row for row in Store(into).rows("study")}
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
    for name in LISTS:
        joined[name] = list(dict.fromkeys(item for config in configs for item in config[name]))
    joined["repetitions"] = max(config["repetitions"] for config in configs)
    return joined
