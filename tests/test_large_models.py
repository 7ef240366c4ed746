"""A ResNet-18 and a GPT-2 go through plan, estimate, solve, SecondOrder and compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import curvlab
from curvlab.architectures import architecture
from curvlab.cli import main
from curvlab.optim import SecondOrder
from curvlab.studies.compare.costs import Pair, memory
from examples import huggingface

Made = tuple[nn.Module, torch.Tensor, torch.Tensor]
SEED = 0


def resnet18() -> Made:
    """ResNet-18 for images of 32 × 32 in its batch-normalised form, as it is evaluated."""
    generator = torch.Generator().manual_seed(SEED)
    model = architecture("resnet18").build(seed=SEED).eval()
    return model, torch.randn(2, 3, 32, 32, generator=generator), torch.tensor([1, 7])


def gpt2() -> Made:
    """GPT-2 from its configuration, two blocks of width 16; its embedding is its head as well."""
    pytest.importorskip("transformers", reason="needs transformers")
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(huggingface.VOCABULARY["tiny"], (3, 17), generator=generator)
    return huggingface.tiny(), tokens[:, :-1], tokens[:, 1:]


@pytest.mark.slow
@pytest.mark.parametrize("make", [resnet18, gpt2])
def test_a_large_model_is_planned_estimated_solved_and_trained(make: Callable[[], Made]) -> None:
    model, inputs, targets = make()
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    pair = Pair("fisher", "ea-cg", 0.05)
    plan = curvlab.plan(problem, [pair.provider], [pair.solver], forms=["sample-space"])
    assert plan["status"].tolist() == ["ok"]
    # The very bytes that a run has, and every parameter has a block.
    assert plan["peak_bytes"][0] == pytest.approx(memory(pair, problem).peak_bytes, rel=0.01)
    curvature, gradient = curvlab.estimate(pair.provider, problem), problem.gradient()
    assert set(curvature.blocks) == {name for name, _ in model.named_parameters()}
    solution = curvlab.solve(pair.solver, curvature, gradient, alpha=pair.alpha)
    slope = sum(float((gradient[name] * solution.direction[name]).sum()) for name in gradient)
    assert slope < 0
    optimizer = SecondOrder(model, "cross-entropy", provider="fisher[kind=mc]", solver="kfi", lr=0.005)
    losses = [float(optimizer.step(inputs, targets)) for _ in range(3)]
    assert losses[-1] < losses[0]


@pytest.mark.long
@pytest.mark.usefixtures("plain_pages")
def test_a_resnet18_is_compared_in_one_command(tmp_path: Path) -> None:
    """`tests/test_huggingface.py` compares a GPT-2."""
    subject = ["--arch", "resnet18", "--data", "synthetic-images[examples=40]", "--batch", "2"]
    given = ["compare", *subject, "-p", "fisher[kind=mc]", "-s", "ea-cg", "-r", "1", "--at", "init"]
    done = CliRunner().invoke(main, [*given, "--quiet", "--output", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "results" / "report.html").exists()
