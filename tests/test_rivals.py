"""Optimizers to compare with: torch's by name, Muon, and those of another package or of the user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

from curvlab.criteria.registry import criterion_named
from curvlab.exceptions import CurvlabError, SpecError
from curvlab.studies.setup import Setup
from curvlab.studies.train.optimizers import optimizers
from curvlab.studies.train.plan import TrainPlan, rates_of
from curvlab.studies.train.run import train

SETUP = Setup(data="digits[train=200]", batch=50, dtype="float64")
OWN = """
import torch

class Signed(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01, weight_decay=0, power: int = 2, betas=(0.5, 0.25), hook=None):
        assert isinstance(weight_decay, float) and isinstance(power, int) and hook is None
        super().__init__(params, {"lr": lr, "betas": betas})

    def step(self, closure):
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * p.grad.sign())
        return loss

def of_model(model, lr):
    return Signed([p for _, p in model.named_parameters()], lr, weight_decay=0.0)

def without_rate(params):
    return None

def nothing(params, lr=0.1):
    return "no optimizer"

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's own; each test has one of another name, since modules are imported once."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return name


def losses(optimizer: str, **more: object) -> list[float]:
    frame: pd.DataFrame = train(TrainPlan(SETUP, optimizer, epochs=2, **more))  # type: ignore[arg-type]
    assert (frame["status"] == "ok").all()
    return [float(loss) for loss in frame["train_loss"]]


@pytest.mark.parametrize("name", ["adamw", "rmsprop", "nadam[lr=0.01]", "torch.optim:RAdam[lr=0.01]", "muon"])
def test_any_optimizer_of_torch_trains_by_its_name(name: str) -> None:
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon from 2.9 on")
    first, *_, last = losses(name)
    assert last < first


def test_adamw_by_name_is_the_built_in_adam_with_the_same_settings() -> None:
    assert losses("adamw[lr=0.02,weight_decay=0]") == losses("adam[lr=0.02]")


def test_an_address_of_torch_is_the_same_optimizer_as_its_name() -> None:
    assert losses("torch.optim:SGD[lr=0.5,momentum=0.9]") == losses("sgd[lr=0.5]")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_muon_orthogonalises_the_steps_of_matrices_and_leaves_the_rest_to_adamw() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3)).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stepper = optimizers.make("muon[lr=0.01,momentum=0]").build(model, criterion_named("cross-entropy"))
    stepper.step(torch.randn(20, 6, dtype=torch.float64), torch.arange(20) % 3)
    for name, p in model.named_parameters():
        step = (p.detach() - before[name]) / 0.01
        if p.ndim == 1:
            # The first step of Adam is the sign of the gradient.
            torch.testing.assert_close(step.abs(), torch.ones_like(step), rtol=1e-4, atol=0)
        else:
            # The rank of the last layer's gradient is 2: its rows, of 3 classes, add up to 0.
            values = torch.linalg.svdvals(step)[:2] / (0.2 * max(step.shape) ** 0.5)
            assert 0.6 < float(values.min()) <= float(values.max()) < 1.4, "Newton-Schulz comes close to 1"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_a_run_with_muon_resumes_to_the_bit(tmp_path: Path) -> None:
    plan = TrainPlan(SETUP, "muon", epochs=3)
    whole = train(plan)
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps > 5

    train(plan, tmp_path / "run", should_stop=stop)
    resumed = train(plan, tmp_path / "run")
    assert resumed["train_loss"].tolist() == whole["train_loss"].tolist()


def test_an_optimizer_of_the_users_own_trains_by_its_address(own: str) -> None:
    first, *_, last = losses(f"{own}:Signed[lr=0.02,weight_decay=0.5]")
    assert last < first
    assert losses(f"{own}:Signed[lr=0.02]") == losses(f"{own}:of_model[lr=0.02]"), "given the model itself"
    made = optimizers.make(f"{own}:Signed[betas=(0.9,0.99),power=3]")
    assert (made.betas, made.power, made.weight_decay) == ((0.9, 0.99), 3, 0.0)  # type: ignore[attr-defined]
    assert optimizers.make(optimizers.canonical(made)) == made


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("without_rate", "no argument `lr`"),
        ("number", "is a int; expected a class or a function"),
        ("missing", "has no `missing`"),
        ("nothing", "gave a str without step"),
        ("Signed[power=much]", "takes an integer"),
        ("Signed[speed=1]", "not a field"),
    ],
)
def test_what_is_no_optimizer_is_refused_with_the_reason(own: str, attribute: str, words: str) -> None:
    with pytest.raises(CurvlabError, match=words):
        losses(f"{own}:{attribute}")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"known: .*`sgd`"):
        optimizers.make("sgdd")


def test_what_another_optimizer_calls_alpha_is_no_damping() -> None:
    assert rates_of("rmsprop[alpha=0.9]") == {"lr": 0.01, "momentum": 0.0}


def test_runs_of_several_seeds_are_of_the_same_data_with_other_weights() -> None:
    plans = [TrainPlan(SETUP, "sgd", epochs=1, run_seed=seed) for seed in (0, 1)]
    zero, one = plans
    torch.testing.assert_close(zero.load_data().test.all()[0], one.load_data().test.all()[0], rtol=0, atol=0)
    weights = [next(plan.build_model().parameters()) for plan in plans]
    assert not torch.equal(*weights)
    assert losses("sgd", run_seed=0) == losses("sgd"), "the setup's seed is 0"
    assert zero.key != one.key


def test_a_holdout_is_taken_from_the_training_set_and_never_trained_on() -> None:
    whole, held = TrainPlan(SETUP).load_data(), TrainPlan(SETUP, holdout=0.2).load_data()
    assert (len(held.train), len(held.test)) == (160, 40)
    rows = {tuple(row) for row in whole.train.all()[0].tolist()}
    parts = [{tuple(row) for row in part.all()[0].tolist()} for part in (held.train, held.test)]
    assert parts[0] | parts[1] == rows
    assert not parts[0] & parts[1]
    with pytest.raises(SpecError, match="holdout"):
        TrainPlan(SETUP, holdout=1.0)


def test_naming_an_optimizer_of_torch_in_a_help_page_imports_no_torch() -> None:
    code = "import sys, curvlab.studies.train.optimizers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_optimizer_from_pypi_trains_by_its_address() -> None:
    first, *_, last = losses("pytorch_optimizer:SOAP[lr=0.01]")
    assert last < first
