"""Curvature providers: one recorded pass and the blocks, over networks, criteria, activations and batches."""

from __future__ import annotations

import curvlab
from benchmarks import base, workload

KRONECKER = ("fisher", "fisher[kind=mc]", "fisher[kind=exact]", "gauss-newton", "pch-1", "pch-2")


class Estimate(base.Cost):
    """Every provider with Kronecker blocks, on all three networks."""

    axes = {"provider": KRONECKER, "architecture": base.ALL, "batch": (100,), "device": base.DEVICES}

    def prepare(self) -> None:
        self.fresh = workload.afresh(self.problem)

    def run(self) -> curvlab.Curvature:
        return curvlab.estimate(self.given["provider"], self.fresh)


class Batch(Estimate):
    """The same at the paper's batch size for CIFAR-10."""

    axes = {
        "provider": ("fisher", "pch-1"),
        "architecture": ("cifar10-fcnn",),
        "batch": (500,),
        "device": base.DEVICES,
    }


class Criteria(Estimate):
    """Criteria and activations, on the narrow network."""

    axes = {
        "provider": ("fisher", "pch-1"),
        "architecture": ("narrow",),
        "criterion": ("cross-entropy", "robust", "mse"),
        "activation": ("sigmoid", "tanh", "relu"),
        "device": base.DEVICES,
    }


class ExactBlocks(base.Cost):
    """The exact bias blocks, formed: what every error is measured against."""

    axes = {"provider": ("hessian",), "architecture": ("narrow",), "batch": (100,), "device": base.DEVICES}

    def prepare(self) -> None:
        self.fresh = workload.afresh(self.problem)

    def run(self) -> list[object]:
        blocks = curvlab.estimate(self.given["provider"], self.fresh).blocks
        return [block.to_dense() for name, block in blocks.items() if name.endswith("bias")]


class PassRatio(base.Ratio):
    """A recording with its blocks against a plain forward and backward pass."""

    axes = {
        "provider": ("fisher", "pch-1"),
        "architecture": base.ALL,
        "batch": (100,),
        "device": base.DEVICES,
    }

    def contestants(self) -> base.Contestants:
        provider, problem = self.given["provider"], self.problem

        def plain_pass() -> None:
            problem.model.zero_grad()
            workload.forward_backward(problem)

        return lambda: curvlab.estimate(provider, workload.afresh(problem)), plain_pass
