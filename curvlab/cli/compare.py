"""`curvlab compare`: every provider with every solver on one problem, and one report."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from curvlab.cli.console import (
    kept_when_interrupted,
    paragraph,
    print_json,
    progress_bar,
    records,
    say,
    show_rows,
)
from curvlab.cli.options import (
    SchemaCommand,
    config_option,
    executor_option,
    grid_settings,
    make_settings,
    output_options,
)
from curvlab.exceptions import StoreError
from curvlab.studies.compare.columns import CONVERGENCE, RACE, cell_columns

if TYPE_CHECKING:
    from curvlab.studies.compare.frames import Comparison
    from curvlab.studies.compare.run import Progress

__all__ = ["command", "finish", "show_comparison"]

DEFAULT_FOLDER = Path("runs/compare")
WRITTEN = (
    "results.jsonl",
    "results.csv",
    "config.toml",
    "environment.json",
    "report.html",
    "report.md",
    "figures/",
)


@click.command("compare", cls=SchemaCommand, schema=lambda: grid_settings("compare"))
@config_option
@executor_option()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=DEFAULT_FOLDER,
    show_default=True,
    metavar="DIR",
    help="Folder of results and report.",
)
@click.option("--fresh", is_flag=True, help="Measure again what the folder has; that is set aside.")
@click.option("--retry", is_flag=True, help="Measure again what has failed.")
@output_options
def command(
    executor: str, output: Path, fresh: bool, retry: bool, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Measure error, time, memory and convergence of every provider with every solver.

    Results go to the folder as they are measured: the same command resumes an interrupted comparison, and
    only shows a finished one; after a change of curvlab's own code it measures again. A cell that fails is
    in the table with its reason, and the exit code is 1; a pair that does not exist is skipped with the
    reason, which is no failure while another was measured.

    \b
    Examples:
      curvlab compare
      curvlab compare -p fisher -p pch-1 -s kfi -s 'ea-cg[max_iter=20]' \\
          --arch 64-32-16-10 --activation tanh --criterion robust --epochs 5 \\
          -r 5 -o reports/mine
      curvlab compare --model mypackage.nets:build --data mypackage.data:batches
      curvlab compare --config runs/compare/config.toml -o runs/again

    \b
    Completion of options, names and files, for bash (zsh and fish likewise):
      eval "$(_CURVLAB_COMPLETE=bash_source curvlab)"
    """
    from curvlab.studies.compare.run import run_comparison

    settings = make_settings(options)
    if not quiet:
        _say_what_is_added(output)
    done = 0
    with (
        kept_when_interrupted(output, fresh) as check_interrupted,
        progress_bar(not quiet, "preparing") as show,
    ):

        def follow(progress: Progress) -> None:
            nonlocal done
            check_interrupted()
            done = progress.done
            show(progress.done, progress.total, _label(progress))

        compared = run_comparison(
            settings,
            output,
            fresh=fresh,
            retry=retry,
            executor=executor,
            on_progress=follow,
        )
    if not done and not quiet:
        say(f"Nothing was measured anew: {output} had all of it. `--fresh` measures it again.")
    finish(compared, output, as_json, quiet)


def _say_what_is_added(folder: Path) -> None:
    """Tell what comes beside the files of a folder that is no results folder, and how to keep it apart."""
    others = [path.name for path in folder.iterdir() if path.name[0] != "."] if folder.is_dir() else []
    if not others or "results.jsonl" in others:
        return
    named = ", ".join(sorted(others)[:3]) + (", …" if len(others) > 3 else "")
    say(
        f"{folder} has other files ({named}). Beside them come {', '.join(WRITTEN)}. "
        f"To keep them apart, give a subfolder: -o {folder / 'compare'}"
    )


def _label(progress: Progress) -> str:
    row = progress.row or {}
    names = ("kind", "optimizer") if row.get("optimizer") else ("kind", "provider", "solver")
    return " ".join(str(row[name]) for name in names if row.get(name))


def finish(compared: Comparison, folder: Path, as_json: bool, quiet: bool) -> None:
    """Write the report, show the results, and exit with 1 if a cell failed or no pair was measured."""
    report = _write_report(compared, folder)
    if as_json:
        print_json(_document(compared, folder, report))
    elif not quiet:
        show_comparison(compared)
        click.echo(f"Report: {report}")
    for failure in compared.failures:
        say(f"failed: {failure}")
    if compared.cells.empty:
        say(
            f"Error: {folder} has no row of a pair, as after an interruption. The command that began it goes "
            f"on from there: `{compared.command}`"
        )
    elif not compared.measured:
        for reason in compared.warnings:
            say(reason)
        say("No pair was measured: every one was skipped or failed. `curvlab list` shows which pairs exist.")
    if not compared.ok:
        sys.exit(1)


def _write_report(compared: Comparison, folder: Path) -> Path:
    from curvlab.report import write_report

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # matplotlib's opinions on layout are not the user's concern
            return Path(write_report(compared, folder))
    except StoreError as error:
        say(f"Error: {error}. To render the report of the results again: `curvlab report {folder}`")
        sys.exit(1)


def _document(compared: Comparison, folder: Path, report: Path) -> dict[str, Any]:
    names = ("cells", "errors", "repetitions", "blocks", "convergence", "by_time", "tuning")
    return {
        "folder": str(folder),
        "report": str(report),
        "ok": compared.ok,
        "command": compared.command,
        "config": compared.config,
        "environment": compared.environment,
        **{name: records(getattr(compared, name)) for name in names},
        "warnings": compared.warnings,
        "failures": compared.failures,
    }


def _shares(compared: Comparison) -> list[str]:
    """How much of the parameters the two errors of the table speak for."""
    from curvlab.report.numbers import percent

    if not compared.coverage:
        return []
    bias, weight = (percent(compared.coverage[f"{of}_share"]) for of in ("bias", "weight"))
    return [f"Bias blocks have {bias} of the parameters, weight blocks {weight}."]


def show_comparison(compared: Comparison) -> None:
    """The table of cells, what to know of them, and the answer."""
    from curvlab.report.comparison import shown
    from curvlab.report.training import race_ends

    columns = cell_columns()
    show_rows(columns, [*compared.cells.to_dict("records"), *compared.controls.to_dict("records")])
    if compared.measured:
        paragraph(" ".join([*(column.legend for column in columns if column.legend), *_shares(compared)]))
    if not compared.convergence.empty:
        last = race_ends(compared.convergence)
        show_rows(RACE if "seeds" in last else CONVERGENCE, last.to_dict("records"), {"epoch": "Epochs"})
    found = shown(compared)
    told = found.recommendation.paragraphs
    for warning in compared.warnings if compared.measured else ():  # else they are the errors
        if warning not in told:
            paragraph(f"Note: {warning}")
    for text in found.answer.splitlines():
        paragraph(text)
