"""The worked example of a Hugging Face model runs as its page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import curvlab
from examples import huggingface

pytest.importorskip("transformers", reason="needs transformers")

ROOT = Path(__file__).parent.parent
# A script of examples/ has its own folder on the path, not this tree.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def mean_loss(model: torch.nn.Module, inputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens that have a target."""
    logits = model(**inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.fixture
def tiny() -> tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor]:
    (batch,) = huggingface.batches()
    return huggingface.tiny().double(), *batch


def test_the_batch_leaves_padded_positions_out_of_the_loss(tiny):
    _, inputs, targets = tiny
    assert ((targets == huggingface.IGNORED) == (inputs["attention_mask"] == 0)).all()
    assert (targets == huggingface.IGNORED).any()


def test_the_gradient_is_autograds(tiny):
    model, inputs, targets = tiny
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad(mean_loss(model, inputs, targets), parameters)
    gradient = curvlab.Problem(model, "cross-entropy", inputs, targets).gradient()
    for name, wanted in zip(names, expected, strict=True):
        torch.testing.assert_close(gradient[name], wanted, rtol=1e-9, atol=1e-12)


def test_every_parameter_has_a_block(tiny):
    model, inputs, targets = tiny
    curvature = curvlab.estimate("fisher[kind=mc]", curvlab.Problem(model, "cross-entropy", inputs, targets))
    assert set(curvature.blocks) == {name for name, _ in model.named_parameters()}


@pytest.mark.slow
def test_the_example_runs_and_its_steps_lower_the_loss():
    command = [sys.executable, str(ROOT / "examples" / "huggingface.py"), "--steps", "4"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_command_line_takes_the_model_by_its_address(tmp_path):
    command = [sys.executable, "-m", "curvlab", "compare", "--model", "huggingface:tiny"]
    command += ["--data", "huggingface:batches", "--provider", "fisher", "--solver", "ea-cg"]
    command += ["--at", "init", "--repetitions", "1", "--alphas", "0.5"]
    command += ["--output", str(tmp_path / "results")]
    subprocess.run(
        command, cwd=ROOT / "examples", env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert any((tmp_path / "results").iterdir())


@pytest.mark.long
def test_gpt2_itself_has_its_parameters():
    model = huggingface.gpt2()
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
