"""`check_provider` passes every provider of curvlab; each of its checks fails one made to fail it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.exceptions import ProblemError, SpecError
from curvlab.linalg import DenseFactor, OperatorBlock
from curvlab.model.recording import Recording
from curvlab.problem import Problem
from curvlab.providers import Context, Fisher, Provider
from curvlab.providers.registry import providers
from curvlab.providers.statistics import Statistic, Values
from curvlab.staleness import Versions
from curvlab.testing import Check, check_provider, provider_checks, provider_promises
from curvlab.testing.provider_promises import PROMISES

SLOW = ("hessian", "hessian[full=true]", "gauss-newton[kind=exact]")
LONG = (
    "pch[kind=exact]",
    "hessian[kind=rows]",
    "fisher[structure=ekfac]",
    "fisher[structure=full]",
    "pch[kind=rows,poseig=node,structure=layer]",
    "gauss-newton[kind=rows,structure=block]",
)
MARKS = dict.fromkeys(SLOW, pytest.mark.slow) | dict.fromkeys(LONG, pytest.mark.long)
BUILT_IN = [
    *SLOW,
    *LONG,
    "fisher",
    "fisher[kind=mc,samples=3]",
    "fisher[kind=exact]",
    "gauss-newton",
    "pch[gamma=-0.3,output_gamma=0]",
    "pch-1",
    "pch-2",
]


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{name}-{check}", marks=MARKS.get(name, ()))
        for name in BUILT_IN
        for check in provider_checks(name)
    ],
)
def test_providers_of_curvlab_keep_each_promise(check: Check) -> None:
    check()


def test_a_check_is_named_by_its_promise_and_an_exempt_one_is_left_out() -> None:
    names = [str(check) for check in provider_checks("fisher")]
    assert names == list(PROMISES)
    assert len(set(names)) == len(names)
    left = [str(check) for check in provider_checks("fisher", exempt=["psd", "spec"])]
    assert left == [name for name in names if name not in ("psd", "spec")]


def test_making_the_checks_estimates_nothing() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider_promises, "estimate", lambda *_: pytest.fail("estimated"))
        patch.setattr(provider_promises, "provider_cases", lambda: pytest.fail("made a problem"))
        provider_checks("fisher")


def test_a_problem_of_ones_own_is_checked_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 3), nn.GELU(), nn.Linear(3, 2))
    inputs, targets = torch.randn(9, 2, 4), torch.arange(9) % 2
    check_provider("pch-1", Problem(model, "cross-entropy", inputs, targets))
    check_provider(
        "fisher", Problem(model, "cross-entropy", [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])])
    )


# -- one flaw each: what becomes of an honest Fisher ------------------------------------------------

Flaw = Callable[[Context, Curvature], Curvature]


def with_outputs(curvature: Curvature, change: Callable[[Tensor], Tensor]) -> Curvature:
    """The curvature with each B^t replaced."""
    return replace(
        curvature,
        layers=tuple(replace(x, output=DenseFactor(change(x.output.to_dense()))) for x in curvature.layers),
    )


def with_bias_operator(curvature: Curvature, make: Callable[[LayerCurvature], OperatorBlock]) -> Curvature:
    layers = tuple(
        LayerCurvature(x.name, x.weight_name, x.bias_name, x.output, x.inputs, bias_operator=make(x))
        for x in curvature.layers
    )
    return replace(curvature, layers=layers)


def operator(
    layer: LayerCurvature, product: Callable[[Tensor], Tensor] | None = None, **closed
) -> OperatorBlock:
    b = layer.output.to_dense()
    return OperatorBlock((len(b),), product or (lambda x: b @ x), b, **closed)


@dataclass(frozen=True, eq=False)
class Lying(OperatorBlock):
    """An operator whose dense form is another one's."""

    def _dense(self) -> Tensor:
        return 2 * super()._dense()


def lying(layer: LayerCurvature) -> Lying:
    b = layer.output.to_dense()
    return Lying((len(b),), lambda x: b @ x, b)


def drops_a_layer(_: Context, curvature: Curvature) -> Curvature:
    return replace(curvature, layers=curvature.layers[1:])


def transposes_shapes(_: Context, curvature: Curvature) -> Curvature:
    wide = lambda x: torch.block_diag(x, x)  # noqa: E731
    return with_outputs(curvature, wide)


