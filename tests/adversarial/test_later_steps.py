"""Steps of one optimizer on batches of which a later one is another function: each as if it were the first.

What was compared with the model in an earlier step must change no answer: the step on every batch is that of
an optimizer made for it alone, or both refuse.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from curvlab.exceptions import CurvlabError
from curvlab.optim import SecondOrder
from tests.adversarial.outcomes import Judge
from tests.adversarial.sneaky_later import CLASS_WEIGHTS, LATER

SUITE = "later batches"


def step(optimizer: SecondOrder, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor] | str:
    """The parameters after a step, or that it was refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step(x, y)
    except CurvlabError:
        return "refused"
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", LATER)
def test_a_step_is_what_it_is_for_an_optimizer_made_for_its_batch(name: str, judge: Judge) -> None:
    make, batches = LATER[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model, data = make().double(), batches()
    criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)
    optimizer = SecondOrder(model, criterion, "fisher", "exact", alpha=0.2)
    for x, y in data:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            alone = make().double()  # closures of its own
        alone.load_state_dict(copy.deepcopy(model.state_dict()))
        expected = step(SecondOrder(alone, criterion, "fisher", "exact", alpha=0.2), alone, x, y)
        found = step(optimizer, model, x, y)
        if isinstance(expected, str) or isinstance(found, str):
            return judge(SUITE, "refused" if found == "refused" else "silent", f"given, though {name}")
        for parameter, value in expected.items():
            if not torch.allclose(found[parameter], value, rtol=1e-10, atol=1e-12):
                judge(SUITE, "silent", parameter)
    return judge(SUITE, "held")
