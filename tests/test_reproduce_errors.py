"""Tables 2 to 5: the trajectory measured at the right parameters, the paper's averages, the orderings."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from curvlab.problem import Problem
from curvlab.reproduce.error_statistics import (
    INNER,
    accumulation_claim,
    averages,
    ordering_claim,
    phase_of,
    share_of,
    with_phases,
)
from curvlab.reproduce.error_trajectory import Sampling, Trajectory, errors_frame
from curvlab.reproduce.experiment import Places
from curvlab.reproduce.paper import paper_errors
from curvlab.studies.setup import Setup
from curvlab.studies.small.errors import errors
from curvlab.studies.store import Store
from curvlab.studies.train.run import TrainPlan, train

PLAN = TrainPlan(
    Setup(data="digits[train=300,test=60]", arch="64-12-8-10", batch=30, seed=3),
    "second-order[lr=0.2,alpha=0.01]",
    evaluate_examples=60,
)
TASK = Trajectory(PLAN, 13, (Sampling(20, 4), Sampling(50, 6)), ("fisher", "pch-1"))


def places(folder: Path) -> Places:
    return Places(folder / "work", folder / "runs")


def quiet(share: float, label: str) -> None:
    assert 0 <= share <= 1, label


@pytest.mark.parametrize("table", ["table2", "table3", "table4", "table5"])
def test_the_papers_totals_are_roots_of_sums_of_squares(table: str) -> None:
    for _, column in paper_errors(table).groupby("provider"):
        values = column.set_index("layer")["error"]
        layers = values.drop("Total")
        assert len(layers) == 8
        # Each printed number is rounded to four places.
        assert float(np.sqrt((layers**2).sum())) == pytest.approx(float(values["Total"]), abs=1.5e-4)


@pytest.mark.slow
def test_points_are_measured_at_the_parameters_of_their_update(tmp_path: Path) -> None:
    TASK.run(places(tmp_path), quiet)
    frame = errors_frame(Store(tmp_path / "work"))
    assert sorted(set(zip(frame["step"], frame["batch"], strict=True))) == sorted(
        [(0, 20), (4, 20), (8, 20), (12, 20), (0, 50), (6, 50), (12, 50)]
    )
    parameters = {}

    def keep(run) -> None:
        parameters[run.steps] = {name: p.detach().clone() for name, p in run.model.named_parameters()}

    train(replace(PLAN, epochs=2), observe=keep)
    data, model = PLAN.setup.load_data(), PLAN.setup.build_model().eval()
    inputs, targets = data.train.subset(20, 3).all()
    for step in (0, 8, 12):
        model.load_state_dict(parameters[step])
        expected = errors(Problem(model, "cross-entropy", inputs, targets), ["fisher", "pch-1"])
        found = frame[(frame["step"] == step) & (frame["batch"] == 20)]
        assert found["error"].tolist() == pytest.approx(expected["error"].tolist(), rel=1e-9)
        assert found["relative"].tolist() == pytest.approx(expected["relative"].tolist(), rel=1e-9)


@pytest.mark.slow
def test_an_interrupted_trajectory_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    TASK.run(places(tmp_path / "whole"), quiet)
    whole = Store(tmp_path / "whole" / "work").rows("errors")
    calls = itertools.count()

    def interrupt(share: float, label: str) -> None:
        if next(calls) in (3, 9):
            raise KeyboardInterrupt

    cut = places(tmp_path / "cut")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            TASK.run(cut, interrupt)
    assert not TASK.finished(Store(cut.store))
    TASK.run(cut, quiet)
    assert TASK.finished(Store(cut.store))
    found = Store(cut.store).rows("errors")
    assert [row["key"] for row in found] == [row["key"] for row in whole]
    assert [row["error"] for row in found] == [row["error"] for row in whole]


@pytest.mark.slow
def test_a_longer_trajectory_continues_the_shorter_one(tmp_path: Path) -> None:
    where = places(tmp_path)
    TASK.run(where, quiet)
    longer = replace(TASK, updates=20)
    assert not longer.finished(Store(where.store))
    longer.run(where, quiet)
    steps = [row["step"] for row in Store(where.store).rows("errors") if row["batch"] == 20]
    assert steps == [0, 4, 8, 12, 16]
    assert TASK.finished(Store(where.store))
    assert longer.finished(Store(where.store))


def test_a_run_that_diverges_ends_its_trajectory_with_the_reason(tmp_path: Path) -> None:
    wild = replace(TASK, plan=replace(PLAN, optimizer="second-order[lr=1e39,alpha=0.01]"))
    wild.run(places(tmp_path), quiet)
    store = Store(tmp_path / "work")
    (end,) = store.rows("trajectory")
    assert end["status"] == "diverged"
    assert end["message"]
    assert wild.finished(store)


def made(layer_errors: dict[tuple[str, int], list[list[float]]]) -> pd.DataFrame:
    """Errors by (provider, seed): one list of layers' errors a point."""
    rows = []
    for (provider, seed), points in layer_errors.items():
        for step, layers in enumerate(points):
            head = {"provider": provider, "seed": seed, "step": step, "batch": 10, "loss": 2.0}
            for number, value in enumerate(layers, start=1):
                rows.append(head | {"layer": number, "error": value, "relative": value / 2})
            rows.append(head | {"layer": "Total", "error": float(np.hypot.reduce(layers)), "relative": 0.5})
    return pd.DataFrame(rows)


