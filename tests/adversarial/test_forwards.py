"""Honest forwards are answered, right; of the others none is silently wrong and none ends in a traceback.

`python -m tests.adversarial.forwards` prints every verdict.
"""

from __future__ import annotations

import pytest
import torch

from tests.adversarial.forwards import ITEMS
from tests.adversarial.items import Item, Oracle, kronecker_blocks, verdict
from tests.adversarial.outcomes import Judge
from tests.any_reference import example

# The oracle shares no code with curvlab, so that only a change of this folder can change it.
ORACLES_IN_CI = 8  # every so many items


def of_kind(kind: str) -> list[Item]:
    return [item for item in ITEMS if item.kind == kind]


def name_of(item: Item) -> str:
    return item.name


def judgement(outcome: str) -> str:
    return "held" if outcome == "right" else outcome


@pytest.mark.parametrize("item", of_kind("honest"), ids=name_of)
def test_an_honest_forward_is_answered_right(item: Item, judge: Judge) -> None:
    found = verdict(item)
    judge("honest forwards", judgement(found.outcome), found.reason)
    assert found.outcome == "right", found.reason


@pytest.mark.parametrize("item", of_kind("sneaky"), ids=name_of)
def test_a_sneaky_forward_is_right_or_refused(item: Item, judge: Judge) -> None:
    found = verdict(item)
    judge("sneaky forwards", judgement(found.outcome), found.reason)


def test_the_table_is_as_large_as_promised() -> None:
    assert len(of_kind("honest")) >= 55
    assert len(ITEMS) >= 130


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("item", ITEMS[::ORACLES_IN_CI], ids=name_of)
def test_torch_alone_answers_for_the_item(item: Item) -> None:
    check_oracle(item)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("item", ITEMS, ids=name_of)
def test_torch_alone_answers_for_every_item(item: Item) -> None:
    check_oracle(item)


def check_oracle(item: Item) -> None:
    """Examples depend on each other where the item says so, and the oracle answers everything."""
    made = item.made()
    if made.change is not None:
        made.change()
    if not made.answerable:
        return
    oracle = Oracle(made)
    assert torch.isfinite(oracle.loss())
    gradient = oracle.gradient()
    assert is_independent(oracle) == made.independent
    if made.independent:
        assert set(oracle.plain_blocks()) == set(gradient)
        kronecker_blocks(oracle)
    if made.hessian:
        hessian = oracle.hessian()
        assert float((hessian - hessian.T).abs().max()) <= 1e-6 * (1 + float(hessian.abs().max()))


def is_independent(oracle: Oracle) -> bool:
    """Whether logits of examples alone are those of the batch, and its loss the mean of theirs."""
    for inputs, targets in oracle.made.parts:
        whole = oracle.logits(inputs).detach()
        try:
            alone = torch.cat([oracle.logits(example(inputs, i)).detach() for i in range(len(targets))])
        except ValueError:  # batch norm wants more than one value
            return False
        if alone.shape != whole.shape or not torch.allclose(alone, whole, 1e-5, 1e-7):
            return False
        c = oracle.weights(targets)
        counted = [i for i in range(len(c)) if float(c[i]) > 0]
        losses = torch.stack([oracle.criterion(alone[i : i + 1], targets[i : i + 1]) for i in counted])
        mean = (c[counted].to(losses.dtype) * losses).sum() / c.sum()
        if not torch.allclose(mean.to(losses.dtype), oracle.criterion(whole, targets), 1e-5):
            return False
    return True
