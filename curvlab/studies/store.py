"""The folder of a study: its results, an append-only JSON Lines file with one row per line, and its lock.

A row is appended under a lock, in one write, and is on the disk before `append` returns: two
processes on one store corrupt nothing, and a process killed at any moment loses at most the row
under way. A torn last line or a line that is no JSON object with a `key` is moved to
results.rejected.jsonl, with its number, when the store is opened for writing; the others are used.
A file without a single row was written by something else: it is refused and left as it is.

Rows are strict JSON: numpy and torch scalars become numbers, tuples lists, and NaN and the
infinities `null`, since JSON has none of them.

One run at a time uses a folder, and a second one is told at once who is there (`run_lock`). The process that
leads a run takes the lock before it reads or writes anything in the folder; its workers and ranks need none
of their own. Reading a folder (`curvlab report`, `load_comparison`) takes no lock.

    .run.lock      locked by the operating system, which frees it when its holder ends or is killed
    .run.json      who holds it: process, machine, command, since when; removed at the end of a run
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from curvlab.exceptions import FolderInUseError, ResultsFolderError, StoreError
from curvlab.files import append_bytes, locked, set_file_aside, write_text_atomic

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "BadLine",
    "Conflict",
    "Merged",
    "Row",
    "Store",
    "edited_rows_refused",
    "identity_of",
    "key_of",
    "merge",
    "refuse_foreign_results",
    "run_lock",
]

Row = dict[str, Any]
"""A row of a store: a JSON object with a `key`."""
Check = Callable[[Row], str]


@dataclass(frozen=True)
class BadLine:
    """A line of a store that could not be used: its number (from 1), why, and what it says."""

    line: int
    reason: str
    text: str


class Store:
    """The results in `folder`, read afresh whenever the file has changed.

    With `read_only` nothing is created, locked or repaired: faulty lines are reported and skipped. With
    `fresh` the store begins anew: it has no rows, and what the file holds stays where it is until the first
    row is appended, which sets it aside as results.previous-1.jsonl, or the next number that is free. `check`
    says why a row cannot be used, in a few words, or nothing: such a line counts as faulty.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> store.append({"key": "a1", "kind": "cost", "seconds": 0.5})
    >>> store.has("a1"), store.rows(kind="error")
    (True, [])
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        read_only: bool = False,
        fresh: bool = False,
        check: Check = lambda row: "",
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "results.jsonl"
        self.rejected_path = self.folder / "results.rejected.jsonl"
        self.bad_lines: list[BadLine] = []
        self._read_only, self._fresh, self._check = read_only, fresh, check
        self._rows: list[Row] = []
        self._keys: set[str] = set()
        self._signature: tuple[int, ...] | None = None
        if read_only:
            self._require()
        else:
            self._prepare()
        self._refresh()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; it has a `key`, and is on the disk when this returns."""
        if self._read_only:
            raise StoreError(f"{self.path} was opened to be read only; open it without `read_only`")
        if not isinstance(row.get("key"), str):
            raise StoreError(f"a row needs a `key` that is a string, got {row.get('key')!r}; see `key_of`")
        line = json.dumps(_plain(row, non_finite=None), allow_nan=False).encode() + b"\n"
        with self._lock():
            if self._fresh:
                set_file_aside(self.path)
                self._fresh = False
            if _is_torn(self.path):
                self._repair()
            append_bytes(self.path, line)

    def rows(self, kind: str | None = None) -> list[Row]:
        """All rows in order, or those whose `kind` is the given one."""
        self._refresh()
        return [dict(row) for row in self._rows if kind is None or row.get("kind") == kind]

    def keys(self) -> set[str]:
        """The keys of all rows."""
        self._refresh()
        return set(self._keys)

    def has(self, key: str) -> bool:
        """Whether a row has this key."""
        self._refresh()
        return key in self._keys

    def frame(self, kind: str | None = None) -> pd.DataFrame:
        """The rows as a DataFrame; a field that a row lacks is missing there."""
        import pandas as pd

        return pd.DataFrame(self.rows(kind))

    def __len__(self) -> int:
        self._refresh()
        return len(self._rows)

    def _require(self) -> None:
        if not self.path.is_file():
            raise ResultsFolderError(f"no results at {self.path}; name a folder that a study has written")

    def _prepare(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultsFolderError(f"cannot make the folder {self.folder}: {error.strerror}") from error
        refuse_foreign_results(self.folder)
        if self._fresh:
            return
        with self._lock():
            append_bytes(self.path, b"")
            self._repair()

    def _lock(self) -> AbstractContextManager[None]:
        return locked(self.folder / ".results.lock")

    def _repair(self) -> None:
        """Move faulty lines aside, the rejected first: a crash in between doubles but never loses."""
        lines = _read_lines(self.path)
        _, bad_lines = _parse(lines, self._check)
        if not bad_lines:
            return
        self._report(bad_lines)
        for bad in bad_lines:
            append_bytes(self.rejected_path, json.dumps(vars(bad)).encode() + b"\n")
        faulty = {bad.line for bad in bad_lines}
        kept = [line for number, line in enumerate(lines, start=1) if number not in faulty]
        write_text_atomic(self.path, b"".join(kept).decode())

    def _refresh(self) -> None:
        signature = _signature(self.path)
        if self._fresh or signature == self._signature:
            return
        self._rows, bad_lines = _parse(_read_lines(self.path), self._check)
        self._keys = {row["key"] for row in self._rows}
        if self._read_only:
            self._report(bad_lines)
        self._signature = signature

    def _report(self, bad_lines: list[BadLine]) -> None:
        new = [bad for bad in bad_lines if bad not in self.bad_lines]
        for bad in new:
            warnings.warn(f"{self.path}, line {bad.line}: {bad.reason}; set aside", stacklevel=3)
        self.bad_lines.extend(new)


def refuse_foreign_results(folder: Path) -> None:
    """Raise where the results.jsonl of `folder` is not curvlab's: it has lines, and none of them is a row."""
    path = folder / "results.jsonl"
    lines = _read_lines(path)
    rows, _ = _parse(lines)
    if lines and not rows and not _is_first_row_torn(lines):
        raise ResultsFolderError(
            f"{path} was not written by curvlab: none of its {len(lines)} lines is a row of results, a JSON "
            f"object with a `key`. It was left as it is. Choose another folder with -o DIR, or move the file"
        )


