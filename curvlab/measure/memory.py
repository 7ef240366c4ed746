"""Peak memory: live tensor bytes counted exactly on the CPU, allocator statistics elsewhere.

On the CPU torch keeps no statistics, so a dispatch mode watches every operation:

    current = Σ nbytes of live storages that were made inside (and of the baseline's)
    peak    = max over time of current

A storage counts once, from the operation that makes it until it dies; views, aliases and in-place
results share a storage and add nothing; what existed before adds nothing unless it is named as
baseline. The storages of `FakeTensorMode` are counted by the bytes they stand for, so a plan on
fake tensors and the run on real ones give the same number, byte for byte. Meta tensors hold
nothing and count nothing, and neither do torch's implicit zeros (forward-mode tangents).

Not seen: workspace inside a kernel (LAPACK's work arrays, a transposed copy), sparse tensors, and
memory that is not a tensor's. Under any dispatch mode torch takes another way here and there: a few
autograd formulas their out-of-place form, `eigvalsh` and `svdvals` the one with vectors; the number
is that of the code as it runs here. The cyclic garbage collector is held off while tracking
(`collector_off`): when it happens to run is noise, in memory and in time alike.

Another thread that looks at the stack of the work, as a sampling profiler does, holds its frames, and with
them its tensors, beyond their time. Such a tensor dies in that thread; the tracker is then `disturbed`.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvlab.measure import device as devices
from curvlab.measure.operations import ImplicitZeros

__all__ = ["Allocation", "Tracker", "collector_off", "held_bytes", "peak_bytes", "track"]

# `torch.tensor` makes its result out of sight and only then shows it, through these.
_SHOWN = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)


@dataclass(frozen=True)
class Allocation:
    """A storage made while tracking: by which operation, for a tensor of which shape."""

    operation: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        """Number of elements of the tensor that the storage was made for."""
        return prod(self.shape)


@dataclass
class _Live:
    bytes: int
    reference: weakref.ref[torch.UntypedStorage]


class Tracker(TorchDispatchMode):
    """Counts live tensor bytes between entry and exit; its numbers stand still after the exit.

    Attributes:
        starting_bytes: bytes of the baseline.
        current_bytes: bytes alive now, or at the exit: what the result holds, plus the baseline.
        peak_bytes: the largest value that `current_bytes` had.
        allocations: every new storage in order, if `record` was asked for.
        disturbed: whether another thread held a storage beyond its time, so that the bytes may be too many.
    """

    def __init__(self, baseline: Iterable[Tensor] = (), record: bool = False) -> None:
        super().__init__()
        self.starting_bytes = self.current_bytes = self.peak_bytes = 0
        self.allocations: list[Allocation] = []
        self.disturbed = False
        self._record = record
        self._thread = threading.get_ident()
        self._live: dict[int, _Live] = {}
        for tensor in baseline:
            self._note(tensor)
        self.starting_bytes = self.current_bytes

    def largest(self, n: int = 10) -> list[Allocation]:
        """The `n` largest new storages, largest first (with `record=True`)."""
        return sorted(self.allocations, key=lambda allocation: -allocation.bytes)[:n]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = {} if func in _SHOWN else _sizes((args, kwargs))
        result = func(*args, **kwargs)
        for key, (storage, before) in given.items():
            self._resize(key, storage, before)
        for tensor in _tensors(result):
            made = _storage(tensor)
            if made is not None and made._cdata not in given:
                self._note(tensor, str(func))
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._live.clear()

    def _note(self, tensor: Tensor, operation: str | None = None) -> None:
        storage = _storage(tensor)
        if storage is None or storage._cdata in self._live:
            return
        size = _span(tensor)
        self._add(storage._cdata, storage, size)
        if operation is not None and self._record:
            self.allocations.append(Allocation(operation, tuple(tensor.shape), size))

    def _add(self, key: int, storage: torch.UntypedStorage, size: int) -> None:
        self._live[key] = _Live(size, weakref.ref(storage, partial(self._release, key)))
        self._change(size)

    def _resize(self, key: int, storage: torch.UntypedStorage, before: int) -> None:
        after = int(storage.nbytes())
        if after == before:
            return
        if key in self._live:
            self._live[key].bytes += after - before
            self._change(after - before)
        elif after > before:
            # What existed before the tracker is not counted; what it grew by is.
            self._add(key, storage, after - before)

    def _release(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        self._change(-self._live.pop(key).bytes)
        if threading.get_ident() != self._thread:
            self.disturbed |= _is_python_thread(threading.get_ident())

    def _change(self, size: int) -> None:
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)


@contextmanager
def track(baseline: Iterable[Tensor] = (), record: bool = False) -> Iterator[Tracker]:
    """Count the live tensor bytes of what runs inside; `baseline` tensors count from the start.

    >>> with track() as tracker:
    ...     a = torch.ones(100, dtype=torch.float64)
    ...     b = (a + 1).sum()
    >>> tracker.peak_bytes, tracker.current_bytes
    (1608, 808)
    """
    _load_autograd()
    gc.collect()
    tracker = Tracker(baseline, record)
    del baseline  # held here it could not die inside
    with collector_off(), tracker, ImplicitZeros():
        yield tracker
        # Cycles that the work left behind are no part of what its result holds.
        gc.collect()


def peak_bytes(
    function: Callable[[], object], *, device: torch.device | str, baseline: Iterable[Tensor] = ()
) -> int:
    """Peak bytes while `function` runs: what it allocates, plus what `baseline` holds.

    On the CPU, and for fake tensors of any device, the bytes are counted exactly; on an
    accelerator they are the allocator's, which rounds each block up. Fake tensors are recognised
    by the active mode or by the baseline.

    >>> x = torch.ones(50, dtype=torch.float64)
    >>> peak_bytes(lambda: x @ x, device="cpu"), peak_bytes(lambda: x @ x, device="cpu", baseline=[x])
    (8, 408)
    """
    baseline = list(baseline)
    if devices.has_allocator_statistics(device) and detect_fake_mode(baseline) is None:
        return held_bytes(baseline) + devices.peak_allocated(function, device)
    with track(baseline) as tracker:
        del baseline
        function()
    return tracker.peak_bytes


def held_bytes(tree: Any) -> int:
    """Bytes of the distinct storages of all tensors in `tree` (nested containers, or one tensor).

    >>> x = torch.zeros(10, dtype=torch.float64)
    >>> held_bytes({"x": x, "view": x[2:5]})
    80
    """
    return sum(size for _, size in _sizes(tree).values())


@cache
def _load_autograd() -> None:
    """Make the first backward pass of the process here, before anything is counted.

    It imports modules, and leaves cycles that hold its callers' frames, and their tensors, alive.
    """
    torch.ones((), requires_grad=True).backward()


def _is_python_thread(identifier: int) -> bool:
    """Whether Python started the thread; those in which autograd serves accelerators are torch's own."""
    return any(thread.ident == identifier for thread in threading.enumerate())


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _sizes(tree: Any) -> dict[int, tuple[torch.UntypedStorage, int]]:
    storages = (_storage(tensor) for tensor in _tensors(tree))
    return {s._cdata: (s, int(s.nbytes())) for s in storages if s is not None}


def _span(tensor: Tensor) -> int:
    """Bytes from the first to the last element.

    Less than the storage where a kernel returns a small result in a larger buffer (`mse_loss`
    does): that is workspace, and fake tensors have no way to know of it.
    """
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of `tensor`, or None where it holds no memory of its own to count."""
    if tensor.is_meta or tensor._is_zerotensor() or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage()


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the cyclic collector inside; afterwards it is as it was before.

    >>> with collector_off():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
