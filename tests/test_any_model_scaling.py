"""Where the two settings of weight sharing are exact, where they are not, and how terms and positions scale.

Each statement is checked of the dense reference too, so that the settings are known to be right.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.exceptions import ProblemError
from tests.any_models import (
    CASES,
    CLASSES,
    LOSSES,
    AnyCase,
    assert_blocks,
    labelled_positions,
    real,
    regression,
)
from tests.any_reference import Blocks


def distance(one: Blocks, other: Blocks) -> float:
    """The largest relative Frobenius distance of any block."""
    return max(float((one[n] - b).norm()) / max(float(b.norm()), 1e-12) for n, b in other.items())


def dense(curvature: curvlab.Curvature) -> Blocks:
    return {name: block.to_dense() for name, block in curvature.blocks.items()}


class Average(nn.Module):
    """The mean over all positions of (m, channels, …), or with `last` of (m, …, features)."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1, -2).mean(1) if self.last else x.flatten(2).mean(2)


class Mix(nn.Module):
    """Positions mixed by a running mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


def tokens_net(*between: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, 4), *between, nn.Linear(4, 3), nn.Linear(3, CLASSES))


def circular(a: int, b: int) -> nn.Module:
    return nn.Conv1d(a, b, 3, padding=1, padding_mode="circular")


def images_net(*inner: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv1d(2, 2, 3, padding=1), *(make() for make in inner), Average(), nn.Linear(2, CLASSES)
    )


TOKENS_MSE = regression(4, 3, outputs=(4, CLASSES))
IMAGES_MSE = regression(2, 4, outputs=(CLASSES,))

EXPAND_EXACT = {
    "a deep linear network": AnyCase(tokens_net(), TOKENS_MSE, loss="mse"),
    "1x1 convolutions": AnyCase(
        lambda: nn.Sequential(nn.Linear(3, 4), Swap(), nn.Conv1d(4, 4, 1), Swap(), nn.Linear(4, CLASSES)),
        TOKENS_MSE,
        loss="mse",
    ),
    "one position": AnyCase(tokens_net(), regression(1, 3, outputs=(1, CLASSES)), loss="mse"),
}
EXPAND_DIFFERENT = {
    "cross-entropy": AnyCase(tokens_net(), labelled_positions(4, 3, terms=(4,))),
    "tanh": AnyCase(tokens_net(nn.Tanh()), TOKENS_MSE, loss="mse"),
    "positions mixed": AnyCase(tokens_net(Mix()), TOKENS_MSE, loss="mse"),
    "positions averaged": AnyCase(images_net(), IMAGES_MSE, loss="mse"),
}
REDUCE_EXACT = {
    "the average alone": AnyCase(images_net(), IMAGES_MSE, loss="mse"),
    "1x1 after": AnyCase(images_net(lambda: nn.Conv1d(2, 2, 1)), IMAGES_MSE, loss="mse"),
    "circular after": AnyCase(images_net(lambda: circular(2, 2)), IMAGES_MSE, loss="mse"),
    "1x1 and circular after": AnyCase(
        images_net(lambda: circular(2, 3), lambda: nn.Conv1d(3, 2, 1)), IMAGES_MSE, loss="mse"
    ),
    "tokens averaged": AnyCase(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), Average(last=True), nn.Linear(2, CLASSES)),
        regression(4, 3, outputs=(CLASSES,)),
        loss="mse",
    ),
}
REDUCE_DIFFERENT = {
    "cross-entropy": AnyCase(images_net(lambda: circular(2, 2)), real(2, 4)),
    "tanh": AnyCase(images_net(lambda: circular(2, 2), nn.Tanh), IMAGES_MSE, loss="mse"),
    "zero padding after": AnyCase(images_net(lambda: nn.Conv1d(2, 2, 3, padding=1)), IMAGES_MSE, loss="mse"),
    "stride after": AnyCase(images_net(lambda: nn.Conv1d(2, 2, 2, stride=2)), IMAGES_MSE, loss="mse"),
    "a loss for each position": AnyCase(tokens_net(), TOKENS_MSE, loss="mse"),
}


class Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


EXACT = [("expand", n, c) for n, c in EXPAND_EXACT.items()] + [
    ("reduce", n, c) for n, c in REDUCE_EXACT.items()
]
DIFFERENT = [("expand", n, c) for n, c in EXPAND_DIFFERENT.items()] + [
    ("reduce", n, c) for n, c in REDUCE_DIFFERENT.items()
]


def ids(entry: object) -> str:
    return entry if isinstance(entry, str) else ""


@pytest.mark.parametrize(("sharing", "name", "case"), EXACT, ids=ids)
def test_the_setting_is_exact_where_it_should_be_for_the_reference(
    sharing: str, name: str, case: AnyCase
) -> None:
    reference = case.reference()
    assert distance(reference.blocks("rows", sharing), reference.gauss_newton_blocks()) < 1e-10


@pytest.mark.parametrize(("sharing", "name", "case"), DIFFERENT, ids=ids)
def test_the_setting_differs_where_it_should_for_the_reference(
    sharing: str, name: str, case: AnyCase
) -> None:
    reference = case.reference()
    assert distance(reference.blocks("rows", sharing), reference.gauss_newton_blocks()) > 1e-3


@pytest.mark.parametrize("provider", ["gauss-newton[kind=rows,", "fisher[kind=exact,"])
@pytest.mark.parametrize(("sharing", "name", "case"), EXACT, ids=ids)
def test_sharing_is_exact_for_linear_networks_with_constant_curvature(
    sharing: str, name: str, case: AnyCase, provider: str
) -> None:
    problem = case.problem()
    found = curvlab.estimate(f"{provider}sharing={sharing}]", problem)
    assert_blocks(found, dense(curvlab.estimate("gauss-newton[kind=exact]", problem)))


@pytest.mark.parametrize(("sharing", "name", "case"), DIFFERENT, ids=ids)
def test_sharing_is_an_approximation_elsewhere(sharing: str, name: str, case: AnyCase) -> None:
    problem = case.problem()
    found = curvlab.estimate(f"gauss-newton[kind=rows,sharing={sharing}]", problem)
    assert distance(dense(found), dense(curvlab.estimate("gauss-newton[kind=exact]", problem))) > 1e-3


# loss terms


PER_TOKEN = ("four tokens", "unequal lengths", "class-weighted tokens of unequal lengths", "language model")


@pytest.mark.parametrize("name", PER_TOKEN)
def test_exact_fisher_of_tokens_is_gauss_newton_and_not_a_part_of_it(name: str) -> None:
    problem, reference = CASES[name].problem(), CASES[name].reference()
    plain = set(reference.parameters) - set(reference.parts("empirical", "expand"))
    fisher = curvlab.estimate("fisher[kind=exact]", problem)
    newton = curvlab.estimate("gauss-newton[kind=exact]", problem)
    for parameter in plain:
        found, expected = (c.blocks[parameter].to_dense() for c in (fisher, newton))
        assert float((found - expected).norm()) <= 1e-10 * float(expected.norm()), parameter


def sampled_tokens(m: int, t: int) -> AnyCase:
    """Labels from the model's own prediction, independent from token to token."""
    case = AnyCase(tokens_net(nn.Tanh()), lambda: (torch.randn(m, t, 3), torch.zeros(m, t).long()))
    model, inputs, _ = case.make()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        labels = torch.distributions.Categorical(logits=model(inputs)).sample()
    return AnyCase(case.model, lambda: (inputs, labels))


