"""curvlab leaves no trace on what it is given: also not when it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import curvlab
from curvlab.exceptions import CurvlabError

PROVIDERS = [
    "fisher",
    "fisher[kind=mc]",
    "fisher[kind=exact]",
    "gauss-newton[kind=exact]",
    "hessian",
    "hessian[full=true]",
]
CHAIN_ONLY = ["gauss-newton", "pch-1", "pch-2"]


class Residual(nn.Module):
    """Not a chain; with a dropout that eval mode turns off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.first(x))
        return self.last(self.dropout(F.relu_(self.inner(h))) + h)


class Functional(nn.Module):
    """A chain with an in-place functional activation and a functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.relu_(self.first(x)), 0.5, training=self.training)
        return self.last(h)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(
        nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(3, 2, bias=False)
    ),
    "functional": Functional,
    "residual": Residual,
    "normalised": lambda: nn.Sequential(
        nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Linear(3, 2)
    ),
}


@contextmanager
def no_trace(model: nn.Module, *tensors: Tensor) -> Iterator[None]:
    """Everything about the model, the tensors and torch's state is afterwards as it was."""

    def look() -> list[object]:
        modules = [
            (
                name,
                m.training,
                len(m._forward_hooks),
                len(m._forward_pre_hooks),
                len(m._backward_hooks),
                id(m.forward.__func__),
            )
            for name, m in model.named_modules()
        ]
        parameters = [
            (name, id(p), p._version, p.requires_grad, id(p.grad), p.data_ptr(), len(p._backward_hooks or ()))
            for name, p in model.named_parameters()
        ]
        state = (torch.get_rng_state().tolist(), torch.is_grad_enabled(), torch.get_default_dtype())
        return [modules, parameters, [(t._version, t.requires_grad) for t in tensors], state]

    before, values = look(), [t.clone() for t in (*tensors, *model.state_dict().values())]
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    yield
    assert look() == before
    for t, value in zip((*tensors, *model.state_dict().values()), values, strict=True):
        assert torch.equal(t, value)
    for name, p in model.named_parameters():
        assert p.grad is None if gradients[name] is None else torch.equal(p.grad, gradients[name])


def setting(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    model = MODELS[kind]().double().eval()
    inputs, targets = torch.randn(6, 4).double(), torch.randint(0, 2, (6,))
    F.cross_entropy(model(inputs), targets).backward()
    return model, inputs, targets


def use_everything(problem: curvlab.Problem, providers: list[str]) -> None:
    gradient = problem.gradient()
    problem.loss()
    for curvature in curvlab.estimate(providers, problem):
        curvature @ gradient
        curvature.to_dense()
        curvature.frame()
        curvature.trace(), curvature.diagonal(), curvature.frobenius_norm(), curvature.eigvalsh()
        curvature.to_scipy() @ torch.ones(curvature.numel).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_no_call_leaves_a_trace(kind: str) -> None:
    model, inputs, targets = setting(kind)
    with no_trace(model, inputs, targets):
        problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
        providers = PROVIDERS if problem.chain is None else PROVIDERS + CHAIN_ONLY
        use_everything(problem, providers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "residual"])
def test_a_shuffled_loader_leaves_the_random_state_alone(kind: str) -> None:
    model, inputs, targets = setting(kind)
    with no_trace(model, inputs, targets):
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
        use_everything(curvlab.Problem(model, "cross-entropy", loader), ["fisher", "hessian"])


class Boom(Exception):
    pass


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("where", ["criterion", "data", "nan", "labels", "provider"])
def test_a_call_that_raises_leaves_no_trace(kind: str, where: str) -> None:
    model, inputs, targets = setting(kind)

    def fails(logits: Tensor, target: Tensor) -> Tensor:
        raise Boom

    class Failing:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            torch.rand(3)
            yield inputs, targets
            raise Boom

    bad_inputs, bad_targets = inputs.clone(), targets.clone()
    bad_inputs[1, 1] = torch.nan
    bad_targets[2] = 7
    calls = {
        "criterion": lambda: curvlab.Problem(model, fails, inputs, targets).gradient(),
        "data": lambda: curvlab.estimate("fisher", curvlab.Problem(model, "cross-entropy", Failing())),
        "nan": lambda: curvlab.Problem(model, "cross-entropy", bad_inputs, targets).gradient(),
        "labels": lambda: curvlab.Problem(model, "cross-entropy", inputs, bad_targets).gradient(),
        "provider": lambda: curvlab.estimate(
            "fisher[kind=mc]", curvlab.Problem(model, "tukey", inputs, inputs[:, :2])
        ),
    }
    with no_trace(model, inputs, targets), pytest.raises((Boom, CurvlabError)):
        calls[where]()


@pytest.mark.parametrize("kind", ["chain", "residual"])
def test_a_raising_forward_leaves_no_hook(kind: str) -> None:
    model, inputs, targets = setting(kind)
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    with no_trace(model, inputs, targets), pytest.raises((RuntimeError, CurvlabError)):
        curvlab.estimate("fisher", problem.with_data(inputs[:, :3].contiguous(), targets))


@pytest.mark.parametrize("kind", ["chain", "functional", "residual"])
def test_in_place_activations_do_not_overwrite_the_pre_activations(kind: str) -> None:
    model, inputs, targets = setting(kind)
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    expected = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters()))
    gradient = problem.gradient()
    for (name, _), value in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(gradient[name], value, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", ["chain", "residual"])
def test_it_works_whatever_the_grad_mode_and_autocast(kind: str) -> None:
    model, inputs, targets = setting(kind)
    expected = curvlab.estimate("fisher", curvlab.Problem(model, "cross-entropy", inputs, targets)).to_dense()
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
            dense = curvlab.estimate("fisher", problem).to_dense()
        torch.testing.assert_close(dense.clone(), expected)
    inputs.requires_grad_(True)
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    for name in PROVIDERS:
        assert not curvlab.estimate(name, problem).to_dense().requires_grad
    assert not any(value.requires_grad for value in problem.gradient().values())
