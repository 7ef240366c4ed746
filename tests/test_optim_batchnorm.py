"""Batch normalisation in training: batch statistics in the gradient, running ones in the curvature."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import curvlab
from curvlab.exceptions import CurvlabError, ProblemError, SolveError, SpecError
from curvlab.optim import LevenbergMarquardt, SecondOrder

ALPHA, LR = 0.1, 0.3
FISHER = {"provider": "fisher", "solver": "exact", "alpha": ALPHA, "lr": LR}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for p in model[1].parameters():
            p.add_(0.3 * torch.randn_like(p))
        model[1].running_mean.uniform_(-0.5, 0.5)
        model[1].running_var.uniform_(0.5, 2.0)
    return model.train()


def batch(seed: int, examples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = 1 + 2 * torch.randn(examples, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (examples,), generator=generator)


class ByHand:
    """The network above written out, with the statistics given; and its step by dense matrices."""

    def __init__(self, model: nn.Sequential) -> None:
        self.values = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        self.mean, self.variance = model[1].running_mean.clone(), model[1].running_var.clone()

    def hidden(self, x: Tensor, mean: Tensor | None, variance: Tensor | None) -> tuple[Tensor, Tensor]:
        """z of the first layer, and h of the second."""
        p = self.values
        z = x @ p["0.weight"].T + p["0.bias"]
        mean = z.sum(0) / len(z) if mean is None else mean
        variance = ((z - mean) ** 2).sum(0) / len(z) if variance is None else variance
        return z, torch.tanh((z - mean) / (variance + 1e-5).sqrt() * p["1.weight"] + p["1.bias"])

    def loss(self, x: Tensor, y: Tensor, mean: Tensor | None, variance: Tensor | None) -> Tensor:
        p = self.values
        logits = self.hidden(x, mean, variance)[1] @ p["3.weight"].T + p["3.bias"]
        return -logits.log_softmax(1)[torch.arange(len(y)), y].mean()

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and d of -((1-α)C + αI)⁻¹ g; the running statistics are updated before C is taken."""
        names = list(self.values)
        loss = self.loss(x, y, None, None)
        gradient = dict(zip(names, torch.autograd.grad(loss, list(self.values.values())), strict=True))
        z = (x @ self.values["0.weight"].T + self.values["0.bias"]).detach()
        self.mean = 0.9 * self.mean + 0.1 * z.mean(0)
        self.variance = 0.9 * self.variance + 0.1 * ((z - z.mean(0)) ** 2).sum(0) / (len(z) - 1)
        outer: dict[str, Tensor] = {}
        for i in range(len(x)):
            alone = self.loss(x[i : i + 1], y[i : i + 1], self.mean, self.variance)
            for name, g in zip(names, torch.autograd.grad(alone, list(self.values.values())), strict=True):
                outer[name] = outer.get(name, 0) + torch.outer(g.flatten(), g.flatten()) / len(x)
        h = self.hidden(x, self.mean, self.variance)[1].detach()
        blocks = {
            "0.weight": torch.kron(outer["0.bias"], x.T @ x / len(x)),
            "3.weight": torch.kron(outer["3.bias"], h.T @ h / len(x)),
        }
        direction = {}
        for name in names:
            block = blocks.get(name, outer[name])
            damped = (1 - ALPHA) * block + ALPHA * torch.eye(len(block)).double()
            direction[name] = torch.linalg.solve(damped, -gradient[name].flatten()).reshape(
                gradient[name].shape
            )
        return loss.detach(), direction

    def move(self, direction: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.values.items():
                value += LR * direction[name]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_steps_are_those_written_out_by_hand() -> None:
    model = network()
    reference = ByHand(model)
    optimizer = SecondOrder(model, "cross-entropy", batchnorm="running", **FISHER)
    for seed in range(3):
        x, y = batch(seed)
        expected, direction = reference.step(x, y)
        reference.move(direction)
        torch.testing.assert_close(optimizer.step(x, y), expected, rtol=1e-12, atol=0)
        for name, value in model.named_parameters():
            torch.testing.assert_close(value, reference.values[name], rtol=1e-9, atol=1e-11, msg=name)
        torch.testing.assert_close(model[1].running_mean, reference.mean, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model[1].running_var, reference.variance, rtol=1e-12, atol=1e-14)
    assert int(model[1].num_batches_tracked) == 3


@pytest.mark.parametrize(
    ("provider", "solver"),
    [
        ("fisher", "kfi"),
        ("fisher", "ea-cg"),
        ("gauss-newton", "cg"),
        ("gauss-newton[kind=exact]", "cg"),
        ("hessian", "cg"),
    ],
)
def test_the_step_is_the_solution_for_the_two_functions(provider: str, solver: str) -> None:
    model, (x, y) = network(), batch(0)
    twin = copy.deepcopy(model)
    loss = F.cross_entropy(twin(x), y)
    gradient = dict(
        zip(dict(twin.named_parameters()), torch.autograd.grad(loss, list(twin.parameters())), strict=True)
    )
    problem = curvlab.Problem(twin.eval(), "cross-entropy", x, y)
    solution = curvlab.solve(solver, curvlab.estimate(provider, problem), gradient, alpha=0.3)
    SecondOrder(model, "cross-entropy", provider, solver, 0.1, 0.3, batchnorm="running").step(x, y)
    solution.add_to(twin, 0.1)
    for (name, value), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12, msg=name)


