"""Criteria: derivatives and means against torch.func on torch's own losses; the model's labels; numerics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, hessian
from torch.nn import functional

from curvlab.criteria import (
    BCE,
    MSE,
    Criterion,
    CrossEntropy,
    FunctionCriterion,
    Robust,
    Tukey,
    criterion_from,
)

K = 4
WEIGHT = (0.5, 2.0, 1.25, 0.1)
POS_WEIGHT = (3.0, 0.5, 1.0, 0.0)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits_of(m: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(m, K, dtype=torch.float64, generator=generator(seed))


def labels_of(m: int, seed: int = 0) -> Tensor:
    return torch.randint(K, (m,), generator=generator(seed + 1))


def ignored_labels(m: int, seed: int = 0) -> Tensor:
    return labels_of(m, seed).masked_fill(torch.arange(m) % 3 == 1, -100)


def soft_of(m: int, seed: int = 0) -> Tensor:
    return torch.rand(m, K, dtype=torch.float64, generator=generator(seed + 2)) ** 3


def reals_of(m: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(m, K, dtype=torch.float64, generator=generator(seed + 3))


def bits_of(m: int, seed: int = 0) -> Tensor:
    return (soft_of(m, seed) > 0.2).double()


def tensor(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tukey_loss(c: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        r = logits - targets
        inside = c**2 / 6 * (1 - (1 - (r / c) ** 2) ** 3)
        return torch.where(r.abs() <= c, inside, torch.full_like(r, c**2 / 6)).mean()

    return loss


def robust_loss(delta: float, epsilon: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        chosen = (functional.one_hot(targets, K) * logits.softmax(-1)).sum(-1)
        return (1 / (1 + torch.exp(delta * (chosen - epsilon)))).mean()

    return loss


def log_cosh(logits: Tensor, target: Tensor) -> Tensor:
    """A user function that couples its outputs."""
    return torch.log(torch.cosh(logits - target)).sum() + logits.prod() / 10


def mean_log_cosh(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([log_cosh(h, y) for h, y in zip(logits, targets, strict=True)]).mean()


@dataclass(frozen=True)
class Case:
    """A criterion, targets for it and the same mean loss in torch's words."""

    name: str
    criterion: Criterion
    targets: Callable[[int, int], Tensor]
    mean_loss: Callable[[Tensor, Tensor], Tensor]


def torch_case(name: str, loss: nn.Module, targets: Callable[[int, int], Tensor]) -> Case:
    return Case(name, criterion_from(loss), targets, loss)


