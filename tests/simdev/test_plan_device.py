"""What a plan says of launches and reads, against what the simulated device counts."""

from __future__ import annotations

import pytest

import curvlab
from curvlab.linalg.execution import host_costs
from curvlab.studies.compare.costs import Pair, fresh
from tests.simdev.cases import problem, seeded
from tests.simdev.device import Sim

pytestmark = pytest.mark.device


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", [("fisher", "kfi"), ("pch-1", "kfi"), ("pch-1", "ea-cg[max_iter=5,tol=0]")], ids=" + ".join
)
def test_planned_launches_and_reads_are_those_of_the_device(sim: Sim, pair: tuple[str, str]) -> None:
    """Launches within 15 %: what decides by a value, and the checks of values, are others without them.

    Reads of convergence depend on values and are not planned: at most one for each iteration is more.
    """
    host_costs.cache_clear()
    own = problem(seeded("chain"), "sim")
    provider, solver = pair
    planned = curvlab.plan(
        problem(seeded("chain"), "cpu"), [provider], [solver], forms=["sample-space"], device="h100"
    ).iloc[0]
    work = Pair(provider, solver, 0.05)
    work.run(own)
    again = fresh(own)
    with sim.counted() as counting:
        work.run(again)
    assert counting.counts.launches == pytest.approx(planned["launches"], rel=0.15)
    more = counting.counts.reads - planned["reads"]
    assert -2 <= more <= (5 if "max_iter=5" in solver else 2)
