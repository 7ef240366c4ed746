"""Seconds of a piece of work, and of several measured side by side so that noise hits all of them alike.

    seconds = (time of n calls) / n        with n calls as many as last `min_seconds` together

The device's queue is empty before and after, and the garbage collector is off. `interleaved` measures each
function once in every round, in an order that rotates from round to round; a slow moment of the machine then
falls on neighbours, and the ratio of two functions, taken round by round, cancels what the medians of
separate runs would keep. The processor time of the process is measured beside: it leaves out what other
programs took of a busy machine, and says nothing of an accelerator.

What other programs did is measured too (`Elapsed`, `busy_seconds`), where the system tells it (Linux):

    waited   seconds in which this thread was ready to run and another had the processor
    own      wall − waited: what the work would have taken alone, up to shared caches and memory
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import TypeVar

import numpy as np
import pandas as pd
import torch

from curvlab.measure import device as devices
from curvlab.measure.memory import collector_off

__all__ = [
    "Clock",
    "Elapsed",
    "Ratio",
    "Timing",
    "busy_seconds",
    "calls_lasting",
    "elapsed",
    "frame",
    "interleaved",
    "ratio",
    "timed",
]

THREAD = Path("/proc/thread-self/schedstat")
MACHINE = Path("/proc/stat")

Clock = Callable[[], float]
T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one function, one entry per round, and how many calls one entry averages."""

    name: str
    seconds: tuple[float, ...]
    calls: int
    processor_seconds: tuple[float, ...] = ()

    @property
    def processor(self) -> Timing:
        """The same rounds in processor time, of all threads together."""
        return Timing(self.name, self.processor_seconds, self.calls)

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return _quartiles(self.seconds)[1]

    @property
    def iqr(self) -> float:
        """The interquartile range over the rounds."""
        lower, _, upper = _quartiles(self.seconds)
        return upper - lower


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of paired rounds, with the quartiles around it."""

    lower: float
    median: float
    upper: float

    @property
    def iqr(self) -> float:
        """The interquartile range of the ratios."""
        return self.upper - self.lower


def timed(
    function: Callable[[], T], device: torch.device | str = "cpu", clock: Clock | None = None
) -> tuple[float, T]:
    """Seconds of one call of `function`, until the device has done it, and what it returned.

    >>> ticks = iter([1.0, 3.5])
    >>> timed(lambda: "done", clock=lambda: next(ticks))
    (2.5, 'done')
    """
    read = perf_counter if clock is None else clock
    devices.synchronize(device)
    start = read()
    result = function()
    devices.synchronize(device)
    return read() - start, result


@dataclass(frozen=True)
class Elapsed:
    """Seconds of a piece of work: by the wall clock, of processors (all threads), and waited for one."""

    wall: float = 0.0
    processor: float = 0.0
    waited: float = 0.0

    @property
    def own(self) -> float:
        """By the wall clock, without what was waited."""
        return self.wall - self.waited

    def __add__(self, other: Elapsed) -> Elapsed:
        return Elapsed(self.wall + other.wall, self.processor + other.processor, self.waited + other.waited)


def elapsed(
    function: Callable[[], T], device: torch.device | str = "cpu", clock: Clock | None = None
) -> tuple[Elapsed, T]:
    """What one call of `function` took, until the device has done it, and what it returned.

    With a `clock` of one's own nothing is waited for, and the processor's clock is left alone.

    >>> ticks = iter([1.0, 3.5])
    >>> elapsed(lambda: "done", clock=lambda: next(ticks))
    (Elapsed(wall=2.5, processor=0.0, waited=0.0), 'done')
    """
    if clock is not None:
        seconds, result = timed(function, device, clock)
        return Elapsed(wall=seconds), result
    # What tells of others is read outside of what is timed, because reading it takes microseconds.
    waited, processor, thread = waited_seconds(), process_time(), thread_time()
    wall, result = timed(function, device)
    processor, thread = process_time() - processor, thread_time() - thread
    # Some of the waiting may lie outside of the work: what this thread computed it did not wait for.
    most = max(wall - thread, 0.0)
    return Elapsed(wall, processor, min(waited_seconds() - waited, most)), result


def waited_seconds() -> float:
    """How long this thread has been ready to run while others had the processor; 0 where nothing tells."""
    try:
        return int(THREAD.read_bytes().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def busy_seconds() -> float:
    """Seconds of processors that all programs of the machine have had, to 0.01; NaN where nothing tells.

    The system's own work counts, and what a hypervisor gave to other machines.
    """
    try:
        with MACHINE.open("rb") as file:
            user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return math.nan
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def calls_lasting(min_seconds: float, seconds_of: Callable[[int], float]) -> int:
    """The smallest power of two of calls that last `min_seconds`, given the seconds of so many calls.

    >>> calls_lasting(1.0, lambda calls: 0.3 * calls)
    4
    """
    calls = 1
    while seconds_of(calls) < min_seconds:
        calls *= 2
    return calls


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    repetitions: int,
    device: torch.device | str = "cpu",
    *,
    warmup: int = 1,
    min_seconds: float = 0.002,
    clock: Clock | None = None,
) -> dict[str, Timing]:
    """Measure every function `repetitions` times, in rounds, after `warmup` calls of each.

    `clock` gives seconds, `time.perf_counter` by default.

    >>> timings = interleaved({"one": lambda: sum(range(10)), "two": lambda: None}, repetitions=3)
    >>> [(timing.name, len(timing.seconds)) for timing in timings.values()]
    [('one', 3), ('two', 3)]
    """
    if repetitions < 1:
        raise ValueError(f"repetitions is {repetitions}; at least 1 is needed")

    def seconds_of(name: str, calls: int) -> float:
        return timed(partial(_repeat, functions[name], calls), device, clock)[0]

    with collector_off():
        calls: dict[str, int] = {}
        for name, function in functions.items():
            _repeat(function, warmup)
            calls[name] = calls_lasting(min_seconds, partial(seconds_of, name))
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        processor: dict[str, list[float]] = {name: [] for name in functions}
        for repetition in range(repetitions):
            for name in _rotate(list(functions), repetition):
                started = process_time()
                total = seconds_of(name, calls[name])
                processor[name].append((process_time() - started) / calls[name])
                seconds[name].append(total / calls[name])
    return {
        name: Timing(name, tuple(seconds[name]), calls[name], tuple(processor[name])) for name in functions
    }


def ratio(numerator: Timing, denominator: Timing) -> Ratio:
    """How many times as long `numerator` takes, from measurements of the same rounds.

    >>> ratio(Timing("a", (2.0, 6.0, 4.0), 1), Timing("b", (1.0, 3.0, 2.0), 1)).median
    2.0
    """
    if len(numerator.seconds) != len(denominator.seconds):
        raise ValueError(
            f"`{numerator.name}` has {len(numerator.seconds)} rounds and `{denominator.name}` "
            f"{len(denominator.seconds)}; measure both in one call of `interleaved`"
        )
    pairs = zip(numerator.seconds, denominator.seconds, strict=True)
    return Ratio(*_quartiles([a / b for a, b in pairs]))


def frame(timings: Mapping[str, Timing]) -> pd.DataFrame:
    """One row per function: its name, median, interquartile range, rounds and calls per round."""
    return pd.DataFrame(
        {
            "name": timing.name,
            "median": timing.median,
            "iqr": timing.iqr,
            "repetitions": len(timing.seconds),
            "calls": timing.calls,
        }
        for timing in timings.values()
    )


def _repeat(function: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        function()


def _rotate(names: list[str], by: int) -> list[str]:
    by %= max(len(names), 1)
    return names[by:] + names[:by]


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    lower, median, upper = (float(q) for q in np.quantile(values, [0.25, 0.5, 0.75]))
    return lower, median, upper
