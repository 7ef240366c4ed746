"""The plateau of a training run: how high it is, when a run is said to stay there, and what is said."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from curvlab.cli import main
from curvlab.criteria.registry import criterion_named
from curvlab.data import Examples
from curvlab.data.inputs import TensorInputs
from curvlab.optim import SecondOrder
from curvlab.studies.setup import Setup
from curvlab.studies.train.folder import read_checkpoint, write_checkpoint
from curvlab.studies.train.optimizers import SecondOrderSpec
from curvlab.studies.train.plateau import Plateau
from curvlab.studies.train.run import TrainPlan, train

DEEP = "fcnn[widths=64-24-20-16-12-10]"
DATA = "digits[train=300,test=100]"
STUCK = TrainPlan(Setup(arch=DEEP, data=DATA, batch=10, device="cpu"), "sgd[lr=0.01]", epochs=6)


def of_targets(criterion, targets, outputs: int) -> Plateau:
    examples = Examples(TensorInputs(torch.zeros(len(targets), 1, dtype=torch.float64)), targets)
    return Plateau.of(criterion_named(criterion), examples, outputs, torch.float64)


def classes(*counts: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def entropy(shares) -> float:
    shares = np.asarray(shares, dtype=float) / np.sum(shares)
    return float(-(shares * np.log(shares)).sum())


def test_with_cross_entropy_it_is_the_entropy_of_the_class_frequencies():
    found = of_targets("cross-entropy", classes(700, 250, 50), outputs=3)
    assert found.height == pytest.approx(entropy([700, 250, 50]), rel=1e-12)


def test_an_output_without_examples_does_not_raise_it():
    assert of_targets("cross-entropy", classes(60, 40), 5).height == pytest.approx(
        entropy([60, 40]), rel=1e-9
    )


def test_class_weights_and_ignored_labels_count_as_they_do_in_the_loss():
    weight = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
    labels = torch.cat([classes(50, 30, 20), torch.full((40,), -100)])
    found = of_targets(nn.CrossEntropyLoss(weight=weight), labels, outputs=3)
    assert found.height == pytest.approx(entropy([50, 90, 10]), rel=1e-6)


def test_with_mse_it_is_the_variance_of_the_targets_in_any_number_of_chunks():
    targets = 3 + 2 * torch.randn(2500, 4, dtype=torch.float64)
    assert of_targets("mse", targets, 4).height == pytest.approx(float(targets.var(0, unbiased=False).mean()))


def test_inputs_that_are_their_own_targets_have_one_too():
    inputs = torch.randn(50, 3, dtype=torch.float64)
    examples = Examples(TensorInputs(inputs), None)
    found = Plateau.of(criterion_named("mse"), examples, 3, torch.float64)
    assert found.height == pytest.approx(float(inputs.var(0, unbiased=False).mean()), rel=1e-12)


def test_with_bce_it_is_the_mean_entropy_of_the_outputs():
    ones = torch.tensor([30, 80, 55])
    targets = (torch.arange(100)[:, None] < ones).double()
    wanted = np.mean([entropy([n, 100 - n]) for n in ones.tolist()])
    assert of_targets("bce", targets, 3).height == pytest.approx(wanted, rel=1e-6)


def test_with_a_function_of_the_users_own_it_is_the_lowest_point_of_a_fine_grid():
    def pseudo_huber(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((1 + (logits - target) ** 2).sqrt() - 1).sum()

    targets = torch.cat([torch.randn(40, 1), 12 + torch.randn(9, 1)]).double()
    grid = np.linspace(-3, 15, 20_001)
    losses = (np.sqrt(1 + (grid[:, None] - targets.numpy().T) ** 2) - 1).mean(1)
    assert of_targets(pseudo_huber, targets, 1).height == pytest.approx(losses.min(), rel=1e-6)


@pytest.mark.parametrize(
    ("criterion", "targets", "outputs", "reason"),
    [
        ("cross-entropy", classes(0, 30), 3, "one class"),
        ("mse", torch.full((20, 2), 1.5, dtype=torch.float64), 2, "has loss 0:"),
    ],
)
def test_where_a_constant_is_right_there_is_none_and_a_reason(criterion, targets, outputs, reason):
    found = of_targets(criterion, targets, outputs)
    assert math.isnan(found.height)
    assert reason in found.reason
    assert not found.holds(0.0)


@pytest.mark.parametrize(
    ("loss", "on"), [(2.26, True), (2.34, True), (2.25, False), (2.36, False), (math.nan, False)]
)
def test_a_loss_within_2_percent_lies_on_it(loss, on):
    assert Plateau(math.log(10)).holds(loss) is on


@pytest.fixture(scope="module")
def stuck() -> pd.DataFrame:
    return train(STUCK)


@pytest.mark.slow
def test_a_run_that_stays_says_so_once_with_what_was_seen_and_what_to_try(stuck):
    assert stuck["constant_loss"].unique() == pytest.approx([2.3025], abs=1e-3)
    steps = stuck["plateau_steps"].tolist()
    assert steps[0] == 0
    assert steps[-1] >= 100
    assert all(late in (0, early + 30) for early, late in pairwise(steps))  # 30 updates in an epoch
    first = next(index for index, count in enumerate(steps) if count >= 100)
    notes = [message for message in stuck["message"] if message]
    assert notes == [stuck["message"][first]]
    seen = (f"for {steps[first]} updates", f"now {stuck['train_loss'][first]:.4g}", "2.302")
    assert all(part in notes[0] for part in (*seen, "more epochs", "larger batch (10 now)"))
    assert set(stuck["status"]) == {"ok"}


@pytest.mark.slow
def test_a_run_that_leaves_says_nothing():
    frame = train(TrainPlan(Setup(data=DATA, batch=10, device="cpu"), epochs=4))
    assert frame["train_loss"].iloc[-1] < 1
    assert frame["plateau_steps"].iloc[-1] == 0
    assert not any(frame["message"])


def test_a_few_updates_are_no_stay():
    frame = train(replace(STUCK, epochs=3))
    assert frame["plateau_steps"].iloc[-1] > 0
    assert not any(frame["message"])


@pytest.mark.slow
def test_a_resumed_run_counts_on_and_says_the_same(stuck, tmp_path):
    for stop in (70, 1000):
        left = iter(range(stop))
        frame = train(STUCK, tmp_path, should_stop=lambda left=left: next(left, None) is None)
    columns = ["plateau_steps", "constant_loss", "message"]
    pd.testing.assert_frame_equal(frame[columns], stuck[columns], check_exact=True)


def test_a_checkpoint_from_before_the_plateau_was_watched_is_resumed(tmp_path):
    train(replace(STUCK, epochs=1), tmp_path)
    state = read_checkpoint(tmp_path / "checkpoint.safetensors")
    for row in state["rows"]:
        del row["plateau_steps"], row["constant_loss"]
    write_checkpoint(tmp_path / "checkpoint.safetensors", state)
    frame = train(replace(STUCK, epochs=2), tmp_path)
    assert frame["plateau_steps"].iloc[-1] == 30


def test_regression_is_watched_and_class_balance_is_not_suggested():
    setup = Setup(data="synthetic-regression[train=100,test=20]", criterion="mse", batch=1, device="cpu")
    frame = train(TrainPlan(setup, "second-order[lr=1e-9]", epochs=1))
    targets = setup.load_data().train.targets
    assert frame["constant_loss"][1] == pytest.approx(float(targets.var(0, unbiased=False).mean()), rel=1e-5)
    assert "each class" not in "".join(frame["message"])


WORDS = ["--arch", DEEP, "--data", DATA, "--batch", "10", "--device", "cpu"]


@pytest.mark.long
def test_the_command_warns_at_the_end_whatever_it_prints_and_when_it_shows_a_finished_run(tmp_path):
    settings = ["--alpha", "1", "--lr", "0.1", "--epochs", "5"]  # α = 1: steps along the gradient
    for more in ([], ["--quiet"], ["--json"]):
        result = CliRunner().invoke(main, ["train", *WORDS, *settings, "-o", str(tmp_path), *more])
        assert result.exit_code == 0, result.output
        assert result.stderr.count("stays on its plateau") == 1
        assert "Warning: The run stays on its plateau: for " in result.stderr
        for part in (
            "larger batch (10 now)",
            "smaller learning rate at this batch (0.1 now)",
            "equally many examples of each class",
            "`kfi` instead of `ea-cg`",
        ):
            assert part in result.stderr


def test_the_command_says_why_no_plateau_is_watched_for(tmp_path, monkeypatch):
    monkeypatch.setattr(Plateau, "of", classmethod(lambda cls, *_: cls(math.nan, "of this reason")))
    words = ["train", *WORDS, "--epochs", "0", "-o", str(tmp_path)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "No plateau is watched for: of this reason." in result.stderr


@pytest.mark.slow
def test_the_defaults_leave_the_plateau_of_a_deep_network():
    setup = Setup(arch="fcnn[widths=64-48-40-32-24-16-10]", batch=100, device="cpu")
    frame = train(TrainPlan(setup, epochs=10))
    assert frame["train_loss"].iloc[-1] < 0.8 * frame["constant_loss"].iloc[-1]


def test_the_defaults_are_the_same_for_the_optimizer_the_spec_and_the_help():
    signature = inspect.signature(SecondOrder).parameters
    spec = SecondOrderSpec()
    for name in ("provider", "solver", "lr", "alpha", "momentum", "weight_decay", "ema", "refresh_every"):
        assert signature[name].default == getattr(spec, name)
    text = " ".join(CliRunner().invoke(main, ["train", "--help"]).output.split())
    assert f"(1-α)C + αI. [default: {spec.alpha:g}]" in text
    assert f"[default: {spec.lr:g}, or the baseline's own]" in text
