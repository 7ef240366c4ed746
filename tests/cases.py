"""Small problems, each with its naive reference: networks, criteria and data of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import curvlab
from tests.reference import Reference

ONE_SCENE: dict[str, Any] = {"at": ("init",), "batches": 1, "alphas": ()}
"""A comparison of the untrained model on one batch at one damping: as quick as it goes."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "softplus": nn.Softplus,
}
CLASS_WEIGHTS = [0.5, 2.0, 1.5, 1.0, 3.0]


@dataclass(frozen=True)
class Loss:
    """A criterion as curvlab is given it, and the same loss of one example in plain torch."""

    criterion: Callable[[int], Any]
    example: Callable[[Tensor, Tensor], Tensor]
    targets: Callable[[int, int], Tensor]
    weights: Callable[[Tensor], Tensor] = lambda targets: torch.ones(len(targets)).double()
    convex: bool = True


def _labels(m: int, k: int) -> Tensor:
    return torch.randint(0, k, (m,))


def _real(m: int, k: int) -> Tensor:
    return torch.randn(m, k).double()


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, ignore_index=-1)


def _robust(logits: Tensor, target: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(5.0 * (logits.softmax(0)[target] - 0.2)))


def _tukey(logits: Tensor, target: Tensor) -> Tensor:
    r = logits - target
    inside = 1.0 / 6 * (1 - (1 - r**2) ** 3)
    return torch.where(r.abs() <= 1.0, inside, torch.full_like(r, 1.0 / 6)).mean()


def quartic(logits: Tensor, target: Tensor) -> Tensor:
    """A convex loss of the user's own."""
    return ((logits - target) ** 2).sum() + 0.1 * (logits**4).sum() + logits.logsumexp(0)


def wavy(logits: Tensor, target: Tensor) -> Tensor:
    """A loss of the user's own that is not convex."""
    return torch.sin(2 * (logits - target)).sum() + logits[0] * logits.sum()


def _some_ignored(m: int, k: int) -> Tensor:
    labels = _labels(m, k)
    labels[1::3] = -1
    return labels


def _probabilities(m: int, k: int) -> Tensor:
    return torch.rand(m, k).double().softmax(1)


LOSSES = {
    "cross-entropy": Loss(lambda k: "cross-entropy", _cross_entropy, _labels),
    "weighted": Loss(
        lambda k: nn.CrossEntropyLoss(weight=torch.tensor(CLASS_WEIGHTS[:k])),
        _cross_entropy,
        _labels,
        lambda targets: torch.tensor(CLASS_WEIGHTS).double()[targets],
    ),
    "ignored": Loss(
        lambda k: nn.CrossEntropyLoss(ignore_index=-1),
        lambda logits, target: F.cross_entropy(logits, target.clamp(min=0)) * (target >= 0),
        _some_ignored,
        lambda targets: (targets >= 0).double(),
    ),
    "soft targets": Loss(lambda k: nn.CrossEntropyLoss(), F.cross_entropy, _probabilities),
    "smoothed": Loss(
        lambda k: nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda logits, target: F.cross_entropy(logits, target, label_smoothing=0.2),
        _labels,
    ),
    "robust": Loss(lambda k: "robust", _robust, _labels, convex=False),
    "mse": Loss(lambda k: nn.MSELoss(), F.mse_loss, _real),
    "tukey": Loss(lambda k: "tukey[c=1]", _tukey, _real, convex=False),
    "bce": Loss(
        lambda k: nn.BCEWithLogitsLoss(),
        F.binary_cross_entropy_with_logits,
        lambda m, k: torch.randint(0, 2, (m, k)).double(),
    ),
    "convex function": Loss(lambda k: quartic, quartic, _real),
    "wavy function": Loss(lambda k: wavy, wavy, _real, convex=False),
}


@dataclass(frozen=True)
class Case:
    """One small problem, drawn from a seed."""

    widths: tuple[int, ...] = (4, 3, 5, 3)
    activation: str = "tanh"
    loss: str = "cross-entropy"
    examples: int = 6
    seed: int = 0
    bias: bool = True

    def build(self) -> tuple[curvlab.Problem, Reference]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            layers: list[nn.Module] = []
            for a, b in zip(self.widths, self.widths[1:], strict=False):
                layers += [nn.Linear(a, b, bias=self.bias), ACTIVATIONS[self.activation]()]
            model = nn.Sequential(*layers[:-1]).double()
            loss = LOSSES[self.loss]
            inputs = torch.randn(self.examples, self.widths[0]).double()
            targets = loss.targets(self.examples, self.widths[-1])
        problem = curvlab.Problem(model, loss.criterion(self.widths[-1]), inputs, targets)
        return problem, Reference(model, loss.example, inputs, targets, loss.weights(targets))


def cases(losses: tuple[str, ...] = tuple(LOSSES), min_layers: int = 1) -> st.SearchStrategy[Case]:
    """Widths, depths, batch sizes, activations and seeds."""
    inner = st.lists(st.integers(1, 4), min_size=min_layers, max_size=3)
    return st.builds(
        lambda hidden, outputs, **fields: Case(widths=(*hidden, outputs), **fields),
        inner,
        st.integers(2, 4),
        activation=st.sampled_from(sorted(ACTIVATIONS)),
        loss=st.sampled_from(losses),
        examples=st.integers(1, 6),
        seed=st.integers(0, 10_000),
        bias=st.booleans(),
    )
