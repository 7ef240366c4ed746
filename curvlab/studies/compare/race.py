"""The race: every pair and every baseline, tuned alike, trained from several seeds.

    tuning   learning rate and α of each contestant, by successive halving on a validation set
             (`curvlab.studies.tuning`); with `tune=False` one epoch of each as it is given, for its pace
    runs     each contestant from `train_seeds` seeds: other first weights, the same data, scored on the
             test set

There are two budgets, and each run serves both. *Equal epochs*: all are compared after N epochs. *Equal
processor time*: a contestant whose epochs are quicker goes on until it has had the time that the slowest
needs for N epochs, for at most `LONGEST` · N epochs. With the pace p of a contestant, the median over its
seeds of the processor's seconds per epoch, T = min p · (its epochs) is the most that every contestant has
had, and each is compared after ⌊T/p⌋ epochs. How many that are is a measured time like any other, so the rows
of `by_time` differ from one measurement to the next.

Rows are keyed by what they depend on; `race_tasks` says what to run next, from the rows that there are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from curvlab.exceptions import SpecError
from curvlab.studies.compare.settings import Settings
from curvlab.studies.compare.tasks import Task, head_of, labels
from curvlab.studies.setup import Setup
from curvlab.studies.store import Row
from curvlab.studies.train.plan import EPOCH, TrainPlan, rates_of
from curvlab.studies.train.run import OK, train
from curvlab.studies.tuning import Trial, Tuned, Tuning, run_trial, trial_of

__all__ = [
    "Contestant",
    "RaceRows",
    "measure_run",
    "measure_trial",
    "planned_tasks",
    "race_rows",
    "race_tasks",
]

LONGEST = 10
"""A quick contestant trains for at most so many times the epochs, however long the slowest takes."""
MARGIN = 1.25
"""Some more epochs than the pace of the tuning asks for, because paces are measured."""
EDGES = {"lr": "learning rate", "alpha": "α"}
ASKED = ("epochs_asked", "train_batch", "lr")


@dataclass(frozen=True)
class Contestant:
    """One that races: what the report calls it, and its optimizer; what the text leaves out may be tuned."""

    name: str
    provider: str
    solver: str
    optimizer: str

    def tuning(self, epochs: int, tune: bool) -> Tuning:
        """How it is tuned; with nothing to tune, how its pace is measured."""
        return Tuning.of(self.optimizer, epochs) if tune else Tuning.of(self.optimizer, epochs, grid={})

    def named(self) -> Row:
        """How rows name it."""
        return {"optimizer": self.name, "provider": self.provider, "solver": self.solver}


def contestants(pairs: Iterable[tuple[str, str]], config: Mapping[str, Any]) -> list[Contestant]:
    """Every pair, then the baselines, by the settings of a comparison as plain values."""
    rate = "" if config.get("lr") is None else f",lr={config['lr']}"
    damping = "" if config.get("tune") else f",alpha={config['alpha']}"
    found = [
        Contestant(f"{p} + {s}", p, s, f"second-order[provider={p},solver={s}{damping}{rate}]")
        for p, s in pairs
    ]
    return found + [Contestant(name, "", "", name) for name in config["baselines"]]


def race_tasks(
    settings: Settings, rows: Iterable[Row], left_out: Collection[tuple[str, str]] = ()
) -> list[Task]:
    """What to run next: trials of tunings, then runs; nothing once all rows are there."""
    if not settings.epochs:
        return []
    own = [row for row in rows if row.get("study") == settings.study]
    results = dict(trial_of(row) for row in own if row["kind"] == "tuning" and _asks_same(row, settings))
    tuned: dict[Contestant, Tuned | None] = {}
    trials: list[Task] = []
    for one in _racing(settings, left_out):
        try:
            tuning = one.tuning(settings.epochs, settings.tune)
            asked = tuning.next_trials(results)
        except SpecError:  # the run itself says what is wrong with it
            tuned[one] = None
            continue
        trials += [_trial_task(settings, one, trial) for trial in asked]
        tuned[one] = None if asked else tuning.outcome(results)
    return trials or list(_run_tasks(settings, tuned))


def planned_tasks(settings: Settings, left_out: Collection[tuple[str, str]] = ()) -> int:
    """How many tasks a race has in all."""
    if not settings.epochs:
        return 0
    count = 0
    for one in _racing(settings, left_out):
        try:
            count += sum(one.tuning(settings.epochs, settings.tune).sizes)
        except SpecError:
            continue
        finally:
            count += settings.train_seeds
    return count


def _racing(settings: Settings, left_out: Collection[tuple[str, str]]) -> list[Contestant]:
    pairs = [pair for pair in (labels(*pair) for pair in settings.pairs) if pair not in left_out]
    return contestants(pairs, settings.fields())


def _asks_same(row: Row, settings: Settings) -> bool:
    return bool(row.get("train_batch") == settings.train_batch)


def _trial_task(settings: Settings, one: Contestant, trial: Trial) -> Task:
    choice = {"optimizer": trial.spec, "epochs": trial.epochs, "train_batch": settings.train_batch}
    head = head_of(settings, "tuning", settings.key("tuning", **choice)) | one.named()
    head |= {"spec": trial.spec, "epochs_asked": trial.epochs, "train_batch": settings.train_batch}
    return Task("tuning", settings, head, optimizer=trial.spec)


def _run_tasks(settings: Settings, tuned: Mapping[Contestant, Tuned | None]) -> Iterator[Task]:
    """All seeds of every contestant: seed by seed, so that an interrupted race has whole rounds."""
    paces = [found.epoch_seconds for found in tuned.values() if found and math.isfinite(found.loss)]
    slowest = max(paces, default=0.0)
    for seed in range(settings.train_seeds):
        for one, found in tuned.items():
            spec = one.optimizer if found is None else found.spec
            key = settings.key("convergence", optimizer=spec, seed=seed)
            asked = {name: settings.value(name) for name in ("train_batch", "lr")}
            head = head_of(settings, "convergence", key) | one.named() | asked
            head |= {"spec": spec, "run_seed": seed, "tuned": settings.tune, "epochs_asked": settings.epochs}
            head |= {"epochs_run": _epochs_in_time(settings.epochs, found, slowest), **_cost_of(found)}
            yield Task("convergence", settings, head, optimizer=spec)


def _cost_of(found: Tuned | None) -> Row:
    """What a tuning took, and which of its values lie at the end of their grid."""
    if found is None:
        return {}
    edges = ", ".join(EDGES.get(name, name) for name in found.at_edge)
    return {"tuning_epochs": found.epochs, "tuning_seconds": found.cpu_seconds, "at_edge": edges}


def _epochs_in_time(epochs: int, found: Tuned | None, slowest: float) -> int:
    """Epochs until a contestant has had the time that the slowest needs for `epochs` of them."""
    if found is None or not math.isfinite(found.loss) or found.epoch_seconds <= 0:
        return epochs
    wanted = math.ceil(MARGIN * epochs * slowest / found.epoch_seconds)
    return epochs if found.epoch_seconds == slowest else min(max(epochs, wanted), LONGEST * epochs)


def _setup(settings: Settings) -> Setup:
    assert isinstance(settings.subject, Setup)
    return replace(settings.subject, batch=settings.train_batch)


def measure_trial(task: Task) -> Row:
    """One training of a tuning; one that diverges is a result too, with a loss that is not finite."""
    result = run_trial(_setup(task.settings), Trial(task.optimizer, task.head["epochs_asked"]))
    return {"loss": result.loss, "cpu_seconds": result.cpu_seconds, "message": result.message}


def measure_run(task: Task) -> Row:
    """`epochs` holds one entry per epoch, the first before training; a run that diverged has failed."""
    setup, head = _setup(task.settings), task.head
    plan = TrainPlan(setup, task.optimizer, head["epochs_run"], run_seed=setup.seed + head["run_seed"])
    frame = train(plan, count_memory=False)
    last = frame.iloc[-1]
    columns = [*(column.name for column in EPOCH), "cpu_seconds"]
    ended = {}
    if last["status"] != OK and last["epoch"] <= head["epochs_asked"]:
        ended = {"status": "failed", "message": f"{last['status']}: {last['message']}"}
    return {"epochs": frame[columns].to_dict("records"), **ended}


@dataclass(frozen=True)
class RaceRows:
    """The rows of a race's frames, and those of the store that they are made of.

    `convergence` has one row per contestant, seed and epoch, up to the epochs asked for; `by_time` those of
    the longer runs that equal processor time needs, up to that time; `tuning` one row per trial.
    """

    convergence: list[Row]
    by_time: list[Row]
    tuning: list[Row]
    runs: list[Row]
    warnings: list[str]


def race_rows(runs: Sequence[Row], trials: Sequence[Row], config: Mapping[str, Any]) -> RaceRows:
    """The race of a comparison's settings, from the rows of one study; older rows are of one seed."""
    pairs = [(provider, solver) for provider in config["providers"] for solver in config["solvers"]]
    racing = contestants(pairs, config)
    own = _runs_of(runs, racing, config)
    spent = _TimeBudget.of(own)
    return RaceRows(
        convergence=[
            epoch | spent.reached(run)
            for run in own
            for epoch in _epoch_rows(run)
            if epoch["epoch"] <= config["epochs"]
        ],
        by_time=[
            epoch
            for run in own
            for epoch in _epoch_rows(run)
            if epoch["epoch"] <= spent.epochs.get(run["optimizer"], -1)
        ],
        tuning=_tuning_rows(racing, trials, config, {row["optimizer"] for row in own}),
        runs=own,
        warnings=[f"{row['optimizer']}: {row['message']}" for row in own if row["status"] != OK],
    )


