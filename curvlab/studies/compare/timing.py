"""The seconds of a pair's three phases, measured apart.

    estimate   from the batch to the curvature: forward and backward pass, statistics, gradient (in factors)
    prepare    all that needs only the matrix: factorisations, bases
    apply      the direction

Every call starts from a problem of which nothing has been computed, since curvatures keep what they
have factorised. One measurement is as many calls as last `MIN_SECONDS` together, divided by their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from curvlab.curvature import Curvature
from curvlab.gradient import Gradient
from curvlab.measure.collector import collector_off
from curvlab.measure.stopwatch import Clock, calls_lasting, timed
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.solvers import Mixed, solve
from curvlab.solvers.registry import solvers
from curvlab.solvers.solve import layer_gradient
from curvlab.studies.compare.resources import Pair, fresh

__all__ = ["Phases", "Stopwatch"]

MIN_SECONDS = 0.01


@dataclass(frozen=True)
class Phases:
    """Seconds of one estimate and one solve."""

    estimate: float
    prepare: float
    apply: float

    @property
    def total(self) -> float:
        """From the batch to the direction."""
        return self.estimate + self.prepare + self.apply

    def __add__(self, other: Phases) -> Phases:
        return Phases(self.estimate + other.estimate, self.prepare + other.prepare, self.apply + other.apply)

    def __truediv__(self, calls: int) -> Phases:
        return Phases(self.estimate / calls, self.prepare / calls, self.apply / calls)


class Stopwatch:
    """Measures one pair on one problem; warms up, and finds how many calls to average, the first time.

    `clock` gives seconds, `time.perf_counter` by default.
    """

    def __init__(self, pair: Pair, problem: Problem, clock: Clock | None = None) -> None:
        self.pair, self.problem = pair, problem
        self._timed = partial(timed, device=next(problem.model.parameters()).device, clock=clock)
        self._calls: int | None = None
        self._whole = False

    def measure(self) -> Phases:
        """One measurement: the mean over a few calls.

        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
        >>> problem = Problem(model, "cross-entropy", torch.ones(5, 4), torch.tensor([0, 1, 0, 1, 0]))
        >>> Stopwatch(Pair("fisher", "kfi", 0.05), problem).measure().total > 0
        True
        """
        if self._calls is None:
            self._calls = self._warm_up()
        return self._total(self._calls) / self._calls

    def _warm_up(self) -> int:
        _, solution = self.pair.run(fresh(self.problem))
        self._whole = any(block.route == "operator" for block in solution.blocks.values())
        self._call()
        return calls_lasting(MIN_SECONDS, lambda calls: self._total(calls).total)

    def _total(self, calls: int) -> Phases:
        """The seconds of so many calls together."""
        with collector_off():
            total = self._call()
            for _ in range(calls - 1):
                total = total + self._call()
        return total

    def _call(self) -> Phases:
        problem = fresh(self.problem)
        first, (curvature, gradient) = self._timed(
            lambda: (estimate(self.pair.provider, problem), problem.gradient())
        )
        return Phases(
            first, *(self._solve_whole if self._whole else self._solve_by_layers)(curvature, gradient)
        )

    def _solve_whole(self, curvature: Curvature, gradient: Gradient) -> tuple[float, float]:
        """CG on a matrix-free curvature has nothing to prepare."""
        seconds, _ = self._timed(lambda: solve(self.pair.solver, curvature, gradient, alpha=self.pair.alpha))
        return 0.0, seconds

    def _solve_by_layers(self, curvature: Curvature, gradient: Gradient) -> tuple[float, float]:
        solver, damping = solvers.make(self.pair.solver), Mixed(self.pair.alpha)
        given = [layer_gradient(layer, gradient) for layer in curvature.layers]
        pairs = list(zip(curvature.layers, given, strict=True))
        prepare, states = self._timed(lambda: [solver.prepare(layer, damping, g) for layer, g in pairs])

        def applied() -> object:
            together = solver.apply_jointly(states, given)
            return together or [solver.apply(s, g) for s, g in zip(states, given, strict=True)]

        apply, _ = self._timed(applied)
        return prepare, apply
