"""Does a long run stay as fast and as small as it began? 2,000 steps, told apart by quarter.

    python benchmarks/long_run.py [--steps 2000] [--optimizer SPEC]

Prints, for each quarter of the run, the median processor time of a step, the live tensor bytes and the
process's resident memory at its end, and the ratio of the last quarter to the first. Processor time is
what the step itself costs, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from statistics import median
from time import process_time

import torch

from curvlab.studies.setup import Setup
from curvlab.studies.train.run import TrainPlan, TrainRun


def live_bytes() -> int:
    return sum(t.nbytes for t in gc.get_objects() if issubclass(type(t), torch.Tensor))


def resident_bytes() -> int:
    """Resident memory of this process, on Linux; 0 where it is not told."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--optimizer", default="second-order")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--batch", type=int, default=100)
    options = parser.parse_args()
    setup = Setup(data=options.data, batch=options.batch, device="cpu")
    run = TrainRun(TrainPlan(setup, options.optimizer, epochs=options.steps))
    quarter, rows = options.steps // 4, []
    for _ in range(4):
        seconds = []
        for _ in range(quarter):
            start = process_time()
            run.advance()
            if not run.between_epochs:  # the last step of an epoch evaluates and counts memory
                seconds.append(process_time() - start)
        rows.append((median(seconds), live_bytes(), resident_bytes()))
    print(f"{options.optimizer} on {options.data}, batch {options.batch}, {4 * quarter} steps")
    for index, (time, live, resident) in enumerate(rows, start=1):
        print(
            f"quarter {index}: {1000 * time:8.3f} ms per step, {live:12,} tensor bytes, "
            f"{resident:14,} resident"
        )
    ratios = [last / first if first else float("nan") for first, last in zip(rows[0], rows[-1], strict=True)]
    print("last / first: {:.3f} time, {:.3f} tensor bytes, {:.3f} resident".format(*ratios))


if __name__ == "__main__":
    main()