def test_layers_are_averaged_first_and_the_total_is_made_of_their_means() -> None:
    frame = made({("fisher", 0): [[3.0, 0.0], [0.0, 4.0]], ("fisher", 1): [[1.0, 1.0], [1.0, 1.0]]})
    found = averages(frame).set_index("layer")
    # Seed 0 has layer means 1.5 and 2, whose root of squares is 2.5; the mean of its points' Totals is 3.5.
    assert found.loc["Total", "error"] == pytest.approx((2.5 + np.sqrt(2)) / 2)
    assert found.loc[INNER, "error"] == pytest.approx((1.5 + 1.0) / 2)
    assert found.loc[1, "error_deviation"] == pytest.approx(np.std([1.5, 1.0], ddof=1))


def test_phases_never_go_back() -> None:
    losses = pd.Series([2.4, 2.3, 2.0, 2.4, 1.5])
    assert phase_of(losses, 2.3) == ["plateau", "plateau", "late", "late", "late"]
    assert phase_of(pd.Series([2.25, 2.3]), 2.3) == ["escape", "escape"]


def test_phases_are_found_for_each_seed_and_batch_by_itself() -> None:
    frame = pd.DataFrame(
        {
            "seed": [0, 0, 1, 1],
            "batch": 10,
            "step": [0, 1, 0, 1],
            "loss": [2.3, 1.0, 2.3, 2.3],
            "provider": "a",
        }
    )
    assert with_phases(frame, 2.3)["phase"].tolist() == ["plateau", "late", "plateau", "plateau"]


def totals(a: list[float], b: list[float], seed: int) -> pd.DataFrame:
    steps = range(len(a))
    return pd.concat(
        pd.DataFrame({"provider": name, "seed": seed, "step": steps, "error": values})
        for name, values in (("a", a), ("b", b))
    )


def test_a_share_counts_points_and_seeds_and_ties_do_not_hold() -> None:
    frame = pd.concat(
        [totals([1, 1, 2, 3], [2, 2, 2, 1], seed=0), totals([1, 1, 1, 1], [2, 2, 2, 2], seed=1)]
    )
    share = share_of(frame, ("a", "b"))
    assert (share.points, share.share) == (8, 6 / 8)
    assert (share.seeds, share.seeds_holding) == (2, 1)  # seed 0's averages are equal
    assert 0 <= share.low < share.share < share.high <= 1
    # Clopper and Pearson for 1 of 2: the quantiles of Beta(1, 2) and Beta(2, 1).
    assert share.seeds_low == pytest.approx(1 - np.sqrt(0.975), abs=1e-6)
    assert share.seeds_high == pytest.approx(np.sqrt(0.975), abs=1e-6)


def test_the_interval_knows_that_points_of_a_run_are_not_independent() -> None:
    half = [1.0] * 20 + [3.0] * 20
    alternating = [1.0, 3.0] * 20
    wide = share_of(totals(half, [2.0] * 40, 0), ("a", "b"))
    narrow = share_of(totals(alternating, [2.0] * 40, 0), ("a", "b"))
    assert wide.share == narrow.share == 0.5
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_an_ordering_without_data_is_not_measured() -> None:
    frame = totals([1], [2], 0)
    assert share_of(frame, ("a", "c")).points == 0


@pytest.mark.parametrize(
    ("share", "holding", "verdict"),
    [(0.95, 5, "holds"), (0.95, 4, "mixed"), (0.6, 5, "mixed"), (0.4, 5, "does not hold")],
)
def test_verdicts_on_orderings_follow_their_rule(share: float, holding: int, verdict: str) -> None:
    row = {"ordering": "a < b", "phase": "all", "batch": 100, "points": 50, "share": share, "low": 0.1,
           "high": 1.0, "seeds": 5, "seeds_holding": holding}  # fmt: skip
    claim = ordering_claim(("a", "b"), "a is closer.")
    assert claim.judge({"orderings": pd.DataFrame([row])}).verdict == verdict
    assert claim.judge({}).verdict == "not measured"


def test_accumulation_is_judged_by_relative_errors_next_to_the_input() -> None:
    def frames(first: float) -> dict[str, pd.DataFrame]:
        rows = [
            {
                "provider": "fisher",
                "layer": layer,
                "relative": value,
                "error": 1.0,
                "phase": "all",
                "batch": 10,
            }
            for layer, value in ((1, first), (2, 0.5), (3, 0.0), ("Total", 9.0), (INNER, 9.0))
        ]
        return {"averages": pd.DataFrame(rows)}

    assert accumulation_claim().judge(frames(0.4)).verdict == "holds"
    assert accumulation_claim().judge(frames(0.6)).verdict == "does not hold"


def test_the_plateau_is_the_loss_of_the_uniform_prediction() -> None:
    from curvlab.reproduce.experiments import experiment_named

    assert experiment_named("table2").uninformed == pytest.approx(float(torch.log(torch.tensor(10.0))))
    assert experiment_named("table4").uninformed == pytest.approx(1 / (1 + np.exp(5 * (0.1 - 0.2))))