def works_in_another_dtype(_: Context, curvature: Curvature) -> Curvature:
    def narrow(layer: LayerCurvature) -> OperatorBlock:
        return operator(layer, lambda x: (layer.output.to_dense() @ x).half())

    return with_bias_operator(curvature, narrow)


def is_not_finite(_: Context, curvature: Curvature) -> Curvature:
    return with_outputs(curvature, lambda b: b / 0)


def is_not_linear(_: Context, curvature: Curvature) -> Curvature:
    return with_bias_operator(curvature, lambda layer: operator(layer, lambda x: x * x.norm()))


def is_not_symmetric(_: Context, curvature: Curvature) -> Curvature:
    return with_outputs(curvature, lambda b: b + torch.ones_like(b).triu(1))


def lies_about_its_dense_form(_: Context, curvature: Curvature) -> Curvature:
    return with_bias_operator(curvature, lying)


def lies_about_the_whole(_: Context, curvature: Curvature) -> Curvature:
    names = list(curvature.blocks)
    calls = itertools.count(1)
    return replace(curvature, full_product=lambda vectors: {n: next(calls) * vectors[n] for n in names})


def miscounts(which: str, _: Context, curvature: Curvature) -> Curvature:
    def make(layer: LayerCurvature) -> OperatorBlock:
        b = layer.output.to_dense()
        wrong = b.diagonal() + 1 if which == "diagonal_of" else b.trace() + 1
        return operator(layer, **{which: lambda: wrong})

    return with_bias_operator(curvature, make)


def claims_too_much(_: Context, curvature: Curvature) -> Curvature:
    return with_outputs(curvature, lambda b: b - torch.eye(len(b)).to(b))


CALLS = itertools.count(1)


def is_never_the_same(_: Context, curvature: Curvature) -> Curvature:
    step = 1 + 1e-3 * next(CALLS)
    return with_outputs(curvature, lambda b: b * step)


def depends_on_rounding(_: Context, curvature: Curvature) -> Curvature:
    return with_outputs(curvature, lambda b: b * (1 + torch.finfo(b.dtype).eps ** 0.5))


def never_grows_old(_: Context, curvature: Curvature) -> Curvature:
    return replace(curvature, versions=Versions(()))


def draws(context: Context, curvature: Curvature) -> Curvature:
    torch.rand(1)
    return curvature


def draws_from_python(context: Context, curvature: Curvature) -> Curvature:
    random.random()
    return curvature


def draws_from_numpy(context: Context, curvature: Curvature) -> Curvature:
    np.random.rand()
    return curvature


def changes_modes(context: Context, curvature: Curvature) -> Curvature:
    context.problem.model.eval()
    return curvature


def drops_gradients(context: Context, curvature: Curvature) -> Curvature:
    context.problem.model.zero_grad()
    return curvature


def leaves_a_hook(context: Context, curvature: Curvature) -> Curvature:
    context.problem.model.register_forward_hook(lambda *_: None)
    return curvature


def writes_to_the_inputs(context: Context, curvature: Curvature) -> Curvature:
    for batch in context.problem.batches():
        batch.inputs.data.mul_(1 + 1e-9)
    return curvature


def unfreezes(context: Context, curvature: Curvature) -> Curvature:
    context.problem.model.requires_grad_(True)
    return curvature


def turns_gradients_off(context: Context, curvature: Curvature) -> Curvature:
    torch.set_grad_enabled(False)
    return curvature


def crashes(context: Context, curvature: Curvature) -> Curvature:
    raise KeyError("0.weight")


def refuses_without_a_reason(context: Context, curvature: Curvature) -> Curvature:
    if context.problem.criterion.name == "tukey":
        raise ProblemError("no")
    return curvature


def draws_then_refuses(context: Context, curvature: Curvature) -> Curvature:
    if context.problem.criterion.name == "tukey":
        torch.rand(1)
        raise ProblemError("this provider knows nothing of regression")
    return curvature