def _is_first_row_torn(lines: list[bytes]) -> bool:
    """Whether all there is may be the beginning of curvlab's first row, whose end a power cut took."""
    if len(lines) > 1 or lines[0].endswith(b"\n") or not lines[0].startswith(b'{"'):
        return False
    try:
        json.loads(lines[0])
    except (ValueError, RecursionError):
        return True
    return False


@contextmanager
def edited_rows_refused(store: Store) -> Iterator[None]:
    """Say in a sentence that rows do not fit, where what is made of them in the block fails for that reason.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> with edited_rows_refused(store):
    ...     store.rows() == []
    True
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{store.path} has rows that are not as curvlab writes them ({type(error).__name__}: {error}). "
            f"Take out the lines that were edited, or measure again with --fresh, which sets the file aside"
        ) from error


def key_of(config: Mapping[str, Any]) -> str:
    """Hash of a configuration: 16 hex digits of the SHA-256 of its canonical JSON.

    The order of keys does not matter; types do: 1 and 1.0 differ, so hash the resolved form.
    Non-finite numbers are hashed by name, so that NaN equals NaN.

    >>> key_of({"alpha": 0.05, "solver": "cg"}) == key_of({"solver": "cg", "alpha": 0.05})
    True
    """
    canonical = json.dumps(_plain(config, non_finite=str), sort_keys=True, separators=(",", ":"))
    return sha256(canonical.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Conflict:
    """Two different rows for one cell and repetition; the first was kept."""

    kept: Row
    dropped: Row


@dataclass(frozen=True)
class Merged:
    """What a merge did: rows added, rows that were there already, and conflicting ones."""

    added: int
    doubles: int
    conflicts: list[Conflict]


def merge(folders: Iterable[str | Path], into: str | Path) -> Merged:
    """Join several stores into one; of rows with equal kind, key and repetition the first wins.

    Rows that `into` has already come first, then the folders in the order given; these are only read.
    """
    sources = [Store(folder, read_only=True) for folder in folders]
    target = Store(into)
    seen = {identity_of(row): row for row in reversed(target.rows())}
    added = doubles = 0
    conflicts = []
    for row in (row for source in sources for row in source.rows()):
        kept = seen.setdefault(identity_of(row), row)
        if kept is row:
            target.append(row)
            added += 1
        elif kept == row:
            doubles += 1
        else:
            conflicts.append(Conflict(kept, row))
    return Merged(added, doubles, conflicts)


def identity_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is about: of two rows with one identity, the later has been measured again.

    >>> identity_of({"kind": "cost", "key": "a1", "repetition": 2, "seconds": 0.5})
    ('cost', 'a1', 2)
    """
    return row.get("kind"), row["key"], row.get("repetition")


def _plain(value: Any, non_finite: Any) -> Any:
    """`value` in JSON's own types; `non_finite` is None, or names a non-finite number (`str`)."""
    if hasattr(value, "tolist"):  # scalars and arrays of numpy, tensors of torch
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item, non_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, non_finite) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return non_finite(value) if non_finite else None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise StoreError(
        f"{value!r} is a {type(value).__name__}; a row or configuration holds numbers, strings, "
        "booleans, None, and lists and mappings of these"
    )


def _read_lines(path: Path) -> list[bytes]:
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for whoever writes to it
            raise StoreError(f"cannot read {path}: it is no file; move it, or choose another folder")
        with path.open("rb") as file:
            return file.readlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error


def _parse(lines: list[bytes], check: Check = lambda row: "") -> tuple[list[Row], list[BadLine]]:
    rows: list[Row] = []
    bad_lines: list[BadLine] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = _row(line)
            if problem := check(row):
                raise ValueError(problem)
            rows.append(row)
        except (ValueError, RecursionError) as error:
            text = line.rstrip(b"\n").decode(errors="backslashreplace")
            bad_lines.append(BadLine(number, str(error), text))
    return rows, bad_lines


def _row(line: bytes) -> Row:
    if not line.endswith(b"\n"):
        raise ValueError("torn, it has no end")
    row = json.loads(line.decode(), parse_constant=_refuse)
    if not isinstance(row, dict) or not isinstance(row.get("key"), str):
        raise ValueError("no object with a `key`")
    if any(isinstance(row.get(name), (list, dict)) for name in ("kind", "repetition")):
        raise ValueError("its `kind` or `repetition` is a list or an object")
    return row


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _is_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                return False
            file.seek(-1, 2)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


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
        raise _unwritable_error(folder, error) from error
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
        raise _unwritable_error(folder, error) from error


def _holder(folder: Path) -> str:
    try:
        found = json.loads((folder / ".run.json").read_text(encoding="utf-8"))
        here = "" if found["host"] == socket.gethostname() else f" on {found['host']}"
        since = datetime.fromisoformat(found["since"]).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {int(found['pid'])}{here} (curvlab {found['command']}), since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process, which has not said who it is (.run.json is missing there)"


def _unwritable_error(folder: Path, error: OSError) -> ResultsFolderError:
    reason = error.strerror or error
    return ResultsFolderError(f"cannot write to the folder {folder}: {reason}. Choose another with -o DIR")
