"""Whole training steps, and the loss after a few of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks import base, workload
from curvlab.optim import SecondOrder

STEPS = 30


class Step(base.Cost):
    """Pass, curvature, solve and update; the bytes include the network's and the batch's."""

    axes = {
        "provider": ("fisher", "pch-1"),
        "solver": ("kfi", "ea-cg"),
        "architecture": base.ALL,
        "batch": (100,),
        "device": base.DEVICES,
    }

    def prepare(self) -> None:
        self.step = workload.second_order_step(self.problem, self.given["provider"], self.given["solver"])

    def run(self) -> Tensor:
        return self.step()

    def baseline(self) -> list[Tensor]:
        return list(self.problem.tensors.values())


class SGDRatio(base.Ratio):
    """A second-order step against a step of torch.optim.SGD with momentum."""

    axes = Step.axes

    def contestants(self) -> base.Contestants:
        step = workload.second_order_step(self.problem, self.given["provider"], self.given["solver"])
        return step, workload.SGDStep.of(self.problem)


class Loss(base.Suite):
    """The training loss on the digits after a fixed number of steps from the same start."""

    axes = {
        "provider": ("fisher", "pch-1"),
        "solver": ("kfi", "cg", "ea-cg"),
        "architecture": ("narrow",),
        "criterion": ("cross-entropy", "robust"),
        "batch": (500,),
        "device": base.DEVICES,
    }
    work = ("prepare", "track_loss")

    def prepare(self) -> None:
        workload.problem_of.cache_clear()  # training changes the network: each run has its own

    @base.in_units("loss")
    def track_loss(self, *_: Any) -> float:
        batch = next(self.problem.batches())
        optimizer = SecondOrder(
            self.problem.model, self.problem.criterion, self.given["provider"], self.given["solver"], lr=0.1
        )
        for _step in range(STEPS):
            optimizer.step(batch.inputs, batch.targets)
        return float(self.problem.loss())
