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
CASES = {
    "sigmoid": (Setup(arch="64-32-16-10", batch=500), ["fisher", "pch-2"], ["kfi", "cg"], "step:20"),
    "tanh": (
        Setup(arch="fcnn[widths=64-24-10,activation=tanh]", batch=300),
        ["fisher", "gauss-newton"],
        ["kfi", "ea-cg"],
        "step:40",
    ),
}


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


def recommended(case: str, seed: int) -> tuple[str, float]:
    """The pair that is recommended, by what its step does, and the load that the timing has seen."""
    setup, providers, solvers, point = CASES[case]
    found = compare(
        Setup(arch=setup.arch, data="digits", batch=setup.batch, seed=seed),
        providers,
        solvers,
        at=(point,),
        alphas=(),
        batches=3,
        repetitions=15,
        threads=1,
    )
    best = found.recommendation.best
    return "gradient" if best is None else " + ".join(best), float(found.repetitions["load"].mean())


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_recommendation_is_the_same_with_busy_processes_beside(case: str, seed: int) -> None:
    quiet, _ = recommended(case, seed)
    with busy_machine():
        busy, load = recommended(case, seed)
    assert load > 0.5, "the load has been seen"
    assert busy == quiet
