"""Decisions between contestants measured in rounds: planted differences, pure noise, and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from scipy import stats

from curvlab.exceptions import ArgumentError
from curvlab.studies.compare.costs import decide_times, separate_runs_words
from curvlab.studies.compare.decisions import CONFIDENCE, Decision, below_control, decide
from curvlab.studies.compare.settings import Settings
from curvlab.studies.setup import Setup

ROUNDS = Settings(Setup()).repetitions


def timings(
    seed: int, contestants: int, rounds: int = ROUNDS, correlation: float = 0.0
) -> NDArray[np.float64]:
    """Seconds of equal work on a shared machine: slow rounds, jitter of 3 %, and 8 % of them interrupted.

    With a `correlation` the jitter of each contestant goes on from round to round.
    """
    rng = np.random.default_rng(seed)
    slow = rng.normal(0, 0.1, (rounds, 1)) + rng.exponential(0.5, (rounds, 1)) * (
        rng.random((rounds, 1)) < 0.1
    )
    shape = (rounds, contestants)
    interrupted = rng.exponential(0.3, shape) * (rng.random(shape) < 0.08)
    jitter = rng.normal(0, 0.03, shape)
    for place in range(1, rounds):
        jitter[place] = correlation * jitter[place - 1] + math.sqrt(1 - correlation**2) * jitter[place]
    return 0.005 * np.exp(slow + jitter + interrupted)


def decision(seconds: NDArray[np.float64]) -> Decision:
    return decide({f"pair {i}": column for i, column in enumerate(seconds.T)}, draws=400)


@pytest.mark.slow
@pytest.mark.parametrize("contestants", [2, 8, 16])
def test_of_identical_pairs_one_is_preferred_in_at_most_5_of_100_repetitions(contestants: int) -> None:
    told_apart = sum(len(decision(timings(seed, contestants)).group) < contestants for seed in range(100))
    assert told_apart <= 5


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.3, 0.6])
@pytest.mark.parametrize("contestants", [2, 8, 16])
def test_of_identical_pairs_whose_slowness_goes_on_into_the_next_round_few_are_told_apart(
    contestants: int, correlation: float
) -> None:
    cases = (timings(seed, contestants, correlation=correlation) for seed in range(200))
    told_apart = sum(len(decision(seconds).group) < contestants for seconds in cases)
    assert told_apart <= 0.06 * 200


@pytest.mark.slow
@pytest.mark.parametrize("contestants", [2, 8, 16])
def test_a_planted_difference_of_15_per_cent_is_found_in_at_least_90_of_100_repetitions(
    contestants: int,
) -> None:
    found = 0
    for seed in range(100):
        seconds = timings(seed, contestants)
        seconds[:, -1] *= 1.15
        found += decision(seconds).smaller("pair 0", f"pair {contestants - 1}")
    assert found >= 90


def equal_to_control(
    seed: int, rounds: int, contestants: int, together: float, spread: float
) -> NDArray[np.float64]:
    """Ratios to a control that all equal; `together` is the share of the variance that they share."""
    rng = np.random.default_rng(seed)
    common, own = rng.normal(0, spread, (rounds, 1)), rng.normal(0, spread, (rounds, contestants))
    return np.exp(math.sqrt(together) * common + math.sqrt(1 - together) * own)


def below(ratios: NDArray[np.float64]) -> dict[str, bool]:
    return below_control({f"pair {i}": column for i, column in enumerate(ratios.T)})


@pytest.mark.parametrize("contestants", [1, 16])
@pytest.mark.parametrize("together", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("rounds", "spread"), [(1, 0.1), (3, 0.1), (3, 0.5), (10, 0.3)])
def test_of_contestants_that_equal_the_control_any_is_named_in_at_most_5_of_100(
    rounds: int, spread: float, together: float, contestants: int
) -> None:
    cases = (equal_to_control(seed, rounds, contestants, together, spread) for seed in range(200))
    named = sum(any(below(ratios).values()) for ratios in cases)
    assert named <= 0.05 * 200 + 2 * math.sqrt(200 * 0.05 * 0.95)  # two standard errors of the count itself


@pytest.mark.parametrize(("rounds", "ratio"), [(1, 0.6), (3, 0.7), (5, 0.8)])
def test_a_planted_difference_to_the_control_is_found_in_at_least_90_of_100(
    rounds: int, ratio: float
) -> None:
    found = 0
    for seed in range(100):
        ratios = equal_to_control(seed, rounds, 16, 0.5, 0.1)
        ratios[:, 0] *= ratio
        found += below(ratios)["pair 0"]
    assert found >= 90


def test_a_noisy_contestant_is_judged_by_its_own_noise_beside_quiet_ones() -> None:
    named = 0
    for seed in range(200):
        ratios = equal_to_control(seed, 3, 8, 0.0, 0.02)
        ratios[:, 0] = np.exp(np.random.default_rng(1000 + seed).normal(0, 0.5, 3))
        named += below(ratios)["pair 0"]
    assert named <= 0.05 * 200 + 2 * math.sqrt(200 * 0.05 * 0.95)


def test_the_interval_of_two_is_students_paired_interval_where_nothing_is_trimmed() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 1, 7), rng.normal(2, 1, 7)
    found = decide({"a": a, "b": b}, scale="difference").difference("a", "b")
    expected = stats.ttest_rel(a, b).confidence_interval(CONFIDENCE)
    assert found.value == pytest.approx(np.mean(a - b), rel=1e-12)
    assert (found.lower, found.upper) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_with_many_rounds_the_difference_is_yuens_trimmed_mean() -> None:
    rng = np.random.default_rng(1)
    a, b = np.exp(rng.standard_t(2, 20)), np.exp(rng.standard_t(2, 20))
    found = decide({"a": a, "b": b}, independent=True).difference("a", "b")
    assert math.log(found.value) == pytest.approx(stats.trim_mean(np.log(a / b), 0.2), rel=1e-12)
    # Yuen's test of one sample is scipy's trimmed t test against a constant, up to its pooled error.
    wins = np.asarray(stats.mstats.winsorize(np.log(a / b), (0.2, 0.2)))
    error = wins.std(ddof=1) / (0.6 * math.sqrt(20))
    half = stats.t.isf((1 - CONFIDENCE) / 2, 11) * error
    assert math.log(found.upper / found.value) == pytest.approx(half, rel=1e-9)


def test_equal_data_and_seed_give_the_same_answer_in_any_order_of_contestants() -> None:
    seconds = timings(3, 5)
    names = [f"pair {i}" for i in range(5)]
    one = decide(dict(zip(names, seconds.T, strict=True)))
    again = decide(dict(zip(reversed(names), seconds.T[::-1], strict=True)))
    assert one.frame().equals(decide(dict(zip(names, seconds.T, strict=True))).frame())
    assert (one.names, one.group) == (again.names, again.group)


def test_a_slow_round_that_hits_all_changes_nothing() -> None:
    seconds = timings(4, 4)
    slowed = seconds * np.where(np.arange(len(seconds)) % 2, 1.0, 10.0)[:, None]
    assert decision(slowed).frame().round(9).equals(decision(seconds).frame().round(9))


@pytest.mark.parametrize(
    ("measured", "group", "rounds"),
    [
        ({"a": [1.0], "b": [9.0]}, ("a", "b"), 1),
        ({"a": [1.0, 2.0], "b": [math.nan, math.nan]}, ("a", "b"), 0),
        ({"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0]}, ("a",), 3),
        ({"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0]}, ("a", "b"), 3),
        ({"only": [1.0, 2.0]}, ("only",), 2),
    ],
    ids=["one round", "no common round", "exact difference", "exactly equal", "alone"],
)
def test_few_or_exact_values(measured: dict[str, list[float]], group: tuple[str, ...], rounds: int) -> None:
    found = decide(measured)
    assert (found.group, found.rounds) == (group, rounds)


def test_shares_count_the_draws_in_which_an_ordering_holds() -> None:
    found = decide({"a": [1.0, 1.0, 1.0, 5.0], "b": [2.0, 2.0, 2.0, 2.0]}, scale="difference", draws=4000)
    # The mean of a is below 2 unless the fourth round is drawn at least once of four: then 1 ... 2, so twice.
    twice_or_more = 1 - 0.75**4 - 4 * 0.25 * 0.75**3
    once = 4 * 0.25 * 0.75**3  # exactly equal, counted half
    assert found.difference("a", "b").share == pytest.approx(1 - twice_or_more - once / 2, abs=0.03)
    assert found.best_share["a"] + found.best_share["b"] == pytest.approx(1)


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(ArgumentError, match="scale='difference'"):
        decide({"a": [1.0, -1.0], "b": [1.0, 2.0]})
    with pytest.raises(ArgumentError, match="fill gaps with NaN"):
        decide({"a": [1.0], "b": [1.0, 2.0]})
    with pytest.raises(ArgumentError, match="put a floor under both"):
        below_control({"a": [0.5, -0.1]})
    with pytest.raises(ArgumentError, match="nothing to decide"):
        decide({})
    with pytest.raises(ArgumentError, match="compared were a, b"):
        decide({"a": [1.0, 2.0], "b": [1.0, 3.0]}).difference("a", "c")


def timed(runs: dict[str, dict[str, float]]) -> pd.DataFrame:
    """Four rounds in each run of pairs that take so many seconds; the second run sees a slower machine."""
    slower = {run: 1 + 9 * number for number, run in enumerate(runs)}
    return pd.DataFrame(
        {
            "provider": provider,
            "solver": "s",
            "repetition": repetition,
            "run": run,
            "estimate_seconds": slower[run] * seconds * (1 + 0.01 * repetition),
            "prepare_seconds": 0.0,
            "apply_seconds": 0.0,
        }
        for run, pairs in runs.items()
        for provider, seconds in pairs.items()
        for repetition in range(4)
    )


def test_times_are_paired_within_a_run_only() -> None:
    merged = timed({"a": {"p": 1.0, "q": 2.0}, "b": {"r": 1.0, "t": 2.0}})
    of_a, of_b = decide_times(merged)
    assert (of_a.preferred, of_b.preferred) == ("p + s", "r + s")
    assert set(of_a.names) == {"p + s", "q + s"}
    assert "--fresh" in separate_runs_words(merged)
    # Rounds without a name of their run, as earlier releases wrote them, are one run's.
    (old,) = decide_times(merged.drop(columns="run"))
    assert old.rounds == 4
    assert separate_runs_words(merged.drop(columns="run")) == ""


def test_a_resumed_comparison_has_one_decision_without_the_round_that_was_cut() -> None:
    resumed = timed({"a": {"p": 1.0, "q": 2.0}, "b": {"p": 1.0, "q": 2.0}})
    cut = resumed[~((resumed["run"] == "a") & (resumed["repetition"] == 3) & (resumed["provider"] == "q"))]
    (found,) = decide_times(cut)
    assert (found.rounds, found.preferred) == (7, "p + s")
    assert separate_runs_words(cut) == ""
