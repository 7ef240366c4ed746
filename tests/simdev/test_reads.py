"""Host reads of a step, of every pair and of `curvlab train`: the host waits for the device at each.

Of a chain of eight layers, as long as 3072-1024-…-10 and narrow. How often an iteration asks whether it has
converged is limited (`MOST_READS`), and all that else is read is read once for all layers, so that neither
widths nor values make more of them; the wide network's counts are in docs/accelerators.md.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.launches import TrainReads
from curvlab.exceptions import CurvlabError
from curvlab.optim import LevenbergMarquardt
from tests.simdev.cases import EVERY_PROVIDER, reads_in_training, reads_of_step
from tests.simdev.device import Sim
from tests.solver_cases import SOLVERS

pytestmark = pytest.mark.device

MOST_OF_A_STEP, MOST_IN_TRAIN = 6, 8
TRAINED = (
    "sgd",
    "adam",
    "second-order[provider=fisher,solver=kfi]",
    "second-order[provider=pch-1,solver=ea-cg]",
    "second-order[provider=gauss-newton,solver=cg]",
    "second-order[provider=pch-1,solver=exact]",
    "second-order[provider=pch,solver=cg]",
)


@pytest.mark.slow
@pytest.mark.parametrize("provider", EVERY_PROVIDER)
def test_a_step_of_no_pair_reads_more_than_six_times(sim: Sim, provider: str) -> None:
    counted = {}
    for solver in SOLVERS:
        try:
            counted[solver] = reads_of_step(sim, provider, solver)
        except CurvlabError:
            continue  # a pair that is refused; tests/test_solvers_pairs.py says which are
    assert counted
    assert all(0 < reads <= MOST_OF_A_STEP for reads in counted.values()), counted


OPTIONS: dict[str, dict[str, Any]] = {
    "momentum, decay and clipping": {"momentum": 0.9, "weight_decay": 0.01, "max_grad_norm": 0.5},
    "a moving average": {"ema": 0.5},
    "spring": {"spring": 0.9},
    "an adapted damping": {"adapt": LevenbergMarquardt(every=1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("pch-1", "ea-cg"), ("fisher", "kfi")], ids=" + ".join)
@pytest.mark.parametrize("options", OPTIONS)
def test_options_read_once_for_all_layers(sim: Sim, options: str, pair: tuple[str, str]) -> None:
    """Clipping asks for the gradient's norm and what of it has cancelled, adapting for two losses."""
    assert 0 < reads_of_step(sim, *pair, **OPTIONS[options]) <= MOST_OF_A_STEP + 3


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", TRAINED)
def test_no_step_of_train_reads_more_than_eight_times(sim: Sim, optimizer: str) -> None:
    """The tenth, which looks at residuals, and the last of an epoch, which notes how blocks ended, included.

    The scores after an epoch are no part of a step: they are read once for each set, but for the labels that
    are to be ignored, which every chunk is asked for.
    """
    steps, scores = reads_in_training(sim, optimizer)
    assert len(steps) == 12
    assert 0 < max(steps[1:]) <= MOST_IN_TRAIN, steps
    assert scores
    assert max(scores) <= 6


@pytest.mark.slow
def test_asv_tracks_the_reads_of_train(sim: Sim) -> None:
    suite = TrainReads()
    suite.setup("sgd")
    assert 0 < suite.track_reads("sgd") <= MOST_IN_TRAIN
