"""`--fresh` loses nothing: old results stay until there is something new to keep, and are then set aside."""

from __future__ import annotations

import json
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from click.testing import CliRunner, Result

from curvlab.cli import main
from curvlab.exceptions import ExecutorError
from curvlab.report.figures import learning_curve_png
from curvlab.reproduce.error_trajectory import Sampling, Trajectory, errors_frame
from curvlab.reproduce.experiment import Places
from curvlab.studies.compare.run import compare, load_comparison
from curvlab.studies.setup import Setup
from curvlab.studies.store import Store
from curvlab.studies.train.folder import read_checkpoint
from curvlab.studies.train.run import TrainPlan, train
from tests.cases import ONE_SCENE

pytestmark = pytest.mark.usefixtures("plain_pages")

TINY = Setup(arch="5-4-3", data="synthetic[features=5,classes=3,examples=30]", batch=10, device="cpu")
COMPARE = ["compare", "-p", "fisher", "-s", "kfi", "-r", "1", "--quiet"]
TRAIN = ["train", "--quiet", "--epochs", "1"]
GOOD = ["--arch", TINY.arch, "--data", TINY.data, "--batch", "10", "--device", "cpu"]
STUDY = 'data = "{data}"\nepochs = 1\npairs = ["sgd"]\nlr = [0.1, 0.2]\nbatch = [10]\n'


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def contents(folder: Path) -> dict[str, bytes]:
    """Every visible file of a folder by its path, to the byte."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def no_data(tmp_path: Path) -> list[str]:
    """Options for a data set that is not there."""
    (tmp_path / "empty").mkdir()
    return ["--data", "cifar10", "--data-dir", str(tmp_path / "empty"), "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [COMPARE, TRAIN], ids=["compare", "train"])
def test_fresh_runs_whose_data_cannot_be_loaded_change_no_file(words, no_data, tmp_path):
    folder = tmp_path / "run"
    assert call(*words, *GOOD, "-o", folder).exit_code == 0
    before = contents(folder)
    assert before["results.jsonl"]
    for _ in range(2):
        failed = call(*words, *no_data, "-o", folder, "--fresh")
        assert failed.exit_code == 2
        assert "cifar-10" in failed.stderr.lower()
        assert contents(folder) == before


def test_fresh_reproductions_whose_data_cannot_be_loaded_change_no_file(no_data, tmp_path):
    folder, study = tmp_path / "run", tmp_path / "study.toml"
    words = ["reproduce", "grid", "--study", study, "-o", folder, "--quiet", "--device", "cpu"]
    study.write_text(STUDY.format(data="digits[train=50,test=20]"))
    assert call(*words).exit_code == 0
    before = contents(folder)
    assert before["grid/work/results.jsonl"]
    study.write_text(STUDY.format(data="cifar10"))
    for _ in range(2):
        assert call(*words, *no_data[2:4], "--fresh").exit_code == 2
        assert contents(folder) == before


@dataclass(frozen=True)
class NoWorkers:
    """A place to run whose workers cannot be reached."""

    in_process: ClassVar[bool] = False
    window: ClassVar[int | None] = 1

    def start(self) -> Executor:
        raise ExecutorError("no scheduler there")


def test_a_fresh_comparison_without_workers_changes_no_file(tmp_path):
    compare(TINY, ["fisher"], ["kfi"], **ONE_SCENE, repetitions=1, output=tmp_path)
    before = contents(tmp_path)
    for _ in range(2):
        with pytest.raises(ExecutorError):
            compare(TINY, ["pch-1"], ["kfi"], output=tmp_path, fresh=True, executor=NoWorkers())
        assert contents(tmp_path) == before


@pytest.mark.slow
def test_each_fresh_comparison_sets_the_rows_before_it_aside_under_a_new_number(tmp_path):
    held = []
    for run in range(4):
        compare(TINY, ["fisher"], ["kfi"], **ONE_SCENE, repetitions=1, output=tmp_path, fresh=run > 0)
        held.append((tmp_path / "results.jsonl").read_bytes())
    aside = [(tmp_path / f"results.previous-{number}.jsonl").read_bytes() for number in (1, 2, 3)]
    assert aside == held[:3]
    assert len(load_comparison(tmp_path).cells) == 1


def test_a_backup_that_is_there_is_never_overwritten(tmp_path):
    (tmp_path / "results.previous-3.jsonl").write_text("an older one")
    Store(tmp_path).append({"key": "a"})
    fresh = Store(tmp_path, fresh=True)
    assert fresh.rows() == []
    fresh.append({"key": "b"})
    fresh.append({"key": "c"})
    assert (tmp_path / "results.previous-3.jsonl").read_text() == "an older one"
    assert (tmp_path / "results.previous-4.jsonl").read_text() == '{"key": "a"}\n'
    assert fresh.keys() == {"b", "c"}


@pytest.mark.slow
def test_each_fresh_training_run_sets_the_run_before_it_aside_whole(tmp_path):
    def plan(lr: float) -> TrainPlan:
        return TrainPlan(TINY, f"sgd[lr={lr}]", epochs=2)

    rates = (0.1, 0.2, 0.3)
    frames = []
    for lr in rates:
        draw = learning_curve_png if lr == 0.2 else None
        frames.append(train(plan(lr), tmp_path, fresh=lr > 0.1, draw=draw))
    for number, lr in ((1, 0.1), (2, 0.2)):
        aside = tmp_path / f"previous-{number}"
        expected = {
            "checkpoint.safetensors",
            "config.toml",
            "environment.json",
            "metrics.csv",
            "results.jsonl",
        }
        assert set(contents(aside)) == expected | ({"learning-curve.png"} if lr == 0.2 else set())
        resumed = train(plan(lr), aside)
        assert resumed["test_loss"].tolist() == frames[number - 1]["test_loss"].tolist()
    state = read_checkpoint(tmp_path / "checkpoint.safetensors")["model"]
    train(plan(0.3), tmp_path / "alone")
    alone = read_checkpoint(tmp_path / "alone" / "checkpoint.safetensors")["model"]
    assert all(torch.equal(state[name], alone[name]) for name in alone)


def test_a_fresh_training_run_that_ends_before_its_first_checkpoint_changes_no_file(tmp_path):
    plan = TrainPlan(TINY, "sgd", epochs=2)
    train(plan, tmp_path)
    before = contents(tmp_path)

    def fail(progress: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(plan, tmp_path, fresh=True, on_progress=fail)
    assert contents(tmp_path) == before


def test_a_fresh_reproduction_measures_every_point_of_a_finished_run_again(tmp_path):
    setup = Setup(data="digits[train=100,test=20]", arch="64-8-10", batch=50, device="cpu")
    task = Trajectory(TrainPlan(setup, "sgd", evaluate_examples=20), 4, (Sampling(10, 2),), ("fisher",))

    def points(store: str, fresh: bool) -> int:
        task.run(Places(tmp_path / store, tmp_path / "runs", fresh), lambda share, label: None)
        return errors_frame(Store(tmp_path / store))["step"].nunique()

    assert points("first", fresh=False) == points("again", fresh=True) == 2
    # Interrupted before the run had a new checkpoint, and continued without --fresh.
    assert points("continued", fresh=False) == 2


def test_reproduce_fresh_keeps_the_old_rows_and_runs(tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(STUDY.format(data="digits[train=50,test=20]"))
    folder = tmp_path / "run"
    words = ["reproduce", "grid", "--study", study, "-o", folder, "--quiet", "--device", "cpu"]
    assert call(*words).exit_code == 0
    old = (folder / "grid" / "work" / "results.jsonl").read_bytes()
    assert call(*words, "--fresh").exit_code == 0
    assert (folder / "grid" / "work" / "results.previous-1.jsonl").read_bytes() == old
    new = [json.loads(line) for line in (folder / "grid" / "work" / "results.jsonl").read_text().splitlines()]
    seconds = {row["seconds"] for row in new if row["kind"] == "epoch" and row["epoch"] == 1}
    assert len(seconds) == 2
    assert all(f'"seconds": {value}' not in old.decode() for value in seconds)
    runs = list((folder / "work" / "runs").iterdir())
    assert [(run / "previous-1" / "checkpoint.safetensors").exists() for run in runs] == [True, True]
