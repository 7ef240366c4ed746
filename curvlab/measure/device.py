"""The one place that knows about devices: everything else uses torch's device-neutral calls.

`torch.accelerator` covers cuda, mps, xpu and the like; the CPU has no accelerator module, so the
functions here answer for it. A fake or meta tensor has no values: `readable` says whether a
number may be read back to the host at all, and `read_interval` how often an iteration should.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from curvlab.exceptions import SpecError

__all__ = [
    "available",
    "describe",
    "has_allocator_statistics",
    "keep_freed_memory",
    "memory_bytes",
    "peak_allocated",
    "physical_memory",
    "read_interval",
    "readable",
    "resolve",
    "synchronize",
]

ACCELERATOR_READ_INTERVAL = 8
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
    return device


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has finished its work (on the CPU it always has)."""
    device = torch.device(device)
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def readable(tensor: Tensor) -> bool:
    """Whether the values of `tensor` can be read: not so for meta and fake tensors.

    >>> readable(torch.ones(2)), readable(torch.ones(2, device="meta"))
    (True, False)
    """
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


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


def read_interval(tensor: Tensor) -> int:
    """After how many iterations convergence is read back to the host.

    1 on the CPU, where a read is free, 8 on an accelerator, where each read waits for the queue, 0 (never)
    without values.
    """
    if not readable(tensor):
        return 0
    return 1 if tensor.device.type == "cpu" else ACCELERATOR_READ_INTERVAL


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
    """Whether the allocator of `device` counts its bytes: accelerators do, the CPU does not."""
    return torch.device(device).type not in ("cpu", "meta")


def peak_allocated(function: Callable[[], object], device: torch.device | str) -> int:
    """The most bytes that `function` had allocated on an accelerator, above those at its start."""
    device = torch.device(device)
    synchronize(device)
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    function()
    synchronize(device)
    return torch.accelerator.max_memory_allocated(device) - before


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
