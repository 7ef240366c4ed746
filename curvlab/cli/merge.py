"""`curvlab merge`: several results folders into one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from curvlab.cli.console import say

if TYPE_CHECKING:
    from curvlab.studies.compare.run import MergedComparisons

__all__ = ["command"]


@click.command("merge")
@click.argument(
    "folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The joined folder."
)
@click.option("--quiet", is_flag=True, help="Say nothing unless rows conflict.")
def command(folders: tuple[Path, ...], output: Path, quiet: bool) -> None:
    """Join the stores of several folders; of two rows for one cell and repetition the first is kept.

    The folders are only read. Comparisons of one problem, made in one environment, then show as one.

    \b
    Examples:
      curvlab merge runs/fisher runs/pch -o runs/both
      curvlab report runs/both
    """
    from curvlab.studies.compare.run import merge_comparisons

    done = merge_comparisons(folders, output)
    for conflict in done.merged.conflicts:
        named = (conflict.dropped.get(name) for name in ("kind", "provider", "solver", "optimizer"))
        say(f"conflict: {' '.join(filter(None, named))} was measured twice; the first is kept")
    if not quiet:
        _show(done, output)


def _show(done: MergedComparisons, output: Path) -> None:
    merged, conflicts = done.merged, len(done.merged.conflicts)
    click.echo(f"{merged.added} rows added, {merged.doubles} were there already, {conflicts} in conflict.")
    for folder, count in done.others.items():
        click.echo(
            f"{count} rows of {folder} are of another problem or environment than the comparison that "
            f"{done.shown} shows: kept, and not in the report. See them with: curvlab report {folder}"
        )
    for folder, count in done.apart.items():
        click.echo(
            f"{count} rows of {folder} belong to no comparison (is it a training run?): kept, and not in the "
            f"report. See what {folder} itself holds, or leave it out"
        )
    if done.shown is not None:
        click.echo(f"Render it with: curvlab report {output}")
