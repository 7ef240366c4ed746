"""What an estimate and a solve cost: peak bytes, bytes held by the result, operations, and seconds by phase.

    estimate   from the batch to the curvature: forward and backward pass, statistics, gradient (in factors)
    prepare    all that needs only the matrix: factorisations, bases
    apply      the direction

**Memory.** The peak counts everything that must be in memory at once: the parameters, the batch, the
recording of the forward and backward pass, the curvature and the solver's work. The very same function runs
on real tensors, to measure, and on fake ones, to plan; no formula for bytes exists. Where another thread
looks at the stack meanwhile (a Dask worker's profiler does, and takes long the first time that it reads a
source file), what it holds would be counted as held by the result. Such a run is recognised, and made again.

**Time.** Every call starts from a problem of which nothing has been computed, since curvatures keep what they
have factorised. One measurement is as many calls as last `MIN_SECONDS` together, divided by their number. The
seconds are those of the wall clock without the time in which the work was ready to run and another program
had the processor (`curvlab.measure.stopwatch.Elapsed.own`). A measurement that waited for more than a tenth
of its time is *disturbed*: it is made again, at most `MEASUREMENTS` times in all, and the one that waited
least counts. Where `IN_VAIN` in a row stayed disturbed the machine is busy throughout, and none is made again
until one is quiet (`Patience`). Each row says what it saw: `wall_seconds` and `cpu_seconds` of a call,
`waited` as a share of the wall clock, `load` as the number of processors that others kept busy, and
`attempts`. Where more than a fifth of the rows are disturbed, the times are not trusted
(`disturbance_words`). Which pair is quicker is decided round by round (`decide_times`).

**Controls**, which a pair has to beat, are measured as the pairs are:

    identity   the gradient step -g/α, which is the damped step of no curvature, C = 0
    sgd        forward, backward and θ ← θ - ηg as torch does them: time and memory only
    newton     the exact damped Newton step itself, where it could be solved

The direction of `sgd` is that of `identity`: at the best scale the two are one, so only its cost is its own.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter, process_time
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.linalg.execution import collected
from curvlab.linalg.steps import Gradient
from curvlab.measure import device as devices
from curvlab.measure.memory import Allocation, collector_off, peak_bytes, track
from curvlab.measure.operations import counting
from curvlab.measure.stopwatch import Clock, Elapsed, busy_seconds, calls_lasting, elapsed
from curvlab.problem import Problem
from curvlab.providers import Provider, estimate
from curvlab.solvers import Mixed, Solution, Solver, solve
from curvlab.solvers.run import group_by_solver, solver_units
from curvlab.solvers.solution import Unit
from curvlab.studies.compare.decisions import CONFIDENCE, Decision, decide
from curvlab.studies.compare.directions import backpropagate
from curvlab.studies.store import Row

__all__ = [
    "CONTROLS",
    "TIMED",
    "ControlWatch",
    "Measurement",
    "Pair",
    "Patience",
    "Phases",
    "Stopwatch",
    "Usage",
    "control_usage",
    "decide_times",
    "disturbance_words",
    "fresh",
    "gradient_step",
    "memory",
    "separate_runs_words",
    "usage",
]

ATTEMPTS = 5
"""How often a run that another thread disturbs is made again."""


@dataclass(frozen=True)
class Pair:
    """A provider and a solver with the damping they are compared at."""

    provider: str | Provider
    solver: str | Solver
    alpha: float

    def run(self, problem: Problem) -> tuple[Curvature, Solution]:
        """Estimate and solve, from the batch to the direction."""
        curvature = estimate(self.provider, problem)
        return curvature, solve(self.solver, curvature, problem.gradient(), alpha=self.alpha)


@dataclass(frozen=True)
class Usage:
    """Bytes and operations of one run of a pair.

    `held_bytes` is what the curvature and the solution keep alive, the recording they refer to included;
    `largest` the largest single tensor that was made.
    """

    peak_bytes: int
    held_bytes: int
    flops: int
    largest: Allocation | None


def fresh(problem: Problem) -> Problem:
    """The same problem without what was computed of it before."""
    if problem.streamed:
        return problem
    batch = next(problem.batches())
    return problem.with_data(batch.inputs, batch.targets)


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Keep what exists out of garbage collections inside, which counting makes many of.

    With torch loaded, a full collection visits half a million objects that counting has no interest in.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def usage(pair: Pair, problem: Problem) -> Usage:
    """Run `pair` once on a fresh copy of `problem` and count its bytes and its operations.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
    >>> problem = Problem(model, "cross-entropy", torch.ones(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    >>> used = usage(Pair("pch-1", "kfi", 0.05), problem)
    >>> used.peak_bytes > used.held_bytes > 0
    True
    """
    return _repeat_until_undisturbed(lambda: _count_bytes_and_operations(pair, problem))


def memory(pair: Pair, problem: Problem) -> Usage:
    """The same without operations, whose counting takes as long again (`flops` is 0)."""
    return _repeat_until_undisturbed(lambda: _count_bytes(pair, problem))


def _repeat_until_undisturbed(measure: Callable[[], tuple[Usage, bool]]) -> Usage:
    """The first measurement that no thread disturbed; each disturbed, the smallest: they only add bytes."""
    found = []
    for _ in range(ATTEMPTS):
        used, disturbed = measure()
        if not disturbed:
            return used
        found.append(used)
    peak, held = min(used.peak_bytes for used in found), min(used.held_bytes for used in found)
    return replace(found[0], peak_bytes=peak, held_bytes=held)


def _count_bytes_and_operations(pair: Pair, problem: Problem) -> tuple[Usage, bool]:
    with counting() as operations:
        used, disturbed = _track_one_run(pair, problem)
    # Outside: on an accelerator the peak takes another run, whose operations are not to be counted too.
    return replace(used, flops=operations.total, peak_bytes=_peak(pair, problem, used.peak_bytes)), disturbed


def _count_bytes(pair: Pair, problem: Problem) -> tuple[Usage, bool]:
    used, disturbed = _track_one_run(pair, problem)
    return replace(used, peak_bytes=_peak(pair, problem, used.peak_bytes)), disturbed


def _track_one_run(pair: Pair, problem: Problem) -> tuple[Usage, bool]:
    """The tensor bytes of one run, and whether another thread held some of them."""
    problem = fresh(problem)
    witness = _Witness()
    alive = weakref.ref(witness)
    kept: Any = None
    with _quick_collections(), track(_starting_tensors(problem), record=True) as tracker:
        kept = _run(pair, problem, witness)
        del witness
    disturbed = tracker.disturbed or alive() is not None
    del kept
    held = tracker.current_bytes - tracker.starting_bytes
    largest = tracker.largest(1)
    return Usage(tracker.peak_bytes, held, 0, largest[0] if largest else None), disturbed


class _Witness:
    """Lives in a frame of the work: beyond the work's end only where someone holds its frames."""


def _run(pair: Pair, problem: Problem, witness: _Witness) -> tuple[Curvature, Solution]:
    return pair.run(problem)


def _peak(pair: Pair, problem: Problem, counted: int) -> int:
    """The bytes counted, or on an accelerator those that its allocator handed out."""
    example = next(problem.model.parameters())
    if not devices.has_allocator_statistics(example.device) or not devices.readable(example):
        return counted
    again = fresh(problem)
    return peak_bytes(lambda: pair.run(again), device=example.device, baseline=_starting_tensors(problem))


def _starting_tensors(problem: Problem) -> list[Tensor]:
    """What is there before any work: the parameters and, unless it is streamed, the batch."""
    return list(problem.tensors.values())


MIN_SECONDS = 0.01
MEASUREMENTS = 3
IN_VAIN = 10
DISTURBED = 0.1
"""A measurement that waited for more than this share of its time was disturbed."""
ROUNDS = 3
"""From so many rounds on paired differences decide between times."""
TOLERATED = 0.2
"""Times are trusted as long as no larger share of the rows is disturbed."""


@dataclass(frozen=True)
class Phases:
    """Seconds of one estimate and one solve."""

    estimate: float = 0.0
    prepare: float = 0.0
    apply: float = 0.0

    @property
    def total(self) -> float:
        """From the batch to the direction."""
        return self.estimate + self.prepare + self.apply

    def __add__(self, other: Phases) -> Phases:
        return Phases(self.estimate + other.estimate, self.prepare + other.prepare, self.apply + other.apply)

    def __truediv__(self, calls: int) -> Phases:
        return Phases(self.estimate / calls, self.prepare / calls, self.apply / calls)


@dataclass(frozen=True)
class Measurement:
    """One measurement of a pair: seconds of one call, and what other programs did meanwhile.

    `took` is the time of all calls together, `load` the number of processors that others kept busy.
    """

    phases: Phases
    took: Elapsed
    calls: int
    load: float = math.nan
    attempts: int = 1

    @property
    def waited(self) -> float:
        """The share of the wall clock that was spent waiting for a processor."""
        return self.took.waited / self.took.wall if self.took.wall > 0 else 0.0

    def row(self) -> Row:
        """The measurement as a row of the store holds it."""
        return {
            "estimate_seconds": self.phases.estimate,
            "prepare_seconds": self.phases.prepare,
            "apply_seconds": self.phases.apply,
            "wall_seconds": self.took.wall / self.calls,
            "cpu_seconds": self.took.processor / self.calls,
            "waited": self.waited,
            "load": self.load,
            "attempts": self.attempts,
        }


class Patience:
    """How often a disturbed measurement is made: less where all of the last ones stayed disturbed.

    One is shared by the watches of a comparison, which take turns.

    >>> patience = Patience()
    >>> for _ in range(IN_VAIN):
    ...     patience.note(disturbed=True)
    >>> patience.attempts
    1
    """

    def __init__(self) -> None:
        self._in_vain = 0

    @property
    def attempts(self) -> int:
        """How often the next measurement is made at most."""
        return MEASUREMENTS if self._in_vain < IN_VAIN else 1

    def note(self, *, disturbed: bool) -> None:
        """Take note of how a measurement ended."""
        self._in_vain = self._in_vain + 1 if disturbed else 0


class Stopwatch:
    """Measures one pair on one problem; warms up, and finds how many calls to average, the first time.

    `clock` gives seconds, `time.perf_counter` by default; `patience` is shared with other watches.
    """

    def __init__(
        self, pair: Pair, problem: Problem, clock: Clock | None = None, patience: Patience | None = None
    ) -> None:
        self.pair, self.problem = pair, problem
        self._patience = patience or Patience()
        self._elapsed = partial(elapsed, device=next(problem.model.parameters()).device, clock=clock)
        self._calls: int | None = None
        self._whole = False

    def measure(self) -> Measurement:
        """One measurement: the mean over a few calls, made again while others disturb it.

        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
        >>> problem = Problem(model, "cross-entropy", torch.ones(5, 4), torch.tensor([0, 1, 0, 1, 0]))
        >>> Stopwatch(Pair("fisher", "kfi", 0.05), problem).measure().phases.total > 0
        True
        """
        if self._calls is None:
            self._calls = self._warm_up()
        best = self._attempt(self._calls, 1)
        for attempt in range(2, self._patience.attempts + 1):
            if best.waited <= DISTURBED:
                break
            again = self._attempt(self._calls, attempt)
            best = replace(min(best, again, key=lambda one: one.waited), attempts=attempt)
        self._patience.note(disturbed=best.waited > DISTURBED)
        return best

    def _attempt(self, calls: int, attempt: int) -> Measurement:
        busy, own, started = busy_seconds(), process_time(), perf_counter()
        phases, took = self._total(calls)
        others = busy_seconds() - busy - (process_time() - own)
        load = others / (perf_counter() - started)
        return Measurement(phases / calls, took, calls, 0.0 if load < 0 else load, attempt)

    def _warm_up(self) -> int:
        _, solution = self.pair.run(fresh(self.problem))
        self._whole = any(block.route == "operator" for block in solution.blocks.values())
        self._call()
        return calls_lasting(MIN_SECONDS, lambda calls: self._total(calls)[0].total)

    def _total(self, calls: int) -> tuple[Phases, Elapsed]:
        """What so many calls took together."""
        phases, took = Phases(), Elapsed()
        with collector_off():
            for _ in range(calls):
                parts = self._call()
                phases = phases + Phases(*(part.own for part in parts))
                took = sum(parts, took)
        return phases, took

    def _call(self) -> tuple[Elapsed, Elapsed, Elapsed]:
        problem = fresh(self.problem)
        first, (curvature, gradient) = self._elapsed(
            lambda: (estimate(self.pair.provider, problem), problem.gradient())
        )
        solve_it = self._solve_whole if self._whole else self._solve_by_layers
        return first, *solve_it(curvature, gradient)

    def _solve_whole(self, curvature: Curvature, gradient: Gradient) -> tuple[Elapsed, Elapsed]:
        """CG on a matrix-free curvature has nothing to prepare."""
        took, _ = self._elapsed(lambda: solve(self.pair.solver, curvature, gradient, alpha=self.pair.alpha))
        return Elapsed(), took

    def _solve_by_layers(self, curvature: Curvature, gradient: Gradient) -> tuple[Elapsed, Elapsed]:
        units: list[Unit] = []
        damping = Mixed(self.pair.alpha, l2=curvature.shift)

        def prepared() -> list[object]:
            units.extend(solver_units(self.pair.solver, curvature, gradient))
            with collected() as checks:  # read together, as a solve reads them
                states = [unit.solver.prepare(unit.given, damping, unit.gradient) for unit in units]
                if checks is not None:
                    checks.read()
            return states

        prepare, states = self._elapsed(prepared)

        def applied() -> None:
            for solver, places in group_by_solver(units):
                own, given = [states[i] for i in places], [units[i].gradient for i in places]
                if solver.apply_jointly(own, given) is None:
                    for state, gradient_of_unit in zip(own, given, strict=True):
                        solver.apply(state, gradient_of_unit)

        apply, _ = self._elapsed(applied)
        return prepare, apply


def decide_times(
    repetitions: pd.DataFrame, confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[Decision, ...]:
    """Which pairs are quicker beyond the noise, from the frame of repetitions: names are `provider + solver`.

    Only rounds of one run are paired. Where every pair has rounds in common with all others there is one
    decision. Where pairs were timed in different runs (merged folders, or pairs that were added later) there
    is one of each run on the pairs it has timed, and none between pairs of different runs.

    >>> seconds = [1.0, 2.0, 1.5, 3.1, 1.2, 2.4, 1.0, 2.1]
    >>> frame = pd.DataFrame({"provider": ["p", "q"] * 4, "solver": "s",
    ...     "repetition": [0, 0, 1, 1, 2, 2, 3, 3], "estimate_seconds": seconds,
    ...     "prepare_seconds": 0.0, "apply_seconds": 0.0})
    >>> [decision.preferred for decision in decide_times(frame)]
    ['p + s']
    """
    rounds = _rounds(repetitions)
    whole = rounds.notna().all(axis=1)
    by_run = [own.dropna(axis=1, how="all") for _, own in rounds.groupby(level="run", sort=False)]
    parts = [rounds] if whole.sum() >= ROUNDS or len(by_run) == 1 else by_run
    return tuple(
        decide({str(name): part[name].tolist() for name in part}, confidence=confidence, seed=seed)
        for part in parts
    )


def _rounds(repetitions: pd.DataFrame) -> pd.DataFrame:
    """The total seconds of each pair (columns) in each round of each run (rows)."""
    total = repetitions[["estimate_seconds", "prepare_seconds", "apply_seconds"]].sum(axis=1, skipna=False)
    named = repetitions.assign(name=repetitions["provider"] + " + " + repetitions["solver"], total=total)
    named = named if "run" in named else named.assign(run="")
    return named.pivot_table("total", ["run", "repetition"], "name", aggfunc="last", sort=False)


def separate_runs_words(repetitions: pd.DataFrame) -> str:
    """That pairs were timed in different runs, from the frame of repetitions; empty where they were not."""
    pairs = repetitions[repetitions["solver"] != ""] if len(repetitions) else repetitions
    if pairs.empty or len(decide_times(pairs)) == 1:
        return ""
    return (
        "Not all pairs were timed in the same run: only times of one run are compared round by round, all "
        "others by their medians and interquartile ranges. Compare again with --fresh to time all together."
    )


def disturbance_words(repetitions: pd.DataFrame) -> str:
    """That the times are not trusted, and why, from the frame of repetitions; empty where they are.

    >>> disturbance_words(pd.DataFrame({"waited": [0.5, 0.0], "load": [1.5, 0.5]}))
    'The times are not trusted: other programs disturbed 1 of 2 measurements (each made up to 3 times) and had
     1 of the processors on average. Measure again on a quieter machine, with --fresh.'
    """
    if "waited" not in repetitions or repetitions.empty:
        return ""
    disturbed, count = int((repetitions["waited"] > DISTURBED).sum()), len(repetitions)
    if disturbed <= TOLERATED * count:
        return ""
    load = float(repetitions["load"].mean())
    busy = "" if math.isnan(load) else f" and had {load:.2g} of the processors on average"
    return (
        f"The times are not trusted: other programs disturbed {disturbed} of {count} measurements (each made "
        f"up to {MEASUREMENTS} times){busy}. Measure again on a quieter machine, with --fresh."
    )


TIMED = ("identity", "sgd")
"""The controls that are timed in the same rounds as the pairs."""

CONTROLS = (*TIMED, "newton")


def gradient_step(problem: Problem, alpha: float) -> dict[str, Tensor]:
    """-g/α, formed, by parameter name."""
    gradient = problem.gradient()
    return {name: gradient[name].detach() / -alpha for name in gradient}


def _runner(control: str, problem: Problem, alpha: float) -> Callable[[], Any]:
    """One step of a control; that of `sgd` is on a copy of the model, and is undone by the next."""
    if control == "identity":
        return lambda: gradient_step(fresh(problem), alpha)
    model = copy.deepcopy(problem.model)
    inside = Problem(
        model,
        problem.criterion,
        *_data(problem),
        layers=list(problem.network.parameters),
        l2=problem.l2,
        output=problem.network.call.output,
    )
    optimizer = torch.optim.SGD(list(inside.network.parameters.values()), lr=1e-12)

    def step() -> None:
        for batch in inside.batches():
            backpropagate(inside, batch.inputs, batch.targets)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _data(problem: Problem) -> tuple[Any, ...]:
    batches = [(batch.inputs, batch.targets) for batch in problem.batches()]
    return (batches,) if problem.streamed else batches[0]


def control_usage(control: str, problem: Problem, alpha: float) -> Mapping[str, int]:
    """Peak bytes, the parameters and the batch included, and operations of one step."""
    run = _runner(control, problem, alpha)
    given = list(problem.tensors.values())
    with counting() as operations:
        run()
    example = problem.network.example
    if devices.has_allocator_statistics(example.device):
        peak = peak_bytes(run, device=example.device, baseline=given)
    else:
        with track(given, record=False) as tracker:
            kept = run()
        del kept
        peak = tracker.peak_bytes
    return {"peak_bytes": peak, "flops": operations.total}


class ControlWatch(Stopwatch):
    """Measures the steps of a control as a `Stopwatch` does a pair's; all of its time is that of `estimate`.

    >>> problem = Problem(torch.nn.Linear(2, 2), "mse", torch.eye(2), torch.zeros(2, 2))
    >>> ControlWatch("sgd", problem, 0.05).measure().phases.total > 0
    True
    """

    def __init__(
        self, control: str, problem: Problem, alpha: float, patience: Patience | None = None
    ) -> None:
        super().__init__(Pair(control, "", alpha), problem, patience=patience)
        self._run = _runner(control, problem, alpha)

    def _warm_up(self) -> int:
        self._run()
        return calls_lasting(MIN_SECONDS, lambda calls: self._total(calls)[0].total)

    def _call(self) -> tuple[Elapsed, Elapsed, Elapsed]:
        return self._elapsed(self._run)[0], Elapsed(), Elapsed()