FLAWS: dict[str, tuple[str, str, Flaw]] = {
    "drops a layer": ("blocks", "expected \\['0.weight'", drops_a_layer),
    "other shapes": ("blocks", "has shape", transposes_shapes),
    "other dtype": ("blocks", "float16", works_in_another_dtype),
    "not finite": ("blocks", "not finite", is_not_finite),
    "not linear": ("linear", "not linear", is_not_linear),
    "not symmetric": ("symmetric", "not symmetric", is_not_symmetric),
    "dense form": ("dense", "block `0.bias`", lies_about_its_dense_form),
    "whole": ("dense", "the curvature's", lies_about_the_whole),
    "diagonal": ("summaries", r"diagonal\(\)", partial(miscounts, "diagonal_of")),
    "trace": ("summaries", r"trace\(\)", partial(miscounts, "trace_of")),
    "norm": ("summaries", r"frobenius_norm\(\)", partial(miscounts, "square_norm_of")),
    "psd": ("psd", "smallest eigenvalue is -", claims_too_much),
    "random": ("repeatable", "a second call", is_never_the_same),
    "rounding": ("precision", "float32", depends_on_rounding),
    "never stale": ("fresh", "gives no warning", never_grows_old),
    "draws": ("side-effects", "torch's random state", draws),
    "draws from python": ("side-effects", "Python's random state", draws_from_python),
    "draws from numpy": ("side-effects", "numpy's random state", draws_from_numpy),
    "modes": ("side-effects", "the training mode of the model", changes_modes),
    "gradients": ("side-effects", "the gradient of `0.weight`", drops_gradients),
    "hooks": ("side-effects", "the hooks of the model", leaves_a_hook),
    "inputs": ("side-effects", "the values of the inputs", writes_to_the_inputs),
    "unfreezes": ("side-effects", "requires_grad of `0.weight`", unfreezes),
    "gradient mode": ("side-effects", "torch's gradient mode", turns_gradients_off),
    "crash": ("refusal", "KeyError", crashes),
    "bare refusal": ("refusal", "does not say why", refuses_without_a_reason),
    "refusal that draws": ("side-effects", "torch's random state", draws_then_refuses),
}


@dataclass(frozen=True)
class Flawed(Provider):
    """Fisher, spoiled in one way."""

    needs_chain: ClassVar[bool] = False
    flaw: str

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        return Fisher().statistics(problem)

    def curvature(self, context: Context, name: str) -> Curvature:
        return FLAWS[self.flaw][2](context, Fisher().curvature(context, name))


def promise(provider: Provider, name: str) -> Check:
    """One check of a provider."""
    (found,) = [check for check in provider_checks(provider) if str(check) == name]
    return found


@pytest.mark.parametrize("flaw", FLAWS)
def test_each_flaw_is_found_by_the_check_for_it(flaw: str) -> None:
    check, sentence, _ = FLAWS[flaw]
    with pytest.raises(AssertionError, match=rf"fails the check `{check}`: .*{sentence}"):
        promise(Flawed(flaw), check)()
    assert torch.is_grad_enabled(), "what one check leaves changed would fail the next"


def test_every_check_on_a_problem_has_a_flaw_that_fails_it() -> None:
    elsewhere = {"configuration", "interface", "spec", "accepts", "batches"}
    assert {check for check, *_ in FLAWS.values()} == set(PROMISES) - elsewhere


def test_one_broken_promise_does_not_hide_the_others() -> None:
    kept = [str(check) for check in provider_checks(Flawed("psd")) if _passes(check)]
    assert kept == [name for name in PROMISES if name != "psd"]


def _passes(check: Check) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True


@pytest.mark.slow
def test_check_provider_tells_every_broken_promise_at_once() -> None:
    with pytest.raises(AssertionError) as failure:
        check_provider(Flawed("trace"), exempt={"precision"})
    assert [line.split(": ")[0] for line in str(failure.value).splitlines()] == [
        "`Flawed(flaw='trace')` fails the check `summaries`"
    ]
    with pytest.raises(AssertionError) as failure:
        check_provider(Flawed("crash"))
    broken = [line.split("check `")[1].split("`")[0] for line in str(failure.value).splitlines()]
    assert {"refusal", "accepts", "blocks", "fresh"} <= set(broken)
    assert not {"configuration", "interface", "spec", "side-effects"} & set(broken)


def test_a_failure_names_a_problem_and_counts_the_others() -> None:
    where = r"\(on sigmoid layers with cross-entropy; it fails on \d+ of 21 problems\)"
    with pytest.raises(AssertionError, match=where):
        promise(Flawed("not symmetric"), "symmetric")()


