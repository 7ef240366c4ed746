"""Captured steps on the CPU: the usual steps to the bit, no read, and a failing step that changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvlab.exceptions import ProblemError, SolveError, SpecError
from curvlab.measure.operations import operations
from curvlab.optim import SecondOrder
from curvlab.optim.capture import Capture
from curvlab.optim.levenberg_marquardt import LevenbergMarquardt

PAIRS = [
    ("pch-1", "ea-cg"),
    ("pch-2", "kfi"),
    ("fisher[kind=mc]", "kfi"),
    ("fisher", "sm-kfi"),
    ("gauss-newton", "cg"),
    ("fisher[sharing=reduce]", "kfi"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 6), nn.Sigmoid(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def batches(shape: tuple[int, ...] = (7,), outputs: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(12, *shape, generator=generator),
            torch.randint(outputs, (12,), generator=generator),
        )
        for _ in range(3)
    ]


def trained(model: nn.Module, pair: tuple[str, str], data: Any, capture: Any, **options: Any) -> list[Tensor]:
    own = copy.deepcopy(model)
    optimizer = SecondOrder(own, "cross-entropy", *pair, lr=0.1, alpha=0.1, capture=capture, **options)
    losses = [optimizer.step(*data[k % 3]) for k in range(7)]
    optimizer.read()
    return [value.detach().clone() for value in (*losses, *own.parameters())]


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_captured_steps_are_the_usual_ones_to_the_bit(pair: tuple[str, str]) -> None:
    model, data = network(), batches()
    for options in ({}, {"momentum": 0.9, "weight_decay": 0.01}):
        ours = trained(model, pair, data, Capture(read_every=3), **options)
        assert all(map(torch.equal, ours, trained(model, pair, data, False, **options)))


@pytest.mark.parametrize("pair", [("fisher", "kfi"), ("fisher", "ea-cg")], ids=" + ".join)
def test_captured_steps_of_a_convolution_are_the_usual_ones(pair: tuple[str, str]) -> None:
    """To rounding: whether weights are all equal is not looked at, so that rows are multiplied by them."""
    model, data = convolutional(), batches((2, 4, 4), 3)
    for ours, theirs in zip(trained(model, pair, data, True), trained(model, pair, data, False), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


class Reads(TorchFunctionMode):
    """Counts what brings a number of a tensor to the host, as a user of torch would."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("item", "tolist", "__bool__", "__float__", "__int__", "nonzero", "numpy", "equal"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_a_captured_step_reads_nothing_and_makes_the_same_operations(pair: tuple[str, str]) -> None:
    optimizer = SecondOrder(network(), "cross-entropy", *pair, lr=0.1, alpha=0.1, capture=True)
    data = batches()
    for batch in data[:2]:
        optimizer.step(*batch)
    seen = []
    for batch in data * 2:
        with Reads() as reads, operations() as asked:
            optimizer.step(*batch)
        assert reads.seen == []
        seen.append([(one.name, one.flops, one.bytes) for one in asked.launches])
    assert all(own == seen[0] for own in seen)
    with Reads() as reads:
        optimizer.read()
    assert reads.seen == ["tolist"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda x, y: (x, torch.full_like(y, 9)), "a label is outside of 0 to 3"),
        (lambda x, y: (x.clone().fill_(float("nan")), y), "hold NaN or infinity"),
    ],
)
def test_a_step_that_fails_changes_nothing_nor_do_those_after_it(spoil: Any, said: str) -> None:
    model, data = network(), batches()
    optimizer = SecondOrder(
        model, "cross-entropy", "pch-1", "kfi", lr=0.1, alpha=0.1, momentum=0.9, capture=Capture(read_every=6)
    )
    for batch in data:
        optimizer.step(*batch)
    before = copy.deepcopy(optimizer.state_dict())
    kept = [p.detach().clone() for p in model.parameters()]
    optimizer.step(*spoil(*data[0]))
    optimizer.step(*data[1])
    with pytest.raises(SolveError, match=rf"step 4: .*{said}.*neither did the 1 after it"):
        optimizer.state_dict()
    assert all(map(torch.equal, model.parameters(), kept))
    after = optimizer.state_dict()
    assert after["second_order"]["steps"] == before["second_order"]["steps"] == 3
    for index, state in before["state"].items():
        assert torch.equal(state["momentum_buffer"], after["state"][index]["momentum_buffer"])
    optimizer.step(*data[1])
    optimizer.read()
    assert not torch.equal(next(model.parameters()), kept[0])


