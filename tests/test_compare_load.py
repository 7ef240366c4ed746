"""The same data give the same recommendation on a quiet machine and on a busy one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from curvlab.report.comparison import compare
from curvlab.studies.setup import Setup

BUSY = 2 * (os.cpu_count() or 1)


def spin() -> None:
    """Keep a processor busy until the process is ended."""
    while True:
        sum(range(10_000))


@contextmanager
def busy_machine() -> Iterator[None]:
    started = [multiprocessing.Process(target=spin, daemon=True) for _ in range(BUSY)]
    for one in started:
        one.start()
    try:
        yield
    finally:
        for one in started:
            one.terminate()
            one.join()


def recommended() -> tuple[set[tuple[str, str]], float]:
    """The pairs that are recommended, equal ones together, and the load that the timing has seen."""
    found = compare(
        Setup(arch="64-32-16-10", data="digits", batch=500),
        ["fisher", "pch-2"],
        ["kfi", "cg"],
        at=("step:20",),
        alphas=(),
        batches=3,
        repetitions=15,
        threads=1,
    )
    answer = found.recommendation
    assert answer.best is not None
    return {answer.best, *answer.level}, float(found.repetitions["load"].mean())


@pytest.mark.long
def test_the_recommendation_is_the_same_with_busy_processes_beside() -> None:
    quiet, _ = recommended()
    with busy_machine():
        busy, load = recommended()
    assert load > 0.5, "the load has been seen"
    assert busy == quiet
