"""What a result depends on beside its configuration: source, commits, versions, device and threads.

    source hash     16 hex digits of the SHA-256 of the package's files, in the order of their paths
    source commit   what is checked out in curvlab's source tree, where that is a git checkout
    commit          what is checked out in any folder

The hash identifies the code: the version number stays the same while the code changes, and a commit does not
tell of changes that were not committed. All of it is written to environment.json, which names no host, no
user and no path.

No git process is started. Git runs programs that a repository's configuration names (`core.fsmonitor`, hooks,
filters), and the working folder may be anybody's. Its files are read with a limit, and nothing of them is
kept but a commit's hex digits. Whether the folder differs from its commit cannot be known that way.

Torch is imported when the device is asked for: help pages are made from settings, whose keys hold the hash.
"""

from __future__ import annotations

import platform
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvlab.version import __version__

if TYPE_CHECKING:
    import torch

__all__ = ["commit_of", "distinct_sources", "environment", "mixed_sources", "source_commit", "source_hash"]

PACKAGE = Path(__file__).resolve().parent.parent
# What a wheel holds (`package-data` in pyproject.toml): an installed copy has the hash of its checkout.
SUFFIXES = frozenset({".py", ".typed", ".j2", ".html", ".css", ".js", ".md", ".csv", ".toml"})
COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
UNKNOWN = "not recorded"
SMALL_FILE, PACKED_REFS = 4096, 16 * 2**20
SYMBOLIC_REFS = 5


@cache
def source_hash() -> str:
    """The hash of curvlab's source, computed once in a process.

    Line ends do not count, since git may change them on checkout. The files are those on the disk at the
    first call: a source that is edited between its import and this call is taken for the edited one.

    >>> len(source_hash())
    16
    """
    return tree_hash(PACKAGE)


def tree_hash(folder: Path) -> str:
    """The hash of the source files in `folder`: of each its relative path, its length and its content."""
    digest = sha256()
    found = {path.relative_to(folder).as_posix(): path for path in _source_files(folder)}
    for name in sorted(found):
        content = found[name].read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _source_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file():
            yield path


@cache
def source_commit() -> str | None:
    """The commit of curvlab's source tree; None where curvlab is installed without one.

    A tree is curvlab's own where its pyproject.toml says so: a package in an environment inside a user's
    repository does not have the commit of that repository.
    """
    tree = PACKAGE.parent
    try:
        described = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
        return _commit(tree / ".git") if described["project"]["name"] == "curvlab" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out in `folder`; None outside a repository, or where there is none yet.

    Refs are read from loose files and from packed-refs, of work trees too; a repository that keeps them in
    the reftable format has None.
    """
    try:
        found = next((p / ".git" for p in (folder, *folder.parents) if (p / ".git").exists()), None)
        return None if found is None else _commit(found)
    except OSError:  # a folder that may not be read
        return None


def _commit(git: Path) -> str | None:
    """The commit of a repository whose `.git`, a folder or a file that names one, is given."""
    folder = git
    if not git.is_dir():
        named = _first_line(git).removeprefix("gitdir: ")
        folder = git.parent / named
        if not named or not folder.is_dir():
            return None
    common = folder / (_first_line(folder / "commondir") or ".")
    text = _first_line(folder / "HEAD")
    for _ in range(SYMBOLIC_REFS):
        if COMMIT.fullmatch(text):
            return text
        name = text.removeprefix("ref: ")
        if not name.startswith("refs/") or ".." in name:
            return None
        text = (
            _first_line(folder / name) or _first_line(common / name) or _commit_in_packed_refs(common, name)
        )
    return None


def _commit_in_packed_refs(common: Path, name: str) -> str:
    lines = _read(common / "packed-refs", PACKED_REFS).splitlines()
    return next((line[: -len(name) - 1] for line in lines if line.endswith(f" {name}")), "")


def _first_line(path: Path) -> str:
    return next(iter(_read(path, SMALL_FILE).splitlines()), "").strip()


def _read(path: Path, limit: int) -> str:
    """The beginning of a plain file; empty for what is none, such as a pipe that nobody writes to."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(limit).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def distinct_sources(sources: Iterable[object]) -> list[str]:
    """The hashes that rows name, each once, in order; rows of an older curvlab name none.

    >>> distinct_sources(["aa", None, "aa", "bb"])
    ['aa', 'not recorded', 'bb']
    """
    return list(dict.fromkeys(found if isinstance(found, str) else UNKNOWN for found in sources))


def mixed_sources(sources: Iterable[object]) -> str:
    """A sentence where rows were measured by more than one source of curvlab; empty otherwise.

    >>> mixed_sources(["aa", "aa"])
    ''
    >>> mixed_sources(["aa", None])
    "These numbers were measured by 2 states of curvlab's source: aa, not recorded."
    """
    found = distinct_sources(sources)
    if len(found) < 2:
        return ""
    return f"These numbers were measured by {len(found)} states of curvlab's source: {', '.join(found)}."


PACKAGES = ("torch", "numpy", "scipy", "pandas")


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, source, platform, processor, device, threads and commits, ready for JSON.

    `source` is the hash of curvlab's own source and `source_commit` the commit of its source tree; `git` is
    about the working folder. Older files have `git.dirty` too, which cannot be known without running git.

    >>> sorted(environment())
    ['device', 'device_name', 'git', 'platform', 'processor', 'python', 'source', 'source_commit', 'threads',
     'versions']
    """
    import torch

    from curvlab.measure import device as devices

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
