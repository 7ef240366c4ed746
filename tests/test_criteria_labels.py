"""The model's labels: what each criterion draws, and how its Fisher relates to its Hessian."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from curvlab.criteria import BCE, MSE, Criterion, CrossEntropy, FunctionCriterion, Robust, Tukey
from curvlab.exceptions import ProblemError

K = 4


def logits_of(m: int) -> Tensor:
    return 2 * torch.randn(m, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def fractions_of(m: int) -> Tensor:
    return torch.rand(m, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def log_cosh(logits: Tensor, target: Tensor) -> Tensor:
    return torch.log(torch.cosh(logits - target)).sum()


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-14) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("criterion", [CrossEntropy(), MSE()])
def test_fisher_of_a_likelihood_is_its_hessian(criterion: Criterion) -> None:
    logits = logits_of(6)
    targets = torch.arange(6) % K if isinstance(criterion, CrossEntropy) else fractions_of(6)
    factor = criterion.label_factor(logits)
    assert criterion.likelihood
    close(torch.einsum("rma,rmb->mab", factor, factor), criterion.hessians(logits, targets))


def test_bce_fisher_is_its_hessian_divided_by_the_outputs() -> None:
    logits = logits_of(6)
    factor = BCE().label_factor(logits)
    hessians = BCE().hessians(logits, fractions_of(6).round())
    close(torch.einsum("rma,rmb->mab", factor, factor), hessians / K)


def test_criteria_that_are_no_likelihood_say_so() -> None:
    for criterion in (
        Robust(),
        Tukey(),
        CrossEntropy(label_smoothing=0.1),
        BCE(pos_weight=(2.0,)),
        FunctionCriterion(log_cosh),
    ):
        assert criterion.likelihood is False
    assert CrossEntropy(weight=(0.5, 2.0, 1.25, 0.1)).likelihood


@pytest.mark.parametrize("criterion", [CrossEntropy(), Robust()])
def test_drawn_classes_follow_the_softmax(criterion: Criterion) -> None:
    m = 100_000
    logits = logits_of(1).expand(m, K)
    uniforms = (torch.arange(m, dtype=torch.float64)[:, None].expand(m, K) + 0.5) / m
    counts = torch.bincount(criterion.sample(logits, uniforms), minlength=K)
    torch.testing.assert_close(counts / m, logits[0].softmax(-1), rtol=0, atol=2 / m, check_dtype=False)


@pytest.mark.parametrize("uniform", [1e-30, 0.5, 1 - 1e-7, 1 - 1e-16])
def test_impossible_classes_are_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-math.inf, 0.1, -math.inf, 0.3, 0.0, -math.inf]])
    uniforms = torch.full((1, 6), uniform, dtype=torch.float64)
    assert int(CrossEntropy().sample(logits, uniforms)) in (1, 3, 4)


def test_rounding_of_the_distribution_never_points_past_the_last_class() -> None:
    logits = torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
    assert bool((logits.softmax(-1).cumsum(-1)[:, -1] < 1).any())
    assert int(CrossEntropy().sample(logits, torch.full((500, 7), 1 - 2**-24)).max()) == 6


def test_drawn_regression_targets_are_gaussian_with_variance_k_over_two() -> None:
    m = 100_000
    uniforms = ((torch.arange(m, dtype=torch.float64)[:, None] + 0.5) / m).expand(m, K)
    noise = MSE().sample(logits_of(1).expand(m, K), uniforms) - logits_of(1)
    torch.testing.assert_close(noise.mean(0), torch.zeros(K, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(noise.var(0), torch.full((K,), K / 2, dtype=torch.float64), rtol=1e-3, atol=0)


def test_drawn_bits_are_one_below_the_probability() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert BCE().sample(logits, torch.tensor([[0.6, 0.6]])).tolist() == [[0.0, 1.0]]


def test_a_label_drawn_as_the_ignored_class_still_counts() -> None:
    criterion, logits = CrossEntropy(ignore_index=1), logits_of(3)
    labels = torch.tensor([1, 1, 0])
    close(criterion.gradients(logits, labels), CrossEntropy().gradients(logits, labels))
    assert criterion.losses(logits, labels)[:2].tolist() == [0.0, 0.0]
    weights = criterion.weights(logits, labels)
    assert weights is not None
    assert weights.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("criterion", [Tukey(), FunctionCriterion(log_cosh, name="mine")])
def test_criteria_without_labels_refuse_to_draw_them(criterion: Criterion) -> None:
    with pytest.raises(
        ProblemError, match=rf"`{criterion.name}` has no distribution.*kind=empirical.*sampler"
    ):
        criterion.sample(logits_of(2), fractions_of(2))
    with pytest.raises(ProblemError, match="no distribution of labels"):
        criterion.label_factor(logits_of(2))


def test_a_user_function_draws_with_its_sampler() -> None:
    criterion = FunctionCriterion(log_cosh, sampler=lambda logits, uniforms: logits + uniforms)
    close(criterion.sample(logits_of(3), fractions_of(3)), logits_of(3) + fractions_of(3))
    with pytest.raises(ProblemError, match="kind=mc"):
        criterion.label_factor(logits_of(3))