@pytest.mark.parametrize("t", [2, 8])
def test_empirical_fisher_is_smaller_by_about_the_number_of_terms(t: int) -> None:
    problem = sampled_tokens(300, t).problem()
    exact, empirical = curvlab.estimate(["fisher[kind=exact]", "fisher"], problem)
    ratio = float(exact.blocks["3.bias"].trace() / empirical.blocks["3.bias"].trace())
    assert 0.8 * t < ratio < 1.25 * t


@pytest.mark.parametrize("kind", ["fisher[kind=exact]", "gauss-newton[kind=rows]"])
@pytest.mark.parametrize("loss", ["cross-entropy", "weighted, ignored"])
def test_tokens_that_never_meet_are_examples_of_their_own(kind: str, loss: str) -> None:
    """Without mixing, c_ij enters once: (m, T) tokens give what m·T examples of one token give."""
    ignored = -100 if "ignored" in loss else None
    case = AnyCase(tokens_net(nn.Tanh()), labelled_positions(4, 3, terms=(4,), ignored=ignored), loss=loss)
    model, inputs, targets = case.make()
    flat = curvlab.Problem(model, LOSSES[loss].criterion(), inputs.flatten(0, 1), targets.flatten())
    assert_blocks(curvlab.estimate(kind, case.problem()), dense(curvlab.estimate(kind, flat)))


