"""The answer in words, on frames whose right answer is known."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curvlab.report import recommend
from curvlab.report.pareto import Candidate, front, level_with

NOISE = "no difference beyond the noise"
NAN = math.nan
BY_ERROR = "by time and error of the curvature (bias blocks, from the absolute Hessian |H|)"
BY_STEP = "by time and distance to the Newton step"


def cell(provider: str, solver: str, cost: float, iqr: float, error: float, **more: Any) -> dict[str, Any]:
    row = {"provider": provider, "solver": solver, "status": "ok", "message": "", "newton_reason": ""}
    row |= {"total_seconds": cost, "total_iqr": iqr, "error_relative": error, "distance": NAN, "cosine": NAN}
    return row | more


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(list(rows))


def training(**losses: tuple[list[float], float]) -> pd.DataFrame:
    """One run a keyword `provider__solver` or `sgd`: its losses from epoch 0 and the seconds of an epoch."""
    rows = []
    for name, (values, seconds) in losses.items():
        provider, _, solver = name.partition("__")
        pair = (provider, solver) if solver else ("", "")
        for epoch, loss in enumerate(values):
            row = {
                "optimizer": " + ".join(filter(None, pair)) or name,
                "provider": pair[0],
                "solver": pair[1],
            }
            row |= {"epoch": epoch, "seconds": epoch * seconds, "train_loss": loss}
            rows.append(
                row
                | {
                    "test_loss": NAN,
                    "test_accuracy": NAN,
                    "status": "ok" if np.isfinite(loss) else "diverged",
                }
            )
    return pd.DataFrame(rows)


def test_the_cheapest_and_most_accurate_pair_wins_alone() -> None:
    found = recommend(
        frame(cell("a", "s", 1.0, 0.01, 0.1), cell("b", "s", 2.0, 0.01, 0.2), cell("c", "s", 3.0, 0.01, 0.1))
    )
    assert found.headline == f"Use a + s, {BY_ERROR}."
    assert (found.best, found.front, found.level) == (("a", "s"), (("a", "s"),), ())
    assert NOISE not in found.text


def test_the_front_is_ordered_by_cost_and_the_smallest_product_is_suggested() -> None:
    rows = [
        cell("fine", "s", 9.0, 0.1, 0.05),
        cell("mid", "s", 2.0, 0.1, 0.1),
        cell("quick", "s", 1.0, 0.1, 0.9),
    ]
    found = recommend(frame(*rows, cell("bad", "s", 9.5, 0.1, 0.95)))
    assert found.front == (("quick", "s"), ("mid", "s"), ("fine", "s"))
    assert found.best == ("mid", "s")
    assert "If time is all that counts: quick + s, 2.0 × cheaper, 90.0 % off." in found.text
    assert "If accuracy is all that counts: fine + s, 5.00 % off at 4.5 × the time." in found.text


def test_an_exact_provider_does_not_win_by_its_zero_alone() -> None:
    found = recommend(frame(cell("hessian", "cg", 100.0, 0.1, 0.0), cell("pch-1", "ea-cg", 1.0, 0.1, 0.1)))
    assert found.best == ("pch-1", "ea-cg")
    assert found.front == (("pch-1", "ea-cg"), ("hessian", "cg"))


def test_equal_errors_and_times_within_the_spread_are_a_tie() -> None:
    found = recommend(
        frame(
            cell("a", "x", 1.00, 0.10, 0.1), cell("a", "y", 1.09, 0.02, 0.1), cell("a", "z", 1.2, 0.02, 0.1)
        )
    )
    assert found.headline == f"Use a + x or a + y, {BY_ERROR}: there is {NOISE} between them."
    assert found.level == (("a", "y"),)
    assert (
        f"Between a + x and a + y (1.09 s) there is {NOISE} in cost, and the error is no larger."
        in found.paragraphs
    )


def test_a_difference_just_beyond_the_larger_spread_is_no_tie() -> None:
    found = recommend(frame(cell("a", "x", 1.0, 0.1, 0.1), cell("a", "y", 1.11, 0.1, 0.1)))
    assert found.headline == f"Use a + x, {BY_ERROR}."
    assert found.level == ()


def test_a_pair_cheaper_only_within_the_noise_than_a_more_accurate_one_is_not_on_the_front() -> None:
    found = recommend(frame(cell("rough", "s", 1.00, 0.1, 0.5), cell("fine", "s", 1.05, 0.1, 0.2)))
    assert found.front == (("fine", "s"),)
    assert found.headline == f"Use fine + s, {BY_ERROR}."


def test_a_chain_of_ties_does_not_drop_what_is_clearly_cheaper() -> None:
    rows = [("a", 1.0, 0.5), ("b", 1.08, 0.3), ("c", 1.16, 0.1)]
    kept = front([Candidate(name, "s", cost, 0.1, error) for name, cost, error in rows])
    assert [pair.provider for pair in kept] == ["a", "c"]


def test_providers_whose_errors_agree_are_level_across_names() -> None:
    found = recommend(
        frame(cell("gauss-newton", "kfi", 1.0, 0.1, 0.3), cell("pch-1", "kfi", 1.02, 0.1, 0.3 + 1e-8))
    )
    assert found.headline.startswith(f"Use gauss-newton + kfi or pch-1 + kfi, {BY_ERROR}: there is {NOISE}")


def test_a_single_pair_is_not_called_best_of_anything() -> None:
    found = recommend(frame(cell("a", "s", 1.0, 0.1, 0.1)))
    assert found.headline == "Only a + s finished: there is nothing to compare it with."
    assert found.best == ("a", "s")


def test_nothing_is_recommended_where_all_failed() -> None:
    broken = {"status": "failed", "message": "out of memory"}
    rows = [
        cell("a", "s", NAN, NAN, NAN, **broken),
        cell("b", "s", NAN, NAN, 0.1, status="skipped", message="indefinite"),
    ]
    found = recommend(frame(*rows))
    assert found.best is None
    assert found.headline == "Nothing can be recommended: no pair finished."
    assert found.paragraphs == ("1 pair failed (a + s). 1 pair skipped (b + s).",)


def test_an_empty_frame_recommends_nothing() -> None:
    assert recommend(frame(cell("a", "s", 1.0, 0.1, 0.1)).iloc[:0]).best is None


def test_without_any_error_only_cost_is_compared_and_said_so() -> None:
    found = recommend(
        frame(cell("a", "s", 2.0, 0.1, NAN), cell("b", "s", 1.0, 0.1, NAN), cell("c", "s", 1.05, 0.1, NAN))
    )
    assert found.best == ("b", "s")
    assert found.level == (("c", "s"),)
    assert "no error is known, so only cost is compared" in found.text
    assert found.headline.startswith("Use b + s or c + s, by time alone")
    assert found.measure == ""


def test_a_pair_of_unknown_error_is_named_and_left_off_the_front() -> None:
    found = recommend(frame(cell("a", "s", 2.0, 0.1, 0.1), cell("b", "s", 1.0, 0.1, NAN)))
    assert found.front == (("a", "s"),)
    assert "Not on the front for want of a known error: b + s." in found.paragraphs


@pytest.mark.parametrize("spread", [0.0, NAN])
def test_an_unknown_spread_is_confessed(spread: float) -> None:
    found = recommend(frame(cell("a", "s", 1.0, spread, 0.1), cell("b", "s", 2.0, spread, 0.1)))
    assert "The spread of the times is not known" in found.paragraphs[-1]


def test_solvers_of_one_curvature_are_told_apart_by_their_steps() -> None:
    quick = cell("pch-2", "sm-kfi", 1.0, 0.01, 0.0228, distance=0.505)
    close = cell("pch-2", "ea-cg", 1.5, 0.01, 0.0228, distance=0.286)
    found = recommend(frame(quick, close))
    assert found.best == ("pch-2", "ea-cg")
    assert found.headline == f"Use pch-2 + ea-cg, {BY_STEP}."
    assert found.front == (("pch-2", "sm-kfi"), ("pch-2", "ea-cg"))
    assert found.measure == "distance"
    assert "its step is 28.6 % from the exact damped Newton step" in found.text
    assert "least time for each halving of the way to the Newton point" in found.text
    assert "its bias blocks are 2.28 % from those of the absolute Hessian |H|" in found.text


def test_the_step_decides_over_the_error_of_the_curvature() -> None:
    rough = cell("fisher", "ea-cg", 1.0, 0.01, 0.5, distance=0.1)
    fine = cell("pch-2", "sm-kfi", 1.0, 0.01, 0.02, distance=0.8)
    found = recommend(frame(rough, fine))
    assert found.best == ("fisher", "ea-cg")
    assert "; closest are those of pch-2, 2.00 %." in found.text


def test_a_step_that_is_worse_than_none_does_not_win_by_being_cheap() -> None:
    found = recommend(
        frame(cell("a", "x", 1.0, 0.1, 0.1, distance=1.2), cell("a", "y", 3.0, 0.1, 0.1, distance=0.5))
    )
    assert found.best == ("a", "y")


def test_that_every_step_is_worse_than_none_is_said() -> None:
    found = recommend(
        frame(cell("a", "x", 1.0, 0.1, 0.1, distance=1.9), cell("a", "y", 3.0, 0.1, 0.1, distance=1.2))
    )
    assert found.best == ("a", "y")
    assert "it has the smallest distance." in found.text
    assert "No step at all would be as close to the Newton step (100 %)" in found.text


def test_a_pair_whose_distance_is_not_known_is_named_and_left_off_the_front() -> None:
    found = recommend(frame(cell("a", "s", 2.0, 0.1, 0.1, distance=0.2), cell("b", "s", 1.0, 0.1, 0.1)))
    assert found.front == (("a", "s"),)
    assert "Not on the front for want of a known distance: b + s." in found.paragraphs


def test_where_the_newton_step_is_not_known_the_answer_says_why_and_what_it_goes_by() -> None:
    unknown = {"newton_reason": "the Hessian is indefinite"}
    found = recommend(
        frame(cell("a", "x", 1.0, 0.1, 0.1, **unknown), cell("a", "y", 2.0, 0.1, 0.1, **unknown))
    )
    assert found.headline == f"Use a + x, {BY_ERROR}."
    assert found.measure == "error_relative"
    assert (
        "The exact damped Newton step is not known here: the Hessian is indefinite. The error of the "
        "curvature is the same for every solver: between solvers only time decides." in found.paragraphs
    )


def test_the_exact_hessian_is_not_said_to_be_in_error_where_it_is_indefinite() -> None:
    for more in ({}, {"distance": 1e-7}):
        found = recommend(frame(cell("hessian", "cg", 1.0, 0.1, 1.93, **more)))
        assert "its blocks are exact, and indefinite: 193 % from their own absolute values |H|" in found.text
        assert "from the exact Hessian" not in found.text
    assert "193" not in recommend(frame(cell("hessian", "cg", 1.0, 0.1, 1e-7))).text


def test_a_pair_whose_step_is_zero_is_never_recommended() -> None:
    still = cell("a", "ea-cg[max_iter=0]", 0.1, 0.01, 0.1, distance=1.0, zero_step=True)
    moving = cell("a", "ea-cg", 1.0, 0.01, 0.1, distance=0.3, zero_step=False)
    found = recommend(frame(still, moving))
    assert found.best == ("a", "ea-cg")
    assert found.headline == "Only a + ea-cg finished with a step: there is nothing to compare it with."
    assert "Not compared, since the step is zero: a + ea-cg[max_iter=0]." in found.paragraphs
    alone = recommend(frame(still))
    assert alone.best is None
    assert alone.headline == "Nothing can be recommended: the step of every pair that finished is zero."


def test_a_pair_whose_step_is_zero_is_not_recommended_for_its_training_either() -> None:
    still, moving = (
        cell("a", "still", 0.1, 0.01, 0.1, zero_step=True),
        cell("b", "s", 1.0, 0.01, 0.1, zero_step=False),
    )
    found = recommend(
        frame(still, moving), None, training(a__still=([2.0, 2.0], 0.1), b__s=([2.0, 2.5], 1.0))
    )
    assert found.best == ("b", "s")


def test_the_layer_that_carries_the_error_is_named() -> None:
    errors = pd.DataFrame({"layer": [1, 2, "Total"], "provider": "a", "error": [3.0, 1.0, math.sqrt(10)]})
    found = recommend(frame(cell("a", "s", 1.0, 0.1, 0.1)), errors)
    told = "The bias blocks of a are furthest from |H| at layer 1, which has 90.0 % of the squared total."
    assert told in found.paragraphs


PAIRS = (cell("a", "s", 1.0, 0.1, 0.1), cell("b", "s", 2.0, 0.1, 0.2))


def test_training_decides_where_it_was_measured() -> None:
    found = recommend(
        frame(*PAIRS), None, training(a__s=([2.0, 1.0], 1.0), b__s=([2.0, 0.5], 2.0), sgd=([2.0, 1.5], 0.5))
    )
    assert found.best == ("b", "s")
    assert found.headline == f"Use b + s: it trained to the lowest loss, though {BY_ERROR} it would be a + s."
    assert "In training for 1 epoch, one run each, b + s reached the lowest" in found.text
    assert "The baselines: sgd 1.50 in 500 ms." in found.text


def test_training_may_agree_with_cost_and_error() -> None:
    found = recommend(frame(*PAIRS), None, training(a__s=([2.0, 0.5], 1.0), b__s=([2.0, 1.0], 2.0)))
    assert found.headline == f"Use a + s: it trained to the lowest loss, and is the best {BY_ERROR} too."


def test_losses_within_five_per_cent_are_too_close_to_call() -> None:
    found = recommend(frame(*PAIRS), None, training(a__s=([2.0, 0.51], 1.0), b__s=([2.0, 0.50], 2.0)))
    assert found.best == ("a", "s")
    assert found.headline == f"Use a + s, {BY_ERROR}: in training it is too close to call against b + s."


def test_a_baseline_that_trains_better_is_recommended() -> None:
    found = recommend(frame(*PAIRS), None, training(a__s=([2.0, 1.0], 1.0), adam=([2.0, 0.2], 1.0)))
    assert found.headline.startswith("Train with adam: it reached a lower loss than every pair.")
    assert found.best == ("a", "s")


def test_the_settings_of_every_run_are_told_and_that_they_were_not_tuned() -> None:
    ran = training(
        a__s=([2.0, 1.0], 1.0), b__s=([2.0, 0.5], 2.0), sgd=([2.0, 1.5], 0.5), adam=([2.0, 1.5], 1.0)
    )
    own = ran["provider"] != ""
    rate, momentum = ran["optimizer"].map({"adam": 0.001}).fillna(0.1), ran["optimizer"].map({"sgd": 0.9})
    found = recommend(
        frame(*PAIRS), None, ran.assign(lr=rate, alpha=np.where(own, 0.05, NAN), momentum=momentum)
    )
    assert (
        "Every run had fixed settings, which curvlab did not tune, and other settings may change the order: "
        "every pair with learning rate 0.1, α 0.05; sgd with learning rate 0.1, momentum 0.9; adam with "
        "learning rate 0.001." in found.paragraphs
    )


def test_settings_that_differ_between_pairs_are_told_by_name() -> None:
    ran = training(a__s=([2.0, 1.0], 1.0), b__s=([2.0, 0.5], 2.0))
    found = recommend(frame(*PAIRS), None, ran.assign(lr=ran["provider"].map({"a": 0.1, "b": 0.2})))
    assert "a + s with learning rate 0.1; b + s with learning rate 0.2." in found.text


def test_settings_that_are_not_known_are_not_made_up() -> None:
    assert "tune" not in recommend(frame(*PAIRS), None, training(a__s=([2.0, 1.0], 1.0))).text


def test_a_baseline_does_not_beat_pairs_that_never_finished_training() -> None:
    found = recommend(frame(*PAIRS), None, training(a__s=([2.0, NAN], 1.0), sgd=([2.0, 1.0], 1.0)))
    assert found.headline.startswith("Train with sgd: no pair came to the end of its training.")


def test_wall_clock_is_judged_at_the_end_of_the_quickest_run() -> None:
    found = recommend(
        frame(*PAIRS),
        None,
        training(a__s=([2.0, 0.9, 0.1], 3.0), b__s=([2.0, 0.7, 0.5], 1.0), sgd=([2.0, 1.5, 1.2], 1.5)),
    )
    assert found.best == ("a", "s")
    told = "quickest run, b + s, 2 runs had finished an epoch; b + s was lowest (0.500)."
    assert told in found.text


def test_wall_clock_is_not_judged_where_only_one_run_had_finished_an_epoch() -> None:
    found = recommend(frame(*PAIRS), None, training(a__s=([2.0, 0.1], 3.0), sgd=([2.0, 1.5], 1.0)))
    assert "Within the 1.00 s of the quickest run, sgd, no other had finished an epoch." in found.text


def test_a_pair_that_training_decides_for_is_given_its_cost_and_error() -> None:
    found = recommend(frame(*PAIRS), None, training(a__s=([2.0, 1.0], 1.0), b__s=([2.0, 0.5], 2.0)))
    told = (
        "b + s takes 2.00 s (interquartile range 100 ms) for estimate, prepare and apply, and its bias blocks"
    )
    assert told in found.paragraphs[1]
    assert found.paragraphs[2] == "Without training it would be another pair:"
    assert found.paragraphs[3].startswith("a + s takes 1.00 s")


def test_what_is_said_of_a_front_of_one_is_checked_against_all_pairs() -> None:
    rows = [cell("d", "s", 1.1, 0.01, 0.9), cell("u", "s", 1.0, 0.5, 0.5), cell("m", "s", 1.4, 0.01, 0.1)]
    assert "No other of the 3 pairs is cheaper" not in recommend(frame(*rows)).text
    assert (
        "No other of the 2 pairs is cheaper beyond the noise, and none has a smaller error."
        in recommend(frame(*rows[1:])).text
    )


def test_diverged_runs_are_named_and_do_not_win() -> None:
    found = recommend(frame(*PAIRS), None, training(a__s=([2.0, NAN], 1.0), b__s=([2.0, 1.0], 1.0)))
    assert found.best == ("b", "s")
    assert "a + s failed or diverged in training." in found.text


def test_training_in_which_all_diverged_leaves_the_decision_to_cost_and_error() -> None:
    found = recommend(frame(*PAIRS), None, training(a__s=([2.0, math.inf], 1.0)))
    assert found.headline == f"Use a + s, {BY_ERROR}."
    assert "In training no run ended with a finite loss." in found.paragraphs


numbers = st.floats(0.01, 10)
some_pairs = st.lists(
    st.builds(Candidate, st.just("p"), st.uuids().map(str), numbers, st.floats(0, 1), numbers), min_size=1
)


@given(some_pairs)
def test_no_member_of_the_front_is_beaten_on_both_axes(pairs: list[Candidate]) -> None:
    kept = front(pairs)
    assert kept
    for member in kept:
        assert not any(other.cost < member.cost and other.error < member.error * 0.99 for other in pairs)
    assert [pair.cost for pair in kept] == sorted(pair.cost for pair in kept)
    assert all(not a.same_cost(b) for a, b in itertools.pairwise(kept))


@given(some_pairs)
def test_what_is_level_costs_the_same_and_is_no_less_accurate(pairs: list[Candidate]) -> None:
    for other in level_with(pairs[0], pairs):
        noise = max(other.spread, pairs[0].spread)
        assert abs(other.cost - pairs[0].cost) <= max(noise, 0.1 * pairs[0].cost)
        assert other.error <= pairs[0].error * 1.0011 + 2e-9
