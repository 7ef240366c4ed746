"""What a plan says of launches and reads, against what the simulated device counts."""

from __future__ import annotations

import pytest

import curvlab
from curvlab.measure import device as devices
from curvlab.studies.compare.resources import Pair, fresh
from tests.simdev.cases import problem, seeded
from tests.simdev.device import Sim

pytestmark = pytest.mark.device


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("fisher", "kfi"), ("pch-1", "kfi"), ("pch-1", "ea-cg")], ids=" + ".join)
def test_planned_launches_and_reads_are_those_of_the_device(sim: Sim, pair: tuple[str, str]) -> None:
    """Within a tenth: checks of values are launches that a plan, which has none, leaves out."""
    devices.host_costs.cache_clear()
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
    assert planned["launches"] <= counting.counts.launches <= 1.1 * planned["launches"]
    assert abs(planned["reads"] - counting.counts.reads) <= 2
