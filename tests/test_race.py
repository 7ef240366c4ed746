"""The race of `compare --epochs`: tuned alike, from several seeds, in equal epochs and in equal time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from curvlab.cli import main
from curvlab.report import recommend, write_report
from curvlab.report.controls import Against, Beside, Evidence
from curvlab.report.training import bands, leaders, race_ends, runs, training_words
from curvlab.studies.compare import run as run_module
from curvlab.studies.compare.race import race_rows, race_tasks
from curvlab.studies.compare.run import Progress, command_of, compare, load_comparison
from curvlab.studies.compare.settings import Settings
from curvlab.studies.setup import Setup
from curvlab.studies.store import Row
from tests.cases import ONE_SCENE

TINY = Setup(data="digits[train=60,test=30]", batch=30)
ASK: dict[str, Any] = ONE_SCENE | {
    "repetitions": 1,
    "epochs": 2,
    "train_batch": 20,
    "train_seeds": 2,
    "baselines": ["sgd"],
}
CONFIG = {"providers": ["fisher"], "solvers": ["kfi"], "baselines": ["sgd"], "epochs": 2, "alpha": 0.05,
          "train_batch": 20, "lr": None, "tune": False, "train_seeds": 3}  # fmt: skip


def run_row(optimizer: str, seed: int, pace: float, losses: list[float], status: str = "ok") -> Row:
    """A run of the store: `pace` seconds of the processor for an epoch, and these test losses."""
    named = (*optimizer.split(" + "), "")[:2] if " + " in optimizer else ("", "")
    epochs = [
        {"epoch": e, "seconds": 2 * e * pace, "cpu_seconds": e * pace, "train_loss": loss / 2,
         "test_loss": loss, "test_accuracy": 0.5, "status": "ok"}
        for e, loss in enumerate(losses)
    ]  # fmt: skip
    epochs[-1]["status"] = status
    return {
        "optimizer": optimizer, "provider": named[0], "solver": named[1], "spec": "sgd", "run_seed": seed,
        "tuned": False, "epochs_asked": 2, "train_batch": 20, "lr": None, "epochs": epochs,
        "status": "ok" if status == "ok" else "failed", "message": status,
    }  # fmt: skip


def race_frame(planted: dict[str, tuple[float, list[list[float]]]]) -> pd.DataFrame:
    """The frame of a race: by optimizer its pace, and the test losses of each seed by epoch."""
    rows = [
        run_row(name, seed, pace, losses)
        for name, (pace, seeds) in planted.items()
        for seed, losses in enumerate(seeds)
    ]
    config = CONFIG | {"train_seeds": 99}
    return pd.DataFrame(race_rows(rows, [], config).convergence)


def test_equal_time_counts_the_epochs_that_each_makes_while_the_slowest_makes_its_own() -> None:
    quick = [[3.0, 2.0, 1.5, 1.2, 1.1, 1.0, 0.9]] * 3
    slow = [[3.0, 1.0, 0.8]] * 3
    rows = [run_row("sgd", seed, 0.9, losses) for seed, losses in enumerate(quick)]
    rows += [run_row("fisher + kfi", seed, 2.0, losses) for seed, losses in enumerate(slow)]
    found = race_rows(rows, [], CONFIG)
    frame = pd.DataFrame(found.convergence).groupby("optimizer").first()
    assert frame["time_budget"].tolist() == [4.0, 4.0]
    assert frame["epochs_in_time"].to_dict() == {"fisher + kfi": 2, "sgd": 4}
    assert frame["loss_in_time"].to_dict() == {"fisher + kfi": 0.8, "sgd": 1.1}
    assert max(row["epoch"] for row in found.convergence) == 2, (
        "equal epochs show no more than were asked for"
    )
    assert max(row["epoch"] for row in found.by_time) == 4


def test_a_winner_is_named_only_where_the_seeds_tell_it_from_all_others() -> None:
    rng = np.random.default_rng(0)
    noise = [math.exp(0.1 * value) for value in rng.normal(size=5)]
    far = {
        "sgd": (1.0, [[3.0, 1.0, 0.1 * n] for n in noise]),
        "fisher + kfi": (1.0, [[3.0, 1.0, 0.3 * n * math.exp(0.02 * i)] for i, n in enumerate(noise)]),
    }
    assert [run.optimizer for run in leaders(runs(race_frame(far)))] == ["sgd"]
    assert "sgd has the lowest test loss" in training_words(runs(race_frame(far)))[0]


def test_equal_time_decides_a_race_and_equal_epochs_are_told_beside() -> None:
    def seeds(losses: list[float]) -> list[list[float]]:
        return [[loss * (1 + 0.01 * seed) for loss in losses] for seed in range(5)]

    quick = [3.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.1]
    found = runs(race_frame({"sgd": (1.0, seeds(quick)), "fisher + kfi": (3.0, seeds([3.0, 0.9, 0.3]))}))
    assert [run.optimizer for run in leaders(found, "loss")] == ["fisher + kfi"]
    assert [run.optimizer for run in leaders(found)] == ["sgd"]
    (words,) = training_words(found)[:1]
    assert "After 2 epochs from 5 seeds, fisher + kfi has the lowest test loss, 0.306" in words
    assert "After 6.00 s of the processor each, sgd has the lowest test loss" in words


def test_equal_optimizers_are_told_to_be_no_different() -> None:
    rng = np.random.default_rng(1)
    planted = {
        name: (1.0, [[3.0, 1.0, 0.2 * math.exp(0.2 * rng.normal())] for _ in range(5)])
        for name in ("sgd", "fisher + kfi")
    }
    found = runs(race_frame(planted))
    assert len(leaders(found)) == 2
    assert "no difference in test loss can be told between" in training_words(found)[0]


def test_a_seed_that_diverged_keeps_an_optimizer_from_winning_and_is_told() -> None:
    rows = [run_row("sgd", seed, 1.0, [3.0, 0.1, 0.01], "diverged" if seed else "ok") for seed in range(3)]
    rows += [run_row("fisher + kfi", seed, 1.0, [3.0, 1.0, 0.5]) for seed in range(3)]
    frame = pd.DataFrame(race_rows(rows, [], CONFIG).convergence)
    found = runs(frame)
    assert [run.optimizer for run in leaders(found)] == ["fisher + kfi"]
    assert "sgd (2 of 3 seeds) failed or diverged" in " ".join(training_words(found))
    ends = race_ends(frame).set_index("optimizer")
    assert ends["status"].to_dict() == {"fisher + kfi": "ok", "sgd": "2 of 3 failed"}


PAIRS = pd.DataFrame(
    {"provider": ["quick", "fine"], "solver": "s", "status": "ok", "message": "", "newton_reason": ""}
    | {"total_seconds": [1.0, 1.1], "total_iqr": 0.01, "error_relative": [0.3, 0.1], "distance": math.nan}
)


def frame_of(losses: dict[str, list[float]], statuses: dict[str, str] | None = None) -> pd.DataFrame:
    """Five seeds of each, which differ by a hundredth, in the order of the mapping."""
    statuses = statuses or {}
    config = CONFIG | {"providers": ["quick", "fine"], "solvers": ["s"], "baselines": ["sgd", "adam"]}
    rows = [
        run_row(
            name,
            seed,
            1.0 if name in config["baselines"] else 3.0,
            [loss * (1 + 0.01 * ((seed + len(name)) % 3)) for loss in curve],
            statuses.get(name, "ok") if seed == 3 else "ok",
        )
        for name, curve in losses.items()
        for seed in range(5)
    ]
    return pd.DataFrame(race_rows(rows, [], config | {"train_seeds": 5}).convergence)


LONG = [3.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.1]


def test_baselines_that_cannot_be_told_apart_are_named_together() -> None:
    race = {"sgd": LONG, "adam": LONG, "quick + s": [3.0, 0.9, 0.6], "fine + s": [3.0, 0.9, 0.7]}
    found = recommend(PAIRS, None, frame_of(race))
    # fine has the better steps, and quick has trained to a lower loss, beyond the noise.
    assert found.headline == (
        "Train with sgd or adam: they reached lower losses than every pair. There is no difference beyond "
        "the noise between them. Of the pairs quick + s trained to the lowest loss."
    )
    assert found.best == ("quick", "s")
    level = recommend(
        PAIRS, None, frame_of(race | {"adam": [4 * x for x in LONG], "fine + s": [3.0, 0.9, 0.6]})
    )
    assert level.headline.startswith(
        "Train with sgd: it reached a lower loss than every pair. Of the pairs: fine + s, "
    )
    assert level.best == ("fine", "s")


def test_where_no_pair_beats_the_gradient_step_that_of_the_lowest_loss_is_named_and_not_the_cheapest() -> (
    None
):
    lost = Against(Beside(), Beside(0.1, 0.2, 0.0, False), Beside(), 3)
    evidence = Evidence({("quick", "s"): lost, ("fine", "s"): lost}, draws=3)
    race = {"sgd": LONG, "quick + s": [3.0, 0.9, 0.7], "fine + s": [3.0, 0.9, 0.6]}
    found = recommend(PAIRS, None, frame_of(race), evidence=evidence)
    assert found.headline.endswith("Of the pairs fine + s trained to the lowest loss.")
    assert found.best == ("fine", "s")


def test_a_run_that_diverges_after_the_epochs_and_before_the_time_is_over_is_told() -> None:
    race = {"sgd": LONG[:4], "adam": LONG, "quick + s": [3.0, 0.9, 0.7]}
    found = recommend(PAIRS, None, frame_of(race, {"sgd": "diverged"}))
    assert "- Failed or diverged in training: sgd (before the time was over)." in found.brief
    assert "From one seed or more sgd diverged after these epochs and before that time." in found.text
    assert "before the time was over" not in recommend(PAIRS, None, frame_of(race)).brief


def test_bands_end_where_the_first_seed_ends() -> None:
    frame = pd.DataFrame(
        {"seed": [0, 0, 0, 1, 1], "epoch": [0, 1, 2, 0, 1], "loss": [3.0, 2.0, 1.0, 3.0, 4.0]}
    )
    found = bands(frame, "epoch", "loss")
    assert found["epoch"].tolist() == [0, 1]
    assert (found["lower"].tolist(), found["upper"].tolist()) == ([3.0, 2.0], [3.0, 4.0])


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raced")
    compare(TINY, ["fisher"], ["kfi"], output=folder, **ASK)
    return folder


@pytest.mark.slow
def test_every_contestant_is_tuned_with_the_same_budget_and_run_from_every_seed(raced: Path) -> None:
    found = load_comparison(raced)
    cost = found.tuning.groupby("optimizer")["epochs"].sum()
    assert cost.to_dict() == {"fisher + kfi": 15 * 1 + 5 * 2, "sgd": 15 * 1 + 5 * 2}
    for name, trials in found.tuning.groupby("optimizer"):
        last = trials[trials["epochs"] == 2]
        best = last.loc[last["validation_loss"].idxmin()]
        used = found.convergence[found.convergence["optimizer"] == name]
        assert set(used["lr"]) == {best["lr"]}
        assert used["seed"].nunique() == 2
        assert used["epoch"].max() == 2
    starts = found.convergence.query("epoch == 0 and seed == 0")["train_loss"]
    assert starts.nunique() == 1, "a seed begins with the same weights for all"
    assert (found.convergence["loss_in_time"] > 0).all()


@pytest.mark.slow
def test_the_page_tells_how_it_was_tuned_and_draws_both_budgets(raced: Path, tmp_path: Path) -> None:
    found = load_comparison(raced)
    text = recommend(found.cells, found.errors, found.convergence).text
    assert "were chosen on a validation set by successive halving, with 25 epochs" in text
    assert "of the processor each" in text
    page = Path(write_report(found, tmp_path)).read_text(encoding="utf-8")
    assert "by processor time: the median of the seeds" in page
    assert "which curvlab did not tune" not in page


@pytest.mark.slow
def test_an_interrupted_race_goes_on_and_ends_as_an_uninterrupted_one(raced: Path, tmp_path: Path) -> None:
    for stop in (12, 30, 8):  # among the trials of the first rung, of the second, and the runs

        def interrupt(progress: Progress, stop: int = stop) -> None:
            if progress.done == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compare(TINY, ["fisher"], ["kfi"], output=tmp_path, on_progress=interrupt, **ASK)
    again = compare(TINY, ["fisher"], ["kfi"], output=tmp_path, **ASK)
    whole = load_comparison(raced)
    same = ["optimizer", "lr", "alpha", "seed", "epoch", "train_loss", "test_loss", "test_accuracy", "status"]
    pd.testing.assert_frame_equal(again.convergence[same], whole.convergence[same])
    same = ["optimizer", "lr", "alpha", "epochs", "validation_loss", "chosen", "at_edge"]
    pd.testing.assert_frame_equal(again.tuning[same], whole.tuning[same])


@pytest.mark.slow
def test_nothing_is_trained_again_in_a_finished_folder(raced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(task: object) -> Row:
        raise AssertionError(task)

    monkeypatch.setattr(run_module, "run_task", refuse)
    found = compare(TINY, ["fisher"], ["kfi"], output=raced, **ASK)
    assert found.convergence["seed"].nunique() == 2


@pytest.mark.slow
def test_without_tuning_settings_are_as_given_and_the_page_says_so(tmp_path: Path) -> None:
    ask = ASK | {"tune": False, "baselines": ["sgd[lr=0.05]"]}
    found = compare(TINY, ["fisher"], ["kfi"], output=tmp_path, **ask)
    rates = found.convergence.groupby("optimizer")["lr"].first().to_dict()
    assert rates == {"fisher + kfi": 0.1, "sgd[lr=0.05]": 0.05}
    assert found.tuning.empty
    assert "which curvlab did not tune" in recommend(found.cells, None, found.convergence).text
    assert "--no-tune" in command_of(found.config)


def test_tasks_follow_from_rows_alone() -> None:
    settings = Settings.of(TINY, providers=["fisher"], solvers=["kfi"], **ASK)
    first = race_tasks(settings, [])
    assert {task.kind for task in first} == {"tuning"}
    assert len(first) == 2 * 15
    rows = [task.head | {"loss": float(i), "cpu_seconds": 1.0} for i, task in enumerate(first)]
    second = race_tasks(settings, rows)
    assert {(task.kind, task.head["epochs_asked"]) for task in second} == {("tuning", 2)}
    assert len(second) == 2 * 5
    rows += [task.head | {"loss": None} for task in second]  # all of them diverged
    runs_left = race_tasks(settings, rows)
    assert [(task.head["optimizer"], task.head["run_seed"]) for task in runs_left] == [
        ("fisher + kfi", 0), ("sgd", 0), ("fisher + kfi", 1), ("sgd", 1)]  # fmt: skip
    assert race_tasks(settings, rows, left_out=[("fisher", "kfi")])[0].head["optimizer"] == "sgd"


def test_the_options_of_the_race_are_on_the_command_line() -> None:
    words = " ".join(CliRunner().invoke(main, ["compare", "--help"]).output.split())
    assert "--tune / --no-tune" in words
    assert "--train-seeds" in words
