"""Every pair on networks of every kind: fully-connected, convolutional, residual, transformers.

Cost of a whole step, loss after a few, and how far each provider's matrix is from the Hessian's blocks, over
architectures and criteria. A pair that does not exist is skipped with the sentence that curvlab answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import curvlab
from benchmarks import base, workload
from curvlab.exceptions import CurvlabError
from curvlab.optim import SecondOrder

ARCHITECTURES = ("fcnn", "cnn", "resnet8", "vit-tiny", "gpt-nano")
CRITERIA = ("cross-entropy", "robust", "mse")
PROVIDERS = (
    "fisher",
    "fisher[kind=mc]",
    "fisher[kind=exact]",
    "gauss-newton[samples=1,kind=rows]",
    "gauss-newton[kind=exact]",
    "pch-1",
    "pch-2",
    "hessian",
)
ROWS = (
    "pch[kind=rows,poseig=node,positions=4]",
    "pch[kind=rows,poseig=last,positions=4]",
    "pch[kind=rows,poseig=node,structure=layer]",
    "fisher[structure=layer]",
    "fisher[structure=full]",
    "fisher[structure=ekfac]",
)
SOLVERS = ("kfi", "sm-kfi", "cg", "ea-cg", "exact")
STEPS = 30
LEARNING_RATE, ALPHA = 0.02, 0.1  # at 0.1 ea-cg diverges on the convolutional networks
RATES = {"resnet8": 0.005}  # at 0.02 drawn labels diverge there, with cg, ea-cg and exact
PROBES = 4
WHERE = {"architecture": ARCHITECTURES, "criterion": CRITERIA, "batch": (32,), "device": base.DEVICES}


@contextmanager
def skipping_what_does_not_exist() -> Iterator[None]:
    """What curvlab refuses is no benchmark."""
    try:
        yield
    except CurvlabError as refusal:
        raise NotImplementedError(str(refusal)) from refusal


class Step(base.Cost):
    """Pass, curvature, solve and update; the bytes include the network's and the batch's."""

    axes = {"provider": PROVIDERS, "solver": SOLVERS, **WHERE}

    def prepare(self) -> None:
        self.step = workload.second_order_step(self.problem, self.given["provider"], self.given["solver"])
        with skipping_what_does_not_exist():
            self.step()

    def run(self) -> Tensor:
        return self.step()

    def baseline(self) -> list[Tensor]:
        return list(self.problem.tensors.values())


class Structures(Step):
    """What is made of the examples' rows, and PCH of rows, on a convolutional network and a transformer."""

    axes = {
        "provider": ROWS,
        "solver": ("exact",),
        "architecture": ("cnn", "gpt-nano"),
        "criterion": ("cross-entropy",),
        "batch": (32,),
        "device": base.DEVICES,
    }


class Loss(base.Suite):
    """The loss of the same batch after a fixed number of steps from the same start."""

    axes = {"provider": PROVIDERS, "solver": SOLVERS, **WHERE}
    work = ("prepare", "track_loss")

    def prepare(self) -> None:
        """Take the first step here, where a refusal skips the benchmark: a run that diverges later fails."""
        workload.problem_of.cache_clear()  # training changes the network: each run has its own
        self.batch = next(self.problem.batches())
        chosen = self.given["provider"], self.given["solver"]
        with skipping_what_does_not_exist():
            rate = RATES.get(self.given["architecture"], LEARNING_RATE)
            self.optimizer = SecondOrder(
                self.problem.model, self.problem.criterion, *chosen, lr=rate, alpha=ALPHA
            )
            self.optimizer.step(self.batch.inputs, self.batch.targets)

    @base.in_units("loss")
    def track_loss(self, *_: Any) -> float:
        for _step in range(STEPS - 1):
            self.optimizer.step(self.batch.inputs, self.batch.targets)
        return float(self.problem.loss())


class Error(base.Suite):
    """‖C - H‖_F / ‖H‖_F over all parameters, H the Hessian's blocks, from products with random signs.

    E‖Mv‖² = ‖M‖_F² for random signs v; the same few are taken at every commit, so that the number moves only
    with the matrices.
    """

    axes = {"provider": tuple(name for name in PROVIDERS if name != "hessian"), **WHERE}
    work = ("track_relative_error",)

    @base.in_units("share")
    def track_relative_error(self, *_: Any) -> float:
        with skipping_what_does_not_exist():
            found = curvlab.estimate(self.given["provider"], self.problem)
        exact = curvlab.estimate("hessian", self.problem)
        generator = torch.Generator().manual_seed(0)
        off = size = 0.0
        for _probe in range(PROBES):
            signs = {
                name: torch.randint(2, p.shape, generator=generator).to(p) * 2 - 1
                for name, p in self.problem.network.parameters.items()
            }
            ours, theirs = found @ signs, exact @ signs
            off += sum(float((ours[name] - theirs[name]).square().sum()) for name in signs)
            size += sum(float(theirs[name].square().sum()) for name in signs)
        return float((off / size) ** 0.5)


class StructureError(Error):
    """The same of what is made of the examples' rows."""

    axes = {"provider": ROWS, **{name: Structures.axes[name] for name in WHERE}}
