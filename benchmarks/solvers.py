"""Solvers: from a curvature and a gradient to a direction, nothing remembered from an earlier solve."""

from __future__ import annotations

from typing import Any

import curvlab
from benchmarks import base, workload

ALPHA = 0.05
SOLVERS = ("kfi", "sm-kfi", "cg", "ea-cg", "exact")


class Solve(base.Cost):
    """Every solver, on all three networks."""

    axes = {
        "provider": ("pch-1",),
        "solver": SOLVERS,
        "architecture": base.ALL,
        "batch": (100,),
        "device": base.DEVICES,
    }

    def prepare(self) -> None:
        curvature = curvlab.estimate(self.given["provider"], self.problem)
        self.system = workload.cold(curvature, self.problem.gradient())

    def run(self) -> curvlab.Solution:
        return curvlab.solve(self.given["solver"], *self.system, alpha=ALPHA)


class Batch(Solve):
    """The same at the paper's batch size for CIFAR-10, with the Gram blocks of Fisher beside dense ones."""

    axes = {
        "provider": ("fisher", "pch-1"),
        "solver": SOLVERS,
        "architecture": ("narrow", "cifar10-fcnn"),
        "batch": (500,),
        "device": base.DEVICES,
    }


class Iterations(base.Suite):
    """CG iterations until the relative residual is 1e-6, the most over all blocks."""

    axes = {
        "provider": ("fisher", "gauss-newton", "pch-1", "pch-2"),
        "solver": ("cg", "ea-cg"),
        "architecture": ("narrow", "cifar10-fcnn"),
        "dtype": ("float64",),
        "device": base.DEVICES,
    }
    work = ("prepare", "track_iterations")

    def prepare(self) -> None:
        if self.device.type == "mps":
            raise NotImplementedError("this accelerator has no float64")
        self.curvature = curvlab.estimate(self.given["provider"], self.problem)

    @base.in_units("iterations")
    def track_iterations(self, *_: Any) -> int:
        solver = f"{self.given['solver']}[max_iter=500,tol=1e-6]"
        solution = curvlab.solve(solver, self.curvature, self.problem.gradient(), alpha=ALPHA)
        return max(block.iterations for block in solution.blocks.values())


class ExplicitRatio(base.Ratio):
    """A solver against the paper's equations to the letter: EA-CG on matrices, KFI by torch.linalg.inv."""

    axes = {
        "provider": ("pch-1",),
        "solver": ("ea-cg", "kfi"),
        "architecture": ("narrow", "cifar10-fcnn"),
        "batch": (100,),
        "device": base.DEVICES,
    }
    repetitions = 3

    def contestants(self) -> base.Contestants:
        solver = self.given["solver"]
        curvature = curvlab.estimate(self.given["provider"], self.problem)
        gradient = self.problem.gradient()

        def solve(spec: str) -> curvlab.Solution:
            return curvlab.solve(spec, *workload.cold(curvature, gradient), alpha=ALPHA)

        return lambda: solve(solver), lambda: solve(f"{solver}[formulation=explicit]")


class ProductRatio(base.Ratio):
    """A solve against the bare matrix products SᵀH of the same layers."""

    axes = {
        "provider": ("pch-1",),
        "solver": SOLVERS,
        "architecture": ("cifar10-fcnn", "imagenet10-fcnn"),
        "batch": (100,),
        "device": base.DEVICES,
    }

    def contestants(self) -> base.Contestants:
        solver, gradient = self.given["solver"], self.problem.gradient()
        curvature = curvlab.estimate(self.given["provider"], self.problem)
        products = workload.gradient_products(self.problem)
        return lambda: curvlab.solve(solver, *workload.cold(curvature, gradient), alpha=ALPHA), products
