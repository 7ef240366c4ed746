"""Joining comparisons: the stores of several folders into one folder that reports as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from curvlab.studies.folder import load_comparison, study_of, write_frames, write_settings
from curvlab.studies.store import Merged, Store, merge

__all__ = ["merge_comparisons"]

LISTS = ("providers", "solvers", "baselines")


def merge_comparisons(folders: Sequence[str | Path], into: str | Path) -> tuple[Merged, int]:
    """Join the stores; the new folder shows the first one's study with the choices of all that share it.

    Returns what the merge did, and how many rows belong to other studies: they are kept in the store, and
    a comparison of their configuration in that folder finds them.
    """
    into = Path(into)
    done = merge(folders, into)
    # What a study is, is the same in both; when and with which commit it began need not be.
    done = replace(done, conflicts=[c for c in done.conflicts if c.kept.get("kind") != "study"])
    rows = Store(into).rows()
    studies = {row["key"]: row for row in rows if row.get("kind") == "study"}
    if not studies:
        return done, 0
    compared = [folder for folder in folders if Store(folder, read_only=True).rows("study")]
    first = _study(compared[0], studies)
    configs = [load_comparison(folder).config for folder in compared if _study(folder, studies) is first]
    write_settings(into, _union(configs), first["environment"], first["key"])
    write_frames(into, load_comparison(into))
    return done, sum(row.get("study") != first["key"] for row in rows)


def _study(folder: str | Path, studies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The study that a folder shows."""
    return studies[study_of(Path(folder))]


def _union(configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    joined = dict(configs[0])
    for name in LISTS:
        joined[name] = list(dict.fromkeys(item for config in configs for item in config[name]))
    joined["repetitions"] = max(config["repetitions"] for config in configs)
    return joined
