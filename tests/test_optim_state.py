"""SecondOrder over many steps: what it holds, what it saves, and what it lets go."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

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
