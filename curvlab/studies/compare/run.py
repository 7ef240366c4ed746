"""`compare`: every provider with every solver on one problem, measured side by side.

Rows go to the store as they are measured, keyed by all that they depend on: a comparison that was
interrupted goes on where it was, and one that is finished is only read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import torch

from curvlab import defaults
from curvlab.exceptions import SpecError
from curvlab.measure import device as devices
from curvlab.measure.environment import environment
from curvlab.measure.source import source_hash
from curvlab.problem import Problem
from curvlab.providers import Provider
from curvlab.solvers import Solver
from curvlab.studies.compare.columns import row_problem
from curvlab.studies.compare.folder import command_of, load_comparison, write_frames, write_settings
from curvlab.studies.compare.frames import Comparison, comparison_from
from curvlab.studies.compare.measurements import failure, run_task
from curvlab.studies.compare.problem_notes import problem_notes
from curvlab.studies.compare.race import planned_tasks, race_tasks
from curvlab.studies.compare.settings import Settings, build
from curvlab.studies.compare.tasks import Task, cost_tasks, first_tasks, further_tasks
from curvlab.studies.executor import Place, Workers, place_of
from curvlab.studies.run_lock import run_lock
from curvlab.studies.schema import settings_of
from curvlab.studies.setup import Setup
from curvlab.studies.store import Row, Store, identity_of

__all__ = ["Comparison", "Progress", "compare", "load_comparison", "run_comparison"]

RACE = ("tuning", "convergence")


@dataclass(frozen=True)
class Progress:
    """How far a comparison is: cells done of those to do, and the one that has just ended."""

    done: int
    total: int
    row: Row | None = None


F = TypeVar("F", bound=Callable[..., Any])


def _with_settings(function: F) -> F:
    """Give the function the settings of a comparison as keyword arguments, in its signature and docstring."""
    given = inspect.signature(function)
    kept = {n: p for n, p in given.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    own = {one.name: one for one in settings_of(Settings) if one.name not in kept}
    named = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=one.default) for n, one in own.items()
    ]
    positional = [p for p in kept.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    others = [p for p in kept.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    function.__signature__ = given.replace(parameters=[*positional, *named, *others])  # type: ignore[attr-defined]
    words = "".join(f"{n}: {one.help_text().replace('  [', ' [')}\n        " for n, one in own.items())
    function.__doc__ = (function.__doc__ or "").replace("SETTINGS\n        ", words)
    return function


@_with_settings
def compare(
    subject: Problem | Setup,
    providers: str | Provider | Sequence[str | Provider] = defaults.PROVIDERS,
    solvers: str | Solver | Sequence[str | Solver] = defaults.SOLVERS,
    *,
    output: str | Path | None = None,
    fresh: bool = False,
    retry: bool = False,
    executor: str | Place | Executor = "serial",
    on_progress: Callable[[Progress], None] | None = None,
    **settings: Any,
) -> Comparison:
    """Measure error, time, memory and convergence of every provider with every solver.

    Args:
        subject: a problem, or a setup by name (which alone can train, and run in other processes).
        providers: names such as `"pch-1"` or `"fisher[kind=mc]"`, or instances.
        solvers: names such as `"ea-cg[max_iter=20]"`, or instances.
        **settings: those below, and those that others have registered with
            `curvlab.studies.schema.register_setting`.
        SETTINGS
        output: folder of the store, where the comparison resumes; None keeps all in memory.
        fresh: measure again what the folder has; the first new row sets the old ones aside, as
            results.previous-1.jsonl, -2, ….
        retry: measure again what has failed.
        executor: `"serial"`, `"process[workers=2]"`, `"dask[address=tcp://host:8786]"`, or a
            `concurrent.futures.Executor`.
        on_progress: called after each cell.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
    >>> problem = Problem(model, "cross-entropy", torch.eye(4), torch.tensor([0, 1, 0, 1]))
    >>> compared = compare(problem, ["fisher"], ["kfi"], repetitions=1)
    >>> compared.cells[["provider", "solver", "status"]].values.tolist()
    [['fisher', 'kfi', 'ok']]
    """
    chosen = Settings.of(subject, providers=providers, solvers=solvers, **settings)
    return run_comparison(
        chosen, output, fresh=fresh, retry=retry, executor=executor, on_progress=on_progress
    )


def run_comparison(
    settings: Settings,
    output: str | Path | None = None,
    *,
    fresh: bool = False,
    retry: bool = False,
    executor: str | Place | Executor = "serial",
    on_progress: Callable[[Progress], None] | None = None,
) -> Comparison:
    """Carry out a comparison whose settings are resolved; see `compare`."""
    place = place_of(executor)
    if isinstance(settings.subject, Problem) and not place.in_process and isinstance(executor, str):
        raise SpecError(
            f"executor `{executor}` builds the problem in other processes; give a Setup, not a Problem"
        )
    follow = on_progress or (lambda progress: None)
    if output is None:
        memory = _Memory()
        settings, study = _begun(settings, memory)
        memory.append(study)
        with Workers(place) as workers:
            _measure(settings, memory, workers, retry, follow)
        return _comparison(settings, study, memory)
    with run_lock(output, "compare") as folder:
        store = Store(folder, fresh=fresh, check=row_problem)
        settings, study = _begun(settings, store)
        rows = _FolderRows(folder, settings, store, study)
        with Workers(place) as workers:
            _measure(settings, rows, workers, retry, follow)
        rows.begin()
        compared = _comparison(settings, rows.study, store)
        write_frames(folder, compared)
        return compared


def _comparison(settings: Settings, study: Row, rows: _Rows) -> Comparison:
    config = settings.fields()
    return comparison_from(study, config, rows.rows(), command_of(config))


class _Rows(Protocol):
    """Where rows go: the store, or a list in memory."""

    def append(self, row: dict[str, Any], /) -> None: ...

    def rows(self) -> list[Row]: ...


@dataclass
class _Memory:
    held: list[Row] = field(default_factory=list)

    def append(self, row: Row, /) -> None:
        self.held.append(row)

    def rows(self) -> list[Row]:
        return list(self.held)


@dataclass
class _FolderRows:
    """The store of a folder, in which nothing is touched before there is a row to keep.

    Until then the problem may not be built or the executor not be reached, and all that the folder shows is
    as the last run left it.
    """

    folder: Path
    settings: Settings
    store: Store
    study: Row
    begun: bool = False

    def begin(self) -> None:
        """Write the study's row, so that the store explains itself, and the configuration."""
        if self.begun:
            return
        if not self.store.has(self.study["key"]):
            self.store.append(self.study)
        write_settings(self.folder, self.settings.fields(), self.study["environment"], self.settings.study)
        self.begun = True

    def append(self, row: Row, /) -> None:
        self.begin()
        self.store.append(row)

    def rows(self) -> list[Row]:
        return self.store.rows()


