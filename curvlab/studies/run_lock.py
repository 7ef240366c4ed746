"""The lock of a run's folder: one run at a time, and a second one is told at once who is there.

The process that leads a run takes the lock before it reads or writes anything in the folder; its workers and
ranks need none of their own. Reading a folder (`curvlab report`, `load_comparison`) takes no lock.

    .run.lock      locked by the operating system, which frees it when its holder ends or is killed
    .run.json      who holds it: process, machine, command, since when; removed at the end of a run
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from curvlab.exceptions import FolderInUseError, ResultsFolderError
from curvlab.files import write_text_atomic

__all__ = ["run_lock"]

# Long enough for a holder that has the lock to write who it is, and for one that is ending to be gone.
GRACE_SECONDS = 0.2


@contextmanager
def run_lock(folder: str | Path, command: str) -> Iterator[Path]:
    """Make the folder if it is not there, and hold it for `command` (`compare`, `train`, …).

    Raises `FolderInUseError` at once where another process, or another thread of this one, holds it. The
    thread that holds a folder may take it again.

    >>> import tempfile
    >>> with run_lock(tempfile.mkdtemp(), "compare") as folder:
    ...     json.loads((folder / ".run.json").read_text())["command"]
    'compare'
    """
    folder = Path(folder)
    lock = _acquire(folder)
    try:
        if lock is None:
            raise FolderInUseError(
                f"{folder} is in use by {_holder(folder)}. Wait until it has ended, or choose another folder "
                f"with -o DIR"
            )
        outermost = lock.lock_counter == 1
        if outermost:
            _write_holder(folder, command)
        try:
            yield folder
        finally:
            if outermost:
                with suppress(OSError):
                    (folder / ".run.json").unlink(missing_ok=True)
    finally:
        if lock is not None:
            lock.release()


def _acquire(folder: Path) -> FileLock | None:
    """The lock, held, or None where somebody else has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One object per file, counted per thread: the same thread may come again, another one may not.
        lock = FileLock(folder.resolve() / ".run.lock", is_singleton=True)
        lock.acquire(timeout=GRACE_SECONDS)
    except Timeout:
        return None
    except OSError as error:
        raise _unwritable(folder, error) from error
    return lock


def _write_holder(folder: Path, command: str) -> None:
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": command,
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    try:
        write_text_atomic(folder / ".run.json", json.dumps(holder) + "\n")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _holder(folder: Path) -> str:
    try:
        found = json.loads((folder / ".run.json").read_text(encoding="utf-8"))
        here = "" if found["host"] == socket.gethostname() else f" on {found['host']}"
        since = datetime.fromisoformat(found["since"]).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {int(found['pid'])}{here} (curvlab {found['command']}), since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process, which has not said who it is (.run.json is missing there)"


def _unwritable(folder: Path, error: OSError) -> ResultsFolderError:
    reason = error.strerror or error
    return ResultsFolderError(f"cannot write to the folder {folder}: {reason}. Choose another with -o DIR")
