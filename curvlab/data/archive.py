"""Unpacking a tar archive so that a hostile or broken one does no harm.

Members are judged by tarfile's `data` filter (no absolute paths, nothing outside the folder, no
devices); only the files that are expected are written, into a folder beside the final one, which
gets its name when all of them are there.
"""

from __future__ import annotations

import shutil
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path

from curvlab.exceptions import DataError

__all__ = ["unpack"]


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
