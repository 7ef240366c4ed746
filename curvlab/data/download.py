"""Downloads that resume, and are checked before anything reads them.

Bytes go to `<target>.part`, which a later attempt continues with an HTTP Range request; only a
file of the expected SHA-256 is renamed to `<target>`. The progress bar is on stderr, where that
is a terminal. pooch checks downloads too, but begins a broken one anew; these are large, so it is not used.
"""

from __future__ import annotations

import hashlib
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from curvlab.exceptions import DataError

__all__ = ["fetch"]

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