@pytest.mark.parametrize("loss", ["cross-entropy", "weighted, ignored"])
def test_tokens_that_never_meet_are_examples_of_their_own_for_the_reference(loss: str) -> None:
    ignored = -100 if "ignored" in loss else None
    case = AnyCase(tokens_net(nn.Tanh()), labelled_positions(4, 3, terms=(4,), ignored=ignored), loss=loss)
    flat = AnyCase(case.model, lambda: flattened(case), loss=loss)
    assert distance(flat.reference().blocks("exact"), case.reference().blocks("exact")) < 1e-12


def flattened(case: AnyCase) -> tuple[Tensor, Tensor]:
    _, inputs, targets = case.make()
    return inputs.flatten(0, 1), targets.flatten()


@pytest.mark.parametrize("provider", ["fisher", "fisher[kind=exact]", "gauss-newton[kind=exact]", "hessian"])
def test_a_class_weight_of_two_is_the_example_twice(provider: str) -> None:
    model, inputs, _ = CASES["conv2d"].make()
    targets = torch.tensor([0, 1, 0])
    weight = torch.tensor([1.0, 2.0, 1.0]).double()
    once = curvlab.Problem(model, nn.CrossEntropyLoss(weight=weight), inputs, targets)
    order = torch.tensor([0, 1, 1, 2])
    twice = curvlab.Problem(model, "cross-entropy", inputs[order], targets[order])
    assert_blocks(curvlab.estimate(provider, once), dense(curvlab.estimate(provider, twice)))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", ["empirical", "exact", "mc"])
def test_examples_without_a_term_that_counts_are_left_out(kind: str, sharing: str) -> None:
    case = CASES["unequal lengths"]
    model, inputs, targets = case.make()
    targets[1] = -1
    provider = f"fisher[kind={kind},sharing={sharing}]"
    criterion = nn.CrossEntropyLoss(ignore_index=-1)
    whole = curvlab.Problem(model, criterion, inputs, targets)
    rest = torch.tensor([0, 2])
    without = curvlab.Problem(model, criterion, inputs[rest], targets[rest])
    assert_blocks(curvlab.estimate(provider, whole), dense(curvlab.estimate(provider, without)))


@pytest.mark.parametrize("provider", ["fisher", "fisher[kind=exact]", "gauss-newton[kind=rows]"])
@pytest.mark.parametrize("name", ["conv2d", "attention", "layer norm", "a layer used twice on a sequence"])
def test_bias_and_plain_blocks_do_not_depend_on_sharing(name: str, provider: str) -> None:
    problem, reference = CASES[name].problem(), CASES[name].reference()
    plain = set(reference.parameters) - set(reference.parts("empirical", "expand"))
    joint = provider[:-1] + "," if provider.endswith("]") else provider + "["
    one, other = (curvlab.estimate(f"{joint}sharing={s}]", problem) for s in ("expand", "reduce"))
    for parameter in plain:
        torch.testing.assert_close(
            one.blocks[parameter].to_dense(), other.blocks[parameter].to_dense(), rtol=1e-12, atol=1e-14
        )


