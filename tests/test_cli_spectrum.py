"""`curvlab spectrum` writes a page and frames with the numbers of the whole Hessian."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

import curvlab
from curvlab.cli import main
from curvlab.studies.setup import Setup

SMALL = [
    "--arch",
    "64-6-10",
    "--batch",
    "60",
    "--dtype",
    "float64",
    "-k",
    "4",
    "--probes",
    "4",
    "--steps",
    "30",
]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["spectrum", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_page_and_frames_have_the_spectrum_of_the_whole_hessian(tmp_path: Path) -> None:
    shown = json.loads(run(*SMALL, "-o", str(tmp_path), "--json"))
    setup = Setup(arch="64-6-10", batch=60, dtype="float64")
    whole = curvlab.estimate("hessian[full=true]", setup.build_problem()).to_dense()
    values = torch.linalg.eigvalsh(whole).flip(0)
    frame = pd.read_csv(tmp_path / "eigenvalues.csv")
    assert frame["eigenvalue"].tolist() == pytest.approx(values[:4].tolist(), abs=1e-9)
    assert frame["residual"].max() < 1e-8
    measures = pd.read_csv(tmp_path / "measures.csv").set_index("measure")
    trace = measures.loc["trace"]
    assert abs(trace["value"] - float(whole.trace())) < 5 * trace["standard_error"]
    assert [row["layer"] for row in shown["layers"]] == ["0", "2"]
    assert len(pd.read_csv(tmp_path / "layers.csv")) == 2
    assert list(pd.read_csv(tmp_path / "density.csv")) == ["eigenvalue", "density", "low", "high"]
    page = (tmp_path / "spectrum.html").read_text(encoding="utf-8")
    for heading in ("Density", "Largest eigenvalues", "Layer sharpness", "Measures of the whole matrix"):
        assert heading in page
    assert "are negative" in page
    assert page.count("<svg") == 3


@pytest.mark.slow
def test_a_checkpoint_gives_the_weights_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    model = Setup(arch="64-6-10", dtype="float64").build_model()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    given = [*SMALL, "-p", "fisher", "-o", str(tmp_path / "out")]
    shown = json.loads(run(*given, "--checkpoint", str(tmp_path / "state.pt"), "--json"))
    measures = {row["measure"]: row["value"] for row in shown["measures"]}
    # With all weights zero the logits are: gradients at the bias have squared norm 0.9² + 9 · 0.1².
    hidden = 1 + 6 * 0.25
    assert measures["trace"] == pytest.approx(0.9 * hidden)
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pt")
    result = CliRunner().invoke(main, ["spectrum", *given, "--checkpoint", str(tmp_path / "other.pt")])
    assert result.exit_code == 2
    assert "not the state of this model" in result.output
