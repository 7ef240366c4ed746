"""What a result depends on beside its configuration: versions, source, device, threads, commits.

Written to environment.json. It names no host, no user and no path.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from curvlab.measure import device as devices
from curvlab.measure.source import commit_of, source_commit, source_hash
from curvlab.version import __version__

__all__ = ["environment"]

PACKAGES = ("torch", "numpy", "scipy", "pandas")


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, source, platform, processor, device, threads and commits, ready for JSON.

    `source` is the hash of curvlab's own source and `source_commit` the commit of its source tree; `git` is
    about the working folder. Older files have `git.dirty` too, which cannot be known without running git.

    >>> sorted(environment())
    ['device', 'device_name', 'git', 'platform', 'processor', 'python', 'source', 'source_commit', 'threads',
     'versions']
    """
    return {
        "python": platform.python_version(),
        "versions": {"curvlab": __version__, **{name: _version(name) for name in PACKAGES}},
        "source": source_hash(),
        "source_commit": source_commit(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "device": torch.device(device).type,
        "device_name": devices.describe(device),
        "threads": torch.get_num_threads(),
        "git": _working_folder(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's product name; Linux tells it in /proc only."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _working_folder() -> dict[str, str] | None:
    """The commit of the working folder; None outside a repository."""
    try:
        commit = commit_of(Path.cwd())
    except OSError:  # the folder was removed
        return None
    return None if commit is None else {"commit": commit}