# sampled positions


CONSTANT_GRADIENTS = AnyCase(
    lambda: nn.Sequential(nn.Conv1d(2, 3, 2), Average(), nn.Linear(3, CLASSES)),
    regression(2, 7, outputs=(CLASSES,), m=40),
    loss="mse",
)


class Repeat(nn.Module):
    """The same features at every position, which the average after weighs unequally."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None, :].expand(-1, 6, -1)


class Uneven(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.tanh() * torch.arange(1.0, 7.0, dtype=x.dtype)[:, None]).mean(1)


CONSTANT_INPUTS = AnyCase(
    lambda: nn.Sequential(Repeat(), nn.Linear(3, 3), Uneven(), nn.Linear(3, CLASSES)), real(3, m=40)
)


@pytest.mark.parametrize("name", ["conv2d", "sequence linear", "groups", "four tokens", "attention"])
@pytest.mark.parametrize("q", [16, 100])
def test_as_many_positions_as_there_are_is_all_of_them(name: str, q: int) -> None:
    problem = CASES[name].problem()
    assert_blocks(
        curvlab.estimate(f"fisher[positions={q}]", problem),
        dense(curvlab.estimate("fisher", problem)),
        None,
        1e-12,
    )


@pytest.mark.parametrize("q", [1, 2, 4])
@pytest.mark.parametrize(
    ("case", "weight", "provider"),
    [
        (CONSTANT_GRADIENTS, "0.weight", "gauss-newton[kind=rows"),
        (CONSTANT_INPUTS, "1.weight", "fisher[kind=exact"),
    ],
    ids=["A", "B"],
)
def test_sampled_positions_are_unbiased_for_each_factor(
    case: AnyCase, weight: str, provider: str, q: int
) -> None:
    """Where one factor does not depend on the position, the block is linear in the other, so unbiased too."""
    problem = case.problem()
    exact = curvlab.estimate(f"{provider}]", problem).blocks[weight].to_dense()
    drawn = [
        curvlab.estimate(f"{provider},positions={q},seed={seed}]", problem).blocks[weight].to_dense()
        for seed in range(40)
    ]
    spread = float((drawn[0] - exact).norm() / exact.norm())
    assert spread > 1e-6, "nothing was drawn"
    mean = torch.stack(drawn).mean(0)
    assert float((mean - exact).norm()) <= max(0.6 * spread, 0.02) * float(exact.norm())


@pytest.mark.parametrize("name", ["conv2d", "sequence linear"])
def test_bias_blocks_use_all_positions(name: str) -> None:
    problem = CASES[name].problem()
    every, some = curvlab.estimate(["fisher", "fisher[positions=1]"], problem)
    for parameter in (n for n in every.blocks if n.endswith("bias")):
        torch.testing.assert_close(
            some.blocks[parameter].to_dense(), every.blocks[parameter].to_dense(), rtol=1e-12, atol=1e-15
        )


@pytest.mark.parametrize("solver", ["sm-kfi", "ea-cg[max_iter=100,tol=1e-12]"])
def test_mean_input_solvers_use_all_positions(solver: str) -> None:
    problem = CASES["conv2d"].problem()
    every, some = curvlab.estimate(["fisher", "fisher[positions=1]"], problem)
    one, other = (curvlab.solve(solver, c, problem.gradient(), alpha=0.1).direction for c in (every, some))
    for parameter in one:
        torch.testing.assert_close(other[parameter], one[parameter], rtol=1e-9, atol=1e-11)


# draws are the example's own


DRAWN = (
    "fisher[kind=mc,seed=3]",
    "fisher[kind=mc,samples=3,sharing=reduce]",
    "fisher[positions=2,seed=1]",
    "fisher[kind=mc,positions=1]",
    "gauss-newton[kind=rows,samples=1]",
    "gauss-newton[kind=rows,samples=2,positions=2]",
)


@pytest.mark.parametrize("provider", DRAWN)
@pytest.mark.parametrize("name", ["conv2d", "class-weighted tokens of unequal lengths", "chain", "attention"])
def test_draws_do_not_depend_on_order_or_batches(name: str, provider: str) -> None:
    case = CASES[name]
    model, inputs, targets = case.make()
    order = torch.tensor([2, 0, 1])
    streams = [
        curvlab.Problem(model, LOSSES[case.loss].criterion(), inputs[order], targets[order]),
        curvlab.Problem(
            model, LOSSES[case.loss].criterion(), [(inputs[i : i + 1], targets[i : i + 1]) for i in (1, 2, 0)]
        ),
        curvlab.Problem(
            model, LOSSES[case.loss].criterion(), [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])]
        ),
    ]
    expected = dense(curvlab.estimate(provider, case.problem()))
    for problem in streams:
        assert_blocks(curvlab.estimate(provider, problem), expected, None, 1e-11)


@pytest.mark.parametrize("provider", ["fisher[kind=mc,seed={}]", "fisher[positions=1,seed={}]"])
def test_another_seed_draws_otherwise(provider: str) -> None:
    problem = CASES["conv2d"].problem()
    blocks = [dense(curvlab.estimate(provider.format(seed), problem)) for seed in (0, 1, 0)]
    assert distance(blocks[0], blocks[1]) > 1e-6
    assert distance(blocks[0], blocks[2]) == 0.0


# the layouts of logits


class Turned(nn.Module):
    """A network of tokens whose logits have the classes in dimension 1, as torch's own loss wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = CASES["four tokens"].model()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).movedim(-1, 1)


