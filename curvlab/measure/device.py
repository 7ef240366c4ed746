"""The one place that knows about devices: everything else uses torch's device-neutral calls.

`torch.accelerator` covers cuda, mps, xpu and the like; the CPU has no accelerator module, so the
functions here answer for it. Devices differ in what they have: a generator of random numbers of their own,
statistics of their allocator, an eigendecomposition; the functions here ask, and know no device by name.
A fake or meta tensor has no values: `readable` says whether a number may be read back to the host at all,
and `read_interval` how often an iteration should.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlab.exceptions import SpecError
from curvlab.linalg.execution import has_eigh, in_pieces, read_interval, readable
from curvlab.measure.data_sheets import data_sheet

__all__ = [
    "Graph",
    "RandomStates",
    "available",
    "describe",
    "graph_on",
    "has_allocator_statistics",
    "has_eigh",
    "in_pieces",
    "keep_freed_memory",
    "memory_bytes",
    "peak_allocated",
    "physical_memory",
    "random_state",
    "random_state_restored",
    "random_states",
    "read_interval",
    "readable",
    "resolve",
    "send",
    "set_random_state",
    "stand_in",
    "synchronize",
]

# The largest block by which glibc's malloc raises its thresholds is 32 MiB, page and header included.
LARGEST_BLOCK = (32 << 20) - (8 << 10)


def available() -> list[str]:
    """Device types that can run here, the preferred one first.

    >>> "cpu" in available()
    True
    """
    if torch.accelerator.is_available():
        return [torch.accelerator.current_accelerator().type, "cpu"]  # type: ignore[union-attr]
    return ["cpu"]


def resolve(name: str | torch.device = "auto") -> torch.device:
    """The device called `name`; `auto` is the accelerator where there is one, else the CPU.

    >>> resolve("cpu")
    device(type='cpu')
    """
    if isinstance(name, torch.device):
        return name
    if name == "auto":
        return torch.device(available()[0])
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SpecError(f"device `{name}` is not a torch device; use one of {available()} or auto") from error
    if device.type not in (*available(), "meta"):
        raise SpecError(f"device `{name}` is not available here; use one of {available()} or auto")
    if device.type not in ("cpu", "meta") and (device.index or 0) >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise SpecError(f"device `{name}` is not there: `{device.type}` has {count}, numbered from 0")
    return device


def stand_in(name: str | torch.device) -> str:
    """The device on which to plan for the one called `name`: itself, or the CPU where it is not here.

    A plan runs on tensors without memory; torch makes those of a device that is not here only in part.

    >>> stand_in("cpu"), stand_in("xpu:3"), stand_in("h100")
    ('cpu', 'cpu', 'cpu')
    """
    if data_sheet(str(name)) is not None and str(name) not in available():
        return "cpu"
    try:
        return str(resolve(name))
    except SpecError:
        try:
            torch.device(name)
        except RuntimeError:
            resolve(name)  # no device of that name anywhere: the same refusal as everywhere
        return "cpu"


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has finished its work (on the CPU it always has)."""
    device = torch.device(device)
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on `device`, without waiting for what the device still has to do.

    From the host by way of pinned memory, which a copy need not wait for; where a device pins none, it waits.

    >>> send(torch.ones(2), "cpu").tolist()
    [1.0, 1.0]
    """
    device = torch.device(device)
    if device.type in ("cpu", "meta") or tensor.device.type != "cpu":
        return tensor.to(device)
    try:
        pinned = tensor.pin_memory()
    except (RuntimeError, NotImplementedError):
        return tensor.to(device)
    return pinned.to(device, non_blocking=True)


def memory_bytes(device: torch.device) -> int | None:
    """The bytes of memory that a device has in all; None where that cannot be known.

    >>> memory_bytes(torch.device("meta")) is None
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # no POSIX system
        return None


def keep_freed_memory(device: torch.device | str) -> None:
    """Let the host keep what a step frees for the next one, as an accelerator's allocator does.

    glibc gives the end of its heap back to the system when more than a threshold of it is free. A training
    step frees all of its temporaries, so every step would ask for the same pages again and wait for each to
    be zeroed: a tenth of its time. The threshold becomes twice the largest block ever freed, so one
    such block raises it to 64 MB; it is not touched and costs two system calls. Other allocators ignore it.
    """
    if torch.device(device).type == "cpu":
        np.empty(LARGEST_BLOCK, dtype=np.uint8)  # no tensor: nothing for those who count tensor bytes