CASES = [
    torch_case("cross-entropy", nn.CrossEntropyLoss(), labels_of),
    torch_case("ignored", nn.CrossEntropyLoss(), ignored_labels),
    torch_case("ignored class", nn.CrossEntropyLoss(ignore_index=2), labels_of),
    torch_case("weighted", nn.CrossEntropyLoss(tensor(WEIGHT)), ignored_labels),
    torch_case("smoothed", nn.CrossEntropyLoss(label_smoothing=0.3), ignored_labels),
    torch_case("weighted smoothed", nn.CrossEntropyLoss(tensor(WEIGHT), label_smoothing=0.3), ignored_labels),
    torch_case("soft", nn.CrossEntropyLoss(), soft_of),
    torch_case("soft weighted", nn.CrossEntropyLoss(tensor(WEIGHT)), soft_of),
    torch_case("soft weighted smoothed", nn.CrossEntropyLoss(tensor(WEIGHT), label_smoothing=0.3), soft_of),
    torch_case("zero weight", nn.CrossEntropyLoss(tensor((0.0, 1.0, 2.0, 3.0))), labels_of),
    torch_case("mse", nn.MSELoss(), reals_of),
    torch_case("bce", nn.BCEWithLogitsLoss(), bits_of),
    torch_case("bce soft", nn.BCEWithLogitsLoss(), lambda m, seed: soft_of(m, seed)),
    torch_case(
        "bce weighted",
        nn.BCEWithLogitsLoss(tensor(WEIGHT), pos_weight=tensor(POS_WEIGHT)),
        lambda m, s: soft_of(m, s),
    ),
    torch_case("bce one weight", nn.BCEWithLogitsLoss(pos_weight=tensor((3.0,))), bits_of),
    Case("robust", Robust(), labels_of, robust_loss(5.0, 0.2)),
    Case("robust settings", Robust(delta=2.0, epsilon=0.6), labels_of, robust_loss(2.0, 0.6)),
    Case("tukey", Tukey(), reals_of, tukey_loss(4.685)),
    Case("tukey settings", Tukey(c=1.5), reals_of, tukey_loss(1.5)),
    Case("function", FunctionCriterion(log_cosh), reals_of, mean_log_cosh),
    torch_case("smooth l1", nn.SmoothL1Loss(beta=0.7), reals_of),
    torch_case("kl", nn.KLDivLoss(reduction="batchmean"), soft_of),
    torch_case("multi-label margin", nn.MultiLabelSoftMarginLoss(), bits_of),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
LABELLED = [
    case for case in CASES if isinstance(case.criterion, CrossEntropy | Robust | MSE | BCE)
]  # those that know the distribution of their labels
each_labelled = pytest.mark.parametrize("case", LABELLED, ids=lambda case: case.name)


def weights_of(case: Case, logits: Tensor, targets: Tensor) -> Tensor:
    weights = case.criterion.weights(logits, targets)
    return torch.ones(len(logits), dtype=logits.dtype) if weights is None else weights


def mean(case: Case, logits: Tensor, targets: Tensor, values: Tensor) -> Tensor:
    weights = weights_of(case, logits, targets)
    return torch.einsum("i,i...->...", weights / weights.sum(), values)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@each_case
@given(m=st.integers(1, 7), seed=st.integers(0, 10_000))
def test_weighted_mean_loss_is_torchs_mean_reduction(case: Case, m: int, seed: int) -> None:
    logits, targets = logits_of(m, seed), case.targets(m, seed)
    if float(weights_of(case, logits, targets).sum()) > 0:
        close(
            mean(case, logits, targets, case.criterion.losses(logits, targets)),
            case.mean_loss(logits, targets),
        )


@each_case
def test_derivatives_equal_torch_func_on_the_mean_loss(case: Case) -> None:
    m = 9
    logits, targets = logits_of(m), case.targets(m, 0)
    criterion = case.criterion
    criterion.check(logits, targets)
    weights = weights_of(case, logits, targets)
    share = weights / weights.sum()
    gradients = grad(case.mean_loss)(logits, targets)
    full = hessian(case.mean_loss)(logits, targets)
    hessians = torch.stack([full[i, :, i, :] for i in range(m)])
    vectors = reals_of(2 * m, 5).reshape(2, m, K)

    close(share[:, None] * criterion.gradients(logits, targets), gradients)
    close(share[:, None, None] * criterion.hessians(logits, targets), hessians)
    close(criterion.mean_hessian(logits, targets, share), hessians.sum(0))
    close(
        share[:, None] * criterion.hessian_products(logits, targets, vectors[0]),
        torch.einsum("iab,ib->ia", hessians, vectors[0]),
    )
    products = criterion.hessian_products(logits, targets, vectors[None])
    close(share[:, None] * products, torch.einsum("iab,xyib->xyia", hessians, vectors[None]))


@each_case
def test_mean_hessian_takes_any_weights_and_is_symmetric(case: Case) -> None:
    logits, targets = logits_of(6), case.targets(6, 0)
    weights = torch.linspace(0.0, 3.0, 6, dtype=torch.float64)
    mean_hessian = case.criterion.mean_hessian(logits, targets, weights)
    close(mean_hessian, torch.einsum("i,iab->ab", weights, case.criterion.hessians(logits, targets)))
    assert torch.equal(mean_hessian, mean_hessian.T)


@each_case
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 1.0, 10.0]))
def test_convexity_is_what_the_eigenvalues_say(case: Case, seed: int, scale: float) -> None:
    if case.criterion.convex:
        smallest = torch.linalg.eigvalsh(
            case.criterion.hessians(logits_of(5, seed, scale), case.targets(5, seed))
        )
        assert smallest.min() > -1e-14