def tokens(t: int, labels: Tensor | None = None) -> tuple[nn.Module, Tensor, Tensor]:
    """The turned network in float64, tokens (4, t, 2) and labels (4, t)."""
    torch.manual_seed(0)
    drawn = torch.randint(CLASSES, (4, t)) if labels is None else labels
    return Turned().double(), torch.randn(4, t, 2).double(), drawn


ROW_PROVIDERS = ("fisher", "fisher[kind=exact]", "gauss-newton[kind=rows,sharing=reduce]", "hessian")
TOKEN_LOSSES = {
    "plain": {},
    "weighted": {"weight": torch.tensor([0.5, 2.0, 1.25]).double()},
    "ignored": {"ignore_index": 1},
    "both": {"weight": torch.tensor([0.5, 2.0, 1.25]).double(), "ignore_index": 2},
    "smoothed": {"label_smoothing": 0.2},
}


def assert_torch_s(problem: curvlab.Problem, loss: Tensor, model: nn.Module) -> None:
    """The loss and the gradient are those of torch's own mean."""
    torch.testing.assert_close(problem.loss().detach(), loss.detach(), rtol=1e-12, atol=1e-14)
    named = dict(model.named_parameters())
    for name, value in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
        torch.testing.assert_close(problem.gradient()[name], value, rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_torch_s_own_layout_is_that_of_classes_last(name: str, t: int) -> None:
    model, inputs, targets = tokens(t)
    targets[1] = 1  # an example that `ignored` leaves out as a whole
    targets[2, 1:] = 2  # and examples of unequal lengths
    targets[0, 0] = 0
    criterion = nn.CrossEntropyLoss(**TOKEN_LOSSES[name])
    turned = curvlab.Problem(model, criterion, inputs, targets)
    assert_torch_s(turned, criterion(model(inputs), targets), model)
    last = curvlab.Problem(model.inner, criterion, inputs, targets)
    providers = [p for p in ROW_PROVIDERS if name != "smoothed" or "exact" not in p]
    for one, other in zip(
        curvlab.estimate(providers, turned), curvlab.estimate(providers, last), strict=True
    ):
        blocks = {f"inner.{n}": block for n, block in dense(other).items()}
        assert_blocks(one, blocks, None, 1e-11)


def test_as_many_tokens_as_classes_are_refused_for_a_torch_loss_alone() -> None:
    model, inputs, targets = tokens(CLASSES)
    with pytest.raises(
        ProblemError, match=r'criterion="cross-entropy".*output=lambda z: z\.transpose\(1, 2\)'
    ):
        curvlab.Problem(model, nn.CrossEntropyLoss(), inputs, targets)
    named = curvlab.Problem(
        model, "cross-entropy", inputs, targets, output=lambda logits: logits.transpose(1, 2)
    )
    assert_torch_s(named, nn.functional.cross_entropy(model(inputs), targets), model)
    last = curvlab.Problem(model.inner, "cross-entropy", inputs, targets)
    for one, other in zip(
        curvlab.estimate(ROW_PROVIDERS, named), curvlab.estimate(ROW_PROVIDERS, last), strict=True
    ):
        assert_blocks(one, {f"inner.{n}": block for n, block in dense(other).items()}, None, 1e-11)


@pytest.mark.parametrize("shape", [(2, 4), (CLASSES, 2), (2, CLASSES)], ids=str)
def test_pixels_are_terms_whichever_way_classes_stand(shape: tuple[int, int]) -> None:
    """(B, V, H, W) with targets (B, H, W): one of the sizes may be V where the other tells."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Tanh(), nn.Conv2d(2, CLASSES, 1)).double()
    inputs, targets = torch.randn(3, 2, *shape).double(), torch.randint(CLASSES, (3, *shape))
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    problem = curvlab.Problem(model, criterion, inputs, targets)
    assert_torch_s(problem, criterion(model(inputs), targets), model)


@pytest.mark.parametrize("outputs", [2, 5])
@pytest.mark.parametrize("terms", [None, 1, 4])
def test_squared_errors_of_outputs_are_averaged_and_of_terms_too(terms: int | None, outputs: int) -> None:
    """∂²/∂b² of the mean over K outputs is 2/K I, for one term and for the mean of T of them.

    With the loss's own residuals r_ij the empirical Fisher is E[(2/KT Σ_j r_ij)(…)ᵀ], smaller by about T.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, outputs).double()
    shape = (6,) if terms is None else (6, terms)
    inputs, targets = torch.randn(*shape, 3).double(), torch.randn(*shape, outputs).double()
    problem = curvlab.Problem(model, "mse", inputs, targets)
    assert_torch_s(problem, nn.functional.mse_loss(model(inputs), targets), model)
    expected = 2 / outputs * torch.eye(outputs).double()
    for provider in ("gauss-newton[kind=rows]", "gauss-newton[kind=exact]", "hessian", "fisher[kind=exact]"):
        found = curvlab.estimate(provider, problem).blocks["bias"].to_dense()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14, msg=provider)
    residuals = (model(inputs) - targets).detach().reshape(6, -1, outputs).mean(1) * 2 / outputs
    empirical = curvlab.estimate("fisher", problem).blocks["bias"].to_dense()
    torch.testing.assert_close(empirical, residuals.T @ residuals / 6, rtol=1e-11, atol=1e-14)


def test_binary_outputs_without_a_last_dimension_of_their_own_are_one_term() -> None:
    """BCE on (B, T) has one term of T outputs: E[p(1-p)]/T on the diagonal of the Gauss-Newton bias block."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    inputs, targets = torch.randn(6, 3).double(), torch.randint(2, (6, 4)).double()
    problem = curvlab.Problem(model, nn.BCEWithLogitsLoss(), inputs, targets)
    assert_torch_s(problem, nn.functional.binary_cross_entropy_with_logits(model(inputs), targets), model)
    p = model(inputs).detach().sigmoid()
    expected = torch.diag((p * (1 - p)).mean(0) / 4)
    newton = curvlab.estimate("gauss-newton[kind=rows]", problem).blocks["bias"].to_dense()
    torch.testing.assert_close(newton, expected, rtol=1e-12, atol=1e-15)
    fisher = curvlab.estimate("fisher[kind=exact]", problem).blocks["bias"].to_dense()
    torch.testing.assert_close(fisher, expected / 4, rtol=1e-12, atol=1e-15)
