"""Batches on the simulated device: no blocking upload in an epoch, and files decoded ahead of the step."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from PIL import Image

from curvlab.data import dataset
from curvlab.data.base import Batches, Examples
from curvlab.data.inputs import FileInputs, Standardisation
from curvlab.distributed.communicator import rank_batches
from curvlab.measure.device import send
from tests.simdev.device import Sim

pytestmark = pytest.mark.device


def test_an_epoch_uploads_its_order_once_and_waits_for_nothing(sim: Sim) -> None:
    """Indices from the host were two blocking uploads a batch."""
    own = dataset("digits").load(seed=0)
    there = own.to("sim")
    with sim.counted() as counting, sim.log() as log:
        batches = list(there.batches(100, seed=1))
    assert len(batches) == 15
    assert counting.counts.uploads == 1
    assert counting.counts.reads == 0
    assert not [line for line in log if line.startswith("blocking")]
    for (x, y), (expected_x, expected_y) in zip(batches, own.batches(100, seed=1), strict=True):
        assert torch.equal(x.cpu(), expected_x)
        assert torch.equal(y.cpu(), expected_y)


def test_an_epoch_of_train_uploads_its_order_once(sim: Sim) -> None:
    """Every rank has its rows of every batch; two uploads a batch before."""
    own = dataset("digits").load(seed=0)
    there = own.to("sim").batches(100, seed=1)
    with sim.counted() as counting:
        halves = [list(rank_batches(there, rank, 2)) for rank in range(2)]
    assert counting.counts.uploads == 2
    for (x, y), *parts in zip(own.batches(100, seed=1), *halves, strict=True):
        for whole, pieces in zip((x, y), zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat([piece.cpu() for piece in pieces]), whole)


def test_a_pinned_copy_that_need_not_wait_does_not(sim: Sim) -> None:
    sim.set_costs(launch=1.0, sync=100.0, kernel=10.0, byte=1.0, flop=0.0)
    x = torch.ones(1000)
    torch.accelerator.synchronize()
    started = sim.clock()
    sent = send(x, "sim")
    assert sim.clock() - started == pytest.approx(1.0)  # a launch; the 4000 bytes are on their way
    torch.accelerator.synchronize()
    assert sim.clock() - started == pytest.approx(1.0 + 4000.0 + 100.0)
    started = sim.clock()
    x.to("sim")
    assert sim.clock() - started == pytest.approx(1.0 + 4000.0 + 100.0)
    started = sim.clock()
    x.to("sim", non_blocking=True)  # of memory that is not pinned it waits all the same
    assert sim.clock() - started == pytest.approx(1.0 + 4000.0 + 100.0)
    assert sent.tolist() == x.tolist()


@pytest.fixture
def files(tmp_path: Path) -> FileInputs:
    paths = []
    for k in range(6):
        paths.append(tmp_path / f"{k}.png")
        Image.new("RGB", (8, 8), (40 * k, 10, 20)).save(paths[-1])
    standardisation = Standardisation(torch.zeros(3, 1, 1), torch.ones(3, 1, 1))
    return FileInputs(tuple(paths), standardisation, 8)


def test_files_are_decoded_one_batch_ahead_by_another_thread(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, files: FileInputs
) -> None:
    from curvlab.data import inputs as module

    decoded: list[tuple[int, str]] = []
    decode = module.decode

    def noted(paths: list[Path], size: int) -> torch.Tensor:
        decoded.append((len(decoded), threading.current_thread().name))
        return decode(paths, size)

    monkeypatch.setattr(module, "decode", noted)
    examples = Examples(files, torch.arange(6)).to("sim")
    batches = iter(Batches(examples, torch.arange(6), 2))
    first = next(batches)
    waiting = threading.Event()
    for _ in range(200):  # the second is decoded while nobody asks for it
        if len(decoded) == 2 or waiting.wait(0.05):
            break
    assert len(decoded) == 2
    assert all(name.startswith("curvlab-batches") for _, name in decoded)
    whole = [first, *batches]
    assert [name for _, name in decoded if not name.startswith("curvlab-batches")] == []
    decoded.clear()
    next(rank_batches(Batches(examples, torch.arange(6), 2), 0, 1))  # as `train` asks for them
    assert all(name.startswith("curvlab-batches") for _, name in decoded)
    plain = list(Batches(Examples(files, torch.arange(6)), torch.arange(6), 2))
    for (x, y), (expected, labels) in zip(whole, plain, strict=True):
        assert x.device.type == y.device.type == "sim"
        assert torch.equal(x.cpu(), expected)
        assert torch.equal(y.cpu(), labels)


def test_on_the_cpu_nothing_is_done_ahead(files: FileInputs) -> None:
    before = threading.active_count()
    batches = iter(Batches(Examples(files, torch.arange(6)), torch.arange(6), 2))
    next(batches)
    assert threading.active_count() == before