@pytest.mark.parametrize("criterion", [Robust(), Tukey()])
def test_criteria_that_say_so_are_not_convex(criterion: Criterion) -> None:
    targets = labels_of(50) if isinstance(criterion, Robust) else reals_of(50)
    assert criterion.convex is False
    assert torch.linalg.eigvalsh(criterion.hessians(logits_of(50), targets)).min() < -0.01


def test_convexity_of_a_user_function_is_unknown() -> None:
    assert FunctionCriterion(log_cosh).convex is None


def test_cross_entropy_hessian_keeps_its_digits_where_the_model_is_sure() -> None:
    logits, targets = torch.tensor([[30.0, 0.0, -1.0, -2.0]]), torch.tensor([0])
    single = CrossEntropy().mean_hessian(logits, targets, torch.ones(1))
    double = CrossEntropy().mean_hessian(logits.double(), targets, torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(single.double(), double, rtol=5e-6, atol=0)


def expected_outer_product(case: Case, logits: Tensor) -> Tensor:
    """E_{y ~ model}[∇ξ ∇ξᵀ] by summing over all labels; for mse over the nodes of a Gaussian quadrature."""
    if isinstance(case.criterion, MSE):
        nodes = torch.cartesian_prod(*[tensor((-math.sqrt(3), 0.0, math.sqrt(3)))] * K)
        chances = list(torch.cartesian_prod(*[tensor((1 / 6, 2 / 3, 1 / 6))] * K).prod(-1)[:, None])
        targets = [logits + math.sqrt(K / 2) * node for node in nodes]
    elif isinstance(case.criterion, BCE):
        p = logits.sigmoid()
        outcomes = torch.cartesian_prod(*[tensor((0.0, 1.0))] * K)
        chances = [(p * y + (1 - p) * (1 - y)).prod(-1) for y in outcomes]
        targets = [y.expand_as(logits) for y in outcomes]
    else:
        chances = list(logits.softmax(-1).T)
        targets = [torch.full((len(logits),), c) for c in range(K)]
    gradients = [case.criterion.gradients(logits, y) for y in targets]
    return sum(
        c[:, None, None] * g[:, :, None] * g[:, None, :] for c, g in zip(chances, gradients, strict=True)
    )


@each_labelled
def test_label_factor_is_the_expected_outer_product_of_gradients(case: Case) -> None:
    logits = logits_of(8)
    factor = case.criterion.label_factor(logits)
    assert factor.shape == (K, 8, K)
    close(torch.einsum("rma,rmb->mab", factor, factor), expected_outer_product(case, logits), 1e-13)


@each_labelled
def test_drawn_labels_have_the_label_factors_second_moment(case: Case) -> None:
    m = 200_000
    logits = logits_of(1, scale=1.0).expand(m, K)
    uniforms = torch.rand(m, K, dtype=torch.float64, generator=generator(7))
    gradients = case.criterion.gradients(logits, case.criterion.sample(logits, uniforms))
    factor = case.criterion.label_factor(logits[:1])[:, 0]
    expected = factor.T @ factor
    torch.testing.assert_close(
        gradients.T @ gradients / m, expected, rtol=0, atol=0.02 * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    ("criterion", "targets"),
    [
        (CrossEntropy(), torch.tensor([0, 1, 2])),
        (CrossEntropy(label_smoothing=0.2, weight=(1.0, 2.0, 0.5)), torch.tensor([0, 1, 2])),
        (CrossEntropy(), torch.eye(3)),
        (Robust(), torch.tensor([0, 1, 2])),
        (MSE(), torch.zeros(3, 3)),
        (Tukey(), torch.zeros(3, 3)),
        (BCE(), torch.eye(3)),
        (BCE(pos_weight=(0.0, 1.0, 5.0)), torch.eye(3)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("size", [80.0, 200.0, 1e4])
def test_float32_extremes_stay_finite_and_right(criterion: Criterion, targets: Tensor, size: float) -> None:
    logits = size * torch.tensor([[1.0, -1.0, 0.0], [1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]])
    weights = torch.ones(3)
    doubles = logits.double()
    for method in ("losses", "gradients", "hessians"):
        single = getattr(criterion, method)(logits, targets)
        assert torch.isfinite(single).all()
        torch.testing.assert_close(
            single.double(), getattr(criterion, method)(doubles, targets), rtol=1e-5, atol=1e-6
        )
    assert torch.isfinite(criterion.mean_hessian(logits, targets, weights)).all()
    assert torch.isfinite(criterion.hessian_products(logits, targets, torch.ones(3, 3))).all()
    if not isinstance(criterion, Tukey):
        assert torch.isfinite(criterion.label_factor(logits)).all()


def test_bce_is_exact_beyond_the_threshold_of_torchs_softplus() -> None:
    logits, targets = torch.tensor([[20.5, -20.5]], dtype=torch.float64), tensor((0.0, 1.0))[None]
    expected = 20.5 + math.log1p(math.exp(-20.5))
    assert float(BCE().losses(logits, targets)) == pytest.approx(expected, rel=1e-14)


def test_rows_without_a_label_have_no_derivatives() -> None:
    labels = torch.full((2,), -100)
    for criterion in (CrossEntropy(), CrossEntropy(WEIGHT, label_smoothing=0.1)):
        assert not criterion.losses(logits_of(2), labels).any()
        assert not criterion.gradients(logits_of(2), labels).any()
        assert not criterion.hessians(logits_of(2), labels).any()


@each_case
def test_results_have_the_logits_dtype(case: Case) -> None:
    logits, targets = logits_of(4).float(), case.targets(4, 0)
    targets = targets.float() if isinstance(case.criterion, FunctionCriterion) else targets
    for method in (case.criterion.losses, case.criterion.gradients, case.criterion.hessians):
        assert method(logits, targets).dtype == torch.float32


@each_labelled
def test_criteria_work_on_tensors_without_values(case: Case) -> None:
    logits, targets = logits_of(5).to("meta"), case.targets(5, 0).to("meta")
    case.criterion.check(logits, targets)
    weights = case.criterion.weights(logits, targets)
    assert weights is None or weights.shape == (5,)
    assert case.criterion.losses(logits, targets).shape == (5,)
    assert case.criterion.gradients(logits, targets).shape == (5, K)
    assert case.criterion.hessians(logits, targets).shape == (5, K, K)
    assert case.criterion.mean_hessian(
        logits, targets, torch.empty(5, device="meta", dtype=torch.float64)
    ).shape == (K, K)


@each_case
def test_no_grad_around_a_criterion_changes_nothing(case: Case) -> None:
    logits, targets = logits_of(4), case.targets(4, 0)
    expected = case.criterion.hessians(logits, targets)
    with torch.no_grad():
        close(case.criterion.hessians(logits, targets), expected, 1e-15)
        case.criterion.check(logits, targets)


def test_narrow_label_dtypes_mean_the_same_labels() -> None:
    logits, labels = logits_of(5), labels_of(5)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        CrossEntropy().check(logits, labels.to(dtype))
        assert CrossEntropy().weights(logits, labels.to(dtype)) is None
        for criterion in (CrossEntropy(), Robust()):
            close(criterion.gradients(logits, labels.to(dtype)), criterion.gradients(logits, labels))
    # As uint8, -100 and 156 have the same bits.
    many, label = torch.zeros(1, 200), torch.tensor([156], dtype=torch.uint8)
    CrossEntropy().check(many, label)
    assert CrossEntropy().weights(many, label) is None
    assert float(CrossEntropy().losses(many, label)) == pytest.approx(math.log(200))


def test_predictions_are_classes_bits_or_none() -> None:
    logits = torch.tensor([[1.0, -2.0, 3.0]])
    assert CrossEntropy().predictions(logits).tolist() == Robust().predictions(logits).tolist() == [2]
    assert BCE().predictions(logits).tolist() == [[1, 0, 1]]
    assert MSE().predictions(logits) is None
    assert FunctionCriterion(log_cosh).predictions(logits) is None
