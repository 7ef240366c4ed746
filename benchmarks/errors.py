"""Approximation errors against the exact Hessian, by provider: the paper's Total, absolute and relative."""

from __future__ import annotations

from itertools import product
from typing import Any

import curvlab
from benchmarks import base, workload

PROVIDERS = ("fisher", "gauss-newton", "pch-1", "pch-2")
CRITERIA = ("cross-entropy", "robust")
ACTIVATIONS = ("sigmoid", "tanh", "relu")
Totals = dict[tuple[str, str, str], tuple[float, float]]


class Error(base.Suite):
    """Errors at the initial parameters, in float64; one pass over the exact Hessian serves all providers."""

    axes = {
        "provider": PROVIDERS,
        "architecture": ("narrow",),
        "criterion": CRITERIA,
        "activation": ACTIVATIONS,
    }
    work = ("setup_cache",)

    def setup_cache(self) -> Totals:
        """All errors, computed once and handed to every benchmark of this suite."""
        totals: Totals = {}
        for criterion, activation in product(CRITERIA, ACTIVATIONS):
            case = workload.Case(criterion=criterion, activation=activation, batch=500, dtype="float64")
            frame = curvlab.errors(workload.problem_of(case), PROVIDERS)
            for row in frame[frame["layer"] == "Total"].itertuples():
                totals[row.provider, criterion, activation] = (row.error, row.relative)
        return totals

    def setup(self, *_: Any) -> None:
        """Nothing: the numbers are there."""

    def track_error(self, totals: Totals, provider: str, _: str, criterion: str, activation: str) -> float:
        return totals[provider, criterion, activation][0]

    def track_relative_error(
        self, totals: Totals, provider: str, _: str, criterion: str, activation: str
    ) -> float:
        return totals[provider, criterion, activation][1]

    track_error.unit = track_relative_error.unit = "Frobenius"