def _runs_of(rows: Sequence[Row], racing: Sequence[Contestant], config: Mapping[str, Any]) -> list[Row]:
    """The runs that the settings ask for: by contestant, then by seed."""
    asked = [config.get(name) for name in ("epochs", "train_batch", "lr")]
    fitting = [
        row
        for row in rows
        if [row.get(name) for name in ASKED] == asked
        and bool(row.get("tuned")) == bool(config.get("tune"))
        and row.get("run_seed", 0) < config.get("train_seeds", 1)
    ]
    found = {(row["optimizer"], row.get("run_seed", 0)): row for row in fitting}
    order = {one.name: place for place, one in enumerate(racing)}
    known = [key for key in found if key[0] in order]
    return [found[key] for key in sorted(known, key=lambda key: (order[key[0]], key[1]))]


@dataclass(frozen=True)
class _TimeBudget:
    """The processor time that every contestant has had, and the epochs that each makes in it."""

    seconds: float
    epochs: dict[str, int]

    @classmethod
    def of(cls, runs: Sequence[Row]) -> _TimeBudget:
        """From the runs of the contestants that came to their end from every seed."""
        ends: dict[str, list[Row]] = {}
        for run in runs:
            ends.setdefault(run["optimizer"], []).append(run["epochs"][-1] if run.get("epochs") else {})
        whole = {
            name: last
            for name, last in ends.items()
            if all(end.get("status") == OK and end.get("cpu_seconds") and end["epoch"] for end in last)
        }
        paces = {
            name: median(end["cpu_seconds"] / end["epoch"] for end in last) for name, last in whole.items()
        }
        had = {name: min(end["epoch"] for end in last) for name, last in whole.items()}
        seconds = min((paces[name] * had[name] for name in whole), default=0.0)
        made = {name: min(had[name], int(seconds / paces[name] * (1 + 1e-9))) for name in whole}
        return cls(seconds, made)

    def reached(self, run: Row) -> Row:
        """Where a run was when the time was spent; nothing where no epoch was finished by then."""
        epochs = self.epochs.get(run["optimizer"], 0)
        if not epochs:
            return {}
        loss = next(one["test_loss"] for one in run["epochs"] if one["epoch"] == epochs)
        return {"time_budget": self.seconds, "epochs_in_time": epochs, "loss_in_time": loss}


