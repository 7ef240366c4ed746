"""What a problem refuses when it is made, and with which sentence; and that it records once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.exceptions import ProblemError, StaleError
from curvlab.model.recording import Recording
from tests.cases import Case

X, Y = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def problem(
    inputs: Any = X, targets: Any = Y, criterion: Any = "cross-entropy", model: Any = None
) -> curvlab.Problem:
    return curvlab.Problem(model or mlp(), criterion, inputs, targets)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no targets": (lambda: problem(targets=None), "targets are missing"),
    "inputs of numpy": (lambda: problem(inputs=X.numpy()), "inputs is a ndarray where targets are given"),
    "targets as a list": (
        lambda: problem(targets=[0, 1, 0, 1, 1]),
        "targets of the batch: expected a dense tensor, got a list",
    ),
    "sparse inputs": (lambda: problem(inputs=X.to_sparse()), "inputs of the batch: expected a dense tensor"),
    "a number": (
        lambda: problem(inputs=3, targets=None),
        "inputs is a int; expected a tensor, a tuple or dictionary of tensors, or a re-iterable",
    ),
    "an empty batch": (lambda: problem(X[:0], Y[:0]), r"inputs of the batch have shape \(0, 4\)"),
    "a scalar": (lambda: problem(X[0, 0], Y), "inputs of the batch is a single number"),
    "counts that differ": (lambda: problem(X, Y[:3]), r"the batch has 5 inputs but targets of shape \(3,\)"),
    "too few features": (
        lambda: problem(X[:, :3]),
        r"inputs have shape \(5, 3\), but layer `0` expects \(examples, 4\)",
    ),
    "images": (
        lambda: problem(X.reshape(5, 2, 2)),
        r"inputs have shape \(5, 2, 2\).*put nn.Flatten\(\) in front",
    ),
    "float64 inputs": (
        lambda: problem(X.double()),
        "inputs of the batch are torch.float64 but the model is torch.float32",
    ),
    "integer inputs": (
        lambda: problem(X.long()),
        "inputs of the batch are torch.int64 but the model is torch.float32",
    ),
    "complex numbers": (
        lambda: problem(X.to(torch.complex64), model=mlp().to(torch.complex64)),
        "model is in torch.complex64; curvature needs float32",
    ),
    "another device": (
        lambda: problem(X.to("meta")),
        "inputs of the batch are on meta but the model is on cpu",
    ),
    "targets elsewhere": (
        lambda: problem(X, Y.to("meta")),
        "targets of the batch are on meta but the model is on cpu",
    ),
    "labels out of range": (lambda: problem(X, Y + 1), "`targets` has label 2 at example 1; expected 0 to 1"),
    "negative labels": (lambda: problem(X, Y - 1), "`targets` has label -1 at example 0"),
    "labels in float": (lambda: problem(X, Y.float()), "`targets` has dtype torch.float32; expected integer"),
    "labels as a column": (lambda: problem(X, Y[:, None]), r"`targets` has shape \(5, 1\).*squeeze"),
    "targets of another width": (
        lambda: problem(X, X, "mse"),
        r"`targets` has shape \(5, 4\); expected \(5, 2\)",
    ),
    "targets not finite": (
        lambda: problem(X, torch.full((5, 2), torch.nan), "mse"),
        "`targets` is not finite at example 0",
    ),
    "reduction": (
        lambda: problem(criterion=nn.CrossEntropyLoss(reduction="sum")),
        "reduction='sum'.*use reduction='mean'",
    ),
    "no reduction": (lambda: problem(criterion=nn.MSELoss(reduction="none")), "reduction='none'"),
    "an unknown criterion": (lambda: problem(criterion="cross-entropi"), "cross-entropy"),
    "a criterion class": (lambda: problem(criterion=nn.MSELoss), r"expected an instance: MSELoss\(\)"),
    "class weights": (
        lambda: problem(criterion=nn.CrossEntropyLoss(torch.ones(3))),
        "3 class weights; expected 2",
    ),
    "a function of vectors": (lambda: problem(criterion=lambda z, y: z), "expected a scalar"),
    "a batch that is no pair": (
        lambda: list(problem([X], None).batches()),
        r"batch 0 is a Tensor; expected a pair",
    ),
    "a bad second batch": (lambda: problem([(X, Y), (X, Y + 1)], None).gradient(), "`targets` has label 2"),
    "a later batch of other shape": (
        lambda: problem([(X, Y), (X[:, :2], Y)], None).gradient(),
        r"inputs have shape \(5, 2\)",
    ),
    "an empty stream": (lambda: problem([], None).gradient(), "gave no batch"),
    "targets beside a stream": (lambda: problem([(X, Y)], Y), "brings its own targets"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_go_together_is_refused_by_name(kind: str) -> None:
    call, message = REFUSED[kind]
    with pytest.raises((ProblemError, curvlab.exceptions.SpecError), match=message):
        call()


def test_inputs_that_are_not_finite_are_found_with_their_example() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        inputs = X.clone()
        inputs[3, 1] = bad
        with pytest.raises(
            ProblemError, match="inputs are not finite: NaN or infinity in 1 examples, the first is 3"
        ):
            problem(inputs).gradient()


@pytest.mark.parametrize("graph", [False, True], ids=["chain", "graph"])
@pytest.mark.parametrize("where", ["weight", "bias"])
def test_weights_that_are_not_finite_are_found_at_their_layer(graph: bool, where: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1) if graph else nn.Tanh(), nn.Linear(3, 2))
    with torch.no_grad():
        getattr(model[2], where)[0] = torch.nan
    with pytest.raises(ProblemError, match="the pre-activations of layer `2` are not finite"):
        problem(model=model).gradient()


def test_finite_values_whose_sum_overflows_are_no_error() -> None:
    model = nn.Sequential(nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(2e38)
    recorded = curvlab.Problem(model, "cross-entropy", torch.ones(4, 1), torch.zeros(4).long()).recording()
    assert recorded.logits.sum().isinf()
    assert torch.equal(recorded.logits, torch.full((4, 2), 2e38))
    torch.testing.assert_close(recorded.loss, torch.tensor(math.log(2)))


def test_one_recording_serves_the_gradient_and_every_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = curvlab.problem.record_and_probe

    def counted(*args: Any, **kwargs: Any) -> Recording:
        calls.append(1)
        return run(*args, **kwargs)

    monkeypatch.setattr(curvlab.problem, "record_and_probe", counted)
    given, _ = Case().build()
    given.gradient()
    given.loss()
    for name in ("fisher", "pch-1", "hessian", "gauss-newton[kind=exact]", "fisher[kind=exact]"):
        curvature = curvlab.estimate(name, given)
        curvature @ given.gradient()
    assert len(calls) == 1


def test_no_weight_gradient_is_formed_until_it_is_asked_for() -> None:
    given, _ = Case(widths=(50, 40, 2)).build()
    gradient = given.gradient()
    shapes = {tuple(t.shape) for t in vars(gradient.factored("0.weight"))["inputs"].tensors().values()}
    assert (40, 50) not in shapes
    assert gradient["0.weight"].shape == (40, 50)


@pytest.mark.parametrize("change", ["in place", "other storage", "inputs"])
def test_a_changed_parameter_or_batch_is_recorded_anew(change: str) -> None:
    model, x, y = mlp().double(), X.double(), Y
    given = curvlab.Problem(model, "cross-entropy", x, y)
    given.gradient()
    with torch.no_grad():
        if change == "in place":
            model[0].weight.mul_(2)
        if change == "other storage":
            model[0].weight.data = model[0].weight.data * 2
        if change == "inputs":
            x.mul_(2)
    expected = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model[2].weight)[0]
    torch.testing.assert_close(given.gradient()["2.weight"], expected)


def replace_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def replace_module(model: nn.Sequential) -> None:
    model[0] = nn.Linear(4, 3).double()


def freeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


@pytest.mark.parametrize("stream", [False, True], ids=["batch", "stream"])
@pytest.mark.parametrize("change", [replace_parameter, replace_module, freeze])
def test_a_model_whose_parameters_are_others_needs_a_new_problem(
    change: Callable[[nn.Sequential], None], stream: bool
) -> None:
    model, x = mlp().double(), X.double()
    given = problem([(x, Y)], None, model=model) if stream else problem(x, model=model)
    given.gradient()
    curvature = curvlab.estimate("hessian", given)
    change(model)
    for use in (given.gradient, lambda: curvlab.estimate("fisher", given)):
        with pytest.raises(StaleError, match=r"`0.weight`.*replaced.*Make a new Problem"):
            use()
    with pytest.raises(StaleError, match=r"0\.weight"):
        curvature.to_dense()
    again = problem(x, model=model).gradient()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert list(again) == names
    loss = nn.functional.cross_entropy(model(x), Y)
    expected = torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
    torch.testing.assert_close(list(again.values()), list(expected))


def test_the_same_problem_on_other_data_analyses_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem()
    monkeypatch.setattr(curvlab.model.network.Network, "of", None)
    other = given.with_data(X[:2], Y[:2])
    assert other.network is given.network
    assert "2 examples" in repr(other)


def test_repr_says_what_the_problem_is() -> None:
    assert repr(problem()) == "Problem(4-3-2, criterion=cross-entropy, 5 examples)"
    assert "a stream of batches" in repr(problem([(X, Y)], None))
    graph = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1), nn.Linear(3, 2))
    assert "Problem(Sequential, 23 parameters, criterion" in repr(problem(model=graph))
    some = curvlab.Problem(graph, "cross-entropy", X, Y, layers=["0"], l2=0.5)
    assert repr(some).startswith(
        "Problem(Sequential, 15 parameters, no block for `2.weight`, `2.bias`, criterion"
    )
    assert "l2=0.5, 5" in repr(some)


def test_a_streamed_problem_has_no_single_recording() -> None:
    with pytest.raises(ProblemError, match="use recordings"):
        problem([(X, Y)], None).recording()


def test_a_function_of_one_example_is_a_criterion() -> None:
    def huber(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.smooth_l1_loss(logits, target)

    given = problem(X, torch.randn(5, 2), huber)
    assert given.criterion.name == "huber"
    assert curvlab.estimate("hessian", given).to_dense().shape == (23, 23)
