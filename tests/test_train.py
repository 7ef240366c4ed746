"""`train`: what its rows say, that runs resume to the bit, and how they end."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch import nn

from curvlab.exceptions import SpecError, StoreError
from curvlab.optim import SecondOrder
from curvlab.report.figures import curves
from curvlab.studies.setup import Setup
from curvlab.studies.store import Store
from curvlab.studies.train.folder import read_checkpoint, write_checkpoint
from curvlab.studies.train.run import TrainPlan, train

pytestmark = pytest.mark.slow

SMALL = Setup(data="digits[train=300,test=100]", batch=50, device="cpu")
# A kept curvature remembers factorisations, which a resumed run makes anew: the peak may differ.
MACHINE = ["seconds", "cpu_seconds", "step_seconds", "peak_bytes"]


def small(optimizer: str = "second-order", epochs: int = 2, **fields) -> TrainPlan:
    return TrainPlan(SMALL, optimizer, epochs, **fields)


def final_model(folder) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "checkpoint.safetensors")["model"]


def assert_same_bits(one, two) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_digits_pass_95_percent_with_the_defaults():
    frame = train(TrainPlan())
    assert frame["test_accuracy"].iloc[-1] >= 0.95
    assert frame["epoch"].tolist() == list(range(11))


def test_rows_say_what_a_plain_loop_measures():
    frame = train(small(epochs=2))
    data, model = SMALL.load_data(), SMALL.resolve().build_model()
    optimizer = SecondOrder(model, "cross-entropy")
    for epoch in range(3):
        x, y = data.test.all()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y).item()
        assert frame["test_loss"][epoch] == pytest.approx(loss, rel=1e-5)
        assert frame["test_accuracy"][epoch] == (logits.argmax(1) == y).double().mean().item()
        x, y = data.train.all()
        assert frame["train_loss"][epoch] == pytest.approx(
            nn.functional.cross_entropy(model(x), y).item(), rel=1e-5
        )
        losses = [optimizer.step(*pair).item() for pair in data.batches(50, seed=0, epoch=epoch)]
        if epoch < 2:
            assert frame["step_loss"][epoch + 1] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert frame["steps"].tolist() == [0, 6, 12]
    assert frame["seconds"].is_monotonic_increasing
    statuses = frame.filter(like="blocks_").iloc[1:]
    assert (statuses.sum(axis=1) - 1).abs().max() < 1e-12
    assert (frame["peak_bytes"].iloc[1:] > 0).all()
    assert (frame["cg_iterations"].iloc[1:] > 0).all()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lbfgs"])
def test_baselines_are_torchs_own(optimizer):
    setup = replace(SMALL, dtype="float64")
    frame = train(TrainPlan(setup, f"{optimizer}[lr=0.05]", epochs=1))
    data, model = setup.load_data().to("cpu", torch.float64), setup.resolve().build_model()
    made = {
        "sgd": lambda p: torch.optim.SGD(p, 0.05, 0.9),
        "adam": lambda p: torch.optim.Adam(p, 0.05),
        "lbfgs": lambda p: torch.optim.LBFGS(p, 0.05, 5, history_size=10, line_search_fn="strong_wolfe"),
    }[optimizer](model.parameters())
    for x, y in data.batches(50, seed=0, epoch=0):

        def closure(x=x, y=y):
            made.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        made.step(closure)
    x, y = data.test.all()
    assert frame["test_loss"][1] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-9)
    assert frame["optimizer"].tolist() == [optimizer] * 2
    assert frame["cg_iterations"].isna().all()


def test_nothing_is_written_without_a_folder_and_no_random_state_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    train(small(epochs=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_holds_configuration_environment_rows_and_curve(tmp_path):
    frame = train(small(), tmp_path, draw=curves.learning_curve_png)
    config = tomllib.loads((tmp_path / "config.toml").read_text())
    assert config["setup"]["batch"] == 50
    assert json.loads((tmp_path / "environment.json").read_text())["device"] == "cpu"
    written = pd.read_csv(tmp_path / "metrics.csv", keep_default_na=True)
    pd.testing.assert_series_equal(written["test_loss"], frame["test_loss"])
    assert [row["epoch"] for row in Store(tmp_path).rows("epoch")] == [0, 1, 2]
    assert (tmp_path / "learning-curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_learning_curve_names_the_settings_it_was_run_with(tmp_path, monkeypatch):
    drawn = []
    draw = curves.learning_curve

    def keep(run, title):
        drawn.append(draw(run, title).get_figure())
        return drawn[-1].axes[0]

    monkeypatch.setattr(curves, "learning_curve", keep)
    train(small("sgd[lr=0.03]", epochs=1), tmp_path, draw=curves.learning_curve_png)
    (figure,) = drawn
    assert figure.get_suptitle() == "sgd\nlearning rate 0.03, momentum 0.9"
    assert [len(panel.lines) for panel in figure.axes] == [1, 1, 1, 1]


SPECS = [
    "second-order[ema=0.8,momentum=0.5,solver=kfi,provider=fisher,lr=0.02]",
    "second-order[refresh_every=4,adapt_every=3]",
    "second-order[provider=hessian,solver=cg[max_iter=3]]",
    "sgd",
    "adam",
    "lbfgs",
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_stopped_run_resumes_to_the_bit(spec, tmp_path):
    plan = small(spec, schedule="cosine")
    whole = train(plan, tmp_path / "whole")
    for stop in (3, 2, 4, 10_000):
        left = iter(range(stop))
        resumed = train(plan, tmp_path / "parts", should_stop=lambda left=left: next(left, None) is None)
    assert_same_bits(final_model(tmp_path / "whole"), final_model(tmp_path / "parts"))
    pd.testing.assert_frame_equal(
        whole.drop(columns=MACHINE), resumed.drop(columns=MACHINE), check_exact=True
    )
    assert len(Store(tmp_path / "parts").rows("epoch")) == 3


def test_a_run_killed_at_random_moments_and_resumed_equals_an_uninterrupted_one(tmp_path):
    spec = "second-order[momentum=0.5,ema=0.5]"
    plan = small(spec, epochs=8)
    train(plan, tmp_path / "whole")
    program = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from curvlab.studies.train.run import TrainPlan, train\n"
        "from curvlab.studies.setup import Setup\n"
        f"plan = TrainPlan(Setup(data={SMALL.data!r}, batch=50, device='cpu'), {spec!r}, 8)\n"
        "train(plan, sys.argv[1], checkpoint_steps=2, on_progress=lambda p: print(p.step, flush=True))\n"
    )
    folder, chance, kills = tmp_path / "killed", random.Random(0), 0
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, env=os.environ
        )
        for _ in range(chance.randint(4, 13)):
            process.stdout.readline()
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    assert kills == 2
    assert read_checkpoint(folder / "checkpoint.safetensors")["steps"] < 48
    train(plan, folder)
    assert_same_bits(final_model(tmp_path / "whole"), final_model(folder))
    assert [row["epoch"] for row in Store(folder).rows("epoch")] == list(range(9))


def test_more_epochs_continue_a_finished_run(tmp_path):
    train(small(epochs=1), tmp_path / "a")
    train(small(epochs=3), tmp_path / "a")
    train(small(epochs=3), tmp_path / "b")
    assert_same_bits(final_model(tmp_path / "a"), final_model(tmp_path / "b"))
    assert len(train(small(epochs=2), tmp_path / "a")) == 3


def test_another_configuration_is_refused_and_fresh_begins_anew(tmp_path):
    train(small(epochs=1), tmp_path)
    other = small("second-order[lr=0.3]", epochs=1)
    with pytest.raises(SpecError, match=r"optimizer\.lr is `0\.1` there, `0\.3` now.*--fresh"):
        train(other, tmp_path)
    frame = train(other, tmp_path, fresh=True)
    assert len(frame) == len(Store(tmp_path).rows("epoch")) == 2


def test_fresh_does_not_remove_another_studys_results(tmp_path):
    (tmp_path / "config.toml").write_text('study = "compare"\n')
    with pytest.raises(SpecError, match="another study"):
        train(small(), tmp_path, fresh=True)


@pytest.mark.parametrize("spec", ["sgd[lr=1e6,momentum=0]", "second-order[lr=1e30]"])
def test_a_run_that_diverges_is_a_row(spec, tmp_path):
    setup = Setup(data=SMALL.data, batch=50, activation="relu", device="cpu")
    frame = train(TrainPlan(setup, spec, epochs=4), tmp_path)
    last = frame.iloc[-1]
    assert last["status"] == "diverged"
    assert 1 <= last["epoch"] <= 4
    assert math.isnan(last["test_loss"])
    assert last["message"]
    pd.testing.assert_frame_equal(train(TrainPlan(setup, spec, epochs=4), tmp_path), frame)


def test_regression_has_no_accuracy():
    setup = Setup(data="synthetic-regression[train=60,test=20]", criterion="mse", batch=20, device="cpu")
    frame = train(TrainPlan(setup, epochs=1))
    assert frame["test_accuracy"].isna().all()
    assert frame["test_loss"].notna().all()


def test_a_checkpoint_keeps_every_value(tmp_path):
    tree = {
        "state": {0: {"x": torch.randn(3, 2).T, "step": 3}, 1: {"x": None}},
        "list": [1, 0.1, True, "text", [torch.tensor(2, dtype=torch.uint8)]],
        "nan": math.nan,
        "empty": torch.zeros(0),
    }
    path = tmp_path / "checkpoint.safetensors"
    write_checkpoint(path, tree)
    read = read_checkpoint(path)
    assert torch.equal(read["state"][0]["x"], tree["state"][0]["x"])
    assert read["state"][1] == {"x": None}
    assert read["list"][:4] == tree["list"][:4]
    assert read["list"][4][0].dtype == torch.uint8
    assert math.isnan(read["nan"])
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_checkpoint_is_named(tmp_path):
    train(small(epochs=1), tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StoreError, match=r"checkpoint\.safetensors.*--fresh"):
        train(small(epochs=1), tmp_path)
    with pytest.raises(StoreError, match=r"cannot write .*checkpoint\.safetensors"):
        write_checkpoint(tmp_path / "missing" / "checkpoint.safetensors", {})


@pytest.mark.parametrize("wrong", [{"epochs": -1}, {"evaluate_examples": 0}])
def test_plans_out_of_range_are_refused(wrong):
    with pytest.raises(SpecError, match=next(iter(wrong))):
        TrainPlan(**wrong)
