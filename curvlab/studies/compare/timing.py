"""The seconds of a pair's three phases, measured apart.

    estimate   from the batch to the curvature: forward and backward pass, statistics, gradient (in factors)
    prepare    all that needs only the matrix: factorisations, bases
    apply      the direction

Every call starts from a problem of which nothing has been computed, since curvatures keep what they
have factorised. One measurement is as many calls as last `MIN_SECONDS` together, divided by their number.

Other programs on the machine. The seconds are those of the wall clock without the time in which the work was
ready to run and another program had the processor (`curvlab.measure.stopwatch.Elapsed.own`). A measurement
that waited for more than a tenth of its time is *disturbed*: it is made again, at most `ATTEMPTS` times in
all, and the one that waited least counts. Where `IN_VAIN` in a row stayed disturbed the machine is busy
throughout, and none is made again until one is quiet (`Patience`). Each row says what it saw: `wall_seconds`
and `cpu_seconds` of a call, `waited` as a share of the wall clock, `load` as the number of processors that
others kept busy, and `attempts`. Where more than a fifth of the rows are disturbed, the times are not trusted
(`disturbance_words`). Which pair is quicker is decided round by round (`decide_times`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter, process_time

import pandas as pd

from curvlab.curvature import Curvature
from curvlab.linalg.steps import Gradient
from curvlab.measure.collector import collector_off
from curvlab.measure.stopwatch import Clock, Elapsed, busy_seconds, calls_lasting, elapsed
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.solvers import Mixed, solve
from curvlab.solvers.base import Unit
from curvlab.solvers.solve import group_by_solver, solver_units
from curvlab.studies.compare.decisions import CONFIDENCE, Decision, decide
from curvlab.studies.compare.resources import Pair, fresh
from curvlab.studies.store import Row

__all__ = [
    "Measurement",
    "Patience",
    "Phases",
    "Stopwatch",
    "decide_times",
    "disturbance_words",
    "separate_runs_words",
]

MIN_SECONDS = 0.01
ATTEMPTS = 3
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
        return ATTEMPTS if self._in_vain < IN_VAIN else 1

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
            return [unit.solver.prepare(unit.given, damping, unit.gradient) for unit in units]

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
        f"up to {ATTEMPTS} times){busy}. Measure again on a quieter machine, with --fresh."
    )