def _epoch_rows(run: Row) -> list[Row]:
    named = {name: run[name] for name in ("optimizer", "provider", "solver")}
    named |= rates_of(run.get("spec", "")) | {"seed": run.get("run_seed", 0), "tuned": bool(run.get("tuned"))}
    named |= {name: run.get(name) for name in ("tuning_epochs", "tuning_seconds", "at_edge")}
    return [named | epoch for epoch in run.get("epochs", [])]


def _tuning_rows(
    racing: Sequence[Contestant], trials: Sequence[Row], config: Mapping[str, Any], ran: Collection[str]
) -> list[Row]:
    """One row per trial of the contestants that ran, with its values and whether they were chosen."""
    if not config.get("tune") or not config["epochs"]:
        return []
    results = dict(trial_of(row) for row in trials if row.get("train_batch") == config.get("train_batch"))
    found: list[Row] = []
    for one in racing:
        if one.name not in ran:
            continue
        tuning = one.tuning(config["epochs"], True)
        if not tuning.grid or tuning.next_trials(results):
            continue
        outcome = tuning.outcome(results)
        for values, trial in tuning.trials(results):
            result, chosen = results[trial], trial.spec == outcome.spec
            row = one.named() | values | {"epochs": trial.epochs, "validation_loss": result.loss}
            row |= {"cpu_seconds": result.cpu_seconds, "chosen": chosen}
            found.append(row | {"at_edge": ", ".join(outcome.at_edge) if chosen else ""})
    return found
