"""`reproduce`: carry out an experiment in a folder, and write its page there.

    <output>/<experiment>/report.html  report.md  figures/  *.csv       the page and its frames
    <output>/<experiment>/work/                                        the store
    <output>/work/runs/                                                training runs and their checkpoints

Every row is in the store when it is measured and every run has its checkpoint, so the same call goes on after
an interruption, with any executor.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from curvlab.files import csv_text, write_text_atomic
from curvlab.measure.environment import environment
from curvlab.report.pages import write_pages
from curvlab.reproduce.experiment import (
    ENVIRONMENT,
    Experiment,
    ExperimentOutcome,
    ExperimentTask,
    Places,
    ShowShare,
)
from curvlab.reproduce.experiments import experiment_named
from curvlab.reproduce.provenance import Provenance, record_scale
from curvlab.reproduce.subjects import Options
from curvlab.studies.executor import Place, Workers
from curvlab.studies.store import Store, edited_rows_refused, key_of, run_lock

__all__ = ["DEFAULT_OUTPUT", "command_of", "reproduce", "work_folder", "write_experiment"]

DEFAULT_OUTPUT = "runs/paper"
ShowProgress = Callable[[float, float, str], None]
"""Told how many tasks are done (a fraction counts the one under way), how many there are, and what runs."""


def reproduce(
    name: str,
    options: Options | None = None,
    output: str | Path = DEFAULT_OUTPUT,
    *,
    executor: str | Place | Executor = "serial",
    fresh: bool = False,
    on_progress: ShowProgress | None = None,
) -> Path:
    """Carry out the experiment `name` as far as it is not done, and return its page.

    Args:
        name: `table1` … `table5`, `fig-…`, `pch1-vs-pch2`; see `experiments()`.
        options: the scale and what else the user chooses.
        output: the folder of all experiments; this one's is inside.
        executor: where tasks run; with other processes or machines they must see the folder.
        fresh: measure again what the folder has; old rows and training runs are set aside, numbered, once
            the data are loaded and the first model is built.
        on_progress: called as the work goes on.
    """
    experiment, options = experiment_named(name), options or Options()
    follow = on_progress or (lambda done, total, label: None)
    with run_lock(output, "reproduce") as all_experiments:
        folder = all_experiments / experiment.name
        places = Places(work_folder(folder), work_folder(all_experiments) / "runs", fresh)
        store = Store(places.store, fresh=fresh)
        tasks = experiment.tasks(options)
        with Workers(executor) as workers:
            with edited_rows_refused(store):
                pending = [task for task in tasks if not task.finished(store)]
            if fresh:
                _prepare(pending[:1], workers)
            if pending:
                # In a fresh store the first of these rows sets the old ones aside, before any task writes.
                record_scale(store, options.scale)
                _record_environment(store)
            _carry_out(pending, len(tasks), places, workers, follow)
        return write_experiment(experiment, store, options, folder)


def write_experiment(experiment: Experiment, store: Store, options: Options, folder: Path) -> Path:
    """Write the frames and the page of what has been measured."""
    with edited_rows_refused(store):
        frames = experiment.frames(store)
        outcome = ExperimentOutcome(store, options, command_of(experiment.name, options), frames)
        content = Provenance.of(store, frames, options).mark(experiment.content(outcome))
    for name, frame in frames.items():
        write_text_atomic(folder / f"{name}.csv", csv_text(frame, float_format="%.6g"))
    return write_pages(content, folder)


def work_folder(folder: Path) -> Path:
    """Where a folder keeps what is not to be published: the store, the checkpoints."""
    return folder / "work"


def command_of(name: str, options: Options) -> str:
    """The shell command of a reproduction, without the folders of this machine.

    >>> command_of("table2", Options("smoke", seeds=(3,)))
    'curvlab reproduce table2 --scale smoke --seed 3'
    """
    words = ["curvlab", "reproduce", name, "--scale", options.scale]
    words += [word for seed in options.seeds for word in ("--seed", str(seed))]
    if options.imagenet is not None:
        words += ["--imagenet", "DIR"]
    return shlex.join(words)


def _carry_out(
    pending: Sequence[ExperimentTask], total: int, places: Places, workers: Workers, on_progress: ShowProgress
) -> None:
    done = total - len(pending)
    on_progress(done, total, "")

    def show(share: float, label: str) -> None:
        on_progress(done + share, total, label)

    call = partial(_run, places=places, show=show if workers.place.in_process else None)
    for ended in workers.run(call, pending):
        if ended.error is not None:
            raise ended.error
        done += 1
        on_progress(done, total, ended.argument.label)


def _prepare(tasks: Sequence[ExperimentTask], workers: Workers) -> None:
    """Prepare the tasks where they will run, and raise what would keep them from running."""
    for ended in workers.run(_prepare_task, tasks):
        if ended.error is not None:
            raise ended.error


def _prepare_task(task: ExperimentTask) -> None:
    task.prepare()


def _run(task: ExperimentTask, places: Places, show: ShowShare | None) -> None:
    task.run(places, show or (lambda share, label: None))


def _record_environment(store: Store) -> None:
    found = environment()
    key = key_of({"kind": ENVIRONMENT, **found})
    if not store.has(key):
        store.append({"kind": ENVIRONMENT, "key": key, "environment": found})