def test_without_the_option_the_refusal_names_it() -> None:
    with pytest.raises(ProblemError, match=r'SecondOrder\(…, batchnorm="running"\)'):
        SecondOrder(network(), "cross-entropy")
    optimizer = SecondOrder(network().eval(), "cross-entropy", "fisher")
    optimizer._model.train()
    with pytest.raises(ProblemError, match='batchnorm="running"'):
        optimizer.step(*batch(0))


def test_results_and_the_optimizer_say_so() -> None:
    model, notes = network(), []
    optimizer = SecondOrder(model, "cross-entropy", "fisher", "kfi", batchnorm="running")
    optimizer.on_solution = lambda solution: notes.append((solution.notes, solution._repr_html_()))
    optimizer.step(*batch(0))
    told, shown = notes[0]
    assert any("running statistics" in note and "the gradient with the batch's" in note for note in told)
    assert "running statistics" in shown
    assert "running statistics" in repr(optimizer)
    assert "running" not in repr(SecondOrder(network().eval(), "cross-entropy"))


def test_a_model_in_evaluation_mode_steps_as_without_the_option() -> None:
    one, other = network().eval(), network().eval()
    SecondOrder(one, "cross-entropy", **FISHER, batchnorm="running").step(*batch(0))
    SecondOrder(other, "cross-entropy", **FISHER).step(*batch(0))
    assert_same(state(one), state(other))


def test_a_frozen_layer_keeps_its_own_mode_and_statistics() -> None:
    model = nn.Sequential(network(), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    model[1].eval()
    before = state(model[1])
    SecondOrder(model, "cross-entropy", **FISHER, batchnorm="running").step(*batch(0))
    assert [m.training for m in (model[0][1], model[1])] == [True, False]
    assert_same(state(model[1]), {name: v for name, v in before.items() if "running" in name})


class FailingOnce(nn.Module):
    """Fails in the forward of the curvature, after that of the gradient has updated the statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = network(), 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.inner[1].training and self.calls == 0:
            self.calls += 1
            raise KeyError("by mistake")
        return self.inner(x)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: (FailingOnce(), *batch(0)), CurvlabError),
        (lambda: (network(), batch(0)[0] * float("nan"), batch(0)[1]), CurvlabError),
        (lambda: (network(), batch(0)[0], batch(0)[1] + 7), CurvlabError),
    ],
    ids=["forward", "inputs", "targets"],
)
def test_after_an_exception_modes_statistics_and_parameters_are_as_before(make: Any, error: Any) -> None:
    model, x, y = make()
    optimizer = SecondOrder(model, "cross-entropy", **FISHER, batchnorm="running")
    before, modes = state(model), [m.training for m in model.modules()]
    with pytest.raises(error):
        optimizer.step(x, y)
    assert [m.training for m in model.modules()] == modes
    assert_same(state(model), before)


def test_a_step_that_overflows_leaves_the_statistics_alone() -> None:
    model = network()
    optimizer = SecondOrder(model, "cross-entropy", "fisher", "kfi", 1e308, 1e-9, batchnorm="running")
    before = state(model)
    with pytest.raises(SolveError):
        optimizer.step(*(100 * t if t.is_floating_point() else t for t in batch(0)))
    assert_same(state(model), before)


def test_a_layer_without_running_statistics_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)).double()
    with pytest.raises(ProblemError, match=r"layer `1` \(BatchNorm1d\) has no running statistics"):
        SecondOrder(model, "cross-entropy", batchnorm="running")


def test_dropout_in_training_mode_is_still_refused() -> None:
    model = nn.Sequential(network(), nn.Dropout(0.5)).double()
    with pytest.raises(ProblemError, match="Dropout"):
        SecondOrder(model, "cross-entropy", batchnorm="running")
    assert model[0][1].training


def test_levenberg_marquardt_compares_the_same_function_before_and_after() -> None:
    """A tiny step: the loss falls by what was predicted, so that alpha is lowered; statistics move once."""
    model, (x, y) = network(), batch(0)
    adapt = LevenbergMarquardt(every=1)
    optimizer = SecondOrder(
        model, "cross-entropy", "gauss-newton", "exact", 1e-3, 0.5, adapt=adapt, batchnorm="running"
    )
    before = float(optimizer.step(x, y))
    assert int(model[1].num_batches_tracked) == 1
    assert optimizer.alpha < 0.5
    with torch.no_grad():
        assert float(F.cross_entropy(copy.deepcopy(model)(x), y)) < before


def test_several_batches_of_one_step_are_weighed_by_their_examples() -> None:
    model, twin = network(), network()
    parts = [batch(0, 6), batch(1, 3)]
    SecondOrder(model, "cross-entropy", **FISHER, batchnorm="running").step(parts)
    loss = sum(len(y) * F.cross_entropy(twin(x), y) for x, y in parts) / 9
    gradient = dict(
        zip(dict(twin.named_parameters()), torch.autograd.grad(loss, list(twin.parameters())), strict=True)
    )
    problem = curvlab.Problem(twin.eval(), "cross-entropy", parts)
    solution = curvlab.solve("exact", curvlab.estimate("fisher", problem), gradient, alpha=ALPHA)
    solution.add_to(twin, LR)
    for (name, value), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("value", ["batch", True])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(SpecError, match="running"):
        SecondOrder(network().eval(), "cross-entropy", batchnorm=value)
