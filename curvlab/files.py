"""Files: written so that neither a crash nor a second process loses what was there, and TOML and CSV in them.

A file is replaced through a temporary one beside it, appended to in a single write, or set aside under a
name that nothing has yet. The lock here is a short one, around a write: others wait for it. The lock of a
whole run, for which nobody waits, is in `curvlab.studies.store`.

Frames become CSV files that a spreadsheet opens without running anything. Their texts come from rows of a
store, which may be anybody's: names of layers, messages of errors, specs. A spreadsheet takes a cell that
begins with `=`, `+`, `-` or `@` for a formula, which can fetch addresses or start programs; a tab or a line
break in front is dropped before it looks. Such a text gets an apostrophe in front, as OWASP's "CSV Injection"
advises. Numbers are never changed, those written as text included. A carriage return becomes a newline, which
is quoted: bare it would begin a new row, and with it a new cell.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import tomli_w
from filelock import FileLock
from safetensors import SafetensorError

from curvlab.exceptions import FileWriteError, SpecError, unknown_name

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "append_bytes",
    "csv_text",
    "locked",
    "next_number",
    "plain_cell",
    "read_settings",
    "read_toml",
    "replaced",
    "set_file_aside",
    "toml_text",
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


def toml_text(fields: Mapping[str, Any], comment: str = "") -> str:
    """The text of a table under `comment`; fields that are None, which TOML does not have, are left out.

    >>> print(toml_text({"alpha": 0.05, "lr": None, "setup": {"data": "digits"}}, "What was run."), end="")
    # What was run.
    alpha = 0.05
    <BLANKLINE>
    [setup]
    data = "digits"
    """
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + tomli_w.dumps(_without_none(fields))


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in fields.items()
        if value is not None
    }


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table of a file."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not a TOML file: {error}") from error


def read_settings(path: str | Path, known: Collection[str]) -> dict[str, Any]:
    """The fields of a flat table; a key that is not among `known` is an error with the nearest match."""
    fields = read_toml(path)
    for key, value in fields.items():
        if key not in known:
            raise SpecError(f"{path}: {unknown_name('setting', key, known)}")
        if isinstance(value, dict):
            raise SpecError(f"{path}: `{key}` is a table; write `{key} = …` with a plain value")
    return fields


OPENINGS = tuple("=+-@\t\n＝＋－＠")  # the wide forms are those of East Asian keyboards


def csv_text(frame: pd.DataFrame, float_format: str | None = None) -> str:
    """The frame as CSV, without its index; see the module on cells that look like formulas.

    >>> import pandas as pd
    >>> print(csv_text(pd.DataFrame({"layer": ["=1+1", "-1", "0"], "error": [-1.5, 2.0, 0.0]})), end="")
    layer,error
    '=1+1,-1.5
    -1,2.0
    0,0.0
    """
    import pandas as pd

    shown = frame.rename(columns=plain_cell)
    texts = [i for i, dtype in enumerate(frame.dtypes) if not pd.api.types.is_numeric_dtype(dtype)]
    for index in texts:
        shown.isetitem(index, [plain_cell(value) for value in frame.iloc[:, index]])
    text: str = shown.to_csv(index=False, float_format=float_format)
    return text


def plain_cell(value: Any) -> Any:
    """A text that no spreadsheet takes for a formula; anything but a text as it is.

    >>> plain_cell("@SUM(A1)"), plain_cell("-0.5"), plain_cell("pch-1"), plain_cell(-2)
    ("'@SUM(A1)", '-0.5', 'pch-1', -2)
    """
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(OPENINGS) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip() and text[0] in "+-"
