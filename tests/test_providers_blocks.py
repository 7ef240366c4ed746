"""Every block of every provider equals the formula written out in plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import curvlab
from curvlab.providers.statistics import uniforms
from tests.cases import ACTIVATIONS, LOSSES, Case, cases
from tests.reference import Blocks, Reference

ALL = [Case(activation=a, loss=loss) for a in ACTIVATIONS for loss in LOSSES]
CLASSES = ("cross-entropy", "weighted", "ignored", "robust", "smoothed")


def ids(case: Case) -> str:
    return f"{case.activation}-{case.loss}"


def assert_blocks(curvature: curvlab.Curvature, expected: Blocks, tolerance: float = 1e-10) -> None:
    assert list(curvature.blocks) == list(expected)
    for name, block in curvature.blocks.items():
        torch.testing.assert_close(block.to_dense(), expected[name], rtol=tolerance, atol=tolerance, msg=name)


def check_all(case: Case) -> None:
    problem, reference = case.build()
    specs = ["fisher", "gauss-newton", "pch-1", "pch-2", "pch[gamma=-0.3,output_gamma=0]"]
    fisher, recursive, pch_1, pch_2, mixed = curvlab.estimate(specs, problem)
    hessian, exact = curvlab.estimate(["hessian", "gauss-newton[kind=exact]"], problem)
    assert_blocks(fisher, reference.kronecker_blocks(reference.fisher()))
    assert_blocks(recursive, reference.kronecker_blocks(reference.gauss_newton()))
    assert_blocks(pch_1, reference.kronecker_blocks(reference.pch(-1.0)))
    assert_blocks(pch_2, reference.kronecker_blocks(reference.pch(0.0)))
    assert_blocks(mixed, reference.kronecker_blocks(reference.pch(-0.3, 0.0)))
    last, clipped = curvlab.estimate(
        ["pch[poseig=last]", "pch[gamma=-0.3,output_gamma=0,poseig=last]"], problem
    )
    assert_blocks(last, reference.kronecker_blocks(reference.signed_pch(-1.0)))
    assert_blocks(clipped, reference.kronecker_blocks(reference.signed_pch(-0.3, 0.0)))
    assert_blocks(hessian, reference.hessian_blocks())
    assert_blocks(exact, reference.gauss_newton_blocks())


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=ids)
def test_every_block_of_every_provider_equals_the_written_out_formula(case: Case) -> None:
    check_all(case)


@pytest.mark.slow
@given(cases())
def test_blocks_are_right_for_any_width_depth_batch_and_seed(case: Case) -> None:
    check_all(case)


@given(cases(min_layers=2))
@settings(max_examples=10)
def test_the_full_hessian_has_its_cross_layer_blocks(case: Case) -> None:
    problem, reference = case.build()
    hessian = curvlab.estimate("hessian[full=true]", problem)
    expected = reference.full_hessian()
    torch.testing.assert_close(hessian.to_dense(), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(hessian.frobenius_norm(), expected.norm(), rtol=1e-10, atol=1e-10)


def test_where_poseig_is_taken_matters_and_the_default_is_the_paper_s_order() -> None:
    problem, _ = Case(widths=(4, 5, 4, 3), loss="robust").build()
    node, plain, last = curvlab.estimate(["pch[poseig=node]", "pch-1", "pch[poseig=last]"], problem)
    assert torch.equal(node.to_dense(), plain.to_dense())
    assert not torch.allclose(node.blocks["0.bias"].to_dense(), last.blocks["0.bias"].to_dense(), rtol=1e-2)
    output = problem.layers[-1].bias_name
    assert torch.equal(node.blocks[output].to_dense(), last.blocks[output].to_dense())


@given(cases())
def test_gradient_and_loss_are_torch_s_own(case: Case) -> None:
    problem, reference = case.build()
    gradient, expected = problem.gradient(), reference.gradient()
    assert set(gradient) == set(expected)
    for name, value in gradient.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-12)
    norm = torch.cat([g.flatten() for g in expected.values()]).norm()
    torch.testing.assert_close(gradient.norm(), norm, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(problem.loss(), reference.mean_loss(reference.parameters), rtol=1e-12, atol=0)


@pytest.mark.parametrize("provider", ["fisher", "pch-1", "hessian", "gauss-newton[kind=exact]"])
@pytest.mark.parametrize("loss", ["robust", "weighted"])
def test_summaries_of_a_block_are_those_of_its_dense_form(provider: str, loss: str) -> None:
    problem, _ = Case(loss=loss).build()
    curvature = curvlab.estimate(provider, problem)
    for block in curvature.blocks.values():
        dense = block.to_dense()
        close = {"rtol": 1e-10, "atol": 1e-12}
        torch.testing.assert_close(block.diagonal().flatten(), dense.diagonal(), **close)
        torch.testing.assert_close(block.trace(), dense.trace(), **close)
        torch.testing.assert_close(block.frobenius_norm(), torch.linalg.matrix_norm(dense), **close)
        torch.testing.assert_close(block.eigvalsh(), torch.linalg.eigvalsh(dense), **close)
        x = torch.randn(block.shape).double()
        torch.testing.assert_close((block @ x).flatten(), dense @ x.flatten(), **close)
    whole = curvature.to_dense()
    torch.testing.assert_close(curvature.trace(), whole.trace(), **close)
    torch.testing.assert_close(curvature.frobenius_norm(), whole.norm(), **close)
    diagonal = torch.cat([d.flatten() for d in curvature.diagonal().values()])
    torch.testing.assert_close(diagonal, whole.diagonal(), **close)


def exact_fisher(reference: Reference, loss: str) -> list[Tensor]:
    if loss in CLASSES:
        return reference.fisher_over_classes()
    # The covariance of ∇ξ in closed form: 2/K for mse's Gaussian, p(1-p)/K² for Bernoulli labels.
    k = len(reference.logits(0))

    def covariance(i: int) -> Tensor:
        p = reference.logits(i).sigmoid()
        return torch.eye(k).double() * 2 / k if loss == "mse" else torch.diag(p * (1 - p)) / k**2

    def pulled(i: int, t: int) -> Tensor:
        jacobian = torch.stack([reference.backward(i, unit)[t] for unit in torch.eye(k).double()])
        return jacobian.T @ covariance(i) @ jacobian

    return [reference.mean(lambda i, t=t: pulled(i, t)) for t in range(len(reference.linears))]


@given(cases(losses=(*CLASSES, "mse", "bce")))
def test_exact_fisher_is_the_expectation_over_the_model_s_labels(case: Case) -> None:
    problem, reference = case.build()
    fisher = curvlab.estimate("fisher[kind=exact]", problem)
    assert_blocks(fisher, reference.kronecker_blocks(exact_fisher(reference, case.loss)))


def test_exact_fisher_is_exact_gauss_newton_for_a_likelihood_only() -> None:
    for loss, same in (("cross-entropy", True), ("weighted", True), ("mse", True), ("soft targets", True),
                       ("smoothed", False), ("robust", False)):  # fmt: skip
        problem, _ = Case(loss=loss).build()
        fisher, newton = curvlab.estimate(["fisher[kind=exact]", "gauss-newton[kind=exact]"], problem)
        a, b = (c.blocks["0.bias"].to_dense() for c in (fisher, newton))
        assert torch.allclose(a, b, rtol=1e-10) == same, loss
        # Soft targets are no labels that the model could draw, but their Fisher happens to agree.
        assert bool(fisher.notes) == (loss in ("smoothed", "robust")), loss


@given(cases(losses=CLASSES))
def test_mc_fisher_is_that_of_the_labels_drawn_for_each_example(case: Case) -> None:
    problem, reference = case.build()
    fisher = curvlab.estimate("fisher[kind=mc,samples=3,seed=7]", problem)
    logits = torch.stack([reference.logits(i) for i in range(case.examples)])
    cumulative = logits.softmax(1).cumsum(1)
    keys = problem.recording().example_keys
    draws = [
        (uniforms(7, draw, keys, logits.shape[1], logits.dtype)[:, :1] > cumulative)
        .sum(1)
        .clamp(max=logits.shape[1] - 1)
        for draw in range(3)
    ]
    assert_blocks(fisher, reference.kronecker_blocks(reference.fisher_of_labels(draws)))


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_draws_go_with_the_example_wherever_it_stands(loss: str) -> None:
    problem, _ = Case(loss=loss, examples=7).build()
    batch = next(problem.batches())
    assert isinstance(batch.inputs, torch.Tensor)
    order = torch.tensor([4, 0, 6, 2, 1, 5, 3])
    shuffled = problem.with_data(batch.inputs[order], batch.targets[order])
    keys = problem.recording().example_keys
    assert len(set(keys.tolist())) == 7
    assert torch.equal(shuffled.recording().example_keys, keys[order])
    pieces = list(zip(batch.inputs[order].split(3), batch.targets[order].split(3), strict=True))
    expected = curvlab.estimate("fisher[kind=mc,samples=2,seed=1]", problem)
    for other in (shuffled, problem.with_data(pieces)):
        found = curvlab.estimate("fisher[kind=mc,samples=2,seed=1]", other)
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-11, atol=1e-14)
    again = curvlab.estimate("fisher[kind=mc,samples=2,seed=2]", problem)
    assert not torch.allclose(again.to_dense(), expected.to_dense(), rtol=1e-3)


def test_equal_examples_share_their_draws_and_other_targets_are_another_example() -> None:
    problem, _ = Case(widths=(3, 4), examples=2).build()
    batch = next(problem.batches())
    assert isinstance(batch.inputs, torch.Tensor)
    inputs, targets = batch.inputs[[0, 0, 0]], torch.tensor([1, 1, 0])
    keys = problem.with_data(inputs, targets).recording().example_keys
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("loss", ["cross-entropy", "mse", "bce", "robust"])
def test_mc_fisher_converges_to_exact_fisher(loss: str) -> None:
    problem, _ = Case(loss=loss, widths=(2, 2, 2), examples=3).build()
    exact = curvlab.estimate("fisher[kind=exact]", problem).blocks["0.bias"].to_dense()
    samples = 2_000
    sampled = curvlab.estimate(f"fisher[kind=mc,samples={samples}]", problem).blocks["0.bias"].to_dense()
    few = curvlab.estimate("fisher[kind=mc,samples=20]", problem).blocks["0.bias"].to_dense()
    assert (sampled - exact).norm() < 10 / samples**0.5 * exact.norm()
    assert (sampled - exact).norm() < (few - exact).norm()


@pytest.mark.parametrize("kind", ["mc", "exact"])
@pytest.mark.parametrize("loss", ["tukey", "convex function"])
def test_a_criterion_without_labels_refuses_the_fisher_kinds_that_need_them(kind: str, loss: str) -> None:
    problem, _ = Case(loss=loss).build()
    with pytest.raises(curvlab.exceptions.ProblemError, match="no distribution of labels"):
        curvlab.estimate(f"fisher[kind={kind}]", problem)
