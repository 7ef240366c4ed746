"""SecondOrder over many steps: what it holds, what it saves, and what it lets go."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.exceptions import CurvlabError, ProblemError, SolveError, SpecError
from curvlab.optim import LevenbergMarquardt, SecondOrder


def network(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        modules += [nn.Linear(fan_in, fan_out, dtype=torch.float64), nn.Sigmoid()]
    return nn.Sequential(*modules[:-1])


def batch(seed: int, examples: int = 12, features: int = 5, classes: int = 3):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, features, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(classes, (examples,), generator=generator)


OPTIONS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "ema": {"ema": 0.7, "provider": "fisher", "solver": "kfi"},
    "refresh": {"refresh_every": 3, "solver": "kfi"},
    "adapt": {"adapt": LevenbergMarquardt(every=2), "momentum": 0.5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_state_dict_continues_to_the_bit_and_keeps_dtypes(options, dtype):
    def made(model):
        return SecondOrder(model, "cross-entropy", **{"lr": 0.2, **options})

    model = network(9, 7, 3).to(dtype)
    optimizer = made(model)
    batches = [(x.to(dtype), y) for x, y in (batch(seed, 4, 9) for seed in range(8))]
    for x, y in batches[:4]:
        optimizer.step(x, y)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    for x, y in batches[4:]:
        optimizer.step(x, y)
    other = network(9, 7, 3, seed=1).to(dtype)
    other.load_state_dict(weights)
    resumed = made(other)
    resumed.load_state_dict(state)
    for x, y in batches[4:]:
        resumed.step(x, y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert resumed.alpha == optimizer.alpha
    tensors = [t for entry in resumed.state.values() for t in entry.values()]
    tensors += (
        []
        if resumed._kept is None
        else [t for lay in resumed._kept.layers for t in lay.output.tensors().values()]
    )
    assert all(t.dtype == dtype for t in tensors)


def test_state_dict_can_be_saved_and_loaded_without_pickled_code(tmp_path):
    model = network(5, 4, 3)
    optimizer = SecondOrder(model, "cross-entropy", ema=0.9, momentum=0.9)
    optimizer.step(*batch(0))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    fresh = SecondOrder(model, "cross-entropy", ema=0.9, momentum=0.9)
    assert entries(fresh.state_dict()) != entries(optimizer.state_dict())
    fresh.load_state_dict(loaded)
    assert entries(fresh.state_dict()) == entries(optimizer.state_dict())


def entries(state: object) -> object:
    """A nested state with its tensors as what they hold, so that two can be compared."""
    if isinstance(state, torch.Tensor):
        return state.dtype, state.shape, state.flatten().tolist()
    if isinstance(state, dict):
        return {key: entries(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [entries(value) for value in state]
    return state


def live_bytes() -> int:
    return sum(t.nbytes for t in gc.get_objects() if issubclass(type(t), torch.Tensor))


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_live_tensors_do_not_grow_over_many_steps(options):
    model = network(9, 7, 3)
    optimizer = SecondOrder(model, "cross-entropy", **{"lr": 0.01, **options})
    batches = [batch(seed, 4, 9) for seed in range(5)]
    gc.collect()
    gc.disable()  # nothing may wait for it: a cycle would hold a batch and all its activations
    try:
        for step in range(12):
            optimizer.step(*batches[step % 5])
        before = live_bytes()
        for step in range(200):
            optimizer.step(*batches[step % 5])
        assert live_bytes() <= before
    finally:
        gc.enable()


def test_the_users_batch_is_not_kept_alive():
    optimizer = SecondOrder(network(5, 4, 3), "cross-entropy", ema=0.9)
    x, y = batch(0)
    seen = weakref.ref(x)
    optimizer.step(x, y)
    del x
    gc.collect()
    assert seen() is None


def small_optimizer(**options: Any) -> tuple[nn.Module, SecondOrder]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, SecondOrder(model, "cross-entropy", **options)


SMALL_BATCH = (torch.eye(4, dtype=torch.float64), torch.tensor([0, 1, 0, 1]))
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda held: pickle.loads(pickle.dumps(held)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "ema": 0.8}, {"adapt": True}], ids=str)
def test_a_copied_optimizer_goes_on_as_the_original_does(how: str, options: dict[str, Any]) -> None:
    model, optimizer = small_optimizer(**options)
    optimizer.step(*SMALL_BATCH)
    copied_model, copied = COPIES[how]((model, optimizer))
    for _ in range(2):
        assert torch.equal(optimizer.step(*SMALL_BATCH), copied.step(*SMALL_BATCH))
    pairs = list(zip(model.parameters(), copied_model.parameters(), strict=True))
    assert all(torch.equal(one, other) and one is not other for one, other in pairs)


def test_an_optimizer_of_a_process_group_is_not_copied() -> None:
    _, optimizer = small_optimizer()
    optimizer.process_group = object()  # type: ignore[assignment]
    with pytest.raises(ProblemError, match="process_group can be neither copied nor pickled"):
        copy.deepcopy(optimizer)


def sgd_state(state: dict[str, Any]) -> dict[str, Any]:
    return torch.optim.SGD(small_optimizer()[0].parameters(), lr=77.0, momentum=0.9).state_dict()


def bad_alpha(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "second_order": {**state["second_order"], "alpha": "x"}}


def other_sizes(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "param_groups": [{**state["param_groups"][0], "params": [0], "lr": 77.0}]}


def missing_rate(state: dict[str, Any]) -> dict[str, Any]:
    group = {key: value for key, value in state["param_groups"][0].items() if key != "momentum"}
    return {**state, "param_groups": [{**group, "lr": 77.0}]}


def other_shapes(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {0: {"momentum_buffer": torch.zeros(9)}}}


@pytest.mark.parametrize("spoil", [sgd_state, bad_alpha, other_sizes, missing_rate, other_shapes])
def test_a_state_that_does_not_fit_is_refused_whole(
    spoil: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    _, optimizer = small_optimizer(lr=0.3, momentum=0.5)
    optimizer.step(*SMALL_BATCH)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CurvlabError):
        optimizer.load_state_dict(spoil(copy.deepcopy(before)))
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["second_order"] == before["second_order"]
    assert all(
        torch.equal(after["state"][key]["momentum_buffer"], held["momentum_buffer"])
        for key, held in before["state"].items()
    )


class Expanded(nn.Module):
    """A bias whose entries share one number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3).double(), nn.Linear(3, 2).double()
        self.b.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64).expand(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_a_step_that_cannot_be_written_everywhere_is_written_nowhere() -> None:
    model = Expanded()
    before = [p.detach().clone() for p in model.parameters()]
    problem = curvlab.Problem(model, "cross-entropy", *SMALL_BATCH)
    solution = curvlab.solve("kfi", curvlab.estimate("fisher", problem), problem.gradient(), alpha=0.1)
    optimizer = SecondOrder(model, "cross-entropy", "fisher")
    for write in (lambda: solution.add_to(model), lambda: optimizer.step(*SMALL_BATCH)):
        with pytest.raises(SolveError, match=r"`b\.bias` of shape \(2,\) has entries that share memory"):
            write()
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


NO_NUMBERS: tuple[Any, ...] = ("x", [1], None, 1j, torch.ones(2), object(), float("nan"))


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["alpha", "lr", "momentum", "weight_decay", "ema", "refresh_every"])
def test_what_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"{name}=.*expected"):
        small_optimizer(**{name: value})
