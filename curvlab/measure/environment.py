"""What a result depends on beside its configuration: versions, device, threads, git state.

Written to environment.json. It names no host, no user and no path.
"""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from curvlab.measure import device as devices

__all__ = ["environment"]

PACKAGES = ("curvlab", "torch", "numpy", "scipy", "pandas")


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, platform, processor, device, threads and git state, ready for JSON.

    >>> sorted(environment())
    ['device', 'device_name', 'git', 'platform', 'processor', 'python', 'threads', 'versions']
    """
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "device": torch.device(device).type,
        "device_name": devices.describe(device),
        "threads": torch.get_num_threads(),
        "git": _git_state(),
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


def _git_state() -> dict[str, Any] | None:
    """Commit of the working folder and whether it differs from it; None outside a repository."""
    commit, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return None if commit is None or status is None else {"commit": commit, "dirty": bool(status)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
