"""`curvlab report`: the report of a results folder, rendered again."""

from __future__ import annotations

from pathlib import Path

import click

from curvlab.cli.compare import finish
from curvlab.cli.options import output_options

__all__ = ["command"]


@click.command("report")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@output_options
def command(folder: Path, as_json: bool, quiet: bool) -> None:
    """Render report.html, report.md and figures/ of a results folder again, from its store.

    \b
    Examples:
      curvlab report runs/compare
      curvlab report runs/compare --json
    """
    from curvlab.studies.compare.run import load_comparison, write_frames

    compared = load_comparison(folder)
    write_frames(folder, compared)
    finish(compared, folder, as_json, quiet)
