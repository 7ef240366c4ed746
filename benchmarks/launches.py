"""Launches and host reads of a step on the simulated accelerator (tests/simdev): counted, not timed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import base

ROOT = str(Path(__file__).resolve().parents[1])


def _simulated() -> tuple[Any, Any]:
    """What counts, and the device with its usual costs; NotImplementedError, which skips, without one."""
    if ROOT not in sys.path:  # asv imports `benchmarks` by its folder, but the device is in `tests`
        sys.path.append(ROOT)
    # torch cannot unload the device: it is loaded where something is counted, not at import.
    from tests.simdev import cases, device

    if (reason := device.lacking()) is not None:
        raise NotImplementedError(reason)
    sim = device.load()
    sim.set_costs()
    return cases, sim


class StepCounts(base.Suite):
    """What the second step of an optimizer asks of the device; skipped where that cannot be built.

    The first set of parameters builds the device, once for all commits of a history.
    """

    axes = {
        "architecture": ("chain", "resnet8"),
        "provider": ("fisher", "pch-1", "gauss-newton"),
        "solver": ("kfi", "ea-cg", "cg"),
    }
    work = ("setup",)

    def setup(self, *values: Any) -> None:
        network, provider, solver = values
        cases, sim = _simulated()
        if network == "resnet8" and (provider != "fisher" or solver == "cg"):
            raise NotImplementedError(f"`{provider}` with `{solver}` is counted on the chain")
        self.counts = cases.counts_of_step(sim, network, provider, solver)

    @base.in_units("launches")
    def track_launches(self, *_: Any) -> int:
        """Operations that are neither views nor allocations."""
        return self.counts.launches

    @base.in_units("reads")
    def track_reads(self, *_: Any) -> int:
        """Waits of the host for a value."""
        return self.counts.reads


class TrainReads(base.Suite):
    """What the steps of `curvlab train` read, the first one, which looks at the forward, left out."""

    axes = {
        "optimizer": (
            "sgd",
            "second-order[provider=fisher,solver=kfi]",
            "second-order[provider=pch-1,solver=ea-cg]",
            "second-order[provider=gauss-newton,solver=cg]",
        )
    }
    work = ("setup",)

    def setup(self, *values: Any) -> None:
        cases, sim = _simulated()
        (optimizer,) = values
        steps, _ = cases.reads_in_training(sim, optimizer)
        self.most = max(steps[1:])

    @base.in_units("reads")
    def track_reads(self, *_: Any) -> int:
        """Waits of the host for a value, of the step that has most."""
        return self.most
