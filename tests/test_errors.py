"""`curvlab.errors` against dense matrices from torch.func, on networks small enough to form them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian

import curvlab
from curvlab.curvature import Curvature, Definiteness, LayerCurvature
from curvlab.linalg import DenseFactor
from curvlab.linalg.factors import InputFactors
from curvlab.problem import Problem
from curvlab.providers import Context, Provider
from curvlab.studies.small import errors as weight_errors
from curvlab.studies.small.references import Budget, probed_weight_errors

ALL = [
    "fisher",
    "gauss-newton",
    "pch-1",
    "pch-2",
    "fisher[kind=exact]",
    "gauss-newton[kind=exact]",
    "hessian",
]
LOSSES = {
    "cross-entropy": nn.functional.cross_entropy,
    "robust": lambda z, y: (1 / (1 + torch.exp(5 * (z.softmax(1).gather(1, y[:, None]) - 0.2)))).mean(),
}
ACTIVATIONS = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}


def mlp(activation: type[nn.Module] = nn.Sigmoid, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    layers = [nn.Linear(4, 5), activation(), nn.Linear(5, 3), activation(), nn.Linear(3, 3)]
    return nn.Sequential(*layers).to(dtype)


def batch(examples: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 4, dtype=torch.float64).to(dtype), torch.arange(examples) % 3


def true_block(model: nn.Module, name: str, loss, x: Tensor, y: Tensor) -> Tensor:
    """The Hessian of the mean loss over one parameter, by torch.func."""
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def of(value: Tensor) -> Tensor:
        return loss(functional_call(model, parameters | {name: value}, (x,)), y)

    size = parameters[name].numel()
    return hessian(of)(parameters[name]).reshape(size, size)


def absolute(matrix: Tensor) -> Tensor:
    """√(M²), which has the absolute eigenvalues of M."""
    left, singular, _ = torch.linalg.svd(matrix)
    return left @ torch.diag(singular) @ left.T


def at(frame, provider: str, layer: object, column: str) -> float:
    rows = frame[(frame["provider"] == provider) & (frame["layer"] == layer)]
    assert len(rows) == 1
    return float(rows[column].iloc[0])


@pytest.mark.parametrize("criterion", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_errors_are_distances_from_the_true_hessian(activation: str, criterion: str) -> None:
    model, (x, y) = mlp(ACTIVATIONS[activation]), batch()
    problem = Problem(model, criterion, x, y)
    providers = [p for p in ALL if criterion == "cross-entropy" or p != "fisher[kind=exact]"]
    frame = curvlab.errors(problem, providers, weights=True)
    for provider in providers:
        curvature = curvlab.estimate(provider, problem)
        for number, name in enumerate(["0", "2", "4"], start=1):
            bias = absolute(true_block(model, f"{name}.bias", LOSSES[criterion], x, y))
            distance = (curvature.blocks[f"{name}.bias"].to_dense() - bias).norm().item()
            assert at(frame, provider, number, "error") == pytest.approx(distance, rel=1e-9, abs=1e-14)
            relative = at(frame, provider, number, "relative")
            assert relative == pytest.approx(distance / bias.norm().item(), rel=1e-9, abs=1e-13)
            weight = true_block(model, f"{name}.weight", LOSSES[criterion], x, y)
            distance = (curvature.blocks[f"{name}.weight"].to_dense() - weight).norm().item()
            assert at(frame, provider, number, "weight_error") == pytest.approx(distance, rel=1e-9, abs=1e-13)
            relative = at(frame, provider, number, "weight_relative")
            assert relative == pytest.approx(distance / weight.norm().item(), rel=1e-9, abs=1e-12)


def test_total_is_the_root_of_the_sum_of_squares_over_layers() -> None:
    problem = Problem(mlp(), "robust", *batch())
    frame = curvlab.errors(problem, weights=True)
    exact = curvlab.estimate("hessian", problem)
    for provider in ("fisher", "pch-2"):
        rows = frame[frame["provider"] == provider]
        for column in ("error", "weight_error", "weight_floor"):
            total = rows[rows["layer"] == "Total"][column].item()
            assert total**2 == pytest.approx((rows[rows["layer"] != "Total"][column] ** 2).sum(), rel=1e-12)
        norm = math.hypot(*(float(exact.blocks[f"{n}.bias"].to_dense().norm()) for n in (0, 2, 4)))
        assert at(frame, provider, "Total", "relative") == pytest.approx(
            at(frame, provider, "Total", "error") / norm, rel=1e-12
        )


def test_rows_are_layers_then_total_for_each_provider_in_order() -> None:
    frame = curvlab.errors(Problem(mlp(), "cross-entropy", *batch()))
    assert list(frame.columns) == ["layer", "layer_name", "provider", "error", "relative"]
    assert frame["layer"].tolist() == [1, 2, 3, "Total"] * 4
    assert frame["layer_name"].tolist()[:4] == ["0", "2", "4", "Total"]
    assert frame["provider"].unique().tolist() == ["fisher", "gauss-newton", "pch-1", "pch-2"]


def test_attributes_say_criterion_and_definiteness() -> None:
    frame = curvlab.errors(Problem(mlp(), "robust", *batch()), ["gauss-newton", "pch-1"])
    assert frame.attrs["criterion"] == "robust"
    assert frame.attrs["definiteness"]["gauss-newton"].startswith("indefinite")
    assert frame.attrs["definiteness"]["pch-1"].startswith("positive semi-definite")


def test_floor_is_the_error_of_the_best_output_factor() -> None:
    model, (x, y) = mlp(nn.Tanh), batch()
    frame = curvlab.errors(Problem(model, "cross-entropy", x, y), "pch-1", weights=True)
    h = nn.Sequential(*list(model)[:2])(x).detach()
    truth = true_block(model, "2.weight", LOSSES["cross-entropy"], x, y)
    # min over B of ‖B ⊗ A - M‖: a least-squares problem in the entries of B.
    a, unit = h.T @ h / len(h), torch.eye(9, dtype=torch.float64)
    columns = torch.stack([torch.kron(e.reshape(3, 3), a).flatten() for e in unit], dim=1)
    best = torch.linalg.lstsq(columns, truth.flatten()).solution
    floor = (columns @ best - truth.flatten()).norm().item()
    assert at(frame, "pch-1", 2, "weight_floor") == pytest.approx(floor, rel=1e-9)
    assert floor < at(frame, "pch-1", 2, "weight_error")


def test_weight_errors_count_class_weights() -> None:
    model, (x, y) = mlp(), batch()
    criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64))
    problem = Problem(model, criterion, x, y)
    frame = curvlab.errors(problem, ["pch-2"], weights=True)
    truth = true_block(model, "0.weight", criterion, x, y)
    block = curvlab.estimate("pch-2", problem).blocks["0.weight"].to_dense()
    assert at(frame, "pch-2", 1, "weight_error") == pytest.approx((block - truth).norm().item(), rel=1e-9)


def test_weight_errors_agree_with_the_pair_sum_of_the_exact_hessian() -> None:
    problem = Problem(mlp(), "robust", *batch(9))
    curvature = curvlab.estimate("fisher", problem)
    from curvlab.providers.hessian import ChainHessian

    exact = ChainHessian(problem)
    frame = curvlab.errors(problem, "fisher", weights=True)
    for position, layer in enumerate(curvature.layers):
        square = float(exact.pair_sum(position, layer.output.to_dense()))
        assert at(frame, "fisher", position + 1, "weight_error") ** 2 == pytest.approx(square, rel=1e-9)


def test_result_does_not_depend_on_how_many_columns_are_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(mlp(), "robust", *batch())
    whole = curvlab.errors(problem, ALL[:2], weights=True)
    monkeypatch.setattr(weight_errors, "COLUMN_BYTES", 1)
    monkeypatch.setattr(weight_errors, "GRAM_COLUMNS", 1)
    assert curvlab.errors(problem, ALL[:2], weights=True)["weight_error"].tolist() == pytest.approx(
        whole["weight_error"].tolist(), rel=1e-12
    )


def test_float32_keeps_the_floor_where_inputs_point_the_same_way() -> None:
    # Hidden units of a fresh sigmoid network are nearly constant: κ is nearly of rank one and its deviations,
    # which alone make the floor, are what a plain float32 pair sum would lose.
    model, (x, y) = mlp(), batch(30)
    x = 0.05 * x
    double = curvlab.errors(Problem(model, "robust", x, y), "pch-1", weights=True)
    single = curvlab.errors(Problem(model.float(), "robust", x.float(), y), "pch-1", weights=True)
    for layer in (1, 2, 3):
        expected = at(double, "pch-1", layer, "weight_floor")
        assert at(single, "pch-1", layer, "weight_floor") == pytest.approx(expected, rel=2e-3)


def test_zero_inputs_have_no_weight_error() -> None:
    _, y = batch()
    problem = Problem(mlp(), "cross-entropy", torch.zeros(6, 4, dtype=torch.float64), y)
    frame = curvlab.errors(problem, ["fisher", "gauss-newton[kind=exact]"], weights=True)
    for provider in ("fisher", "gauss-newton[kind=exact]"):
        assert at(frame, provider, 1, "weight_error") == 0
        assert at(frame, provider, 1, "weight_relative") == 0
        assert at(frame, provider, 2, "weight_error") > 0


class Counting(list):
    """A re-iterable of batches that counts its passes."""

    passes = 0

    def __iter__(self) -> Iterator:
        type(self).passes += 1
        return super().__iter__()


def test_a_stream_gives_the_errors_of_the_batch_in_one_pass() -> None:
    model, (x, y) = mlp(), batch(10)
    Counting.passes = 0
    stream = Counting([(x[:3], y[:3]), (x[3:4], y[3:4]), (x[4:], y[4:])])
    problem = Problem(model, "robust", stream)
    before = Counting.passes
    streamed = curvlab.errors(problem)
    assert Counting.passes - before == 1
    whole = curvlab.errors(Problem(model, "robust", x, y))
    assert streamed["error"].tolist() == pytest.approx(whole["error"].tolist(), rel=1e-10)


def test_weight_errors_of_a_stream_are_estimated_by_random_products() -> None:
    model, (x, y) = mlp(nn.Tanh), batch(64)
    exact = curvlab.errors(Problem(model, "cross-entropy", x, y), ["fisher", "hessian"], weights=True)
    halves = [(x[:32], y[:32]), (x[32:], y[32:])]
    probed = curvlab.errors(Problem(model, "cross-entropy", halves), ["fisher", "hessian"], weights=True)
    assert exact.attrs["weight_probes"] == 0 < probed.attrs["weight_probes"]
    assert at(probed, "fisher", "Total", "weight_relative") == pytest.approx(
        at(exact, "fisher", "Total", "weight_relative"), rel=0.3
    )
    assert at(probed, "hessian", "Total", "weight_relative") < 1e-12


class Residual(nn.Module):
    """No chain: a Linear layer around which the input passes."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=bias, dtype=torch.float64)
        self.last = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.first(x).tanh())


