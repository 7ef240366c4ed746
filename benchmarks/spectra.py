"""Spectra: the five largest eigenvalues, densities and traces of whole Hessians, and Kronecker densities."""

from __future__ import annotations

import curvlab
from benchmarks import base, workload

AXES = {
    "provider": ("hessian[full=true]",),
    "architecture": ("narrow", "cifar10-fcnn"),
    "batch": (100,),
    "device": base.DEVICES,
}


class TopFive(base.Cost):
    """The five largest eigenvalues, to the default residuals."""

    axes = AXES

    def prepare(self) -> None:
        self.curvature = curvlab.estimate(self.given["provider"], workload.afresh(self.problem))

    def run(self) -> object:
        return curvlab.spectrum(self.curvature, k=5)


class SpectralDensity(TopFive):
    """A density of few probes."""

    def run(self) -> object:
        return curvlab.density(self.curvature, probes=2, steps=30)


class KroneckerDensity(TopFive):
    """The exact density of a Kronecker curvature, eigenvalues of its factors included."""

    axes = AXES | {"provider": ("fisher", "pch-1")}

    def prepare(self) -> None:
        self.fresh = workload.afresh(self.problem)

    def run(self) -> object:
        return curvlab.density(curvlab.estimate(self.given["provider"], self.fresh))


class Trace(TopFive):
    """The trace by Hutch++."""

    def run(self) -> object:
        return self.curvature.trace(estimator="hutch++", probes=18)
