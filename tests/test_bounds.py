"""`curvlab.bounds` against the definition, written out example by example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian

import curvlab
from curvlab.exceptions import ProblemError
from curvlab.problem import Problem
from curvlab.providers import hessian as hessian_provider

LIPSCHITZ = {nn.Sigmoid: 0.25, nn.Tanh: 1.0, nn.ReLU: 1.0, nn.Softplus: 1.0}


def mlp(activation: type[nn.Module] = nn.Sigmoid) -> nn.Sequential:
    layers = [nn.Linear(4, 5), activation(), nn.Linear(5, 4), activation(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


def batch(examples: int = 7) -> tuple[Tensor, Tensor]:
    return 2 * torch.randn(examples, 4, dtype=torch.float64), torch.arange(examples) % 3


def naive(
    model: nn.Sequential, loss, x: Tensor, y: Tensor, weights: Tensor, index: int
) -> tuple[float, float]:
    """‖Ele-Cov(X_i, Y_i)‖² and Σ Var(X_i) at the Linear layer `index`, in loops over the examples."""
    tail, above = nn.Sequential(*list(model)[index + 3 :]), model[index + 2]
    share = weights / weights.sum()
    xs, ys = [], []
    for row, label in zip(x, y, strict=True):
        z = model[: index + 1](row)
        below = model[index + 1]
        slope = torch.autograd.functional.jacobian(below, z).diagonal()
        upper = above(below(z)).detach()
        curved = hessian(lambda u, label=label: loss(tail(u)[None], label[None]))(upper)
        xs.append((above.weight.T @ curved @ above.weight).detach())
        ys.append(torch.outer(slope, slope).detach())
    mean_x = sum(c * a for c, a in zip(share, xs, strict=True))
    mean_y = sum(c * b for c, b in zip(share, ys, strict=True))
    covariance = sum(c * (a - mean_x) * (b - mean_y) for c, a, b in zip(share, xs, ys, strict=True))
    variance = sum(c * (a - mean_x).square() for c, a in zip(share, xs, strict=True))
    return float(covariance.square().sum()), float(variance.sum())


def check(problem: Problem, model: nn.Sequential, loss, x: Tensor, y: Tensor, weights: Tensor) -> None:
    lipschitz = LIPSCHITZ[type(model[1])]
    frame = curvlab.bounds(problem)
    assert frame["layer"].tolist() == [1, 2]
    assert frame["layer_name"].tolist() == ["0", "2"]
    assert frame["lipschitz"].tolist() == [lipschitz] * 2
    assert frame["holds"].all()
    for row, index in zip(frame.itertuples(), (0, 2), strict=True):
        left, variance = naive(model, loss, x, y, weights, index)
        assert row.left == pytest.approx(left, rel=1e-10)
        assert row.right == pytest.approx(lipschitz**4 * variance, rel=1e-10)
        assert row.left < row.right


@pytest.mark.parametrize("activation", LIPSCHITZ)
def test_both_sides_follow_their_definition(activation: type[nn.Module]) -> None:
    model, (x, y) = mlp(activation), batch()
    problem = Problem(model, "cross-entropy", x, y)
    check(problem, model, nn.functional.cross_entropy, x, y, torch.ones(7, dtype=torch.float64))


def test_a_criterion_that_is_not_convex() -> None:
    def robust(z: Tensor, target: Tensor) -> Tensor:
        return (1 / (1 + torch.exp(5 * (z.softmax(1).gather(1, target[:, None]) - 0.2)))).mean()

    model, (x, y) = mlp(), batch()
    check(Problem(model, "robust", x, y), model, robust, x, y, torch.ones(7, dtype=torch.float64))


def test_class_weights_count_in_the_moments() -> None:
    model, (x, y) = mlp(nn.Tanh), batch()
    classes = torch.tensor([1.0, 0.0, 2.5], dtype=torch.float64)
    problem = Problem(model, nn.CrossEntropyLoss(classes), x, y)
    check(problem, model, nn.functional.cross_entropy, x, y, classes[y])


def test_chunks_and_streams_merge_to_the_moments_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = mlp(), batch(11)
    classes = torch.tensor([1.0, 0.0, 2.5], dtype=torch.float64)
    criterion = nn.CrossEntropyLoss(classes)
    whole = curvlab.bounds(Problem(model, criterion, x, y))
    monkeypatch.setattr(hessian_provider, "CHUNK_BYTES", 1)
    chunked = curvlab.bounds(Problem(model, criterion, x, y))
    streamed = curvlab.bounds(Problem(model, criterion, [(x[:2], y[:2]), (x[2:], y[2:])]))
    for frame in (chunked, streamed):
        assert frame["left"].tolist() == pytest.approx(whole["left"].tolist(), rel=1e-10)
        assert frame["right"].tolist() == pytest.approx(whole["right"].tolist(), rel=1e-10)


def test_the_left_side_is_the_error_of_one_step_of_the_recursion() -> None:
    model, (x, y) = mlp(nn.Tanh), batch()
    problem = Problem(model, "cross-entropy", x, y)
    exact = curvlab.estimate("gauss-newton[kind=exact]", problem).blocks["2.bias"].to_dense()
    recursive = curvlab.estimate("gauss-newton", problem).blocks["2.bias"].to_dense()
    error = (exact - recursive).square().sum().item()
    assert curvlab.bounds(problem)["left"].iloc[1] == pytest.approx(error, rel=1e-9)


def test_float32_keeps_the_small_covariance() -> None:
    model, (x, y) = mlp(), batch(40)
    double = curvlab.bounds(Problem(model, "cross-entropy", 0.02 * x, y))
    single = curvlab.bounds(Problem(model.float(), "cross-entropy", 0.02 * x.float(), y))
    assert single["left"].tolist() == pytest.approx(double["left"].tolist(), rel=2e-2)
    assert single["right"].tolist() == pytest.approx(double["right"].tolist(), rel=1e-3)


def test_the_last_step_is_exact_where_every_example_has_the_same_output_hessian() -> None:
    targets = torch.randn(50, 3, dtype=torch.float64)
    frame = curvlab.bounds(Problem(mlp(), "mse", batch(50)[0], targets))
    assert frame["left"].iloc[1] < 1e-30
    assert frame["right"].iloc[1] < 1e-28
    assert frame["left"].iloc[0] > 1e-12


def test_the_bound_holds_where_both_sides_are_the_same_rounding() -> None:
    model = mlp(nn.Identity).float()
    inputs, targets = torch.randn(11, 4), torch.randn(11, 3)
    frame = curvlab.bounds(Problem(model, "mse", inputs, targets))
    assert frame["holds"].all()


def test_a_subset_of_layers_gives_their_rows_only() -> None:
    model, (x, y) = mlp(), batch()
    whole = curvlab.bounds(Problem(model, "cross-entropy", x, y))
    part = curvlab.bounds(Problem(model, "cross-entropy", x, y, layers=["2", "4"]))
    assert part["layer"].tolist() == [2]
    assert part["left"].iloc[0] == whole["left"].iloc[1]


def test_a_network_without_hidden_layers_has_no_rows() -> None:
    frame = curvlab.bounds(Problem(nn.Linear(4, 3).double(), "cross-entropy", *batch()))
    assert len(frame) == 0
    assert {"layer", "left", "right", "lipschitz", "holds"} <= set(frame.columns)


def test_a_model_that_is_no_chain_is_refused() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + self.inner(x))

    with pytest.raises(ProblemError, match="`bounds` follows a recursion"):
        curvlab.bounds(Problem(Skip(), "cross-entropy", *batch()))
