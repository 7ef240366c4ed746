"""What one estimate and one solve use: peak bytes, bytes held by their result, operations.

The peak counts everything that must be in memory at once: the parameters, the batch, the recording of
the forward and backward pass, the curvature and the solver's work. The very same function runs on real
tensors, to measure, and on fake ones, to plan; no formula for bytes exists.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
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
    return problem.on(batch.inputs, batch.targets)


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
    with counting() as operations:
        used = memory(pair, problem)
    return replace(used, flops=operations.total)


def memory(pair: Pair, problem: Problem) -> Usage:
    """The same without operations, whose counting takes as long again (`flops` is 0)."""
    problem = fresh(problem)
    kept: Any = None
    with _quick_collections(), track(_given(problem), record=True) as tracker:
        kept = pair.run(problem)
    del kept
    held = tracker.current_bytes - tracker.starting_bytes
    largest = tracker.largest(1)
    return Usage(_peak(pair, problem, tracker.peak_bytes), held, 0, largest[0] if largest else None)


def _peak(pair: Pair, problem: Problem, counted: int) -> int:
    """The bytes counted, or on an accelerator those that its allocator handed out."""
    example = next(problem.model.parameters())
    if not devices.has_allocator_statistics(example.device) or not devices.readable(example):
        return counted
    again = fresh(problem)
    return peak_bytes(lambda: pair.run(again), device=example.device, baseline=_given(problem))


def _given(problem: Problem) -> list[Tensor]:
    """What is there before any work: the parameters and, unless it is streamed, the batch."""
    return list(problem.tensors.values())