def test_providers_that_need_no_chain_are_measured_without_one() -> None:
    model, (x, y) = Residual(), batch()
    problem = Problem(model, "cross-entropy", x, y)
    frame = curvlab.errors(problem, ["fisher", "gauss-newton[kind=exact]"])
    truth = absolute(true_block(model, "first.bias", LOSSES["cross-entropy"], x, y))
    for provider in ("fisher", "gauss-newton[kind=exact]"):
        block = curvlab.estimate(provider, problem).blocks["first.bias"].to_dense()
        assert at(frame, provider, 1, "error") == pytest.approx((block - truth).norm().item(), rel=1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_off_the_chain_errors_are_at_the_outputs_of_layers_with_a_bias_or_without(bias: bool) -> None:
    model, (x, y) = Residual(bias=bias), batch(12)
    problem = Problem(model, "cross-entropy", x, y)
    frame = curvlab.errors(problem, ["fisher", "hessian"], weights=True)
    twin = Residual(bias=True).to(x)
    twin.load_state_dict(model.state_dict(), strict=False)
    for name, parameter in twin.named_parameters():
        if name not in model.state_dict():
            nn.init.zeros_(parameter)
    fisher = curvlab.estimate("fisher", Problem(twin, "cross-entropy", x, y))
    names = [name for name in frame["layer_name"].unique() if name != "Total"]
    assert names
    for name in names:
        exact = absolute(true_block(twin, f"{name}.bias", nn.functional.cross_entropy, x, y))
        distance = (fisher.blocks[f"{name}.bias"].to_dense() - exact).norm().item()
        rows = frame[(frame["layer_name"] == name) & (frame["provider"] == "fisher")]
        assert rows["error"].item() == pytest.approx(distance, rel=1e-9)
    assert frame.attrs["left_out"] == []
    weights = sum(p.numel() for n, p in model.named_parameters() if n.endswith("weight"))
    share = weights / sum(p.numel() for p in model.parameters())
    assert frame.attrs["weight_share"] == pytest.approx(share)
    assert at(frame, "hessian", "Total", "weight_relative") < 1e-10


def test_probed_weight_errors_are_unbiased_for_the_frobenius_norms() -> None:
    model, (x, y) = Residual(), batch(12)
    problem = Problem(model, "cross-entropy", x, y)
    fisher, exact = curvlab.estimate(["fisher", "hessian"], problem)
    found = [
        probed_weight_errors(problem, exact, [fisher], Budget(math.inf), seed=seed) for seed in range(40)
    ]
    for name, block in exact.blocks.items():
        if name.endswith("weight"):
            truth = block.to_dense()
            error = (fisher.blocks[name].to_dense() - truth).norm().item()
            squares = [one[0][name] ** 2 for one, _, _ in found]
            assert (sum(squares) / len(squares)) ** 0.5 == pytest.approx(error, rel=0.15)
            norms = [norms[name] ** 2 for _, norms, _ in found]
            assert (sum(norms) / len(norms)) ** 0.5 == pytest.approx(truth.norm().item(), rel=0.15)


def test_what_is_beyond_the_limit_is_left_out_with_the_reason() -> None:
    problem = Problem(Residual(bias=False), "cross-entropy", *batch())
    frame = curvlab.errors(problem, "fisher", weights=True, operations=1.0)
    assert frame[["error", "weight_error"]].isna().all(axis=None)
    assert "beyond the limit" in " ".join(frame.attrs["left_out"])


def test_a_subset_of_layers_keeps_their_numbers() -> None:
    model, (x, y) = mlp(), batch()
    frame = curvlab.errors(Problem(model, "robust", x, y, layers=["2"]), "fisher", weights=True)
    whole = curvlab.errors(Problem(model, "robust", x, y), "fisher", weights=True)
    assert frame["layer"].tolist() == [2, "Total"]
    for column in ("error", "weight_error", "weight_floor"):
        assert at(frame, "fisher", 2, column) == pytest.approx(at(whole, "fisher", 2, column), rel=1e-12)


def test_frozen_weights_have_no_weight_error_and_leave_the_total() -> None:
    model, (x, y) = mlp(), batch()
    model[0].weight.requires_grad_(False)
    frame = curvlab.errors(Problem(model, "robust", x, y), "fisher", weights=True)
    assert math.isnan(at(frame, "fisher", 1, "weight_error"))
    assert at(frame, "fisher", 1, "error") > 0
    rest = math.hypot(at(frame, "fisher", 2, "weight_error"), at(frame, "fisher", 3, "weight_error"))
    assert at(frame, "fisher", "Total", "weight_error") == pytest.approx(rest, rel=1e-12)


@dataclass(frozen=True)
class OtherInputs(Provider):
    """A provider whose weight blocks are I ⊗ I."""

    def statistics(self, problem: Problem) -> tuple:
        return ()

    def curvature(self, context: Context, name: str) -> Curvature:
        layers = tuple(
            LayerCurvature(
                layer.name,
                layer.weight_name,
                layer.bias_name,
                DenseFactor(torch.eye(layer.out_features, dtype=torch.float64)),
                InputFactors(DenseFactor(torch.eye(layer.in_features, dtype=torch.float64))),
            )
            for layer in context.layers
        )
        return Curvature(name, "any", layers, Definiteness(True, "the identity"))


def test_weight_blocks_with_other_input_factors_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from curvlab.providers.registry import providers

    monkeypatch.setattr(providers, "_entries", dict(providers._entries))
    providers.register("other-inputs", OtherInputs)
    frame = curvlab.errors(Problem(mlp(), "robust", *batch()), ["other-inputs", "fisher"], weights=True)
    assert math.isnan(at(frame, "other-inputs", "Total", "weight_error"))
    assert math.isnan(at(frame, "other-inputs", 1, "weight_relative"))
    assert at(frame, "other-inputs", 1, "weight_floor") == at(frame, "fisher", 1, "weight_floor")


def test_linear_activations_make_exact_gauss_newton_exact() -> None:
    frame = curvlab.errors(
        Problem(mlp(nn.ReLU), "cross-entropy", *batch()), "gauss-newton[kind=exact]", weights=True
    )
    assert at(frame, "gauss-newton[kind=exact]", "Total", "weight_error") < 1e-14
    assert at(frame, "gauss-newton[kind=exact]", "Total", "error") < 1e-14


@pytest.mark.parametrize("structure", ["ekfac", "diagonal", "block", "layer", "full"])
@pytest.mark.parametrize("provider", ["fisher", "gauss-newton", "pch-1[poseig=node]"])
def test_structures_are_measured_by_their_blocks_of_the_biases(provider: str, structure: str) -> None:
    problem = Problem(mlp(), "cross-entropy", *batch())
    spec = provider.removesuffix("]").replace("pch-1[", "pch[kind=rows,")
    spec += f"{',' if '[' in spec else '['}structure={structure}]"
    found = curvlab.errors(problem, [spec], weights=True)
    own, true = curvlab.estimate([spec, "hessian"], problem)
    for name, error in zip(("0.bias", "2.bias", "4.bias"), found["error"], strict=False):
        values, vectors = torch.linalg.eigh(true.blocks[name].to_dense())
        absolute = vectors @ values.abs().diag() @ vectors.T
        expected = torch.linalg.matrix_norm(own.blocks[name].to_dense() - absolute)
        assert error == pytest.approx(float(expected), rel=1e-9, abs=1e-15)
    assert found["layer"].tolist() == [1, 2, 3, "Total"]
    assert float(found["error"].iloc[-1]) > 1e-3
    assert not (found["weight_error"] == 0).any()
