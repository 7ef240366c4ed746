"""Run folders that an earlier version wrote still open, report and resume.

tests/data/folders-of-31b49ba holds what commit 31b49ba wrote, without figures and pages:

    curvlab compare --arch 6-4-3 --data 'synthetic[features=6,classes=3,examples=50]' --batch 20
        -p fisher -p pch-1 -s kfi -s ea-cg -r 2 --epochs 1 --train-batch 10 --baseline sgd -o compare
    curvlab train --arch 6-4-3 --data 'synthetic[features=6,classes=3,examples=50]' --batch 10
        --epochs 2 -p fisher -s kfi -o train
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

import curvlab
from curvlab.cli import main
from curvlab.studies.setup import Setup
from curvlab.studies.store import Store
from curvlab.studies.train.plan import TrainPlan
from curvlab.studies.train.run import train

pytestmark = pytest.mark.usefixtures("plain_pages")

FOLDERS = Path(__file__).parent / "data" / "folders-of-31b49ba"
DATA = "synthetic[features=6,classes=3,examples=50]"


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDERS / "compare", tmp_path / "compare"))


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDERS / "train", tmp_path / "train"))


def test_an_old_comparison_loads_with_the_numbers_it_was_written_with() -> None:
    found = curvlab.load_comparison(FOLDERS / "compare").cells
    written = pd.read_csv(FOLDERS / "compare" / "results.csv")
    assert set(written.columns) <= set(found.columns)
    for name in written.columns:
        if pd.api.types.is_numeric_dtype(written[name]) and written[name].notna().any():
            assert found[name].astype(float).tolist() == pytest.approx(
                written[name].astype(float), nan_ok=True
            )
    assert found["status"].tolist() == ["ok"] * 4


def test_an_old_comparison_shows_its_training_runs_and_its_command() -> None:
    found = curvlab.load_comparison(FOLDERS / "compare")
    assert set(found.convergence["optimizer"]) == {
        f"{p} + {s}" for p in ("fisher", "pch-1") for s in ("kfi", "ea-cg")
    } | {"sgd"}
    assert found.command.startswith("curvlab compare -p fisher -p pch-1 -s kfi -s ea-cg")
    assert "--train-batch 10" in found.command


@pytest.mark.slow
def test_an_old_comparison_is_reported_anew(compared: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(compared)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "pch-1" in result.stdout
    assert "All numbers" in (compared / "report.html").read_text()


@pytest.mark.slow
def test_an_old_folder_is_measured_on_beside_its_rows(compared: Path) -> None:
    before = [row["key"] for row in Store(compared, read_only=True).rows()]
    words = ["--config", str(compared / "config.toml"), "--epochs", "0", "-s", "kfi", "-r", "1"]
    result = CliRunner().invoke(
        main, ["compare", *words, "-o", str(compared), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    rows = Store(compared, read_only=True).rows()
    assert [row["key"] for row in rows][: len(before)] == before
    assert len(json.loads(result.stdout)["cells"]) == 2


def test_old_folders_merge(compared: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["merge", str(compared), "-o", str(tmp_path / "both")], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    assert len(curvlab.load_comparison(tmp_path / "both").cells) == 4


def test_an_old_training_run_resumes_where_it_was(trained: Path) -> None:
    before = pd.read_csv(trained / "metrics.csv")
    plan = TrainPlan(
        Setup(arch="6-4-3", data=DATA, batch=10, device="cpu"),
        "second-order[provider=fisher,solver=kfi,lr=0.1,alpha=0.05]",
        epochs=3,
    )
    frame = train(plan, trained)
    assert frame["epoch"].tolist() == [0, 1, 2, 3]
    assert frame["train_loss"][:3].tolist() == pytest.approx(before["train_loss"].tolist(), rel=1e-12)
    assert frame["status"].tolist() == ["ok"] * 4
