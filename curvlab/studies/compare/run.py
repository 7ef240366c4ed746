"""`compare`: every provider with every solver on one problem, measured side by side, and the folder of that.

Rows go to the store as they are measured, keyed by all that they depend on: a comparison that was
interrupted goes on where it was, and one that is finished is only read.

The folder holds results.jsonl, results.csv, config.toml and environment.json. The store is the truth; the
other files are written from it, each in full, and can be written again. Several folders join into one
(`merge_comparisons`), which then reports as one.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import torch
from torch import nn

from curvlab import defaults
from curvlab.exceptions import ResultsFolderError, SpecError, named_briefly
from curvlab.files import csv_text, read_settings, toml_text, write_text_atomic
from curvlab.measure import device as devices
from curvlab.measure.environment import environment, source_hash
from curvlab.model.network import DROPOUTS
from curvlab.problem import Problem
from curvlab.providers import Provider
from curvlab.solvers import Solver
from curvlab.studies.compare.columns import row_problem
from curvlab.studies.compare.costs import fresh
from curvlab.studies.compare.frames import Comparison, comparison_from
from curvlab.studies.compare.measurements import failure, run_task
from curvlab.studies.compare.race import planned_tasks, race_tasks
from curvlab.studies.compare.settings import Settings, all_settings, build
from curvlab.studies.compare.tasks import Task, cost_tasks, first_tasks, further_tasks
from curvlab.studies.executor import Place, Workers, place_of
from curvlab.studies.schema import Setting, read_values, settings_of
from curvlab.studies.setup import Setup, load_weights
from curvlab.studies.store import Merged, Row, Store, identity_of, merge, run_lock

__all__ = [
    "Comparison",
    "MergedComparisons",
    "Progress",
    "command_of",
    "compare",
    "load_comparison",
    "merge_comparisons",
    "problem_notes",
    "run_comparison",
    "study_of",
    "write_frames",
    "write_settings",
]

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

    A row that is there is taken as it is, and where it says what the providers are on the problem, that is
    not built. Of a problem that does not fit into memory a note is made, and its rows fail.
    """
    subject = settings.subject
    found = (row for row in rows.rows() if row.get("kind") == "study" and row["key"] == settings.study)
    row = next(found, None)
    if row is not None and (known := settings.resolved_as(row.get("resolved", {}))) is not None:
        return known, row
    resolved: dict[str, str] = {}
    try:
        problem = build(subject)
    except (MemoryError, torch.OutOfMemoryError) as error:
        assert isinstance(subject, Setup)  # a problem is there already
        device, notes = devices.resolve(subject.device), [f"The problem does not fit into memory: {error}"]
    else:
        if settings.checkpoint is not None:  # what does not fit ends the study, not each of its pairs
            load_weights(problem.model, settings.checkpoint)
            fresh(problem).gradient()
        resolved = settings.resolutions(problem)
        settings = settings.on(problem)
        if row is not None:
            return settings, row
        device, notes = next(problem.model.parameters()).device, problem_notes(problem)
    if row is not None:
        return settings, row
    return settings, {
        "key": settings.study,
        "kind": "study",
        "study": settings.study,
        "source": source_hash(),
        "config": settings.fields(),
        "environment": environment(device) | {"threads": settings.threads},
        "resolved": resolved,
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


COMMENT = "The resolved configuration; run it again with: curvlab compare --config config.toml -o FOLDER"
OF_PROBLEM = "A problem given from Python: this file says what was compared, and cannot run it again."


def write_settings(folder: Path, config: dict[str, Any], environment: dict[str, Any], study: str) -> None:
    """Write config.toml and environment.json."""
    comment = OF_PROBLEM if "problem" in config else COMMENT
    write_text_atomic(folder / "config.toml", toml_text(config, comment))
    write_text_atomic(
        folder / "environment.json", json.dumps({"study": study, **environment}, indent=2) + "\n"
    )


def write_frames(folder: Path, comparison: Comparison) -> None:
    """Write results.csv: the cells, one row per pair."""
    write_text_atomic(folder / "results.csv", csv_text(comparison.cells))


def load_comparison(folder: str | Path) -> Comparison:
    """The comparison that a folder holds, from its store."""
    folder = Path(folder)
    rows = Store(folder, read_only=True, check=row_problem).rows()
    key = study_of(folder)
    study = next(row for row in rows if row.get("kind") == "study" and row["key"] == key)
    config = study["config"] | _config_of(folder, study["config"])
    return comparison_from(study, config, rows, command_of(config))


def study_of(folder: Path) -> str:
    """The key of the study that a folder shows: the one it ran last."""
    store = Store(folder, read_only=True, check=row_problem)
    keys = [row["key"] for row in store.rows("study")]
    if not keys:
        raise ResultsFolderError(
            f"{store.path} holds no comparison; name a folder that `curvlab compare` has written"
        )
    try:
        shown = json.loads((folder / "environment.json").read_text(encoding="utf-8")).get("study")
    except (OSError, ValueError, AttributeError, RecursionError):
        shown = None
    return str(shown) if shown in keys else str(keys[-1])


def _config_of(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """The latest configuration: a second run may have asked for other providers in the same folder."""
    path = folder / "config.toml"
    if not path.exists():
        return {}
    found = read_settings(path, like)
    known = [one for one in all_settings() if one.name in found]
    read_values({one.name: found[one.name] for one in known}, known, str(path))
    return found


def command_of(config: dict[str, Any]) -> str:
    """The shell command that compares the same again; what is as by default is left out.

    >>> command_of({"providers": ["pch-1"], "solvers": ["cg[tol=0.1]"], "alpha": 0.1, "lr": None})
    "curvlab compare -p pch-1 -s 'cg[tol=0.1]' --alpha 0.1"
    """
    if "problem" in config:
        return "curvlab.compare(problem, …) from Python"
    known = {one.name: one for one in all_settings()}
    words = ["curvlab", "compare"]
    for name, value in config.items():
        # A folder may have been written with a setting that is not registered here.
        one = known.get(name) or Setting(name, str, None, "", many=isinstance(value, list))
        words += one.words(value)
    return shlex.join(words)


@dataclass(frozen=True)
class MergedComparisons:
    """What a merge did, the folder whose comparison shows in the new one, and the rows that do not show.

    `shown` is None where no folder holds a comparison. `others` counts, by folder, rows of another problem
    or environment than the one shown; `apart` rows of folders that hold no comparison, training runs say.
    """

    merged: Merged
    shown: Path | None
    others: dict[Path, int]
    apart: dict[Path, int]


def merge_comparisons(folders: Sequence[str | Path], into: str | Path) -> MergedComparisons:
    """Join the stores; the new folder shows the first comparison with the choices of all that share it.

    Rows that belong to other studies are kept in the store, and a comparison of their configuration in that
    folder finds them.
    """
    with run_lock(into, "merge") as target:
        return _merge(folders, target)


def _merge(folders: Sequence[str | Path], into: Path) -> MergedComparisons:
    paths = [Path(folder) for folder in folders]
    held = {path: Store(path, read_only=True, check=row_problem).rows() for path in paths}
    for path, rows in held.items():
        if not rows and (path / "results.jsonl").is_file():
            raise ResultsFolderError(
                f"{path}/results.jsonl has no row that curvlab has written: it is of another program, or "
                f"damaged. Leave the folder out"
            )
    done = merge(paths, into)
    done = replace(done, conflicts=[c for c in done.conflicts if not _differs_anyway(c.kept)])
    compared = [path for path, rows in held.items() if any(row.get("kind") == "study" for row in rows)]
    apart = {path: len(rows) for path, rows in held.items() if path not in compared}
    if not compared:
        return MergedComparisons(done, None, {}, apart)
    first = _show(compared, into)
    counts = {path: sum(row.get("study") != first for row in held[path]) for path in compared}
    return MergedComparisons(done, compared[0], {path: n for path, n in counts.items() if n}, apart)


def _differs_anyway(row: Mapping[str, Any]) -> bool:
    """Whether every folder has a row of its own: when a study began, and the seconds of a control.

    Every comparison times the controls, so that two of them would be in conflict whatever they compare.
    """
    return row.get("kind") == "study" or (row.get("kind") == "cost" and not row.get("solver"))


def _show(compared: Sequence[Path], into: Path) -> str:
    """Write what the new folder shows, the first folder's study; its key."""
    studies = {row["key"]: row for row in Store(into, check=row_problem).rows("study")}
    first = _study(compared[0], studies)
    configs = [load_comparison(folder).config for folder in compared if _study(folder, studies) is first]
    write_settings(into, _union(configs), first["environment"], first["key"])
    write_frames(into, load_comparison(into))
    return str(first["key"])


def _study(folder: str | Path, studies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The study that a folder shows."""
    return studies[study_of(Path(folder))]


def _union(configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    joined = dict(configs[0])
    known = {name for config in configs for name in config}  # an earlier release had fewer settings
    for name in (one.name for one in all_settings() if one.many and one.name in known):
        joined[name] = list(dict.fromkeys(item for config in configs for item in config.get(name, ())))
    joined["repetitions"] = max(config["repetitions"] for config in configs)
    return joined


def problem_notes(problem: Problem) -> list[str]:
    """Sentences on what the problem itself makes equal or impossible.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> problem_notes(Problem(model, "cross-entropy", torch.eye(4), torch.tensor([0, 1, 0, 1])))[0][:37]
    'PCH and Gauss-Newton are the same her'
    """
    chain, criterion = problem.chain, problem.criterion
    found = []
    straight = chain is not None and all(activation.piecewise_linear for activation in chain.activations)
    if straight and criterion.convex:
        found.append(
            "PCH and Gauss-Newton are the same here: the activations are piecewise linear (σ'' = 0) and the "
            f"criterion `{criterion.name}` is convex, so nothing is left for PCH to correct."
        )
    if criterion.convex is False:
        found.append(
            f"Criterion `{criterion.name}` is not convex: Gauss-Newton may be indefinite, and solvers that "
            "need a positive semi-definite matrix then refuse it."
        )
    if chain is None:
        found.append("The model is no chain of Linear layers: providers that recur over layers are left out.")
    return [*found, *_outside(problem), *_modes(problem)]


def _outside(problem: Problem) -> list[str]:
    """That some trainable parameters have no block."""
    trainable = {name: p for name, p in problem.model.named_parameters() if p.requires_grad}
    left = problem.network.left_out
    if not left:
        return []
    share = sum(trainable[name].numel() for name in left) / sum(p.numel() for p in trainable.values())
    return [
        f"{len(left)} of {len(trainable)} trainable parameters ({share:.0%} of the entries: "
        f"{named_briefly(left)}) have no "
        "curvature here, because layers=[…] leaves them out: errors, times and memory are of the rest."
    ]


def _modes(problem: Problem) -> list[str]:
    """That layers which behave otherwise in training are measured as in evaluation."""
    kinds = (*DROPOUTS, nn.modules.batchnorm._BatchNorm)
    found = sorted({type(module).__name__ for module in problem.model.modules() if isinstance(module, kinds)})
    if not found:
        return []
    return [
        f"{' and '.join(found)} are in evaluation mode: in training mode the loss of an example would depend "
        "on chance or on the rest of its batch, and would have no curvature of its own."
    ]
