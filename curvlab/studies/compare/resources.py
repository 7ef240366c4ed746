"""What one estimate and one solve use: peak bytes, bytes held by their result, operations.

The peak counts everything that must be in memory at once: the parameters, the batch, the recording of
the forward and backward pass, the curvature and the solver's work. The very same function runs on real
tensors, to measure, and on fake ones, to plan; no formula for bytes exists.

Where another thread looks at the stack meanwhile (a Dask worker's profiler does, and takes long the first
time that it reads a source file), what it holds would be counted as held by the result. Such a run is
recognised, and made again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.measure import device as devices
from curvlab.measure.flops import counting
from curvlab.measure.memory import Allocation, peak_bytes, track
from curvlab.problem import Problem
from curvlab.providers import Provider, estimate
from curvlab.solvers import Solution, Solver, solve

__all__ = ["Pair", "Usage", "fresh", "memory", "usage"]

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