def test_an_exempt_check_is_not_run() -> None:
    check_provider(Flawed("psd"), exempt={"psd"})
    with pytest.raises(SpecError, match=r"exempt=\['psds'\].*'psd'"):
        check_provider("fisher", exempt={"psds"})


@dataclass(frozen=True)
class MeanGradients(Statistic):
    """The outer product of a batch's mean gradient: not a mean over rows."""

    def of(self, recording: Recording) -> Values:
        return tuple(torch.outer(r.gradients.mean, r.gradients.mean) for r in recording.layers)


@dataclass(frozen=True)
class BatchDependent(Provider):
    """Squares before it takes the mean over batches."""

    needs_chain: ClassVar[bool] = False

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        return (*Fisher().statistics(problem), MeanGradients())

    def curvature(self, context: Context, name: str) -> Curvature:
        honest = Fisher().curvature(context, name)
        squares = context.means[MeanGradients()]
        pairs = zip(honest.layers, squares, strict=True)
        return replace(honest, layers=tuple(replace(x, output=DenseFactor(b)) for x, b in pairs))


def test_a_provider_that_depends_on_the_batching_is_found() -> None:
    with pytest.raises(AssertionError, match="fails the check `batches`: a stream of uneven batches"):
        check_provider(BatchDependent())


class Plain(Fisher):
    """Not a dataclass of its own."""


@dataclass(frozen=True)
class Busy(Fisher):
    """Works in its constructor."""

    def __post_init__(self) -> None:
        torch.ones(3).sum()


@dataclass(frozen=True, eq=False)
class Unequal(Fisher):
    """Equal to itself only."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("provider", "sentence"),
    [
        (Plain(), "no frozen dataclass"),
        (Busy(), "does work: aten"),
        (Unequal(), "not equal"),
        (Fisher, "Fisher"),
    ],
)
def test_configuration_is_checked(provider: Provider, sentence: str) -> None:
    with pytest.raises((AssertionError, SpecError), match=sentence):
        check_provider(provider)


@dataclass(frozen=True)
class Mistyped(Fisher):
    """A field whose annotation is not what it is given."""

    rate: int = 1


@pytest.mark.slow
def test_a_registered_provider_must_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_entries", dict(providers._entries))
    providers.register("mistyped", Mistyped)
    check_provider("mistyped[rate=2]")
    with pytest.raises(SpecError, match=r"rate=0\.5: expected a whole number"):
        Mistyped(rate=0.5)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Refusing(Fisher):
    """Refuses everything."""

    def check(self, problem: Problem, name: str) -> None:
        raise ProblemError("this provider waits for better problems")


def test_refusing_everything_is_no_conformance() -> None:
    with pytest.raises(AssertionError, match=r"refuses every problem .* waits for better problems"):
        check_provider(Refusing())


def test_a_given_problem_must_be_accepted() -> None:
    problem = Problem(nn.Linear(4, 3), "tukey", torch.randn(5, 4), torch.randn(5, 3))
    with pytest.raises(AssertionError, match="refuses every problem"):
        check_provider("fisher[kind=exact]", problem)


def test_the_random_state_of_the_caller_is_left_alone() -> None:
    before = torch.get_rng_state()
    check_provider("pch-1")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plugin_of_the_first_interface_passes_whether_it_says_so_or_not() -> None:
    assert "interface" not in vars(Flawed)
    promise(Flawed("psd"), "interface")()
    promise(Explicit(), "interface")()


@dataclass(frozen=True)
class Explicit(Fisher):
    """Repeats the number that it was written for."""

    interface: ClassVar[int] = 1


@dataclass(frozen=True)
class FromTheFuture(Fisher):
    """Written for an interface that is not there yet."""

    interface: ClassVar[int] = Provider.interface + 1


@dataclass(frozen=True)
class Misnumbered(Fisher):
    """The number of a release instead of that of an interface."""

    interface: ClassVar[Any] = "0.1"


@pytest.mark.parametrize(
    ("provider", "sentence"),
    [
        (FromTheFuture(), "written for interface 2 of curvlab and this curvlab has interface 1"),
        (Misnumbered(), "its `interface` is '0.1'; expected a whole number"),
    ],
)
def test_another_interface_is_a_sentence(provider: Provider, sentence: str) -> None:
    with pytest.raises(AssertionError, match=f"fails the check `interface`: .*{sentence}"):
        promise(provider, "interface")()
