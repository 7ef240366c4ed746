"""`curvlab spectrum` writes a page and frames with the numbers of the whole Hessian."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from filelock import FileLock

import curvlab
from curvlab.cli import main
from curvlab.exceptions import CurvlabError, DenseSizeError, FolderInUseError
from curvlab.report.spectra import spectrum_content, write_spectrum
from curvlab.studies.setup import Setup
from curvlab.studies.small.spectra import SpectrumStudy, study_spectrum

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
    negative = float((values < -1e-10 * values.abs().max()).double().mean())
    measures = pd.read_csv(tmp_path / "measures.csv").set_index("measure")
    trace = measures.loc["trace"]
    assert abs(trace["value"] - float(whole.trace())) < 5 * trace["standard_error"]
    assert [row["layer"] for row in shown["layers"]] == ["0", "2"]
    assert len(pd.read_csv(tmp_path / "layers.csv")) == 2
    assert list(pd.read_csv(tmp_path / "density.csv")) == ["eigenvalue", "density", "low", "high"]
    page = (tmp_path / "spectrum.html").read_text(encoding="utf-8")
    for heading in ("Density", "Largest eigenvalues", "Layer sharpness", "Measures of the whole matrix"):
        assert heading in page
    assert "are negative" in page  # so few parameters have all their eigenvalues, and no estimate
    assert measures.loc["negative mass", "standard_error"] == 0
    assert measures.loc["negative mass", "value"] == pytest.approx(negative)
    assert f">{len(values)}<" in page
    assert page.count("<svg") == 3


def test_an_estimated_share_of_negative_eigenvalues_has_its_error_and_says_from_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(curvlab.curvature, "DENSE_OPERATOR_UP_TO", 0)
    problem = Setup(arch="64-6-10", batch=60, dtype="float64").build_problem()
    study = study_spectrum(curvlab.estimate("hessian[full=true]", problem), k=2, probes=4, steps=30)
    row = study.measures().set_index("measure").loc["negative mass"]
    assert 0 < row["standard_error"] < row["value"] < 1
    said = " ".join(spectrum_content(study).answer.paragraphs)
    assert f"{row['value']:.1%} (± {row['standard_error']:.1%}) of the eigenvalues lie below -0.00" in said


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


def small_study(model: torch.nn.Module, provider: str = "fisher") -> SpectrumStudy:
    problem = curvlab.Problem(model, "cross-entropy", torch.eye(4).double(), torch.tensor([0, 1, 0, 1]))
    return study_spectrum(curvlab.estimate(provider, problem), k=3)


@pytest.mark.slow
def test_another_spectrum_and_files_of_the_user_are_set_aside(tmp_path: Path, plain_pages: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()
    (tmp_path / "layers.csv").write_text("mine")
    write_spectrum(small_study(model), tmp_path)
    assert (tmp_path / "layers.previous-1.csv").read_text() == "mine"
    first = (tmp_path / "eigenvalues.csv").read_bytes()
    write_spectrum(small_study(model), tmp_path)
    assert not (tmp_path / "eigenvalues.previous-1.csv").exists(), "the same numbers again"
    write_spectrum(small_study(model, "pch-1"), tmp_path)
    assert (tmp_path / "eigenvalues.previous-1.csv").read_bytes() == first
    assert (tmp_path / "eigenvalues.csv").read_bytes() != first
    assert (tmp_path / "spectrum.previous-1.html").exists()


def test_a_folder_that_another_run_holds_is_left_alone(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2)).double()
    study = small_study(model)
    with FileLock(tmp_path / ".run.lock"), pytest.raises(FolderInUseError, match="in use"):
        write_spectrum(study, tmp_path)
    assert not (tmp_path / "eigenvalues.csv").exists()


def test_names_of_layers_are_no_formulas_in_the_frames() -> None:
    model = torch.nn.Sequential()
    model.add_module("=1+1", torch.nn.Linear(4, 2).double())
    assert "\n'=1+1," in small_study(model).frame_texts()["layers.csv"]


def test_more_vectors_than_memory_has_room_for_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 200), torch.nn.Tanh(), torch.nn.Linear(200, 2)).double()
    problem = curvlab.Problem(model, "cross-entropy", torch.eye(4).double(), torch.tensor([0, 1, 0, 1]))
    fisher = curvlab.estimate("fisher", problem)
    with pytest.raises(DenseSizeError, match="vectors of"):
        curvlab.density(problem, probes=10**9)
    with pytest.raises(CurvlabError, match=r"days|bytes"):  # what is too much depends on the machine
        curvlab.density(problem, probes=10**6, steps=1000)
    with pytest.raises(DenseSizeError, match="bytes"):
        fisher.sample(10**12, damping=curvlab.Additive(0.1))
