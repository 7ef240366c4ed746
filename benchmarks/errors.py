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
            total = frame[frame["layer"] == "Total"].set_index("provider")
            for provider in PROVIDERS:
                found = float(total["error"][provider]), float(total["relative"][provider])
                totals[provider, criterion, activation] = found
        return totals

    def setup(self, *_: Any) -> None:
        """Nothing: the numbers are there."""

    @base.in_units("Frobenius norm")
    def track_error(self, totals: Totals, provider: str, _: str, criterion: str, activation: str) -> float:
        return totals[provider, criterion, activation][0]

    @base.in_units("share")
    def track_relative_error(
        self, totals: Totals, provider: str, _: str, criterion: str, activation: str
    ) -> float:
        return totals[provider, criterion, activation][1]
