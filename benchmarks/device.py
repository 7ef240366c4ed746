"""Times, peaks and launch bounds of steps on this machine's accelerator, written to reports/device.

    make bench-device          the same as python -m benchmarks.device [--rounds 9] [--out reports/device]

Steps of five methods on two networks, and with `capture=True` where the method can be captured: seconds until
the device has done them (medians of rounds in which all take turns), their launches, the peak of the
allocator, and whether launches bound them, by rates that were calibrated on the device before.

Without an accelerator it runs on the simulated one of tests/simdev, on small networks and its virtual clock,
to show that the command works, and publishes nothing: such numbers are of no device. It says what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.floor import METHODS, asked_of, step_of
from curvlab.exceptions import SpecError
from curvlab.measure import device as devices
from curvlab.measure.environment import environment
from curvlab.measure.memory import peak_bytes
from curvlab.measure.stopwatch import interleaved
from curvlab.studies.small.floor import Calibration, Rates, calibrate

NETWORKS = {"3072-1024-512-256-128-64-32-16-10": 500, "784-256-256-10": 256}
SMALL = {"64-32-16-10": 50}
CAPTURED = " (captured)"


@dataclass(frozen=True)
class Row:
    """One method on one network of the device."""

    network: str
    method: str
    seconds: float
    spread: float
    launches: int
    peak_bytes: int
    floor: float
    bound: str


def main(arguments: list[str] | None = None) -> int:
    """Measure, and publish what is of a real device; exit code 1 where nothing is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("reports/device"))
    given = parser.parse_args(arguments)
    missing = what_is_missing()
    if missing is None:
        device = torch.device(devices.available()[0])
        calibration, rows = measure(device, NETWORKS, given.rounds, time.perf_counter)
        publish(given.out, device, calibration, rows)
        print(f"written to {given.out}")
        return 0
    print(missing)
    simulated = simulated_device()
    if simulated is None:
        return 1
    calibration, rows = measure(torch.device("sim"), SMALL, 2, simulated.clock)
    print("\nOn the simulated device, in seconds of its virtual clock, which are no device's:\n")
    print(table(rows))
    print("\nNothing was written.")
    return 1


def what_is_missing() -> str | None:
    """Why nothing can be published here; None where it can."""
    device = devices.available()[0]
    if device == "cpu":
        return (
            "No times were measured: torch finds no accelerator here. Missing: a GPU (or mps, or "
            f"xpu) with a torch built for it; this is torch {torch.__version__}. There, `make bench-device` "
            "writes reports/device"
        )
    if hasattr(torch.get_device_module(device), "simulated"):
        return "No times were measured: the only accelerator here is simulated. Missing: a GPU"
    return None


def simulated_device() -> Any:
    """The simulated device, or None (said why) where it cannot be built."""
    from tests.simdev import device

    if (reason := device.lacking()) is not None:
        print(f"The simulated device is not there either: {reason}")
        return None
    return device.load()


def measure(
    device: torch.device, networks: dict[str, int], rounds: int, clock: Callable[[], float]
) -> tuple[Calibration, list[Row]]:
    """All methods on all networks."""
    calibration = calibrate(device)
    rows = []
    for network, batch in networks.items():
        steps = {method: step_of(method, network, batch, device) for method in METHODS}
        for method in METHODS[1:]:
            try:
                captured = step_of(method, network, batch, device, capture=True)
                for _ in range(3):
                    captured()
            except SpecError as error:
                print(f"{method} on {network}: {error}")
                continue
            steps[method + CAPTURED] = captured
        timings = interleaved(steps, rounds, device, min_seconds=0.02, clock=clock)
        for method, step in steps.items():
            rows.append(_row(network, method, step, timings[method], calibration.rates, device))
    return calibration, rows


def _row(
    network: str, method: str, step: Callable[[], object], timing: Any, rates: Rates, device: torch.device
) -> Row:
    asked = asked_of(step)
    peak = peak_bytes(step, device=device)
    captured = method.endswith(CAPTURED)
    bound = "one launch" if captured else rates.verdict(asked)
    launches, floor = (1, float("nan")) if captured else (len(asked.launches), rates.floor(asked))
    return Row(network, method, timing.median, timing.iqr, launches, peak, floor, bound)


def table(rows: list[Row]) -> str:
    """The rows as Markdown; what is predicted is called so, in a column of its own."""
    lines = ["| network | step | measured ms (IQR) | peak MB | launches | predicted floor ms | bound |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        floor = "" if row.floor != row.floor else f"{1e3 * row.floor:.3g}"
        seconds = f"{1e3 * row.seconds:.3g} ({1e3 * row.spread:.2g})"
        peak = f"{row.peak_bytes / 1e6:.3g}"
        cells = [row.network, row.method, seconds, peak, row.launches, floor, row.bound]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def publish(out: Path, device: torch.device, calibration: Calibration, rows: list[Row]) -> None:
    """Write the table and the rows, with what they were measured on."""
    rates, known = calibration.rates, environment(device)
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text(
        f"# Steps on {rates.name}\n\n`make bench-device`, commit {known['source_commit']}, torch "
        f"{torch.__version__}.\n\n{table(rows)}\n\nCalibrated on the device: {rates.flops / 1e12:.3g} "
        f"TFLOP/s in float32, {rates.bandwidth / 1e9:.4g} GB/s, {1e6 * rates.launch:.3g} µs of the host an "
        f"operation, {1e6 * rates.read:.3g} µs a read; a run that was not used for it was predicted with an "
        f"error of {100 * calibration.error:+.0f} %.\n"
    )
    found = {"environment": known, "rates": asdict(rates), "rows": [asdict(row) for row in rows]}
    (out / "rows.json").write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    sys.exit(main())
