"""Where data files are: the folder the user names, or the cache.

The user's folder is the argument `data_dir` (`--data-dir`), else the environment variable
CURVLAB_DATA. The cache is $XDG_CACHE_HOME/curvlab, or ~/.cache/curvlab.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from curvlab.exceptions import DataError, DataFolderError

__all__ = ["cache_folder", "locked", "user_folder"]


def user_folder(data_dir: Path | None) -> Path | None:
    """The folder the user named, or `None`; one that is not there is an error."""
    named = os.environ.get("CURVLAB_DATA")
    folder = data_dir if data_dir is not None else Path(named).expanduser() if named else None
    if folder is not None and not folder.is_dir():
        origin = "--data-dir" if data_dir is not None else "CURVLAB_DATA"
        raise DataFolderError(f"{folder}: no such folder; {origin} names an existing folder with the data")
    return folder


def cache_folder() -> Path:
    """The folder that downloads are kept in (not created here)."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "curvlab"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` (created if need be) against other processes that would fill it: they wait."""
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written ({error}); set XDG_CACHE_HOME to a folder that can, "
            "or name one with the data by --data-dir"
        ) from error
    try:
        yield
    finally:
        lock.release()
