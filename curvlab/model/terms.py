"""Loss terms: what an example's loss is made of where the model gives several predictions per example.

The last dimension of the logits holds the outputs of one term, every dimension between batch and last counts
terms: (B, K) is one term per example, (B, T, K) are T. With the terms' weights c_ij (class weights, 0 where
`ignore_index` says so)

    c_i = Σ_j c_ij        ξ_i = Σ_j c_ij ξ_ij / c_i        E[f] = Σ_i c_i f_i / Σ_i c_i

so E[ξ] is torch's own mean over all terms. Inside an example a cotangent of term j carries c_ij / c_i for the
gradient, and its square root where outer products are summed over the terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from curvlab.criteria import Criterion
from curvlab.exceptions import NoRowsError, ProblemError
from curvlab.linalg.pending import require
from curvlab.model.float_copy import in_float

__all__ = ["AllWeightsZeroError", "LossTerms"]


class AllWeightsZeroError(NoRowsError):
    """A batch of which no example counts; a stream goes on without it."""

    def __init__(self) -> None:
        super().__init__("every example has weight 0 (ignore_index or class weights): no mean exists")


def _refuse_no_weight(total: list[float]) -> None:
    if not total[0] > 0:
        raise AllWeightsZeroError


@dataclass(frozen=True, eq=False)
class LossTerms:
    """The terms of a batch, in order: `logits` (B·T, K) and `targets` (B·T, …) are flattened over examples.

    `shape` is (B, *terms); `classes_first` says that the model's logits have classes in dimension 1, as
    torch's own cross-entropy has them.

    >>> from curvlab.criteria import CrossEntropy
    >>> terms = LossTerms.of(CrossEntropy(), torch.zeros(2, 3, 5), torch.zeros(2, 3).long())
    >>> terms.examples, terms.per_example, terms.outputs
    (2, 3, 5)
    """

    criterion: Criterion
    logits: Tensor
    targets: Tensor
    shape: tuple[int, ...]
    classes_first: bool

    @classmethod
    def of(
        cls, criterion: Criterion, logits: Tensor, targets: Tensor, *, torch_layout: bool = False
    ) -> LossTerms:
        """The terms of a batch's logits, without their graph; refuses shapes that do not go together.

        `torch_layout`: the criterion is a torch loss, whose classes are dimension 1 where both readings fit.
        """
        targets = in_float(targets)
        classes_first = _classes_first(criterion, logits, targets, torch_layout)
        values = logits.detach()
        if classes_first:
            values = values.movedim(1, -1)
        shape = tuple(values.shape[:-1])
        flat = values.reshape(prod(shape), values.shape[-1])
        # One term per example: the criterion checks the targets itself. Several: one target for each.
        fits = len(shape) == 1 or targets.shape[: len(shape)] == shape
        if not fits:
            raise ProblemError(
                f"logits of shape {tuple(logits.shape)} are {prod(shape[1:])} predictions per example, and "
                f"targets have shape {tuple(targets.shape)}; expected one target for each, of shape "
                f"{shape} (or {tuple(values.shape)} for outputs that are numbers)"
            )
        rest = targets.detach() if len(shape) == 1 else targets.detach().flatten(0, len(shape) - 1)
        criterion.check(flat, rest)
        return cls(criterion, flat, rest, shape, classes_first)

    @property
    def examples(self) -> int:
        """B, the number of examples."""
        return self.shape[0]

    @property
    def per_example(self) -> int:
        """T, the number of terms of an example."""
        return prod(self.shape[1:])

    @property
    def outputs(self) -> int:
        """K, the number of outputs of a term."""
        return self.logits.shape[1]

    @cached_property
    def _given_weights(self) -> Tensor | None:
        """What the criterion says of the terms' weights; None: all are 1."""
        return self.criterion.weights(self.logits, self.targets)

    @property
    def equal_weights(self) -> bool:
        """Whether all examples are known, without a look at values, to weigh the same."""
        return self._given_weights is None

    @cached_property
    def weights(self) -> Tensor:
        """c_ij, (B, T)."""
        given = self._given_weights
        flat = self.logits.new_ones(len(self.logits)) if given is None else given
        if given is not None or not len(flat):
            require([flat.sum()], _refuse_no_weight)
        return flat.reshape(self.examples, self.per_example)

    @cached_property
    def example_weights(self) -> Tensor:
        """c_i = Σ_j c_ij, (B,)."""
        return self.weights.sum(1)

    @cached_property
    def total_weight(self) -> Tensor:
        """Σ c_i: what the batch weighs in a mean over several."""
        return self.example_weights.sum()

    @cached_property
    def share(self) -> Tensor:
        """c_i / Σ c_i: the weight of each example in the mean."""
        return self.example_weights / self.total_weight

    @cached_property
    def within(self) -> Tensor:
        """c_ij / c_i, (B, T): the weight of each term in its example; zero where c_i is."""
        return self.weights / torch.where(self.example_weights > 0, self.example_weights, 1)[:, None]

    @cached_property
    def loss(self) -> Tensor:
        """E[ξ]."""
        losses = self.criterion.losses(self.logits, self.targets).reshape(self.examples, self.per_example)
        # An ignored term's loss may be anything, also not finite: it does not count.
        counted = torch.where(self.weights > 0, losses, 0)
        return (self.share[:, None] * self.within * counted).sum()

    def gradient_cotangent(self) -> Tensor:
        """∂ξ_i/∂logits as the model gives them: c_ij/c_i ∇ξ_ij."""
        return self.as_logits(self.criterion.gradients(self.logits, self.targets), self.within)

    def as_logits(self, cotangents: Tensor, within: Tensor) -> Tensor:
        """Cotangents of the terms, (…, B·T, K), times weights (B, T), in the shape of the model's logits."""
        draws = cotangents.shape[:-2]
        weighed = cotangents.reshape(*draws, self.examples, self.per_example, self.outputs)
        weighed = torch.where(within[..., None] > 0, weighed * within[..., None], 0)
        shaped = weighed.reshape(*draws, *self.shape, self.outputs)
        return shaped.movedim(-1, len(draws) + 1) if self.classes_first else shaped


def _classes_first(criterion: Criterion, logits: Tensor, targets: Tensor, torch_layout: bool) -> bool:
    """Whether classes are dimension 1: decided by the shapes, refused where a torch loss fits both."""
    if logits.ndim < 3 or targets.ndim != logits.ndim - 1 or targets.is_floating_point():
        return False
    last = tuple(targets.shape) == tuple(logits.shape[:-1])
    first = tuple(targets.shape) == (logits.shape[0], *logits.shape[2:])
    if last and first and torch_layout:
        raise ProblemError(
            f"logits of shape {tuple(logits.shape)} with targets of shape {tuple(targets.shape)}: the "
            f'classes may be the last dimension or dimension 1. Pass criterion="{criterion.name}" for '
            f"classes in the last one, with output=lambda z: z.transpose(1, 2) where they are dimension 1"
        )
    return first and not last
