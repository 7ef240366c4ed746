"""Launches and host reads of one step, counted: the network 3072-1024-…-10 with a batch of 500, and resnet8.

The counts are upper bounds at what they are today: a step that launches more has become slower on every
accelerator, whatever the CPU says. Conjugate gradients end where they converge, so theirs depend on the
network; those of resnet8, on 8 images here, depend on the batch, which decides about routes.
"""

from __future__ import annotations

import pytest

from benchmarks.launches import StepCounts
from tests.simdev.cases import counts_of_step
from tests.simdev.device import Sim

pytestmark = pytest.mark.device

STEPS = {
    ("chain", "pch-1", "ea-cg"): (828, 4),
    ("chain", "pch-1", "kfi"): (525, 2),
    ("chain", "fisher", "kfi"): (470, 2),
    ("chain", "gauss-newton", "cg"): (1865, 4),
    ("resnet8", "fisher", "ea-cg"): (1964, 6),
    ("resnet8", "fisher", "kfi"): (1162, 3),
    ("resnet8", "fisher[positions=4]", "kfi"): (2025, 3),
}
"""Launches and reads."""


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=" + ".join)
def test_a_step_launches_and_reads_no_more_than_it_did(sim: Sim, step: tuple[str, str, str]) -> None:
    counts = counts_of_step(sim, *step)
    launches, reads = STEPS[step]
    assert counts.launches <= launches
    assert counts.reads <= reads
    assert counts.uploads == 0


@pytest.mark.slow
def test_asv_tracks_the_same_counts(sim: Sim) -> None:
    suite = StepCounts()
    step = ("chain", "fisher", "kfi")
    suite.setup(*step)
    launches, reads = STEPS[step]
    assert 0 < suite.track_launches(*step) <= launches
    assert 0 < suite.track_reads(*step) <= reads
