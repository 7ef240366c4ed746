"""What a criterion is: the loss ξ of one example as a function of its logits, with two derivatives.

Everything here is per example and unweighted; the mean over a batch is

    E[f] = Σ_i c_i f_i / Σ_i c_i

with c_i from `weights`. For every criterion curvlab ships, E[ξ] is torch's own mean-reduced loss.
In shapes, m is the number of examples and K the number of outputs.

The checks of logits and targets are shared by the criteria; each error names the argument. Values are read
only where a tensor has some (`curvlab.measure.device.readable`); shapes always.

`LossTerms` are what an example's loss is made of where the model gives several predictions per example.

The last dimension of the logits holds the outputs of one term, every dimension between batch and last counts
terms: (B, K) is one term per example, (B, T, K) are T. With the terms' weights c_ij (class weights, 0 for
`ignore_index`)

    c_i = Σ_j c_ij        ξ_i = Σ_j c_ij ξ_ij / c_i        E[f] = Σ_i c_i f_i / Σ_i c_i

so E[ξ] is torch's own mean over all terms. Inside an example a cotangent of term j carries c_ij / c_i for the
gradient, and its square root where outer products are summed over the terms.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.exceptions import NoRowsError, ProblemError, SpecError
from curvlab.linalg import eigh
from curvlab.linalg.execution import LEAST, Limits, in_float, require, would_read
from curvlab.measure.device import readable

__all__ = [
    "AllWeightsZeroError",
    "Criterion",
    "LossTerms",
    "as_weights",
    "check_labels",
    "check_logits",
    "check_positive",
    "check_real_targets",
]


class Criterion(ABC):
    """A loss of the logits, per example; subclasses are frozen dataclasses.

    >>> from curvlab.criteria import MSE
    >>> logits, targets = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0]])
    >>> MSE().losses(logits, targets), MSE().gradients(logits, targets)
    (tensor([5.]), tensor([[1., 3.]]))
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def convex(self) -> bool | None:
        """Whether ξ is convex in the logits; None: unknown, ask the output Hessian's eigenvalues."""

    @property
    @abstractmethod
    def likelihood(self) -> bool:
        """Whether ξ is the negative log-likelihood of the labels that `sample` draws."""

    @abstractmethod
    def check(self, logits: Tensor, targets: Tensor) -> None:
        """Raise `ProblemError` unless shapes, dtypes, devices and values go together."""

    def check_targets(self, logits: Tensor, targets: Tensor) -> None:
        """What of `check` is quick enough for every batch of a training: of a known criterion, all of it."""
        self.check(logits, targets)

    def weights(self, logits: Tensor, targets: Tensor) -> Tensor | None:
        """c_i, (m,), not normalised; None means that all are one."""
        return None

    @abstractmethod
    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """ξ_i, (m,)."""

    @abstractmethod
    def gradients(self, logits: Tensor, targets: Tensor) -> Tensor:
        """∇ξ_i, (m, K)."""

    @abstractmethod
    def hessian_products(self, logits: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """∇²ξ_i v_i for `vectors` of shape (..., m, K)."""

    @abstractmethod
    def mean_hessian(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Σ_i weights_i ∇²ξ_i, (K, K), without holding one matrix per example."""

    def hessians(self, logits: Tensor, targets: Tensor) -> Tensor:
        """∇²ξ_i, (m, K, K)."""
        m, k = logits.shape
        basis = torch.eye(k, dtype=logits.dtype, device=logits.device)[:, None, :].expand(k, m, k)
        return self.hessian_products(logits, targets, basis).movedim(0, 1)

    def hessian_factors(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """L⁺ and L⁻, each (columns, m, K), with ∇²ξ = L⁺L⁺ᵀ - L⁻L⁻ᵀ; None where nothing is negative.

        An eigenvalue that is rounding counts as zero: its root is half of all digits, at which a draw would
        depend on the batch that an example is in. For the same reason L⁺ and L⁻ are the symmetric roots of
        the two parts, which do not turn with the eigenvectors of eigenvalues that nearly coincide.
        """
        values, vectors = eigh(self.hessians(logits, targets))
        magnitudes = values.abs()
        rounding = 16 * values.shape[-1] * torch.finfo(values.dtype).eps * magnitudes.amax(-1, keepdim=True)
        values = torch.where(magnitudes > rounding, values, 0)
        plus = _symmetric_root(values.clamp(min=0), vectors)
        if self.convex or not bool((values < 0).any()):
            return plus, None
        return plus, _symmetric_root((-values).clamp(min=0), vectors)

    def draw_hessian(
        self, logits: Tensor, targets: Tensor, signs: Tensor, negative_signs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """L⁺ε and L⁻ε, each (m, K), for signs ε of the columns, (m, K)."""
        plus, minus = self.hessian_factors(logits, targets)
        drawn = torch.einsum("mr,rmk->mk", signs, plus)
        return drawn, None if minus is None else torch.einsum("mr,rmk->mk", negative_signs, minus)

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Targets drawn from the model's own prediction; `uniforms` in (0, 1), (m, K), decides the draw."""
        raise self._has_no_labels()

    def label_factor(self, logits: Tensor) -> Tensor:
        """Vectors v of shape (K, m, K) with Σ_r v_r v_rᵀ = E_{y ~ model}[∇ξ ∇ξᵀ] an example, exactly."""
        raise self._has_no_labels()

    def predictions(self, logits: Tensor) -> Tensor | None:
        """What the model answers, to compare with targets for accuracy; None in regression."""
        return None

    def _has_no_labels(self) -> ProblemError:
        return ProblemError(
            f"criterion `{self.name}` has no distribution of labels, so Fisher kinds `mc` and `exact` do not "
            "exist for it; use `fisher[kind=empirical]`, or a FunctionCriterion with a `sampler` for `mc`"
        )


def _symmetric_root(values: Tensor, vectors: Tensor) -> Tensor:
    """The columns of U √Λ Uᵀ, (columns, m, K)."""
    return torch.einsum("mir,mr,mjr->jmi", vectors, values.sqrt(), vectors)


def as_weights(value: Tensor | Iterable[float] | float | None, argument: str) -> tuple[float, ...] | None:
    """Weights as a plain tuple, which compares, hashes and belongs to no device.

    >>> as_weights(torch.tensor([1.0, 0.5]), "weight")
    (1.0, 0.5)
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        value = _values(value, argument)
    weights = (float(value),) if isinstance(value, int | float) else tuple(float(entry) for entry in value)
    if not all(math.isfinite(entry) and entry >= 0 for entry in weights):
        raise ProblemError(f"`{argument}` is {weights}; expected finite, non-negative weights")
    return weights


def check_positive(criterion: str, **fields: float) -> None:
    """Raise `SpecError` unless every field is a finite number above zero.

    >>> check_positive("robust", delta=5.0)
    """
    for name, value in fields.items():
        if not 0 < value < math.inf:
            raise SpecError(f"{name}={value} of `{criterion}`: expected a finite number above 0")


def _values(weights: Tensor, argument: str) -> list[float]:
    if weights.numel() != (weights.shape[-1] if weights.ndim else 1):
        raise ProblemError(
            f"`{argument}` has shape {tuple(weights.shape)}; expected one weight for each output. "
            "Weights that differ between examples are not supported: they depend on the batch"
        )
    if not readable(weights):
        raise ProblemError(f"`{argument}` is a meta or fake tensor, without values; give numbers")
    return [float(entry) for entry in weights.detach().flatten().tolist()]


def check_logits(logits: Tensor, targets: Tensor) -> None:
    """Logits are (m, K) and floating; targets have a row for each and live on the same device."""
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ProblemError(
            f"the model's output has shape {tuple(logits.shape)} and dtype {logits.dtype}; "
            "expected floating-point logits of shape (examples, outputs)"
        )
    if not isinstance(targets, Tensor):
        raise ProblemError(f"`targets` is a {type(targets).__name__}; expected a tensor")
    if targets.device != logits.device:
        raise ProblemError(f"`targets` is on {targets.device}, the logits on {logits.device}; move one")
    if targets.ndim == 0 or targets.shape[0] != logits.shape[0]:
        raise ProblemError(
            f"`targets` has shape {tuple(targets.shape)}; expected one target for each of the "
            f"{logits.shape[0]} examples"
        )


def check_labels(logits: Tensor, targets: Tensor, ignore_index: int | None = None) -> None:
    """Targets are (m,) class indices below K, or `ignore_index`."""
    m, k = logits.shape
    if targets.shape != (m,):
        advice = "; use `targets.squeeze(1)`" if targets.shape == (m, 1) else ""
        raise ProblemError(
            f"`targets` has shape {tuple(targets.shape)}; expected class indices of shape ({m},){advice}"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ProblemError(
            f"`targets` has dtype {targets.dtype}; expected integer class indices (use `targets.long()`)"
        )
    if not readable(targets):
        would_read()
        return
    labels = targets.long()  # in a narrow dtype a comparison would wrap K or ignore_index
    outside = (labels < 0) | (labels >= k)
    if ignore_index is not None:
        outside &= labels != ignore_index

    def judge(found: list[float]) -> None:
        if not any(found):
            return
        row = int(outside.nonzero()[0])
        ignored = "" if ignore_index is None else f" or ignore_index={ignore_index}"
        raise ProblemError(
            f"`targets` has label {int(labels[row])} at example {row}; expected 0 to {k - 1}{ignored}, "
            f"as the model has {k} outputs"
        )

    require([outside.any()], judge, Limits(f"a label is outside of 0 to {k - 1}", 0, 0))


def check_real_targets(logits: Tensor, targets: Tensor) -> None:
    """Targets are finite floating-point numbers in the logits' own shape."""
    m, k = logits.shape
    if targets.shape != (m, k):
        advice = "; use `targets.unsqueeze(1)`" if targets.shape == (m,) and k == 1 else ""
        raise ProblemError(
            f"`targets` has shape {tuple(targets.shape)}; expected ({m}, {k}), one number an output{advice}"
        )
    if not targets.is_floating_point():
        raise ProblemError(
            f"`targets` has dtype {targets.dtype}; expected floating-point numbers "
            f"(use `targets.to({logits.dtype})` if they are meant as numbers)"
        )

    def judge(found: list[float]) -> None:
        if any(found):
            row = int((~torch.isfinite(targets)).any(1).nonzero()[0])
            raise ProblemError(f"`targets` is not finite at example {row}; expected finite numbers")

    require([torch.isfinite(targets).logical_not().any()], judge, Limits("a target is not finite", 0, 0))


class AllWeightsZeroError(NoRowsError):
    """A batch of which no example counts; a stream goes on without it."""

    def __init__(self) -> None:
        super().__init__("every example has weight 0 (ignore_index or class weights): no mean exists")


WEIGHTED = Limits("every example has weight 0", low=LEAST)


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
            require([flat.sum()], _refuse_no_weight, WEIGHTED)
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
        found = self.criterion.losses(self.logits, self.targets)
        if self.equal_weights and self.per_example == 1:
            return (self.share * found).sum()
        losses = found.reshape(self.examples, self.per_example)
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
