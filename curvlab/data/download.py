"""Files of data: where they are, downloads that resume and are checked, and archives unpacked without harm.

The user's folder is the argument `data_dir` (`--data-dir`), else the environment variable
CURVLAB_DATA. The cache is $XDG_CACHE_HOME/curvlab, or ~/.cache/curvlab.

Bytes go to `<target>.part`, which a later attempt continues with an HTTP Range request; only a
file of the expected SHA-256 is renamed to `<target>`. The progress bar is on stderr, where that
is a terminal. pooch checks downloads too, but begins a broken one anew; these are large, so it is not used.

An archive may be hostile or broken. Its members are judged by tarfile's `data` filter (no absolute paths,
nothing outside the folder, no devices); only the files that are expected are written, into a folder beside
the final one, which gets its name when all of them are there.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from curvlab.exceptions import DataError, DataFolderError

__all__ = ["cache_folder", "fetch", "locked", "unpack", "user_folder"]


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


CHUNK = 1 << 18
TIMEOUT = 30.0
Report = Callable[[int, int | None], None]


def fetch(address: str, target: Path, sha256: str) -> Path:
    """Bring `address` to `target`, resuming what an earlier attempt left, and check its SHA-256.

    A connection that breaks is taken up again for as long as each one brings something.
    """
    if target.exists() and _sha256(target) == sha256:
        return target
    part = target.with_name(target.name + ".part")
    with _progress(target.name) as report:
        _fill(address, part, report)
    digest = _sha256(part)
    if digest != sha256:
        part.unlink()
        raise DataError(
            f"{address}: the SHA-256 of what was downloaded is {digest}, expected {sha256}; it was removed. "
            "Run again, or bring the data yourself and name its folder by --data-dir"
        )
    return part.replace(target)


def _fill(address: str, part: Path, report: Report) -> None:
    """Requests until `part` is whole, or one of them brings nothing."""
    before = -1
    while _size(part) > before:
        before = _size(part)
        problem, cause = "the connection ended before the file did", None
        try:
            if _request(address, part, report):
                return
        except (OSError, http.client.HTTPException) as error:
            problem, cause = _reason(error), error
    size = _size(part)
    kept = f"{size:,} bytes are kept in {part}, and a new run continues from there. " if size else ""
    raise DataError(
        f"{address}: cannot be downloaded ({problem}). {kept}Run again with a network, or bring the data "
        "yourself and name its folder by --data-dir or CURVLAB_DATA"
    ) from cause


def _reason(error: Exception) -> str:
    # urllib wraps a failure to connect in brackets of its own; the failure inside reads better
    inner = error.reason if type(error) is urllib.error.URLError else error
    return str(inner) or type(inner).__name__


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _request(address: str, part: Path, report: Report) -> bool:
    """One request for what `part` lacks; whether it is whole now."""
    done = _size(part)
    headers = {"User-Agent": "curvlab", **({"Range": f"bytes={done}-"} if done else {})}
    try:
        response = urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if done and error.code == 416:  # nothing beyond `done`: whole already, and the checksum judges it
            return True
        raise
    with response:
        if done and not (response.headers.get("Content-Range") or "").startswith(f"bytes {done}-"):
            done = 0  # the server sends the file from its beginning
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with _writer(part, "ab" if done else "wb") as write:
            report(done, total)
            while chunk := response.read(CHUNK):
                write(chunk)
                done += len(chunk)
                report(done, total)
    return total is None or done >= total


@contextmanager
def _writer(part: Path, mode: str) -> Iterator[Callable[[bytes], None]]:
    """A function that appends bytes to `part`; a disk that refuses them is a `DataError`."""

    def refused(error: OSError) -> DataError:
        return DataError(
            f"{part}: cannot be written ({error}); what was downloaded is kept there. "
            "Free disk space, or set XDG_CACHE_HOME to another disk, and run again: it continues"
        )

    try:
        file = part.open(mode, buffering=0)
    except OSError as error:
        raise refused(error) from error

    def write(chunk: bytes) -> None:
        view = memoryview(chunk)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError as error:
            raise refused(error) from error

    with file:
        yield write


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _progress(name: str) -> Iterator[Report]:
    """A function (done, total) that draws the bar."""
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def unpack(archive: Path, folder: Path, expected: Collection[str], limit: int) -> None:
    """Write the files `<folder's name>/<expected>` of `archive` to `folder`, all or none.

    An archive whose members claim more than `limit` bytes together is refused before they are unpacked.
    """
    scratch = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(scratch, ignore_errors=True)  # what a killed run left
    try:
        _extract(archive, scratch, {f"{folder.name}/{name}" for name in expected}, limit)
        (scratch / folder.name).replace(folder)
    except tarfile.FilterError as error:
        raise _broken_archive_error(archive, f"an unsafe member: {error}") from error
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise _broken_archive_error(archive, str(error) or type(error).__name__) from error
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written from {archive} ({error}); free disk space and run again"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _extract(archive: Path, scratch: Path, expected: set[str], limit: int) -> None:
    claimed = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            claimed += member.size
            if claimed > limit:
                raise _broken_archive_error(
                    archive, f"its members take more than {limit:,} bytes, far beyond the data set's"
                )
            tarfile.data_filter(member, str(scratch))
            if member.name in expected and member.isreg():
                tar.extract(member, scratch, filter="data")
    missing = [name for name in sorted(expected) if not (scratch / name).is_file()]
    if missing:
        raise _broken_archive_error(archive, f"{', '.join(missing)} is not in it")


def _broken_archive_error(archive: Path, problem: str) -> DataError:
    return DataError(f"{archive}: the archive cannot be used ({problem}); delete it and run again")
