"""Ranks that disagree are found before their numbers are mixed, and told apart by name.

The ranks are three threads with a communicator of their own; `test_distributed.py` has real process groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.curvature import Curvature
from curvlab.distributed import agreement
from curvlab.distributed.agreement import (
    Description,
    InitialWeightsWarning,
    RankDriftWarning,
    adopt_first_rank,
    agree,
    digest_of,
)
from curvlab.distributed.communicator import LOCAL, Communicator
from curvlab.exceptions import CurvlabError, ProblemError
from curvlab.model.network import Network
from curvlab.optim import SecondOrder
from curvlab.providers.base import Chosen, estimate_jointly
from tests.test_communicator import data, model, on_ranks

RANKS = 3
CPU = torch.device("cpu")


def message(function: Callable[[], object]) -> str:
    try:
        function()
    except CurvlabError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def activation_models(rank: int) -> nn.Module:
    made = model()
    made[1] = nn.LeakyReLU(0.1 if rank == 1 else 0.2)
    return made


def shifted_model(rank: int) -> nn.Module:
    made = model()
    if rank == 1:
        with torch.no_grad():
            made[2].weight[1, 3] += 0.5
    return made


class Scaled(nn.Module):
    """A buffer that the forward reads, and a function that it calls."""

    def __init__(self, scale: float, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 3).double(), function
        self.register_buffer("scale", torch.tensor([scale], dtype=torch.float64))
        with torch.no_grad():
            self.layer.weight.fill_(0.1)
            self.layer.bias.fill_(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)) * self.scale


def hooked_model(rank: int) -> nn.Module:
    made = model()
    if rank == 1:
        made[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return made


def scaled_loss(factor: float, logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, target) * factor


# What differs on rank 1: the model, the criterion and the provider of each rank, and what the error names.
Case = tuple[Callable[[int], nn.Module], Callable[[int], Any], Callable[[int], str], str]
CASES: dict[str, Case] = {
    "one weight": (shifted_model, lambda _: "cross-entropy", lambda _: "fisher", "the weights (`2.weight`)"),
    "buffer": (
        lambda rank: Scaled(1.0 + (rank == 1), torch.tanh),
        lambda _: "cross-entropy",
        lambda _: "fisher",
        "the buffers (`scale`)",
    ),
    "slope": (activation_models, lambda _: "cross-entropy", lambda _: "fisher", "settings"),
    "function": (
        lambda rank: Scaled(1.0, torch.sigmoid if rank == 1 else torch.tanh),
        lambda _: "cross-entropy",
        lambda _: "fisher",
        "settings",
    ),
    "hook": (hooked_model, lambda _: "cross-entropy", lambda _: "fisher", "hooks"),
    "criterion's field": (
        lambda _: model(),
        lambda rank: f"robust[delta={5 + (rank == 1)}]",
        lambda _: "fisher",
        "the criterion",
    ),
    "criterion's closure": (
        lambda _: model(),
        lambda rank: partial(scaled_loss, 2.0 if rank == 1 else 1.0),
        lambda _: "fisher",
        "the criterion",
    ),
    "gamma": (
        lambda _: model(),
        lambda _: "cross-entropy",
        lambda rank: f"pch[gamma={-0.5 if rank == 1 else -1}]",
        "the providers",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_on_one_rank_is_named_on_all(case: str) -> None:
    make, criterion, provider, expected = CASES[case]

    def work(ranks: Communicator) -> str:
        problem = curvlab.Problem(make(ranks.rank), criterion(ranks.rank), *data(4 + ranks.rank))
        chosen = Chosen.of([provider(ranks.rank)], problem)
        return message(lambda: estimate_jointly(chosen, problem, ranks, gradient=True))

    for found in on_ranks(RANKS, work):
        assert found.startswith("RankError: rank 1 of the process group came with other values of")
        assert expected in found


def test_ranks_that_agree_are_joined() -> None:
    def work(ranks: Communicator) -> str:
        problem = curvlab.Problem(model(), nn.CrossEntropyLoss(), *data(4 + ranks.rank))
        return message(lambda: estimate_jointly(Chosen.of(["pch-1"], problem), problem, ranks, loss=True))

    assert on_ranks(RANKS, work) == ["nothing"] * RANKS


def test_every_entry_of_a_large_weight_counts_in_the_first_call() -> None:
    def work(ranks: Communicator) -> str:
        large = nn.Linear(400, 300).double()
        with torch.no_grad():
            large.weight.fill_(0.01)
            large.bias.zero_()
            large.weight[7, 11] += 1e-3 * (ranks.rank == 2)
        x = torch.ones(3, 400, dtype=torch.float64)
        problem = curvlab.Problem(large, "cross-entropy", x, torch.arange(3))
        return message(lambda: problem.join(ranks, loss=True))

    for found in on_ranks(RANKS, work):
        assert found.startswith("RankError: rank 2")
        assert "entry by entry" in found


def test_ranks_that_differ_by_rounding_go_on_with_a_warning() -> None:
    def work(ranks: Communicator) -> float:
        made = model()
        with torch.no_grad():
            made[0].weight.mul_(1 + 1e-13 * ranks.rank)
        return float(curvlab.Problem(made, "cross-entropy", *data(4)).join(ranks, loss=True).loss)

    with pytest.warns(RankDriftWarning, match="the weights of the ranks differ by rounding"):
        losses = on_ranks(RANKS, work)
    assert max(losses) - min(losses) < 1e-12


def test_all_ranks_start_with_the_weights_and_buffers_of_the_first() -> None:
    made: dict[int, nn.Module] = {}

    def work(ranks: Communicator) -> list[Tensor]:
        one = Scaled(1.0 + ranks.rank, torch.tanh)
        with torch.no_grad():
            one.layer.weight.add_(ranks.rank)
        made[ranks.rank] = one
        adopt_first_rank(ranks, Network.of(one))
        return [one.layer.weight.detach(), one.scale]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = on_ranks(RANKS, work)
    assert all(bool((w == 0.1).all()) and float(s) == 1.0 for w, s in found)
    said = sorted(str(one.message) for one in caught if one.category is InitialWeightsWarning)
    assert [text[:6] for text in said] == ["rank 1", "rank 2"]
    assert isinstance(made[1].layer.weight, nn.Parameter)


def test_models_of_different_shapes_are_refused_instead_of_broadcast() -> None:
    def work(ranks: Communicator) -> str:
        return message(lambda: adopt_first_rank(ranks, Network.of(nn.Linear(4, 3 + (ranks.rank == 2)))))

    assert all("rank 2" in found and found.startswith("RankError") for found in on_ranks(RANKS, work))


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "alpha": ({"alpha": 0.1}, {"alpha": 0.2}, "alpha"),
    "lr": ({"lr": 0.1}, {"lr": 0.2}, "the parameter groups"),
    "solver": ({"solver": "ea-cg"}, {"solver": "ea-cg[max_iter=3]"}, "the solver"),
    "provider": ({"provider": "pch-1"}, {"provider": "pch-2"}, "the provider"),
    "clipping": ({}, {"max_grad_norm": 1.0}, "max_grad_norm"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_steps_with_other_settings_on_one_rank_end_all(case: str) -> None:
    common, other, expected = SETTINGS[case]

    def work(ranks: Communicator) -> tuple[str, bool]:
        one = model()
        before = [p.detach().clone() for p in one.parameters()]
        options = other if ranks.rank == 1 else common
        optimizer = SecondOrder(one, "cross-entropy", process_group=ranks, **options)
        found = message(lambda: optimizer.step(*data(4)))
        return found, all(torch.equal(p, old) for p, old in zip(one.parameters(), before, strict=True))

    for found, unchanged in on_ranks(RANKS, work):
        assert found.startswith("RankError: rank 1")
        assert expected in found
        assert unchanged


def _bad_label(optimizer: SecondOrder, rank: int) -> None:
    x, y = data(4)
    optimizer.step(x, y + 7 if rank == 1 else y)


def _missing_target(optimizer: SecondOrder, rank: int) -> None:
    x, y = data(4)
    optimizer.step(x, y[:2] if rank == 1 else y)


def _scalar_closure(optimizer: SecondOrder, rank: int) -> None:
    optimizer.step((lambda: torch.tensor(1.0)) if rank == 1 else (lambda: data(4)))


def _raising_forward(optimizer: SecondOrder, rank: int) -> None:
    def refuse(*_: object) -> None:
        raise KeyError("no such token")

    if rank == 1:
        optimizer._model[0].register_forward_hook(refuse)
    optimizer.step(*data(4))


def _raising_observer(optimizer: SecondOrder, rank: int) -> None:
    def refuse(_: object) -> None:
        raise ProblemError("the disk of the log is full")

    optimizer.on_solution = refuse if rank == 1 else None
    optimizer.step(*data(4))


FAILURES: dict[str, tuple[Callable[[SecondOrder, int], None], str]] = {
    "bad label": (_bad_label, "has label"),
    "missing target": (_missing_target, "expected one target for each example"),
    "scalar closure": (_scalar_closure, "a scalar loss alone"),
    "forward hook that raises": (_raising_forward, "no such token"),
    "observer that raises": (_raising_observer, "the disk of the log is full"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_error_of_one_rank_in_a_step_ends_all_with_its_message(case: str) -> None:
    act, expected = FAILURES[case]

    def work(ranks: Communicator) -> tuple[str, bool]:
        one = model()
        before = [p.detach().clone() for p in one.parameters()]
        optimizer = SecondOrder(one, "cross-entropy", process_group=ranks)
        found = message(lambda: act(optimizer, ranks.rank))
        return found, all(torch.equal(p, old) for p, old in zip(one.parameters(), before, strict=True))

    results = on_ranks(RANKS, work)
    assert all(expected in found and unchanged for found, unchanged in results)
    assert all(": rank 1: " in results[rank][0] for rank in (0, 2))


def test_an_optimizer_that_cannot_be_made_on_one_rank_is_made_on_none() -> None:
    def work(ranks: Communicator) -> str:
        alpha = "x" if ranks.rank == 1 else 0.1
        return message(
            lambda: SecondOrder(model(), "mse", alpha=alpha, process_group=ranks)  # type: ignore[arg-type]
        )

    assert all("alpha='x'" in found for found in on_ranks(RANKS, work))


def _joint(ranks: Communicator) -> tuple[Curvature, Any]:
    problem = curvlab.Problem(model(), "cross-entropy", *data(4 + ranks.rank))
    found = estimate_jointly(Chosen.of(["fisher"], problem), problem, ranks, gradient=True)
    return found.curvatures[0], found.joined.gradient


@pytest.mark.parametrize(
    ("rank_options", "expected"),
    [
        (lambda rank: ("kfi", 0.1 + 0.1 * (rank == 1)), "the damping"),
        (lambda rank: ("sm-kfi" if rank == 1 else "kfi", 0.1), "the solver"),
        (lambda rank: ("kfi", "x" if rank == 1 else 0.1), "alpha='x'"),
    ],
)
def test_solves_of_ranks_that_disagree_are_refused(rank_options: Any, expected: str) -> None:
    def work(ranks: Communicator) -> str:
        curvature, gradient = _joint(ranks)
        solver, alpha = rank_options(ranks.rank)
        return message(lambda: curvlab.solve(solver, curvature, gradient, alpha=alpha, process_group=ranks))

    assert all(expected in found for found in on_ranks(RANKS, work))


def test_a_gradient_of_one_ranks_own_rows_is_refused() -> None:
    def work(ranks: Communicator) -> str:
        curvature, gradient = _joint(ranks)
        if ranks.rank == 2:
            gradient = curvlab.Problem(model(), "cross-entropy", *data(6)).gradient()
        formed = {name: gradient[name] for name in gradient}
        return message(lambda: curvlab.solve("kfi", curvature, formed, alpha=0.1, process_group=ranks))

    assert all("rank 2" in found and "the gradient" in found for found in on_ranks(RANKS, work))


def test_a_product_that_fails_on_one_rank_fails_on_all() -> None:
    def work(ranks: Communicator) -> str:
        one = model()
        problem = curvlab.Problem(one, "cross-entropy", *data(4 + ranks.rank))
        (curvature,) = estimate_jointly(Chosen.of(["hessian"], problem), problem, ranks).curvatures
        block = curvature.layers[0].blocks["0.weight"]
        if ranks.rank == 1:
            with torch.no_grad():
                one[0].weight.add_(1)
        return message(lambda: block @ torch.ones(5, 8, dtype=torch.float64))

    found = on_ranks(RANKS, work)
    assert all(text.startswith("StaleError") for text in found)
    assert all(": rank 1: " in found[rank] for rank in (0, 2))


def test_a_digest_is_of_values_and_not_of_addresses() -> None:
    def scaled(factor: float) -> Callable[[float], float]:
        return lambda x: factor * x

    assert digest_of(scaled(2.0)) == digest_of(scaled(2.0))
    assert digest_of(scaled(2.0)) != digest_of(scaled(3.0))
    assert digest_of([nn.Tanh(), object()]) == digest_of([nn.Tanh(), object()])
    assert digest_of(partial(scaled, 2.0)) != digest_of(partial(scaled, 3.0))
    assert digest_of(torch.arange(4)) != digest_of(torch.arange(4).flip(0))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64]
)
def test_the_digest_of_a_whole_tensor_sees_any_entry(dtype: torch.dtype) -> None:
    values = torch.arange(1, 4 * SAMPLED + 2).to(dtype)
    for index in (1, len(values) - 1):
        other = values.clone()
        other[index] = 0
        assert agreement._whole_digest({"w": values[1:]}) != agreement._whole_digest({"w": other[1:]})


SAMPLED = agreement.SAMPLED


def test_equal_digests_are_told_from_different_ones_by_sums_alone() -> None:
    digests = [(5, 5, 5), (1, 2, 3), (2**64 - 1, 2**64 - 1, 2**64 - 2), (0, 0, 1 << 63)]

    def work(ranks: Communicator) -> list[bool]:
        return [ranks.all_equal(case[ranks.rank], False, CPU) for case in digests] + [
            ranks.all_equal(7, ranks.rank == 2, CPU)
        ]

    assert on_ranks(RANKS, work) == [[True, False, False, False, False]] * RANKS


def test_a_process_alone_agrees_with_itself() -> None:
    assert agree(LOCAL, lambda: 3, lambda _: Description({"x": 1}), on=CPU) == 3