def physical_memory() -> int | None:
    """Bytes of memory that this machine has; None where the system does not tell.

    >>> physical_memory() is None or physical_memory() > 10**6
    True
    """
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def has_allocator_statistics(device: torch.device | str) -> bool:
    """Whether the allocator of `device` counts its bytes: the CPU's does not, nor do all accelerators'.

    torch can be asked for them since 2.9, and not on every device; without, tensor bytes are counted instead.
    """
    device = torch.device(device)
    if device.type in ("cpu", "meta") or not hasattr(torch.accelerator, "memory_allocated"):
        return False
    try:
        torch.accelerator.memory_allocated(device)
    except RuntimeError:
        return False
    return True


def random_state(device: torch.device | str) -> Tensor | None:
    """The state of the device's own generator; None where it has none beside the CPU's."""
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    # Modules of devices that come one to a machine take no argument.
    return module.get_rng_state(device) if torch.accelerator.device_count() > 1 else module.get_rng_state()


def set_random_state(device: torch.device | str, state: Tensor) -> None:
    """Set what `random_state` gave."""
    device = torch.device(device)
    module = torch.get_device_module(device)
    if torch.accelerator.device_count() > 1:
        module.set_rng_state(state, device)
    else:
        module.set_rng_state(state)


@dataclass(frozen=True, eq=False)
class RandomStates:
    """The states of the generators that work on `device` can draw from: the CPU's, and its own."""

    device: torch.device
    host: Tensor
    own: Tensor | None

    def unchanged(self) -> bool:
        """Whether nothing has been drawn since."""
        if not torch.equal(self.host, torch.get_rng_state()):
            return False
        now = random_state(self.device)
        return self.own is None or now is None or torch.equal(self.own, now)

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self.host)
        if self.own is not None:
            set_random_state(self.device, self.own)


def random_states(tensor: Tensor) -> RandomStates:
    """What work on the device of `tensor` can draw from, as it is now.

    >>> before = random_states(torch.ones(1))
    >>> _ = torch.rand(1)
    >>> before.unchanged(), before.restore(), before.unchanged()
    (False, None, True)
    """
    own = random_state(tensor.device) if readable(tensor) else None
    return RandomStates(tensor.device, torch.get_rng_state(), own)


@contextmanager
def random_state_restored(device: torch.device) -> Iterator[None]:
    """Leave the generators of the CPU and of `device` as they were."""
    before = RandomStates(device, torch.get_rng_state(), random_state(device))
    try:
        yield
    finally:
        before.restore()


def peak_allocated(function: Callable[[], object], device: torch.device | str) -> int:
    """The most bytes that `function` had allocated on an accelerator, above those at its start."""
    device = torch.device(device)
    synchronize(device)
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    function()
    synchronize(device)
    return torch.accelerator.max_memory_allocated(device) - before


class Graph:
    """A graph of a device: operations that are captured once, and replayed as one launch."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def capture(self, work: Callable[[], object], device: torch.device) -> None:
        """Capture what `work` asks of `device`; nothing of it runs before `replay`."""
        synchronize(device)
        with torch.Stream(device=device):  # CUDA captures no default stream
            self._own.capture_begin()
            try:
                work()
            finally:
                self._own.capture_end()

    def replay(self) -> None:
        """Run it, on the memory it was captured with."""
        self._own.replay()


def graph_on(device: torch.device) -> Graph | None:
    """A new graph of `device`; None where it has none.

    >>> graph_on(torch.device("cpu")) is None
    True
    """
    if device.type == "cuda":
        return Graph(torch.cuda.CUDAGraph())
    made = getattr(torch.accelerator, "Graph", None)  # since torch 2.12, for devices that have registered one
    if device.type in ("cpu", "meta") or made is None:
        return None
    try:
        return Graph(made())
    except RuntimeError:
        return None


def describe(device: torch.device | str) -> str:
    """The product name of an accelerator, or the device's type where it has none.

    >>> describe("cpu")
    'cpu'
    """
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return device.type
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named is not None else device.type
