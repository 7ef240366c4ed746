"""A floor for the seconds of a run, from what it asks of a device and what the device can do.

    on an accelerator    max(launches · launch, Σ max(flops / peak, bytes / bandwidth)) + reads · read
    on a CPU             operations · host cost + Σ max(flops / peak, bytes / bandwidth)

An accelerator works while its host launches; a CPU does both in turn. The rates are those of a data sheet,
which no kernel reaches; or calibrated on the machine at hand, by kind of operation and size (`speeds`). A
floor is no measurement and never shown as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from curvlab.linalg.execution import host_costs
from curvlab.measure import device as devices
from curvlab.measure.data_sheets import LAUNCH_SOURCE, data_sheet
from curvlab.measure.operations import Operations, operations
from curvlab.measure.stopwatch import interleaved
from curvlab.problem import Problem
from curvlab.studies.compare.costs import Pair, fresh
from curvlab.studies.small.speeds import Speeds, measure_speeds

__all__ = ["Calibration", "Rates", "calibrate", "rates_of"]

ROUNDS = 9
TINY = (4, 4, 4, 3)
CHECKED = (256, 128, 64, 10), 128


@dataclass(frozen=True)
class Rates:
    """Operations and bytes per second, and seconds per launch (on a CPU: per operation) and per read."""

    name: str
    flops: float
    bandwidth: float
    launch: float
    read: float
    source: str
    memory: int | None = None
    overlapping: bool = True
    speeds: Speeds | None = None

    def device_seconds(self, asked: Operations) -> float:
        """What the arithmetic and the memory traffic take."""
        if self.speeds is not None:
            return self.speeds.seconds(asked)
        return asked.seconds(self.flops, self.bandwidth)

    def floor(self, asked: Operations) -> float:
        """The least seconds of a run."""
        device = self.device_seconds(asked)
        host = self.launch * (len(asked.launches) + (0 if self.overlapping else asked.views))
        if self.overlapping:
            return max(host, device) + asked.reads * self.read
        return host + device

    def verdict(self, asked: Operations) -> str:
        """What bounds the run, in words.

        >>> rates = Rates("x", 1e12, 1e12, 1e-5, 1e-5, "by hand")
        >>> with operations() as found:
        ...     _ = torch.ones(2) + 1
        >>> rates.verdict(found).partition(":")[0]
        'launch bound'
        """
        device = self.device_seconds(asked)
        host = self.launch * len(asked.launches) + asked.reads * self.read
        if host > device:
            return f"launch bound: launches and reads take {_times(host, device)} its arithmetic"
        arithmetic = asked.flops / self.flops
        kind = "arithmetic" if arithmetic > asked.bytes / self.bandwidth else "memory traffic"
        return f"bound by {kind}: {_times(device, host)} its launches and reads"


def _times(larger: float, smaller: float) -> str:
    return f"{larger / smaller:.2g} ×" if smaller > 0 else "more than"


def rates_of(device: str) -> Rates | None:
    """The rates of a device by its data sheet; None where it has none.

    >>> rates_of("a100").bandwidth, rates_of("cpu")
    (2039000000000.0, None)
    """
    sheet = data_sheet(device)
    if sheet is None:
        return None
    source = f"{sheet.source}; {LAUNCH_SOURCE}"
    return Rates(sheet.name, sheet.flops, sheet.bandwidth, sheet.launch, sheet.read, source, sheet.memory)


@dataclass(frozen=True)
class Calibration:
    """Rates that were measured here, and how a run that was not used for them compares with its floor."""

    rates: Rates
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def calibrate(device: str | torch.device = "cpu", pair: Pair | None = None) -> Calibration:
    """Measure speeds and host cost on a device that is here, and check them on one small network.

    The host's cost of an operation is that of the pair on a network of widths 4, so small that nothing else
    counts. It takes turns with the network that is checked: a slow moment of the machine is one for both.
    """
    device = torch.device(device)
    pair = pair or Pair("fisher", "kfi", 0.1)
    speeds = measure_speeds(device)
    tiny, checked = _Run.of(pair, TINY, 16, device), _Run.of(pair, *CHECKED, device)
    timings = interleaved({"tiny": tiny.work, "checked": checked.work}, ROUNDS, device)
    cost = timings["tiny"].median / max(1, len(tiny.asked.launches) + tiny.asked.views)
    on_cpu = device.type == "cpu"
    rates = Rates(
        devices.describe(device),
        max(value for _, value in speeds.product.points),
        speeds.stream.points[-1][1],
        cost,
        0.0 if on_cpu else host_costs(device).read,
        "calibrated here",
        overlapping=not on_cpu,
        speeds=speeds,
    )
    return Calibration(rates, rates.floor(checked.asked), timings["checked"].median)


@dataclass(frozen=True, eq=False)
class _Run:
    """A pair on a fully-connected network, and what it asks of the device."""

    asked: Operations
    work: Callable[[], object]

    @classmethod
    def of(cls, pair: Pair, widths: Sequence[int], batch: int, device: torch.device) -> _Run:
        """The same network every time."""
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.Sigmoid()]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(*layers[:-1]).to(device)
            inputs = torch.randn(batch, widths[0]).to(device)
        problem = Problem(model, "cross-entropy", inputs, torch.arange(batch, device=device) % widths[-1])
        pair.run(problem)
        with operations() as asked:
            pair.run(fresh(problem))
        return cls(asked, lambda: pair.run(fresh(problem)))
