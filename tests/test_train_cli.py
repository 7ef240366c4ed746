"""`curvlab train`: what it prints, how it ends, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from curvlab.cli import main
from curvlab.cli.train import _render
from curvlab.studies.setup import Setup
from curvlab.studies.train.folder import read_checkpoint
from curvlab.studies.train.run import TrainPlan, train

HEADS = ["Epoch", "Seconds", "Train loss", "Test loss", "Accuracy", "Peak"]
DATA = "digits[train=300,test=100]"
SMALL = ["--data", DATA, "--batch", "50", "--device", "cpu"]


def run(*words: str):
    return CliRunner().invoke(main, ["train", *SMALL, *words])


@pytest.mark.slow
def test_json_rows_equal_the_python_api(tmp_path):
    result = run("--epochs", "2", "--lr", "0.2", "--json", "-o", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    plan = TrainPlan(Setup(data=DATA, batch=50, device="cpu"), "second-order[lr=0.2]", 2)
    frame = train(plan)
    assert [row["test_loss"] for row in rows] == pytest.approx(frame["test_loss"].tolist(), rel=1e-9)
    assert (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.slow
def test_the_table_fits_80_columns_and_says_where_the_run_is(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run("--epochs", "1", "-o", str(tmp_path))
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert str(tmp_path) in result.stderr


@pytest.mark.slow
def test_the_table_has_the_units_and_the_style_of_the_other_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    head, rule, *rows = run("--epochs", "1", "-o", str(tmp_path)).stdout.strip().splitlines()
    assert re.split(" {2,}", head.strip()) == [*HEADS, "Status"]
    assert set(rule.strip()) == {"─"}
    assert [row.split()[0] for row in rows[:2]] == ["0", "1"]
    assert rows[1].split()[-2:] == ["kB", "ok"]


def test_a_tiny_and_a_huge_loss_are_shown_with_their_digits(capsys):
    names = ("train_loss", "test_loss", "test_accuracy", "peak_bytes", "seconds")
    row = dict.fromkeys(names, float("nan")) | {"epoch": 1, "status": "ok", "seconds": 12345.6}
    _render(pd.DataFrame([row | {"train_loss": 1.234e-7, "test_loss": 9.87e12}]), Path(), False, False)
    assert capsys.readouterr().out.split()[-6:] == ["12346", "1.234e-07", "9.870e+12", "–", "–", "ok"]


def test_the_settings_of_the_run_are_told_and_that_they_were_not_tuned(tmp_path):
    result = run("--epochs", "0", "--lr", "0.2", "-o", str(tmp_path))
    told = (
        "pch-1 + ea-cg: learning rate 0.2, α 0.01, momentum 0, schedule constant; as given or by default, not"
    )
    assert told in result.stderr


def test_quiet_prints_nothing(tmp_path):
    assert run("--epochs", "0", "--quiet", "-o", str(tmp_path)).output == ""


@pytest.mark.slow
def test_without_a_folder_the_same_command_finds_its_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("--epochs", "1", "--quiet")
    run("--epochs", "1", "--quiet")
    run("--epochs", "1", "--quiet", "--lr", "0.3")
    assert len(list((tmp_path / "runs" / "train").iterdir())) == 2


@pytest.mark.slow
def test_a_diverged_run_says_so_and_exits_with_1(tmp_path):
    result = run("--activation", "relu", "--optimizer", "sgd[lr=1e6,momentum=0]", "-o", str(tmp_path))
    assert result.exit_code == 1
    assert "diverged in epoch 1" in result.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--optimizer", "sgd", "-p", "fisher"], "--provider does not go with `sgd`"),
        (["--optimizer", "sdg"], "sgd"),
        (["-s", "ea-gc"], "ea-cg"),
        (["--lr", "-1"], "lr=-1.0"),
        (["--lr-schedule", "cosin"], "cosine"),
        (["-p", "hessian", "-s", "kfi"], "matrix-free"),
        (["--epochs", "-1"], "epochs"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(words, sentence, tmp_path):
    result = run(*words, "-o", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.output


def test_a_folder_that_cannot_be_written_to_is_a_mistake(tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = run("--epochs", "0", "-o", str(tmp_path / "file" / "run"))
    assert result.exit_code == 2
    assert f"cannot write to the folder {tmp_path / 'file' / 'run'}" in result.stderr


def test_another_configuration_in_the_folder_is_a_mistake_too(tmp_path):
    run("--epochs", "0", "--quiet", "-o", str(tmp_path))
    result = run("--epochs", "0", "--alpha", "0.1", "-o", str(tmp_path))
    assert result.exit_code == 2
    assert "optimizer.alpha is `0.01` there, `0.1` now" in result.stderr
    assert run("--epochs", "0", "--alpha", "0.1", "--fresh", "--quiet", "-o", str(tmp_path)).exit_code == 0


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_can_be_resumed(tmp_path):
    words = ["train", *SMALL, "--epochs", "6", "-o", str(tmp_path / "stopped")]
    program = (
        "import curvlab.studies.train.run as runs, curvlab.cli\n"
        "advance = runs.TrainRun.advance\n"
        "def told(self):\n"
        "    advance(self)\n"
        "    print(self.steps, flush=True)\n"
        "runs.TrainRun.advance = told\n"
        "curvlab.cli.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ,
    )
    for _ in range(8):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Resume it with" in errors.decode()
    assert 8 <= read_checkpoint(tmp_path / "stopped" / "checkpoint.safetensors")["steps"] < 36
    run("--epochs", "6", "--quiet", "-o", str(tmp_path / "stopped"))
    run("--epochs", "6", "--quiet", "-o", str(tmp_path / "whole"))
    one, two = (
        read_checkpoint(tmp_path / name / "checkpoint.safetensors")["model"] for name in ("stopped", "whole")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
