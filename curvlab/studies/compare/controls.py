"""The controls of a comparison: what a pair has to beat, measured as the pairs are.

    identity   the gradient step -g/α, which is the damped step of no curvature, C = 0
    sgd        forward, backward and θ ← θ - ηg as torch does them: time and memory only
    newton     the exact damped Newton step itself, where it could be solved

The direction of `sgd` is that of `identity`: at the best scale the two are one, so only its cost is its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvlab.measure import device as devices
from curvlab.measure.flops import counting
from curvlab.measure.memory import peak_bytes, track
from curvlab.measure.stopwatch import Elapsed, calls_lasting
from curvlab.problem import Problem
from curvlab.studies.compare.descent import backpropagate
from curvlab.studies.compare.resources import Pair, fresh
from curvlab.studies.compare.timing import MIN_SECONDS, Patience, Stopwatch

__all__ = ["CONTROLS", "TIMED", "ControlWatch", "control_usage", "gradient_step"]

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
