"""Launches and host reads of one step, counted, for the network 3072-1024-…-10 with a batch of 500.

The counts are upper bounds at what they are today: a step that launches more has become slower on every
accelerator, whatever the CPU says. Conjugate gradients end where they converge, so theirs
depend on the network.
"""

from __future__ import annotations

import pytest

from curvlab.linalg.execution import host_costs
from curvlab.optim import SecondOrder
from tests.simdev.cases import chain
from tests.simdev.device import Counts, Sim

pytestmark = pytest.mark.device

WIDTHS = (3072, 1024, 512, 256, 128, 64, 32, 16, 10)
BATCH = 500
STEPS = {
    ("pch-1", "ea-cg"): (924, 4),
    ("pch-1", "kfi"): (534, 2),
    ("fisher", "kfi"): (483, 2),
    ("gauss-newton", "cg"): (1896, 4),
}
"""Launches and reads."""


def counts_of(sim: Sim, provider: str, solver: str) -> Counts:
    """Of the second step: the first makes what the others keep."""
    host_costs.cache_clear()  # may have been measured with other costs
    model, inputs, targets = chain(WIDTHS, BATCH)
    model, inputs, targets = model.to("sim"), inputs.to("sim"), targets.to("sim")
    optimizer = SecondOrder(model, "cross-entropy", provider, solver, lr=0.1, alpha=0.1)
    optimizer.step(inputs, targets)
    with sim.counted() as counting:
        optimizer.step(inputs, targets)
    return counting.counts


@pytest.mark.slow
@pytest.mark.parametrize("pair", STEPS, ids=" + ".join)
def test_a_step_launches_and_reads_no_more_than_it_did(sim: Sim, pair: tuple[str, str]) -> None:
    counts = counts_of(sim, *pair)
    launches, reads = STEPS[pair]
    assert counts.launches <= launches
    assert counts.reads <= reads
    assert counts.uploads == 0
