"""Writing files so that neither a crash nor a second process loses what was there.

A file is replaced through a temporary one beside it, appended to in a single write, or set aside under a
name that nothing has yet. The lock here is a short one, around a write: others wait for it. The lock of a
whole run, for which nobody waits, is in `curvlab.studies.run_lock`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from filelock import FileLock
from safetensors import SafetensorError

from curvlab.exceptions import FileWriteError

__all__ = [
    "append_bytes",
    "locked",
    "next_number",
    "replaced",
    "set_file_aside",
    "write_bytes_atomic",
    "write_text_atomic",
]

POLL_SECONDS = 0.01


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock that is the file `path`; other processes and threads wait.

    The lock is the operating system's own and dies with its holder, so a killed process leaves nothing to
    clean up.
    """
    lock = FileLock(path)
    try:
        lock.acquire(poll_interval=POLL_SECONDS)
    except OSError as error:
        raise _failure("lock", path, error) from error
    try:
        yield
    finally:
        lock.release()


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


@contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """A temporary file to be written, which then takes the place of `path`.

    A reader, or a crash at any moment, finds the old file or the new one, never a part. Whatever ends the
    block early leaves `path` as it was and removes the temporary file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "weights.bin"
    >>> with replaced(path) as temporary:
    ...     written = temporary.write_bytes(b"new")
    >>> path.read_bytes(), len(list(path.parent.iterdir()))
    (b'new', 1)
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        raise _failure("write", path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text_atomic(path: str | Path, text: str) -> None:
    """Replace the file `path` by `text`, in UTF-8; folders that are missing are made.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "report.md"
    >>> write_text_atomic(path, "# Report")
    >>> path.read_text()
    '# Report'
    """
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str | Path, data: bytes) -> None:
    """Replace the file `path` by `data`; folders that are missing are made."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _failure("write", path, error) from error
    with replaced(path) as temporary:
        temporary.write_bytes(data)


def next_number(folder: Path, template: str) -> int:
    """One more than the largest number that stands for `{}` in a name of `folder`; 1 where there is none.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "results.previous-7.jsonl").touch()
    >>> next_number(folder, "results.previous-{}.jsonl"), next_number(folder, "previous-{}")
    (8, 1)
    """
    pattern = re.compile(re.escape(template).replace(re.escape("{}"), "([0-9]+)"))
    found = (pattern.fullmatch(path.name) for path in folder.iterdir())
    return 1 + max((int(match[1]) for match in found if match), default=0)


def set_file_aside(path: Path) -> Path | None:
    """Rename `results.jsonl` to `results.previous-1.jsonl`, or the next number that is free; the new path.

    A file that is not there or is empty stays as it is. Nothing is ever overwritten.
    """
    template = f"{path.stem}.previous-{{}}{path.suffix}"
    try:
        if not path.exists() or path.stat().st_size == 0:
            return None
        aside = path.with_name(template.format(next_number(path.parent, template)))
        # Renaming would silently replace a file that appears in this moment; creating it would fail.
        aside.open("x").close()
        path.replace(aside)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileWriteError(f"cannot set {path} aside: {reason}; it was left as it is") from error
    return aside


def _failure(action: str, path: Path, error: Exception) -> FileWriteError:
    reason = getattr(error, "strerror", None) or error
    return FileWriteError(
        f"cannot {action} {path}: {reason}; free space or choose another folder. "
        "What was stored before is unchanged"
    )