def test_checks_are_read_by_themselves_after_so_many_steps() -> None:
    optimizer = SecondOrder(
        network(), "cross-entropy", "fisher", "kfi", alpha=0.1, capture=Capture(read_every=2)
    )
    inputs, targets = batches()[0]
    optimizer.step(inputs, targets)
    optimizer.step(inputs, targets + 9)
    with pytest.raises(SolveError, match="step 2"):
        optimizer.step(inputs, targets)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adapt": True}, "the damping follows the loss"),
        ({"adapt": LevenbergMarquardt()}, "the damping follows the loss"),
        ({"max_grad_norm": 1.0}, "the gradient's norm"),
        ({"ema": 0.5}, "its shape changes"),
        ({"refresh_every": 3}, "different operations"),
        ({"batchnorm": "running"}, "running statistics"),
    ],
    ids=str,
)
def test_options_that_need_the_host_are_refused_by_name(options: Any, said: str) -> None:
    with pytest.raises(SpecError, match=f"capture=True with {next(iter(options))}=.*{said}"):
        SecondOrder(network(), "cross-entropy", capture=True, **options)


@pytest.mark.parametrize("pair", [("hessian", "cg"), ("fisher", "exact"), ("pch[kind=rows]", "kfi")])
def test_pairs_that_read_on_the_way_are_refused_in_their_second_step(pair: tuple[str, str]) -> None:
    model = network()
    optimizer = SecondOrder(model, "cross-entropy", *pair, lr=0.1, alpha=0.1, capture=True)
    data = batches()
    optimizer.step(*data[0])
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(SpecError, match=r"cannot be captured here: .*Captured steps go with `fisher`"):
        optimizer.step(*data[1])
    assert all(map(torch.equal, model.parameters(), before))


def test_batches_of_another_shape_closures_and_ignored_labels_are_refused() -> None:
    optimizer = SecondOrder(network(), "cross-entropy", "fisher", "kfi", alpha=0.1, capture=True)
    inputs, targets = batches()[0]
    with pytest.raises(ProblemError, match="takes a batch of two tensors"):
        optimizer.step(lambda: (inputs, targets))
    optimizer.step(inputs, targets)
    with pytest.raises(ProblemError, match=r"the batch has \(5, 7\) float32.*drop_last=True"):
        optimizer.step(inputs[:5], targets[:5])
    optimizer.step(inputs, torch.where(targets == 1, -100, targets))
    with pytest.raises(SolveError, match="a label is `ignore_index`"):
        optimizer.read()
    optimizer.on_solution = print
    with pytest.raises(SpecError, match="on_solution with capture=True"):
        optimizer.step(inputs, targets)


def test_a_setting_that_changes_is_taken_up() -> None:
    def run(capture: bool) -> list[Tensor]:
        model = network()
        optimizer = SecondOrder(model, "cross-entropy", "fisher", "kfi", lr=0.1, alpha=0.1, capture=capture)
        for k, batch in enumerate(batches() * 2):
            optimizer.alpha, optimizer.param_groups[0]["lr"] = (0.1, 0.1) if k < 3 else (0.3, 0.05)
            optimizer.step(*batch)
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


def test_a_copy_and_a_loaded_state_go_on_captured() -> None:
    model, data = network(), batches()
    optimizer = SecondOrder(model, "cross-entropy", "fisher", "kfi", alpha=0.1, momentum=0.5, capture=True)
    for batch in data:
        optimizer.step(*batch)
    twin, copied = copy.deepcopy((model, optimizer))
    other = copy.deepcopy(model)
    loaded = SecondOrder(other, "cross-entropy", "fisher", "kfi", alpha=0.1, momentum=0.5, capture=True)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own in (optimizer, copied, loaded):
        for batch in data:
            own.step(*batch)
    for p, q, r in zip(model.parameters(), twin.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)
