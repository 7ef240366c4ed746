"""`curvlab merge`: several results folders into one."""

from __future__ import annotations

from pathlib import Path

import click

from curvlab.cli.console import say
from curvlab.cli.options import check_writable
from curvlab.studies.merging import merge_comparisons

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
    merged, others = merge_comparisons(folders, check_writable(output))
    for conflict in merged.conflicts:
        row = conflict.dropped
        what = " ".join(str(row[name]) for name in ("kind", "provider", "solver") if row.get(name))
        say(f"conflict: {what} was measured twice; the first is kept")
    if quiet:
        return
    conflicts = len(merged.conflicts)
    click.echo(f"{merged.added} rows added, {merged.doubles} were there already, {conflicts} in conflict.")
    if others:
        click.echo(
            f"{others} rows are of another problem or environment than {folders[0]}: not in the report."
        )
    click.echo(f"Render it with: curvlab report {output}")
