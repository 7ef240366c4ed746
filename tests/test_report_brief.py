"""The answer in short: a few sentences, each with the number that it rests on, and what limits it."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from curvlab.report.controls import Against, Beside, Damping, Evidence
from curvlab.report.pareto import Candidate, best_by_price, front
from curvlab.report.recommendation import recommend
from curvlab.studies.compare.decisions import decide

PRODUCT = 0.01


def price(pair: Candidate) -> float:
    return pair.cost * max(pair.error, PRODUCT)


def cells(**more: object) -> pd.DataFrame:
    frame = pd.DataFrame(
        {"provider": ["quick", "fine"], "solver": "s", "status": "ok", "message": "", "newton_reason": ""}
    )
    numbers = {"total_seconds": [1.0, 1.5], "total_iqr": 0.01, "error_relative": [0.3, 0.2]}
    return frame.assign(**numbers, distance=math.nan, sine=[0.4, 0.1], **more)


def against(sine: float) -> Against:
    return Against(Beside(sine, 0.6, 1.0, True), Beside(0.5, 0.1, 1.0, True), Beside(), 3)


def test_the_answer_comes_first_then_why_then_what_limits_it() -> None:
    evidence = Evidence({("fine", "s"): against(0.1), ("quick", "s"): against(0.4)}, point="init", draws=3)
    found = recommend(cells(), evidence=evidence)
    assert found.brief.splitlines() == [
        "Use fine + s, by time and angle to the Newton step.",
        "fine + s takes 1.50 s a step and ends at its best scale 10.0 % from the exact damped Newton step; "
        "the gradient step: 60.0 %. Cheaper: quick + s, 1.5 × less time, 40.0 %.",
        "- Steps are those of 3 batches or seeds at one set of parameters, init.",
    ]
    assert len(found.text) > len(found.brief), "the whole account says more"


def test_where_no_pair_beats_the_gradient_the_reasons_are_its_numbers() -> None:
    lost = Against(Beside(0.1, 0.06, 0.0, False), Beside(0.2, 0.3, 0.0, False), Beside(), 3)
    evidence = Evidence({("fine", "s"): lost, ("quick", "s"): lost}, Damping(0.05, 0.039), draws=3)
    found = recommend(cells(), evidence=evidence)
    assert found.headline.startswith("None of them: use the gradient.")
    assert "the gradient step is 6.00 % from" in found.brief
    assert "lowers the loss of its batch by 30.0 %; the most by a pair, fine + s: 20.0 %" in found.brief
    assert "- The damping rules: α = 0.05 is more than the largest eigenvalue, 0.0390" in found.brief
    assert "another batch" not in found.brief


def test_a_pair_that_loses_on_another_batch_alone_is_said_to() -> None:
    lost = Against(Beside(), Beside(0.2, 0.1, 1.0, True), Beside(-0.3, 0.05, 0.0, False), 3)
    found = recommend(cells(), evidence=Evidence({("fine", "s"): lost, ("quick", "s"): lost}, draws=3))
    assert found.headline.startswith("None of them: use the gradient.")
    assert (
        "the most by a pair, fine + s: 20.0 %. On another batch the loss goes up by 30.0 % along that same "
        "step, down by 5.00 % along the gradient step."
    ) in found.brief


def test_the_only_pair_that_beats_the_gradient_is_not_called_the_only_one_that_finished() -> None:
    lost = Against(Beside(0.4, 0.3, 0.0, False), Beside(0.2, 0.3, 0.0, False), Beside(), 3)
    found = recommend(
        cells(), evidence=Evidence({("fine", "s"): against(0.1), ("quick", "s"): lost}, draws=3)
    )
    assert found.headline == "Use fine + s: no other pair beats the gradient step beyond the noise."
    assert recommend(cells().iloc[:1]).headline.startswith("Only quick + s finished")


@pytest.mark.parametrize(("largest", "rules"), [(0.05, True), (-0.05, True), (0.06, False), (-0.06, False)])
def test_negative_curvature_that_outweighs_the_damping_is_not_ruled_by_it(
    largest: float, rules: bool
) -> None:
    assert Damping(0.05, largest).rules is rules


def test_where_only_the_loss_is_known_the_gradient_is_named() -> None:
    lost = Against(Beside(), Beside(0.2, 0.3, 0.0, False), Beside(), 3)
    found = recommend(
        cells().assign(sine=math.nan), evidence=Evidence({("fine", "s"): lost, ("quick", "s"): lost})
    )
    assert found.reasons[0].startswith("The gradient step lowers the loss of its batch by 30.0 %")


def test_failed_pairs_unknown_spreads_and_a_missing_reference_are_cautions() -> None:
    frame = cells().assign(sine=math.nan, total_iqr=math.nan)
    broken = frame.iloc[:1].assign(provider="lost", status="failed")
    found = recommend(pd.concat([frame, broken], ignore_index=True))
    assert found.cautions[0] == "The exact Newton step is not known here: between solvers only time decides."
    assert "The spread of the times is not known, so small differences mean nothing." in found.cautions
    assert found.cautions[-1] == "1 pair failed; the page says why."


def test_a_race_gives_the_losses_of_those_ahead() -> None:
    rows = [
        {"optimizer": name, "provider": "", "solver": "", "epoch": epoch, "seconds": float(epoch)}
        | {
            "train_loss": loss if epoch else 2.0,
            "test_loss": math.nan,
            "test_accuracy": math.nan,
            "status": "ok",
        }
        for name, loss in (("sgd", 1.0), ("adam", 0.5))
        for epoch in (0, 1)
    ]
    found = recommend(cells(), None, pd.DataFrame(rows))
    assert found.reasons[0] == "After 1 epoch, the lowest training loss: adam 0.500 and sgd 1.00."


@pytest.mark.parametrize(("ratio", "best"), [(1.9, "fine"), (3.9, "fine"), (4.1, "quick")])
def test_of_equally_good_bargains_the_more_accurate_is_suggested(ratio: float, best: str) -> None:
    quick, fine = Candidate("quick", "s", 1.0, 0.0, 0.4), Candidate("fine", "s", ratio, 0.0, 0.2)
    assert best_by_price([quick, fine], [quick, fine], price)[0].provider == best


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
def test_the_suggestion_is_the_same_whatever_the_noise_of_the_times(noise: float) -> None:
    generator = np.random.default_rng(0)
    answers = set()
    for _ in range(30):
        rounds = np.exp(noise * generator.standard_normal((15, 2)))
        times = {"quick + s": rounds[:, 0].tolist(), "fine + s": (1.9 * rounds[:, 1]).tolist()}
        decided = (decide(times),)
        cost = {name: float(np.median(values)) for name, values in times.items()}
        quick = Candidate("quick", "s", cost["quick + s"], 0.1, 0.4, decided)
        fine = Candidate("fine", "s", cost["fine + s"], 0.1, 0.2, decided)
        answers.add(best_by_price([quick, fine], [quick, fine], price)[0].provider)
    assert answers == {"fine"}, (
        "the price of both is equal within the noise: the lowest one is now this, now that"
    )


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.15])
def test_noise_does_not_make_a_bargain_of_a_pair_that_is_none(noise: float) -> None:
    generator = np.random.default_rng(0)
    answers = []
    for _ in range(50):
        rounds = np.exp(noise * generator.standard_normal((15, 2)))
        # Twice as accurate at 5.2 times the cost: a price of 2.6, beyond 2 whatever the interval says.
        times = {"quick + s": rounds[:, 0].tolist(), "fine + s": (5.2 * rounds[:, 1]).tolist()}
        decided = (decide(times),)
        cost = {name: float(np.median(values)) for name, values in times.items()}
        quick = Candidate("quick", "s", cost["quick + s"], 0.1, 0.4, decided)
        fine = Candidate("fine", "s", cost["fine + s"], 0.1, 0.2, decided)
        answers.append(best_by_price([quick, fine], [quick, fine], price)[0].provider)
    assert answers == ["quick"] * 50


def test_of_level_pairs_the_more_accurate_is_named_first_whichever_was_quicker_this_time() -> None:
    for costs in ((1.0, 1.01), (1.01, 1.0)):
        rough, fine = (
            Candidate(name, "s", cost, 0.05, error)
            for name, cost, error in zip(("rough", "fine"), costs, (0.7569, 0.7563), strict=True)
        )
        ahead = front([rough, fine])
        assert [pair.provider for pair in best_by_price([rough, fine], ahead, price)] == ["fine", "rough"]
    # Of equals the cheapest.
    twins = [Candidate(name, "s", cost, 0.05, 0.5) for name, cost in (("slow", 1.02), ("quick", 1.0))]
    assert best_by_price(twins, front(twins), price)[0].provider == "quick"
