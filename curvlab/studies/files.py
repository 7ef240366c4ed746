"""Files that survive what happens to processes: locks, atomic replacement, whole-or-nothing appends.

A lock is the operating system's own and dies with its holder, so a killed process leaves nothing
to clean up.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from curvlab.exceptions import ResultsFolderError, StoreError

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    def _lock(descriptor: int) -> None:
        while True:
            # `LK_LOCK` gives up after ten seconds; a writer waits for as long as it takes.
            with suppress(OSError):
                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined]
                return
else:

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)


__all__ = ["append_bytes", "locked", "writable_folder", "write_bytes_atomic", "write_text_atomic"]


def writable_folder(folder: str | Path) -> Path:
    """The folder, made if it is not there; an error where nothing can be written to it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".write-", dir=folder)
        os.close(descriptor)
        Path(name).unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResultsFolderError(
            f"cannot write to the folder {folder}: {reason}. Choose another with -o DIR"
        ) from error
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock that is the file `path`; other processes and threads wait."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _failure("lock", path, error) from error
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def append_bytes(path: Path, data: bytes) -> None:
    """Append `data` in one write and bring it to the disk; on failure leave the file as it was."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        raise _failure("write", path, error) from error
    try:
        size = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, data)
            if written != len(data):
                raise OSError(None, f"only {written} of {len(data)} bytes went in: the disk is full")
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, size)
            raise _failure("write", path, error) from error
    finally:
        os.close(descriptor)


def write_text_atomic(path: str | Path, text: str) -> None:
    """Replace the file `path` by `text`: a reader, or a crash, finds the old or the new, whole.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "report.md"
    >>> write_text_atomic(path, "# Report")
    >>> path.read_text()
    '# Report'
    """
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str | Path, data: bytes) -> None:
    """The same for bytes."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _failure("write", path, error) from error


def _failure(action: str, path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot {action} {path}: {error.strerror}; free space or choose another folder. "
        "What was stored before is whole"
    )
