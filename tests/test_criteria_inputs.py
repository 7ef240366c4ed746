"""What users hand in as criterion and targets: torch losses, functions, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
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
from curvlab.exceptions import ProblemError, SpecError

K = 4


def logits_of(m: int) -> Tensor:
    return 2 * torch.randn(m, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def reals_of(m: int) -> Tensor:
    return 3 * torch.randn(m, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def log_cosh(logits: Tensor, target: Tensor) -> Tensor:
    return torch.log(torch.cosh(logits - target)).sum()


@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf])
@pytest.mark.parametrize(("criterion", "field"), [(Robust, "delta"), (Tukey, "c")])
def test_a_field_that_must_be_positive_is_refused_at_construction(
    criterion: type[Criterion], field: str, value: float
) -> None:
    with pytest.raises(SpecError, match=f"{field}={value} of `{criterion.name}`: expected .* above 0"):
        criterion(**{field: value})


def test_settings_of_torch_losses_are_kept_as_plain_values() -> None:
    weight = torch.tensor([1.0, 0.5])
    expected = CrossEntropy(weight=(1.0, 0.5), ignore_index=3, label_smoothing=0.25)
    assert criterion_from(nn.CrossEntropyLoss(weight, ignore_index=3, label_smoothing=0.25)) == expected
    assert CrossEntropy(weight=weight) == CrossEntropy(weight=(1.0, 0.5))  # type: ignore[arg-type]
    assert len({expected, criterion_from(expected), CrossEntropy()}) == 2
    assert criterion_from(nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))) == BCE(pos_weight=(2.0,))
    assert criterion_from(nn.MSELoss()) == MSE()
    assert criterion_from(functional.cross_entropy) == CrossEntropy()


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss, nn.SmoothL1Loss])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_other_reductions_are_refused_with_advice(kind: type[nn.Module], reduction: str) -> None:
    with pytest.raises(
        ProblemError, match=rf"{kind.__name__}.*{reduction}.*mean loss.*reduction='mean'.*scale"
    ):
        criterion_from(kind(reduction=reduction))


class Doubled(nn.MSELoss):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(logits, target)


def test_a_subclass_with_its_own_forward_is_a_function_of_its_own() -> None:
    criterion = criterion_from(Doubled())
    assert isinstance(criterion, FunctionCriterion)
    doubled = criterion.losses(logits_of(3), reals_of(3))
    torch.testing.assert_close(doubled, 2 * MSE().losses(logits_of(3), reals_of(3)))


def test_functions_and_modules_become_user_functions_with_their_name() -> None:
    assert criterion_from(log_cosh) == FunctionCriterion(log_cosh, name="log_cosh", batched=log_cosh)
    assert criterion_from(nn.SmoothL1Loss()).name == "SmoothL1Loss"


@pytest.mark.parametrize("obj", ["mse", 3, None, [nn.MSELoss()]])
def test_objects_that_are_no_criterion_are_refused(obj: object) -> None:
    with pytest.raises(ProblemError, match=r"`criterion` is .*expected a curvlab Criterion"):
        criterion_from(obj)


def test_a_class_instead_of_an_instance_is_refused() -> None:
    with pytest.raises(ProblemError, match=r"class MSELoss; expected an instance: MSELoss\(\)"):
        criterion_from(nn.MSELoss)


def test_weighted_nll_points_to_cross_entropy() -> None:
    with pytest.raises(ProblemError, match=r"NLLLoss with class weights; use nn.CrossEntropyLoss"):
        criterion_from(nn.NLLLoss(torch.ones(4)))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.GaussianNLLLoss(), "GaussianNLLLoss.*fails on one example"),
        (nn.CTCLoss(), "CTCLoss.*fails on one example"),
        (lambda logits, target: logits - target, r"shape \(4,\) for one example; expected a scalar"),
        (lambda logits, target: logits.sum() if logits.sum() > 0 else -logits.sum(), "torch.where"),
        (lambda logits: logits.sum(), "fails on one example"),
    ],
)
def test_functions_that_cannot_be_analysed_are_refused_at_the_door(loss: object, message: str) -> None:
    criterion = criterion_from(loss)
    with pytest.raises(ProblemError, match=message):
        criterion.check(logits_of(3), reals_of(3))


BATCH_STYLE = {
    "a mean over examples": lambda logits, target: (logits - target).square().mean(0).sum(),
    "a division by their number": lambda logits, target: (logits - target).square().sum() / len(logits),
}
ONE_EXAMPLE = {
    "a sum": lambda logits, target: (logits - target).square().sum(),
    "a mean": lambda logits, target: (logits - target).square().mean(),
    "no function of several": lambda logits, target: torch.dot(logits, target).square(),
    "something else of several": lambda logits, target: (logits * target).sum().square(),
}


@pytest.mark.parametrize("loss", BATCH_STYLE.values(), ids=BATCH_STYLE)
@pytest.mark.parametrize("outputs", [2, 3, 10])
def test_a_function_that_averages_over_a_batch_is_refused(loss: object, outputs: int) -> None:
    """Of one example it would take the outputs for examples: gradients K times too small."""
    criterion = criterion_from(loss)
    with pytest.raises(ProblemError, match=rf"written for a batch.*{outputs} times less"):
        criterion.check(torch.randn(5, outputs), torch.randn(5, outputs))


@pytest.mark.parametrize("loss", ONE_EXAMPLE.values(), ids=ONE_EXAMPLE)
@pytest.mark.parametrize("outputs", [1, 2, 3, 10])
def test_a_function_of_one_example_is_taken_whatever_it_makes_of_a_batch(
    loss: Callable[[Tensor, Tensor], Tensor], outputs: int
) -> None:
    logits, targets = torch.randn(2, 5, outputs, dtype=torch.float64)
    criterion = criterion_from(loss)
    criterion.check(logits, targets)
    one_by_one = torch.stack([loss(*pair) for pair in zip(logits, targets, strict=True)])
    torch.testing.assert_close(criterion.losses(logits, targets), one_by_one)


NAN = torch.full((3, K), math.nan)
INDEX = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("criterion", "targets", "message"),
    [
        (
            CrossEntropy(),
            torch.tensor([0, 4, 1]),
            r"label 4 at example 1; expected 0 to 3 or ignore_index=-100",
        ),
        (CrossEntropy(), torch.tensor([0, -1, 1]), r"label -1 at example 1"),
        (CrossEntropy(), torch.tensor([0, 156, 1], dtype=torch.uint8), r"label 156"),
        (Robust(), torch.tensor([0, -100, 1]), r"label -100 at example 1; expected 0 to 3, as"),
        (CrossEntropy(), INDEX[:, None], r"squeeze\(1\)"),
        (CrossEntropy(), INDEX.double(), r"float64; expected integer class indices"),
        (CrossEntropy(), INDEX > 0, r"torch.bool; expected integer"),
        (CrossEntropy(), torch.zeros(3, K, dtype=torch.long), r"or floating-point probabilities"),
        (CrossEntropy(), torch.zeros(3, K + 1), r"shape \(3, 5\); expected \(3, 4\)"),
        (CrossEntropy(), -torch.ones(3, K), "negative entries"),
        (
            CrossEntropy(ignore_index=1),
            torch.ones(3, K),
            "`ignore_index` is 1 but `targets` are probabilities",
        ),
        (CrossEntropy(), NAN, "not finite at example 0"),
        (
            CrossEntropy(),
            torch.tensor([0, 1]),
            r"shape \(2,\); expected one target for each of the 3 examples",
        ),
        (CrossEntropy(), INDEX.to("meta"), "`targets` is on meta"),
        (CrossEntropy(), [0, 1, 2], "`targets` is a list; expected a tensor"),
        (CrossEntropy(weight=(1.0, 2.0)), INDEX, "`weight` has 2 class weights; expected 4"),
        (CrossEntropy(label_smoothing=1.5), INDEX, "`label_smoothing` is 1.5"),
        (
            CrossEntropy(weight=(0.0, 1, 1, 1), label_smoothing=0.1),
            INDEX,
            "0 for class 0 while `label_smoothing`",
        ),
        (Robust(), torch.ones(3, K), r"expected class indices of shape \(3,\)"),
        (
            MSE(),
            torch.zeros(3, K, dtype=torch.long),
            r"int64; expected floating-point.*targets.to\(torch.float64\)",
        ),
        (MSE(), NAN, "not finite at example 0"),
        (MSE(), torch.zeros(3), r"shape \(3,\); expected \(3, 4\)"),
        (Tukey(), NAN, "not finite"),
        (BCE(), 2 * torch.ones(3, K), "expected probabilities from 0 to 1"),
        (BCE(pos_weight=(1.0, 2.0)), torch.ones(3, K), "`pos_weight` has 2 entries; expected 1, or 4"),
        (FunctionCriterion(log_cosh), NAN, "not finite"),
    ],
)
def test_targets_that_do_not_fit_are_refused(criterion: Criterion, targets: Tensor, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        criterion.check(logits_of(3), targets)


@pytest.mark.parametrize("criterion", [MSE(), BCE(), Tukey()])
def test_one_output_needs_a_column_of_targets(criterion: Criterion) -> None:
    with pytest.raises(ProblemError, match=r"shape \(3,\); expected \(3, 1\).*unsqueeze\(1\)"):
        criterion.check(logits_of(3)[:, :1], torch.zeros(3))


@pytest.mark.parametrize(
    "logits", [torch.zeros(3), torch.zeros(3, K, dtype=torch.long), torch.zeros(3, 2, 2)]
)
def test_outputs_that_are_no_logits_are_refused(logits: Tensor) -> None:
    with pytest.raises(ProblemError, match="the model's output"):
        CrossEntropy().check(logits, INDEX)


@pytest.mark.parametrize(
    "weight", [(-1.0, 1.0), (math.nan, 1.0), torch.ones(3, 2), torch.ones(2, device="meta")]
)
def test_weights_that_are_none_are_refused(weight: object) -> None:
    with pytest.raises(ProblemError, match="`weight`"):
        CrossEntropy(weight=weight)  # type: ignore[arg-type]
