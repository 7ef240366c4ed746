"""Launches and host reads of a pair on an accelerator, counted without one: on tensors without values.

One estimate and one solve on 3072-1024-…-10 and on a residual network, by the routes of an accelerator.
"""

from __future__ import annotations

from typing import Any, ClassVar

from benchmarks.base import in_units
from curvlab.measure.operations import Operations, operations
from curvlab.studies.compare.resources import Pair, fresh
from curvlab.studies.setup import Setup
from curvlab.studies.small.fake_problem import fake_problem

PAIRS = ("pch-1 + ea-cg", "pch-1 + kfi", "fisher + kfi", "gauss-newton + cg")
NETWORKS = {
    "cifar10-fcnn": Setup(arch="3072-1024-512-256-128-64-32-16-10", batch=500),
    "resnet8": Setup(arch="resnet8[norm=none,activation=silu]", batch=16, data="synthetic-images"),
}


class Planned:
    """Counts of one estimate and one solve, from the batch to the direction."""

    param_names: ClassVar[list[str]] = ["pair", "architecture"]
    params: ClassVar[list[list[str]]] = [list(PAIRS), list(NETWORKS)]
    timeout = 300
    found: Operations

    def setup(self, pair: str, architecture: str) -> None:
        provider, _, solver = pair.partition(" + ")
        if architecture != "cifar10-fcnn" and provider == "gauss-newton":
            provider = "gauss-newton[kind=rows]"
        with fake_problem(NETWORKS[architecture]) as problem, operations(there=True) as self.found:
            Pair(provider, solver, 0.1).run(fresh(problem))

    @in_units("launches")
    def track_launches(self, *_: Any) -> int:
        """Operations that are neither views nor allocations."""
        return len(self.found.launches)

    @in_units("reads")
    def track_reads(self, *_: Any) -> int:
        """How often the host would wait for a number."""
        return self.found.reads
