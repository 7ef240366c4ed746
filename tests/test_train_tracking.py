"""Curvature along `curvlab train`: the right numbers, once each, beside a run that is as it would be."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

import curvlab
from curvlab.cli import main
from curvlab.exceptions import SpecError
from curvlab.report.drawing import Look
from curvlab.report.tracking import tracking_content
from curvlab.studies.setup import Setup
from curvlab.studies.train.folder import read_checkpoint
from curvlab.studies.train.run import TrainPlan, train
from curvlab.studies.train.tracking import Tracking

pytestmark = pytest.mark.slow

SETUP = Setup(arch="6-4-3", data="synthetic[features=6,classes=3,examples=60]", batch=20, device="cpu")
PLAN = TrainPlan(SETUP, "sgd[lr=0.5]", epochs=2)
TRACKING = Tracking(["top-eigenvalue", "trace"], every=2, examples=30)


def model_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = read_checkpoint(folder / "checkpoint.safetensors")["model"]
    return found


def test_the_run_is_bit_equal_with_and_without(tmp_path: Path) -> None:
    train(PLAN, tmp_path / "plain")
    train(PLAN, tmp_path / "tracked", track=TRACKING)
    plain, tracked = model_in(tmp_path / "plain"), model_in(tmp_path / "tracked")
    assert all(torch.equal(plain[name], tracked[name]) for name in plain)
    frame = pd.read_csv(tmp_path / "tracked" / "curvature.csv")
    steps = len(SETUP.load_data().batches(20)) * 2
    assert frame["step"].unique().tolist() == list(range(0, steps + 1, 2))
    assert frame["measure"].unique().tolist() == ["top-eigenvalue", "trace"]


def test_the_first_number_is_that_of_the_first_weights(tmp_path: Path) -> None:
    train(PLAN, tmp_path, track=TRACKING)
    frame = pd.read_csv(tmp_path / "curvature.csv")
    seen = SETUP.load_data().train.subset(30, SETUP.seed).all()
    problem = curvlab.Problem(SETUP.resolve().build_model(), "cross-entropy", *seen)
    dense = curvlab.estimate("hessian[structure=full]", problem).to_dense()
    assert frame["value"][0] == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-3)


def test_a_stopped_run_resumes_to_the_numbers_of_an_uninterrupted_one(tmp_path: Path) -> None:
    train(PLAN, tmp_path / "whole", track=TRACKING)
    asked = count()
    train(PLAN, tmp_path / "parts", track=TRACKING, should_stop=lambda: next(asked) == 2)
    train(PLAN, tmp_path / "parts", track=TRACKING)
    whole, parts = (pd.read_csv(tmp_path / name / "curvature.csv") for name in ("whole", "parts"))
    pd.testing.assert_frame_equal(parts, whole)


def test_the_command_writes_the_numbers_and_a_page(tmp_path: Path) -> None:
    words = ["train", "--arch", SETUP.arch, "--data", SETUP.data, "--batch", "20", "--epochs", "1", "--quiet"]
    asked = [*words, "-o", str(tmp_path), "--track", "top-eigenvalue, density", "--track-every", "2"]
    found = CliRunner().invoke(main, asked)
    assert found.exit_code == 0, found.output
    page = (tmp_path / "curvature.html").read_text(encoding="utf-8")
    assert "The top eigenvalue goes from" in page
    assert "outliers" in page
    wrong = CliRunner().invoke(main, [*words, "-o", str(tmp_path / "b"), "--track", "sharpness"])
    assert wrong.exit_code == 2
    assert "top-eigenvalue, trace, density, errors" in wrong.output


@pytest.mark.parametrize("fields", [{"measures": []}, {"every": 0}, {"examples": 0}, {"measures": ["x"]}])
def test_what_cannot_be_tracked_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="expected"):
        Tracking(**fields)  # type: ignore[arg-type]


def test_errors_are_a_line_for_each_provider_with_a_legend_below_the_axes() -> None:
    rows = [
        {
            "step": step,
            "measure": "errors",
            "of": f"{name}, layer {layer}",
            "value": 1.0,
            "standard_error": 0.0,
        }
        for name in ("fisher", "gauss-newton[kind=rows,samples=1]", "pch-1", "pch-2")
        for layer in (1, 2, 3, "Total")
        for step in (0, 10)
    ]
    content = tracking_content(pd.DataFrame(rows), ())
    (drawing,) = next(section for section in content.sections if section.name == "errors").drawings
    axes = drawing.draw(Look.of([]))
    figure, legend = axes.get_figure(root=True), axes.get_legend()
    assert figure is not None
    assert legend is not None
    figure.draw_without_rendering()
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["fisher", "gauss-newton[kind=rows,samples=1]", "pch-1", "pch-2"]
    assert len(axes.lines) == 16
    assert legend.get_window_extent().y1 <= axes.get_window_extent().y0
    assert legend.get_window_extent().y0 >= figure.bbox.y0
    assert axes.get_window_extent().height > 0.5 * figure.bbox.height