def _begun(settings: Settings, rows: _Rows) -> tuple[Settings, Row]:
    """The settings as they are on the problem, and the row that says what is compared, and where.

    A row that is there is taken as it is. Of a problem that does not fit into memory a note is made, and its
    rows fail.
    """
    subject = settings.subject
    try:
        problem = build(subject)
    except (MemoryError, torch.OutOfMemoryError) as error:
        assert isinstance(subject, Setup)  # a problem is there already
        device, notes = devices.resolve(subject.device), [f"The problem does not fit into memory: {error}"]
    else:
        settings = settings.on(problem)
        device, notes = next(problem.model.parameters()).device, problem_notes(problem)
    for row in rows.rows():
        if row.get("kind") == "study" and row["key"] == settings.study:
            return settings, row
    return settings, {
        "key": settings.study,
        "kind": "study",
        "study": settings.study,
        "source": source_hash(),
        "config": settings.fields(),
        "environment": environment(device) | {"threads": settings.threads},
        "warnings": notes,
    }


def _measure(
    settings: Settings, rows: _Rows, workers: Workers, retry: bool, on_progress: Callable[[Progress], None]
) -> None:
    done = {identity_of(row): row for row in rows.rows()}
    finished = {i for i, row in done.items() if not (retry and row.get("status") == "failed")}
    stages = (first_tasks, further_tasks, cost_tasks)
    total = sum(identity_of(task.head) not in finished for stage in stages for task in stage(settings))
    trained = [done[i] for i in finished if i[0] in RACE and done[i].get("study") == settings.study]
    total += max(0, planned_tasks(settings) - len(trained))
    count = 0
    run = uuid4().hex[:12]
    on_progress(Progress(count, total))

    def carry_out(tasks: Iterable[Task]) -> int:
        """Run what is not finished; how many there were."""
        nonlocal count
        pending = [task for task in tasks if identity_of(task.head) not in finished]
        for ended in workers.run(run_task, pending):
            row = ended.result if ended.result is not None else failure(ended.argument.head, ended.error)  # type: ignore[arg-type]
            if row["kind"] == "cost":
                row["run"] = run  # rounds of different runs saw different moments of the machine
            rows.append(row)
            done[identity_of(row)] = row
            finished.add(identity_of(row))
            count += 1
            on_progress(Progress(count, max(total, count), row))
        return len(pending)

    for stage in stages:
        carry_out(stage(settings, _left_out(done.values(), settings.study)))
    left_out = _left_out(done.values(), settings.study)
    # What is trained next depends on what came of the trainings before.
    while carry_out(race_tasks(settings, [done[identity] for identity in finished], left_out)):
        pass


def _left_out(rows: Iterable[Row], study: str) -> set[tuple[str, str]]:
    """Pairs that are refused or fail: they are neither timed nor trained."""
    solved = [row for row in rows if row.get("kind") == "solve" and row.get("study") == study]
    return {(row["provider"], row["solver"]) for row in solved if row["status"] != "ok"}
