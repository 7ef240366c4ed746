"""The simulated accelerator `sim`: builds and loads device.cpp, and gives its controls names.

    sim = device.load()              # from here on torch.device("sim") exists, and is the accelerator
    with sim.counted() as counting:
        work()
    counting.counts                  # launches, reads, uploads, allocations, virtual seconds

A *launch* is an operation that is no view and no allocation; a *read* brings a value or a data-dependent
shape to the host, which waits for it; an *upload* brings host memory to the device. The library is built
once into .cache/simdev, named after the source, and torch cannot unload it: tests on `sim` have a process
of their own (`make test-device`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Counts", "Sim", "lacking", "load"]

SOURCE = Path(__file__).with_name("device.cpp")
HEADER = Path(__file__).with_name("graph.h")
BUILDS = Path(__file__).parents[2] / ".cache" / "simdev"
NO_LIMIT = 2**63 - 1


def _find_ninja() -> None:
    """Put the programs of this environment on the path: ninja's wheel installs it there."""
    programs = str(Path(sys.executable).parent)
    if programs not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"


def lacking() -> str | None:
    """Why the device cannot be built here; None where it can."""
    _find_ninja()
    compiler = os.environ.get("CXX", "g++")
    if not sys.platform.startswith("linux"):
        return f"the simulated device protects its memory as Linux does; this is {sys.platform}"
    if shutil.which(compiler) is None:
        return f"the simulated device is C++, and there is no compiler `{compiler}`"
    if not cpp_extension.is_ninja_available():
        return "the simulated device is built with ninja, which is not installed: pip install ninja"
    if not hasattr(torch.accelerator, "memory_allocated"):
        return f"the simulated device needs torch 2.9 for its allocator; this is {torch.__version__}"
    return None


def _build(library: Path) -> None:
    """Compile the library, and load it.

    Built beside and renamed: an interrupted build leaves neither half a library nor a lock.
    """
    work = BUILDS / f"{library.stem}.{os.getpid()}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        cpp_extension.load(
            library.stem, [str(SOURCE)], ["-O1", "-w"], build_directory=str(work), is_python_module=False
        )
        (work / library.name).replace(library)
    finally:
        shutil.rmtree(work)


@cache
def load() -> Sim:
    """The simulated device, built and registered with torch once per process."""
    sources = SOURCE.read_bytes() + HEADER.read_bytes()
    key = hashlib.sha256(sources + torch.__version__.encode()).hexdigest()[:12]
    library = BUILDS / f"simdev_{key}.so"
    if library.exists():
        torch.ops.load_library(library)
    else:
        _build(library)
    sim = Sim()
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module(sim))
    torch.utils.generate_methods_for_privateuse1_backend()
    return sim


@dataclass(frozen=True)
class Counts:
    """What was asked of the devices, and the seconds that the virtual clock of the host says it took."""

    launches: int = 0
    reads: int = 0
    uploads: int = 0
    allocations: int = 0
    seconds: float = 0.0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.launches - other.launches,
            self.reads - other.reads,
            self.uploads - other.uploads,
            self.allocations - other.allocations,
            self.seconds - other.seconds,
        )


class Counting:
    """The counts between entry and exit of `Sim.counted`."""

    counts: Counts


class Sim:
    """The controls of the simulated devices; the defaults are those of a device that lacks nothing."""

    devices = 2

    def counts(self, device: int = 0) -> Counts:
        """Everything since the library was loaded."""
        return Counts(*torch.ops.simdev.counters(device), self.clock())

    @contextmanager
    def counted(self, device: int = 0) -> Iterator[Counting]:
        """Count what happens inside, on one device."""
        counting, before = Counting(), self.counts(device)
        yield counting
        counting.counts = self.counts(device) - before

    @contextmanager
    def log(self) -> Iterator[list[str]]:
        """What happens inside, in order: "launch aten::mm", "read aten::_local_scalar_dense", …"""
        lines: list[str] = []
        torch.ops.simdev.start_log()
        try:
            yield lines
        finally:
            lines += torch.ops.simdev.stop_log()

    def clock(self) -> float:
        """Virtual seconds of the host: what `perf_counter` would be."""
        return torch.ops.simdev.clock()

    def set_costs(
        self,
        launch: float = 5e-6,
        sync: float = 20e-6,
        kernel: float = 2e-6,
        byte: float = 1e-12,
        flop: float = 1 / 15e12,
    ) -> None:
        """Seconds per launch and per wait of the host; of the shortest kernel, per byte and per operation."""
        torch.ops.simdev.set_costs(launch, sync, kernel, byte, flop)

    @contextmanager
    def limited(self, free_bytes: int, device: int = 0) -> Iterator[None]:
        """Leave so many bytes of the device free."""
        used = torch.accelerator.memory_allocated(device)
        torch.ops.simdev.set_limit(device, used + free_bytes)
        try:
            yield
        finally:
            torch.ops.simdev.set_limit(device, NO_LIMIT)

    @contextmanager
    def without_float64(self) -> Iterator[None]:
        """Refuse tensors of float64, as mps does."""
        torch.ops.simdev.set_double(False)
        try:
            yield
        finally:
            torch.ops.simdev.set_double(True)

    @contextmanager
    def without(self, operations: Sequence[str]) -> Iterator[None]:
        """Refuse operations, by their names in aten."""
        torch.ops.simdev.set_missing([f"aten::{name}" for name in operations])
        try:
            yield
        finally:
            torch.ops.simdev.set_missing([])


def _device_module(sim: Sim) -> ModuleType:
    """`torch.sim`: what torch asks of a device's module."""
    module: Any = ModuleType("torch.sim")

    def index(device: torch.device | str | int | None) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return torch.accelerator.current_device_index() if found is None else found

    def get_rng_state(device: torch.device | str | int | None = None) -> Tensor:
        with _disable_current_modes():  # no operation, as of other devices
            return torch.ops.simdev.rng_state(index(device))

    def set_rng_state(state: Tensor, device: torch.device | str | int | None = None) -> None:
        with _disable_current_modes():
            torch.ops.simdev.set_rng_state(index(device), state)

    def manual_seed(seed: int) -> None:
        torch.ops.simdev.manual_seed(index(None), seed)

    def manual_seed_all(seed: int) -> None:
        for device in range(sim.devices):
            torch.ops.simdev.manual_seed(device, seed)

    @contextmanager
    def current(device: torch.device | str | int | None) -> Iterator[None]:
        before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(index(device))
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    module.device = current
    module.simulated = True
    module.clock = sim.clock
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: sim.devices
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_device_name = lambda device=None: "simulated accelerator"
    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    module.manual_seed, module.manual_seed_all = manual_seed, manual_seed_all
    return module


if __name__ == "__main__":  # build before workers start, so that they do not build it twice
    reason = lacking()
    if reason is None:
        load()
    else:
        print(f"skipped: {reason}")
