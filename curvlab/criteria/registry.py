"""A criterion from what users give: a name, a torch loss, or a function of one example.

The registry is behind `criterion="robust[delta=5]"` and `--criterion`; other packages add theirs through the
entry-point group `curvlab.criteria`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.loss import _Loss

from curvlab.criteria.base import Criterion, as_weights
from curvlab.criteria.function import FunctionCriterion
from curvlab.criteria.separable import BCE, MSE, Tukey
from curvlab.criteria.softmax import CrossEntropy, Robust
from curvlab.exceptions import ProblemError
from curvlab.specs import Registry

__all__ = ["criteria", "criterion_from", "criterion_named"]


def criterion_from(obj: object) -> Criterion:
    """The criterion of a Criterion, a torch loss, or a function of (logits, target) of one example.

    >>> criterion_from(nn.CrossEntropyLoss(label_smoothing=0.1))
    CrossEntropy(weight=None, ignore_index=-100, label_smoothing=0.1)
    """
    if isinstance(obj, Criterion):
        return obj
    if isinstance(obj, type):
        raise ProblemError(f"`criterion` is the class {obj.__name__}; expected an instance: {obj.__name__}()")
    if isinstance(obj, _Loss):
        return _from_loss(obj)
    if isinstance(obj, Hashable) and obj in FUNCTIONS:
        return FUNCTIONS[obj]
    if callable(obj):
        name = getattr(obj, "__name__", type(obj).__name__)
        return FunctionCriterion(obj, name=name, batched=obj)
    raise ProblemError(
        f"`criterion` is {obj!r}; expected a curvlab Criterion, a torch loss such as nn.CrossEntropyLoss(), "
        "or a function from (logits, target) of one example to a scalar"
    )


FUNCTIONS: dict[object, Criterion] = {
    functional.cross_entropy: CrossEntropy(),
    functional.mse_loss: MSE(),
    functional.binary_cross_entropy_with_logits: BCE(),
}


@dataclass(frozen=True)
class OneExample:
    """A torch loss on a batch of one: with a mean reduction, the term that the batch's mean averages."""

    loss: _Loss

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        value: Tensor = self.loss(logits[None], target[None])
        return value


def _from_loss(loss: _Loss) -> Criterion:
    name = type(loss).__name__
    if loss.reduction not in ("mean", "batchmean"):
        raise ProblemError(
            f"`criterion` is {name} with reduction='{loss.reduction}'; curvlab analyses the mean loss: use "
            "reduction='mean' (and scale the result by the number of examples if you need the sum)"
        )
    for kind, convert in CONVERSIONS.items():
        # A subclass with a forward of its own is another function.
        if isinstance(loss, kind) and type(loss).forward is kind.forward:
            return convert(loss)
    if isinstance(loss, nn.NLLLoss) and loss.weight is not None:
        raise ProblemError(
            "`criterion` is NLLLoss with class weights; use nn.CrossEntropyLoss with the same weights, "
            "which on log-probabilities has the same value"
        )
    return FunctionCriterion(OneExample(loss), name=name, batched=loss)


def _cross_entropy(loss: nn.CrossEntropyLoss) -> CrossEntropy:
    return CrossEntropy(as_weights(loss.weight, "weight"), loss.ignore_index, loss.label_smoothing)


def _bce(loss: nn.BCEWithLogitsLoss) -> BCE:
    return BCE(as_weights(loss.weight, "weight"), as_weights(loss.pos_weight, "pos_weight"))


CONVERSIONS: dict[type[_Loss], Callable[..., Criterion]] = {
    nn.CrossEntropyLoss: _cross_entropy,
    nn.MSELoss: lambda _: MSE(),
    nn.BCEWithLogitsLoss: _bce,
}


criteria: Registry[Criterion] = Registry("criterion", "curvlab.criteria")
criteria.register("cross-entropy", CrossEntropy)
criteria.register("robust", Robust)
criteria.register("mse", MSE)
criteria.register("tukey", Tukey)
criteria.register("bce", BCE)


def criterion_named(criterion: str | Any) -> Criterion:
    """A criterion from its name, a torch loss, a function or a `Criterion`.

    >>> criterion_named("robust[delta=3]").delta
    3.0
    """
    return criteria.make(criterion) if isinstance(criterion, str) else criterion_from(criterion)
