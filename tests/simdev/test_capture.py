"""Captured steps on the simulated device: nothing is read, uploaded or freshly shaped; graphs replay them.

The device refuses reads, uploads and random numbers while a graph is captured, runs nothing of it then, and
fills what it gives with NaN, as a GPU leaves it undefined: a step that depended on a value at its capture
would show.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlab.exceptions import SolveError
from curvlab.measure import device as devices
from curvlab.optim import SecondOrder
from curvlab.optim import capture as capture_module
from curvlab.optim.capture import Capture
from tests.simdev.cases import seeded
from tests.simdev.device import Counts, Sim

pytestmark = pytest.mark.device

PAIRS = [
    ("pch-1", "ea-cg"),
    ("pch-1", "kfi"),
    ("fisher", "kfi"),
    ("fisher[kind=mc]", "sm-kfi"),
    ("gauss-newton", "cg"),
]
OPTIONS: dict[str, Any] = {"lr": 0.1, "alpha": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def made(pair: tuple[str, str], capture: Any, **options: Any) -> tuple[nn.Module, SecondOrder, list[Any]]:
    """A model with its optimizer and four batches on the device."""
    model, inputs, targets = seeded("chain")
    model = copy.deepcopy(model).to("sim")
    optimizer = SecondOrder(model, "cross-entropy", *pair, capture=capture, **(OPTIONS | options))
    batches = [((inputs * (1 + k / 8)).to("sim"), targets.roll(k).to("sim")) for k in range(4)]
    return model, optimizer, batches


def trained(pair: tuple[str, str], capture: Any, steps: int = 6) -> list[Tensor]:
    model, optimizer, batches = made(pair, capture)
    losses = [optimizer.step(*batches[k % 4]) for k in range(steps)]
    optimizer.read()
    return [value.detach().cpu() for value in (*losses, *model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_a_replayed_step_equals_the_usual_one(sim: Sim, pair: tuple[str, str]) -> None:
    """To the bit; `cg` on the device sums in the same order in both."""
    ours, theirs = trained(pair, Capture(read_every=4)), trained(pair, False)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_without_graphs_a_step_reads_uploads_and_shapes_nothing(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]
) -> None:
    monkeypatch.setattr(capture_module, "graph_on", lambda device: None)
    _, optimizer, batches = made(pair, capture=True)
    for batch in batches[:2]:
        optimizer.step(*batch)
    found: list[tuple[Counts, list[str]]] = []
    for batch in batches * 2:
        with sim.counted() as counting, sim.log() as log:
            optimizer.step(*batch)
        found.append((counting.counts, log))
    for counts, log in found:
        assert (counts.reads, counts.uploads) == (0, 0)
        assert log == found[0][1]
        assert (counts.launches, counts.allocations) == (found[0][0].launches, found[0][0].allocations)


@pytest.mark.slow
def test_a_captured_step_is_one_launch_beside_its_batch_and_its_loss(sim: Sim) -> None:
    _, optimizer, batches = made(("pch-1", "kfi"), Capture(read_every=4))
    for batch in batches[:3]:
        optimizer.step(*batch)
    with sim.counted() as counting, sim.log() as log:
        optimizer.step(*batches[3])
    assert counting.counts.reads == counting.counts.uploads == 0
    assert [line for line in log if "graph" not in line] == ["launch aten::copy_"] * len(log[:-1])
    assert counting.counts.launches == 4
    with sim.counted() as counting:
        optimizer.step(*batches[0])
    assert counting.counts.reads == 1  # the fourth since the first: its checks are read


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_that_fails_changes_nothing_and_is_named(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    if not graphs:
        monkeypatch.setattr(capture_module, "graph_on", lambda device: None)
    model, optimizer, batches = made(("pch-1", "kfi"), Capture(read_every=100))
    for batch in batches:
        optimizer.step(*batch)
    before = [p.detach().cpu() for p in model.parameters()]
    inputs, targets = batches[0]
    optimizer.step(inputs, torch.full_like(targets, 99))  # the fifth
    optimizer.step(inputs, targets)
    with pytest.raises(SolveError, match=r"step 5: a label is outside of 0 to 3.*the 1 after it"):
        optimizer.read()
    assert all(torch.equal(p.cpu(), old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer.step(inputs, targets)  # and goes on
    optimizer.read()
    assert not torch.equal(next(model.parameters()).cpu(), before[0])


@pytest.mark.slow
def test_a_new_learning_rate_is_captured_anew(sim: Sim) -> None:
    def run(capture: bool) -> list[Tensor]:
        model, optimizer, batches = made(("fisher", "kfi"), capture, momentum=0.0)
        for k in range(6):
            optimizer.param_groups[0]["lr"] = 0.1 if k < 4 else 0.03
            optimizer.step(*batches[k % 4])
        return [p.detach().cpu() for p in model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


def test_the_device_refuses_what_a_graph_cannot_hold(sim: Sim) -> None:
    x = torch.ones(3, device="sim")
    for work in (lambda: x.sum().item(), lambda: x.add(torch.ones(3).to("sim")), lambda: torch.rand_like(x)):
        graph = devices.graph_on(x.device)
        assert graph is not None
        with pytest.raises(RuntimeError, match="not permitted while a graph is captured"):
            graph.capture(work, x.device)


def test_a_graph_runs_on_the_memory_it_was_captured_with(sim: Sim) -> None:
    x, total = torch.ones(3, device="sim"), torch.zeros(3, device="sim")
    graph = devices.graph_on(x.device)
    assert graph is not None
    graph.capture(lambda: total.add_(2 * x), x.device)
    assert total.tolist() == [0.0] * 3
    for k in (1.0, 2.0):
        x.fill_(k)
        graph.replay()
    assert total.tolist() == [6.0] * 3
