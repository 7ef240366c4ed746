"""`curvlab reproduce`: the paper's tables, figures and claims, as studies that resume."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from curvlab.cli.console import Show, kept_when_interrupted, print_json, progress_bar, table
from curvlab.cli.options import executor_option
from curvlab.exceptions import SpecError
from curvlab.reproduce.subjects import SCALES, Options

if TYPE_CHECKING:
    from curvlab.reproduce.grid_study import GridStudy

__all__ = ["command"]

ALL = "all"


@click.command("reproduce")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "listed", is_flag=True, help="List the experiments and what each takes.")
@click.option("--scale", type=click.Choice(SCALES), default="laptop", show_default=True,
              help="How much of the paper: minutes, hours or days.")  # fmt: skip
@click.option("--seed", "seeds", type=int, multiple=True, metavar="N",
              help="Seed, once for each.  [default: the scale's]")  # fmt: skip
@click.option("--imagenet", type=click.Path(exists=True, file_okay=False), metavar="DIR",
              help="Folder with one of images for each class.  [default: enlarged CIFAR-10]")  # fmt: skip
@click.option("--data-dir", type=click.Path(file_okay=False), metavar="DIR",
              help="Folder of CIFAR-10.  [default: downloaded once]")  # fmt: skip
@click.option("--study", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
              help="Study file of `grid`.  [default: the scale's own]")  # fmt: skip
@click.option("--only", multiple=True, metavar="NAME=VALUE,…",
              help="A part of the grid: lr, batch, alpha, max_iter or tol.")  # fmt: skip
@click.option("--device", default="auto", show_default=True, metavar="NAME", help="auto, cpu, cuda, mps, …")
@executor_option()
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR",
              help="Folder of all experiments.  [default: runs/paper/<scale>]")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Measure again what the folder has; that is set aside.")
@click.option("--json", "as_json", is_flag=True, help="Print where the pages are as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(
    names: tuple[str, ...],
    listed: bool,
    scale: str,
    seeds: tuple[int, ...],
    imagenet: str | None,
    data_dir: str | None,
    study: str | None,
    only: tuple[str, ...],
    device: str,
    executor: str,
    output: Path | None,
    fresh: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run experiments of the paper and put its numbers beside ours.

    Every experiment has a page (report.html, report.md) with its frames as CSV files, and all of them
    together a page of findings, claim by claim. What is measured is kept at once: the same command goes on
    after an interruption.

    \b
    Examples:
      curvlab reproduce --list
      curvlab reproduce all --scale smoke
      curvlab reproduce table2 table4 --executor 'process[workers=2]'
      curvlab reproduce table3 --imagenet ~/imagenet10
      curvlab reproduce grid --study mine.toml --only lr=0.1,0.2 --only batch=100
    """
    if listed:
        _list(as_json)
        return
    from curvlab.reproduce.experiments import experiment_named, experiments
    from curvlab.reproduce.findings import write_findings
    from curvlab.reproduce.run import DEFAULT_OUTPUT, reproduce
    from curvlab.studies.store import run_lock

    if not names:
        raise SpecError(f"name an experiment, or `{ALL}`; see `curvlab reproduce --list`")
    chosen = list(experiments()) if ALL in names else [experiment_named(name).name for name in names]
    options = Options(scale, seeds, imagenet, data_dir, device, _study(scale, study, only))  # type: ignore[arg-type]
    folder = output or Path(DEFAULT_OUTPUT) / scale
    pages = {}
    with run_lock(folder, "reproduce"), kept_when_interrupted(folder, fresh) as check_interrupted:
        for name in chosen:
            with progress_bar(not quiet, name) as show, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # matplotlib's opinions on layout are not the user's concern

                def follow(done: float, total: float, label: str, show: Show = show) -> None:
                    check_interrupted()
                    show(done, total, label)

                pages[name] = reproduce(
                    name, options, folder, executor=executor, fresh=fresh, on_progress=follow
                )
            if not quiet and not as_json:
                click.echo(f"{name}: {pages[name]}")
        findings = write_findings(folder, options)
    if as_json:
        print_json({"pages": {name: str(page) for name, page in pages.items()}, "findings": str(findings)})
    elif not quiet:
        click.echo(f"Findings: {findings}")


def _study(scale: str, path: str | None, only: tuple[str, ...]) -> GridStudy | None:
    if path is None and not only:
        return None
    from curvlab.reproduce.grid_search import embedded_study
    from curvlab.reproduce.grid_study import GridStudy, parse_only

    return (embedded_study(scale) if path is None else GridStudy.read(path)).only(parse_only(only))


def _list(as_json: bool) -> None:
    from curvlab.reproduce.experiments import experiments

    found = experiments()
    if as_json:
        print_json([{"name": name, "title": experiment.title} for name, experiment in found.items()])
        return
    rows = [[name, experiment.title] for name, experiment in found.items()]
    table(
        {"Experiment": "left", "What it shows": "fold"}, [*rows, [ALL, "Every one of them, in this order."]]
    )
