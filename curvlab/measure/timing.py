"""Time of several functions, measured side by side so that noise hits all of them alike.

Every round measures each function once, in an order that rotates from round to round; a slow
moment of the machine then falls on neighbours, and the ratio of two functions, taken round by
round, cancels what the medians of separate runs would keep. One measurement is as many calls as
last `min_seconds` together, divided by their number, with the device's queue empty before and
after, and the garbage collector off. The processor time of the process is measured beside: it leaves
out what other programs took of a busy machine, and says nothing of an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

import numpy as np
import pandas as pd
import torch

from curvlab.measure import device as devices
from curvlab.measure.collector import collector_off

__all__ = ["Ratio", "Timing", "frame", "interleaved", "ratio"]


@dataclass(frozen=True)
class Timing:
    """Seconds a call of one function, one entry a round, and how many calls one entry averages."""

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


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    repetitions: int,
    device: torch.device | str = "cpu",
    *,
    warmup: int = 1,
    min_seconds: float = 0.002,
) -> dict[str, Timing]:
    """Measure every function `repetitions` times, in rounds, after `warmup` calls of each.

    >>> timings = interleaved({"one": lambda: sum(range(10)), "two": lambda: None}, repetitions=3)
    >>> [(timing.name, len(timing.seconds)) for timing in timings.values()]
    [('one', 3), ('two', 3)]
    """
    if repetitions < 1:
        raise ValueError(f"repetitions is {repetitions}; at least 1 is needed")
    with collector_off():
        calls = {name: _calls(f, device, warmup, min_seconds) for name, f in functions.items()}
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        processor: dict[str, list[float]] = {name: [] for name in functions}
        for repetition in range(repetitions):
            for name in _rotated(list(functions), repetition):
                started = process_time()
                total = _measure(functions[name], calls[name], device)
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
    """One row a function: its name, median, interquartile range, rounds and calls a round."""
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


def _calls(
    function: Callable[[], object], device: torch.device | str, warmup: int, min_seconds: float
) -> int:
    for _ in range(warmup):
        function()
    calls = 1
    while _measure(function, calls, device) < min_seconds:
        calls *= 2
    return calls


def _measure(function: Callable[[], object], calls: int, device: torch.device | str) -> float:
    devices.synchronize(device)
    start = perf_counter()
    for _ in range(calls):
        function()
    devices.synchronize(device)
    return perf_counter() - start


def _rotated(names: list[str], by: int) -> list[str]:
    by %= max(len(names), 1)
    return names[by:] + names[:by]


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    lower, median, upper = (float(q) for q in np.quantile(values, [0.25, 0.5, 0.75]))
    return lower, median, upper
