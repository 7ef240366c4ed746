"""What every suite inherits: axes as parameters, skipping, versions, and the three kinds of numbers.

`Cost` measures one piece of work (`time_`, `peakmem_`, `track_peak_bytes`); `Ratio` measures it beside a
rival, in the same rounds, so that a slow machine slows both. asv takes every increase for a regression:
all numbers here are better when lower. Importing a suite computes nothing and touches no accelerator, so
that asv may fork what it has imported.
"""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from benchmarks.workload import Case, problem_of
from curvlab import Problem
from curvlab.measure import memory, stopwatch

ALL = ("narrow", "cifar10-fcnn", "imagenet10-fcnn")
DEVICES = ("cpu", "accelerator")


Contestants = tuple[Callable[[], object], Callable[[], object]]
Track = TypeVar("Track", bound=Callable[..., float])


def in_units(unit: str) -> Callable[[Track], Track]:
    """Mark a `track_` method with the unit that asv shows."""

    def mark(method: Track) -> Track:
        method.unit = unit  # type: ignore[attr-defined]
        return method

    return mark


def synchronised() -> float:
    """The timer of torch.utils.benchmark: it waits for the device's queue before it reads the clock."""
    # Imported at the first call: the module asks for accelerators, which must not happen before a fork.
    from torch.utils.benchmark.utils.timer import timer

    return timer()


class Suite:
    """Parameters by name; those that `Case` knows make the problem, the rest are read from `given`."""

    axes: ClassVar[dict[str, Sequence[Any]]] = {}
    params: ClassVar[list[list[Any]]]
    param_names: ClassVar[list[str]]
    timeout = 600

    given: dict[str, Any]
    problem: Problem
    device: torch.device

    def __init_subclass__(cls) -> None:
        cls.param_names = list(cls.axes)
        cls.params = [list(values) for values in cls.axes.values()]

    @property
    def version(self) -> str:
        """asv starts a new history when it changes; by itself asv would not see what a suite overrides."""
        methods = (getattr(type(self), name) for name in self.work)
        return hashlib.sha256("".join(map(inspect.getsource, methods)).encode()).hexdigest()

    work: ClassVar[tuple[str, ...]] = ()
    """Names of the methods that make up what is measured."""

    def setup(self, *values: Any) -> None:
        """Make the problem; raise NotImplementedError, asv's way to skip, where the hardware is missing."""
        self.given = dict(zip(self.param_names, values, strict=True))
        case = Case(**{name: value for name, value in self.given.items() if name in Case.__annotations__})
        if case.torch_device is None:
            raise NotImplementedError("this machine has no accelerator")
        self.device = case.torch_device
        self.problem = problem_of(case)
        self.prepare()

    def prepare(self) -> None:
        """What is needed and not measured."""


class Cost(Suite, ABC):
    """Time and memory of `run`."""

    work = ("prepare", "run")
    timer = staticmethod(synchronised)

    @abstractmethod
    def run(self) -> object:
        """The work that is measured."""

    def baseline(self) -> Iterable[Tensor]:
        """Tensors that count as held from the start."""
        return ()

    def time_run(self, *_: Any) -> None:
        """Seconds."""
        self.run()

    def peakmem_run(self, *_: Any) -> None:
        """The process's peak, set-up and imports included."""
        self.run()

    @in_units("bytes")
    def track_peak_bytes(self, *_: Any) -> int:
        """Peak bytes of tensors, counted exactly on the CPU and by the allocator elsewhere."""
        return memory.peak_bytes(self.run, device=self.device, baseline=self.baseline())


class Ratio(Suite, ABC):
    """How many times as long the work takes as its rival, measured in turns.

    A turn of either lasts about as long as one of the other, the quicker one being called more often (up to
    `max_seconds`): on a busy machine a short turn would slip through between two interruptions, a long one
    not.
    """

    work = ("prepare", "contestants")
    repetitions = 9
    min_seconds = 0.02
    max_seconds = 0.2

    @abstractmethod
    def contestants(self) -> Contestants:
        """The work and its rival."""

    def measure(self) -> stopwatch.Ratio:
        """The ratio, with its quartiles over the repetitions."""
        contestants = dict(zip(("work", "rival"), self.contestants(), strict=True))
        single = stopwatch.interleaved(contestants, 2, self.device, min_seconds=0.0)
        seconds = {name: min(found.seconds) for name, found in single.items()}
        turn = min(max(*seconds.values(), self.min_seconds), self.max_seconds)
        calls = {name: max(1, round(turn / each)) for name, each in seconds.items()}
        turns = {name: partial(_repeat, contestants[name], calls[name]) for name in calls}
        timings = stopwatch.interleaved(turns, self.repetitions, self.device, warmup=0, min_seconds=0.0)
        found = stopwatch.ratio(timings["work"], timings["rival"])
        scale = calls["rival"] / calls["work"]
        return stopwatch.Ratio(found.lower * scale, found.median * scale, found.upper * scale)

    @in_units("x")
    def track_ratio(self, *_: Any) -> float:
        """The median ratio."""
        return self.measure().median


def _repeat(function: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        function()
