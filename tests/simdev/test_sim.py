"""The simulated accelerator behaves as an accelerator does; what the other tests of this folder rely on."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.simdev.device import Sim

pytestmark = pytest.mark.device

TOUCH = """
import ctypes, torch
from tests.simdev import device
device.load()
x = torch.ones(3, device="sim")
print(x.cpu().tolist(), flush=True)
ctypes.string_at(x.data_ptr(), 4)
print("unharmed")
"""


@pytest.mark.slow
def test_a_host_that_touches_device_memory_dies(sim: Sim) -> None:
    done = subprocess.run([sys.executable, "-c", TOUCH], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == "[1.0, 1.0, 1.0]\n"


def test_operands_on_two_devices_are_refused(sim: Sim) -> None:
    x = torch.ones(3, device="sim")
    for other in (torch.ones(3), torch.ones(3, device="sim:1")):
        with pytest.raises(RuntimeError, match="same device"):
            x + other
        with pytest.raises(RuntimeError, match="same device"):
            torch.outer(other, x)
    assert (x + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]  # a number may come from the host


def test_launches_reads_and_uploads_are_counted(sim: Sim) -> None:
    x = torch.ones(4, 4, device="sim")
    cases = {
        "a product": (lambda: x @ x, (1, 0, 0)),
        "a view": (lambda: x.T[1:].unsqueeze(0), (0, 0, 0)),
        "a number": (lambda: x[0, 0].item(), (0, 1, 0)),
        "a list": (lambda: x[0].tolist(), (0, 1, 0)),
        "a comparison": (lambda: torch.equal(x, x), (1, 1, 0)),
        "a shape that depends on values": (lambda: x.nonzero(), (1, 1, 0)),
        "an upload": (lambda: torch.ones(2).to("sim"), (0, 0, 1)),
        "an index from the host": (lambda: x[torch.tensor([1, 2])], (1, 0, 1)),
        "a list of tensors at once": (lambda: torch._foreach_add([x, x], 1.0), (1, 0, 0)),
    }
    for name, (work, expected) in cases.items():
        with sim.counted() as counting:
            work()
        counts = counting.counts
        assert (counts.launches, counts.reads, counts.uploads) == expected, name


def test_the_virtual_clock_adds_launches_kernels_and_waits(sim: Sim) -> None:
    sim.set_costs(launch=1.0, sync=100.0, kernel=10.0, byte=0.0, flop=0.0)
    x = torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    start = sim.clock()
    for _ in range(3):
        x = x * 2
    assert sim.clock() - start == 3.0  # the host goes on
    torch.accelerator.synchronize()
    assert sim.clock() - start == 1.0 + 3 * 10.0 + 100.0
    sim.set_costs(launch=0.0, sync=0.0, kernel=0.0, byte=0.0, flop=1.0)
    start = sim.clock()
    a, b = torch.ones(2, 3, device="sim"), torch.ones(3, 5, device="sim")
    torch.accelerator.synchronize()
    before = sim.clock()
    a @ b
    torch.accelerator.synchronize()
    assert sim.clock() - before == 2 * 2 * 3 * 5


def test_events_measure_the_time_of_the_device(sim: Sim) -> None:
    sim.set_costs(launch=1.0, sync=0.0, kernel=10.0, byte=0.0, flop=0.0)
    x = torch.ones(4, device="sim")
    first, last = (torch.Event(device="sim", enable_timing=True) for _ in range(2))
    first.record()
    x * 2 * 3
    last.record()
    assert not last.query()
    last.synchronize()
    assert last.query()
    assert first.elapsed_time(last) == pytest.approx(20.0 * 1e3)


def test_the_allocator_counts_and_ends(sim: Sim) -> None:
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    x = torch.empty(1000, device="sim")
    del x
    assert torch.accelerator.memory_allocated(0) == before
    assert torch.accelerator.max_memory_allocated(0) == before + 4096
    with sim.limited(4096):
        kept = torch.empty(1000, device="sim")
        with pytest.raises(torch.OutOfMemoryError, match="sim:0 is out of memory"):
            torch.empty(1, device="sim")
        del kept
        torch.empty(1, device="sim")


def test_its_random_numbers_are_its_own(sim: Sim) -> None:
    host = torch.get_rng_state()
    torch.sim.manual_seed_all(7)
    draws = {
        d: [torch.rand(3, device=d).tolist(), torch.randn(3, device=d).tolist()] for d in ("sim:0", "sim:1")
    }
    nn.functional.dropout(torch.ones(5, device="sim"), 0.5)
    assert torch.equal(host, torch.get_rng_state())
    assert draws["sim:0"] == draws["sim:1"]
    one = torch.sim.get_rng_state("sim:1")
    torch.rand(1, device="sim:0")
    assert torch.equal(one, torch.sim.get_rng_state("sim:1"))
    generator = torch.Generator(device="sim").manual_seed(7)
    assert torch.rand(3, generator=generator, device="sim").tolist() == draws["sim:0"][0]


def test_float64_and_operations_can_be_missing(sim: Sim) -> None:
    x = torch.eye(3, device="sim")
    with sim.without_float64():
        for make in (lambda: x.double(), lambda: torch.ones(1, dtype=torch.float64, device="sim")):
            with pytest.raises(TypeError, match="no float64"):
                make()
        x.cpu().double()
    with sim.without(["_linalg_eigh"]), pytest.raises(NotImplementedError, match="_linalg_eigh"):
        torch.linalg.eigh(x)
    assert torch.linalg.eigvalsh(x.double()).tolist() == [1.0, 1.0, 1.0]


def test_derivatives_of_every_kind_equal_the_cpu_s(sim: Sim) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.GELU(), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randn(5, 2, 4, 4)

    def derivatives(device: str) -> list[torch.Tensor]:
        own, inputs = copy.deepcopy(model).to(device), x.to(device)
        parameters = dict(own.named_parameters())

        def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(own, values, inputs).square().mean()

        gradients = torch.func.grad(loss)
        _, forward = torch.func.jvp(gradients, (parameters,), (parameters,))
        values = [*gradients(parameters).values(), *forward.values()]
        assert all(value.device.type == device for value in values)
        return [value.cpu() for value in values]

    for ours, theirs in zip(derivatives("sim"), derivatives("cpu"), strict=True):
        assert torch.equal(ours, theirs)
