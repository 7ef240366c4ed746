"""What the suites and the scripts measure: networks with a batch, solves from cold, steps and their rivals.

Every input is drawn from a seed and stays on disk nowhere; the narrow network sees scikit-learn's digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

# torch.optim and the digits import these two when first used: once here, not again in every fork.
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo
from torch import Tensor, nn

from curvlab import Curvature, Gradient, Problem
from curvlab.architectures import architecture
from curvlab.curvature_layers import KroneckerLayer
from curvlab.linalg import Factor, GramFactor
from curvlab.linalg.factors import InputFactors
from curvlab.linalg.steps import RowGradient
from curvlab.measure import device as devices
from curvlab.optim import SecondOrder
from curvlab.studies.setup import Setup

ARCHITECTURES = {
    "narrow": "digits-fcnn",
    "cifar10-fcnn": "cifar10-fcnn",
    "imagenet10-fcnn": "imagenet10-fcnn",
}
# Networks of other kinds, on drawn inputs and targets of the shapes they take.
NETWORKS = {
    "fcnn": "digits-fcnn",
    "cnn": "cnn",
    "resnet8": "resnet8[norm=none,activation=silu]",
    "vit-tiny": "vit-tiny",
    "gpt-nano": "gpt-nano",
}
FEATURES = {"narrow": 64, "cifar10-fcnn": 3072, "imagenet10-fcnn": 150_528}
REGRESSION = ("mse", "tukey")
# Small enough that repeated steps leave the network where it was, large enough that no kernel is skipped.
RATE = 1e-4

F = TypeVar("F", bound=Factor)


@dataclass(frozen=True)
class Case:
    """A network, its criterion and a batch, by name."""

    architecture: str = "narrow"
    criterion: str = "cross-entropy"
    activation: str = "sigmoid"
    batch: int = 100
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def torch_device(self) -> torch.device | None:
        """The device, `accelerator` being whichever this machine has; None where it has none."""
        preferred = devices.available()[0]
        if self.device == "accelerator":
            return None if preferred == "cpu" else torch.device(preferred)
        return torch.device(self.device)

    @property
    def data(self) -> str:
        """The data set: digits for the narrow network, synthetic ones of the right size for the others."""
        examples = -(-self.batch * 5 // 4)  # of which four fifths are for training
        shape = f"features={FEATURES[self.architecture]},examples={examples}"
        if self.criterion.partition("[")[0] in REGRESSION:
            return f"synthetic-regression[{shape},outputs=10]"
        return "digits" if self.architecture == "narrow" else f"synthetic[{shape}]"


@lru_cache(maxsize=1)
def problem_of(case: Case) -> Problem:
    """The problem of a case; the last one is kept, because asv sets up again before every sample."""
    if case.architecture in NETWORKS:
        return _drawn_problem(case)
    return Setup(
        arch=ARCHITECTURES[case.architecture],
        activation=case.activation,
        data=case.data,
        criterion=case.criterion,
        batch=case.batch,
        device=str(case.torch_device),
        dtype=case.dtype,
    ).build_problem()


def _drawn_problem(case: Case) -> Problem:
    """A network of `NETWORKS` on a batch of random inputs; tokens have a target each."""
    chosen = architecture(NETWORKS[case.architecture])
    generator = torch.Generator().manual_seed(0)
    shape, outputs = chosen.sizes
    tokens = chosen.input_kind == "tokens"
    size = (case.batch, *shape)
    x = (
        torch.randint(outputs, size, generator=generator)
        if tokens
        else torch.randn(size, generator=generator)
    )
    targets = size if tokens else (case.batch,)
    if case.criterion.partition("[")[0] in REGRESSION:
        y = torch.randn(*targets, outputs, generator=generator)
    else:
        y = torch.randint(outputs, targets, generator=generator)
    dtype: torch.dtype = getattr(torch, case.dtype)
    place = {"device": case.torch_device}
    model = chosen.build(seed=0).eval().to(dtype=dtype, **place)
    x, y = (t.to(dtype=dtype, **place) if t.is_floating_point() else t.to(**place) for t in (x, y))
    return Problem(model, case.criterion, x, y)


def afresh(problem: Problem) -> Problem:
    """The same problem with nothing recorded."""
    batch = next(problem.batches())
    return problem.with_data(batch.inputs, batch.targets)


def cold(curvature: Curvature, gradient: Gradient) -> tuple[Curvature, Gradient]:
    """The same with nothing remembered: Gram matrices and factorisations of an earlier solve would be free.

    Factors that were shared stay shared, and no tensor is copied.
    """
    renewed: dict[int | str, Factor] = {}

    def renew(factor: F) -> F:
        key = factor.rows_id if isinstance(factor, GramFactor) else id(factor)
        return renewed.setdefault(key, factor.map(lambda tensor: tensor))  # type: ignore[return-value]

    layers = [
        replace(
            layer,
            output=renew(layer.output),
            inputs=layer.inputs and InputFactors(renew(layer.inputs.full), layer.inputs.given_mean),
        )
        if isinstance(layer, KroneckerLayer)
        else layer
        for layer in curvature.layers
    ]
    held = {name: gradient.factored(name) for name in gradient}
    entries = {
        name: RowGradient(renew(entry.gradients), renew(entry.inputs))
        if isinstance(entry, RowGradient)
        else entry
        for name, entry in held.items()
    }
    return replace(curvature, layers=tuple(layers)), Gradient(entries)


def second_order_step(problem: Problem, provider: str, solver: str) -> Callable[[], Tensor]:
    """A whole step: pass, curvature, solve and update."""
    batch = next(problem.batches())
    optimizer = SecondOrder(problem.model, problem.criterion, provider, solver, lr=RATE)
    return lambda: optimizer.step(batch.inputs, batch.targets)


@dataclass(frozen=True, eq=False)
class SGDStep:
    """A torch.optim.SGD step with momentum, from the forward pass to the update."""

    problem: Problem
    optimizer: torch.optim.SGD

    @classmethod
    def of(cls, problem: Problem) -> SGDStep:
        """A step on the problem's own model."""
        return cls(problem, torch.optim.SGD(problem.model.parameters(), lr=RATE, momentum=0.9))

    def __call__(self) -> None:
        """Take the step."""
        self.optimizer.zero_grad()
        forward_backward(self.problem)
        self.optimizer.step()

    @property
    def buffers(self) -> list[Tensor]:
        """The momentum, which exists after the first step."""
        return [state["momentum_buffer"] for state in self.optimizer.state.values()]

    def clear(self) -> None:
        """Drop gradients and momentum."""
        self.optimizer.zero_grad()
        self.optimizer.state.clear()


def forward_backward(problem: Problem) -> None:
    """A plain pass with torch's own loss; the gradients are left in `p.grad`."""
    batch = next(problem.batches())
    with torch.enable_grad():
        nn.functional.cross_entropy(problem.model(batch.inputs), batch.targets).backward()


def gradient_products(problem: Problem) -> Callable[[], list[Tensor]]:
    """SᵀH for every layer: the matrix products that SGD's gradient takes, and nothing else."""
    pairs = [(record.gradients.rows, record.inputs.rows) for record in problem.recording().layers]
    return lambda: [s.T @ h for s, h in pairs]
