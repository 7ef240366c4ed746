"""Criteria of p = softmax(h): cross-entropy, and the paper's robust criterion.

Cross-entropy has class weights, ignored labels, label smoothing and soft targets.

With p = softmax(h) and any non-negative row q with sum s,

    ξ = -Σ_c q_c log p_c,    ∇ξ = s p - q,    ∇²ξ = s (diag(p) - p pᵀ).

What q and c_i are, so that Σ c_i ξ_i / Σ c_i is torch's mean (w class weights, ε smoothing):

- class indices: c_i = w_{y_i}, q_i = (1-ε) e_{y_i} + (ε/K) w / w_{y_i}, as torch weights the smoothed
  part of every class by its own weight but divides by Σ w_{y_i} alone;
- soft targets t: c_i = 1, q_i = w ⊙ ((1-ε) t_i + ε/K), as torch divides by the number of examples.

The covariance diag(p) - p pᵀ of probabilities is a graph Laplacian: its rows sum to zero and its off-diagonal
entries are -p_j p_k. Taking the diagonal from the rows, not from p_j - p_j², keeps relative accuracy where
p_j is close to one.

The robust criterion is bounded and not convex: ξ = 1 / (1 + exp(δ (yᵀ softmax(h) - ε))).

With u = p_y, φ(u) = sigmoid(-δ (u - ε)) and a = e_y - p,

    ∇u = u a,    ∇²u = u (a aᵀ - (diag(p) - p pᵀ)),
    ∇ξ = φ' u a,    ∇²ξ = (φ'' u² + φ' u) a aᵀ - φ' u (diag(p) - p pᵀ),

where φ' = -δ φ (1-φ) and φ'' = δ² φ (1-φ) (1-2φ).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.criteria.base import (
    Criterion,
    as_weights,
    check_labels,
    check_logits,
    check_positive,
    check_real_targets,
)
from curvlab.exceptions import ProblemError, SpecError
from curvlab.linalg.execution import Limits, deferring, require
from curvlab.measure.device import readable

NONE_IGNORED = Limits(
    "a label is `ignore_index`, which captured steps do not take: whether one is decides what is computed",
    0,
    0,
)

__all__ = [
    "CrossEntropy",
    "Robust",
    "covariance_products",
    "covariances",
    "draw",
    "one_hot",
    "weighted_covariance",
]


def one_hot(labels: Tensor, logits: Tensor) -> Tensor:
    """Rows e_{y_i} in the logits' dtype; unlike torch's one_hot it never reads values back."""
    rows = torch.zeros(labels.shape[0], logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return rows.scatter_(1, labels.long()[:, None], 1.0)


def covariance_products(probabilities: Tensor, vectors: Tensor) -> Tensor:
    """(diag(p) - p pᵀ) v for each row."""
    return probabilities * (vectors - (probabilities * vectors).sum(-1, keepdim=True))


def covariances(probabilities: Tensor) -> Tensor:
    """diag(p_i) - p_i p_iᵀ for each row, (m, K, K)."""
    return _laplacian(probabilities[:, :, None] * probabilities[:, None, :])


def weighted_covariance(probabilities: Tensor, weights: Tensor) -> Tensor:
    """Σ_i weights_i (diag(p_i) - p_i p_iᵀ), (K, K).

    >>> weighted_covariance(torch.tensor([[0.5, 0.5]]), torch.tensor([4.0]))
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    products = (probabilities * weights[:, None]).T @ probabilities
    return _laplacian((products + products.T) / 2)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Class indices by inverse cumulative distribution from one uniform number per row.

    >>> draw(torch.tensor([[0.2, 0.0, 0.8]]).expand(3, 3), torch.tensor([0.1, 0.3, 0.9]))
    tensor([0, 2, 2])
    """
    cumulative = probabilities.cumsum(-1)
    # The sum may miss one by rounding: scaled by it, no number points past the last class.
    positions = uniforms[:, None].to(cumulative.dtype) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, positions).squeeze(-1)


def _laplacian(weights: Tensor) -> Tensor:
    """The matrix with off-diagonal entries -weights and rows that sum to zero."""
    matrix = -weights
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal.zero_()
    diagonal.copy_(-matrix.sum(-1))
    return matrix


@dataclass(frozen=True)
class CrossEntropy(Criterion):
    """Cross-entropy of softmax(logits) against class indices (m,) or probabilities (m, K).

    `weight` may be given as a tensor; it is kept as a tuple. A row whose label is `ignore_index` has
    c_i = 0 and loss 0. If that label is also a class, derivatives are still those of the class: a label
    drawn from the model may be any class, and its gradient counts.

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    >>> CrossEntropy().gradients(logits, torch.tensor([0, 1]))
    tensor([[-0.5000,  0.5000],
            [ 0.5000, -0.5000]])
    """

    name: ClassVar[str] = "cross-entropy"
    convex: ClassVar[bool] = True

    weight: tuple[float, ...] | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", as_weights(self.weight, "weight"))

    @property
    def likelihood(self) -> bool:
        """Label smoothing takes the gradients of drawn labels away from the likelihood's."""
        return self.label_smoothing == 0.0

    def check(self, logits: Tensor, targets: Tensor) -> None:
        """Raise `ProblemError` unless targets are class indices (m,) or probabilities (m, K)."""
        check_logits(logits, targets)
        self._check_settings(logits.shape[1])
        if targets.ndim == 2 and targets.is_floating_point():
            self._check_soft(logits, targets)
        elif targets.ndim == 2 and targets.shape[1] == logits.shape[1] > 1:
            raise ProblemError(
                f"`targets` has shape {tuple(targets.shape)} and dtype {targets.dtype}; expected class "
                f"indices of shape ({logits.shape[0]},), or floating-point probabilities "
                f"(use `targets.to({logits.dtype})`)"
            )
        else:
            check_labels(logits, targets, self.ignore_index)
            self._check_smoothing()

    def weights(self, logits: Tensor, targets: Tensor) -> Tensor | None:
        """Give c_i: w_{y_i}, 0 where the label is ignored; all ones for soft targets."""
        if targets.ndim == 2:
            return None
        ignored = self._is_ignored(targets)
        class_weight = self._class_weight(logits)
        if class_weight is None:
            # All ones is by far the usual case, and None spares every statistic a multiplication.
            if deferring():
                require([ignored.any()], lambda _: None, NONE_IGNORED)
                return None
            none_ignored = not readable(targets) or not bool(ignored.any())
            return None if none_ignored else (~ignored).to(logits.dtype)
        return class_weight[self._classes(logits, targets)].masked_fill(ignored, 0.0)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ξ_i = -Σ_c q_ic log p_ic."""
        losses = -(self._target_rows(logits, targets) * logits.log_softmax(-1)).sum(-1)
        return losses if targets.ndim == 2 else losses.masked_fill(self._is_ignored(targets), 0.0)

    def gradients(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give s_i p_i - q_i."""
        rows = self._target_rows(logits, targets)
        return rows.sum(-1, keepdim=True) * logits.softmax(-1) - rows

    def hessians(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give s_i (diag(p_i) - p_i p_iᵀ)."""
        return self._masses(logits, targets)[:, None, None] * covariances(logits.softmax(-1))

    def mean_hessian(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Give Σ_i weights_i s_i (diag(p_i) - p_i p_iᵀ) from one (K, m) by (m, K) product."""
        return weighted_covariance(logits.softmax(-1), weights * self._masses(logits, targets))

    def hessian_products(self, logits: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """Give s_i p_i ⊙ (v_i - p_iᵀ v_i)."""
        return self._masses(logits, targets)[:, None] * covariance_products(logits.softmax(-1), vectors)

    def hessian_factors(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Columns √(s p_c) (e_c - p), since Σ_c p_c (e_c - p)(e_c - p)ᵀ = diag(p) - ppᵀ."""
        p = logits.softmax(-1)
        roots = (self._masses(logits, targets)[:, None] * p).sqrt()
        identity = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
        return roots.T[:, :, None] * (identity[:, None, :] - p), None

    def draw_hessian(
        self, logits: Tensor, targets: Tensor, signs: Tensor, negative_signs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """√(s p) ⊙ ε - p Σ_c √(s p_c) ε_c, with no matrix of K × K."""
        p = logits.softmax(-1)
        drawn = (self._masses(logits, targets)[:, None] * p).sqrt() * signs
        return drawn - p * drawn.sum(-1, keepdim=True), None

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Class indices from softmax(logits), whose weight in the mean stays that of the given target."""
        return draw(logits.softmax(-1), uniforms[:, 0])

    def label_factor(self, logits: Tensor) -> Tensor:
        """v_c = √p_c ∇ξ(y = c)."""
        p = logits.softmax(-1)
        rows = self._label_rows(logits, torch.arange(logits.shape[1], device=logits.device))
        return p.sqrt().T[:, :, None] * (rows.sum(-1)[:, None, None] * p - rows[:, None, :])

    def predictions(self, logits: Tensor) -> Tensor:
        """Give the most probable class."""
        return logits.argmax(-1)

    def _masses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """s_i = Σ_c q_ic, (m,)."""
        return self._target_rows(logits, targets).sum(-1)

    def _target_rows(self, logits: Tensor, targets: Tensor) -> Tensor:
        """q_i, (m, K)."""
        if targets.ndim == 1:
            return self._label_rows(logits, targets)
        rows = (1 - self.label_smoothing) * targets.to(logits.dtype) + self.label_smoothing / logits.shape[1]
        class_weight = self._class_weight(logits)
        return rows if class_weight is None else rows * class_weight

    def _label_rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Rows q of class indices: zero where the label is no class (only `ignore_index` may be none)."""
        classes = self._classes(logits, labels)
        rows = one_hot(classes, logits)
        if self.label_smoothing:
            class_weight = self._class_weight(logits)
            ratio = 1.0 if class_weight is None else class_weight / class_weight[classes][:, None]
            rows = (1 - self.label_smoothing) * rows + self.label_smoothing / logits.shape[1] * ratio
        return rows * (labels == classes)[:, None]

    def _is_ignored(self, labels: Tensor) -> Tensor:
        # In a narrow dtype the comparison would wrap `ignore_index`.
        return labels.long() == self.ignore_index

    def _classes(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Labels as indices that are safe to look up, also where they are ignored."""
        return labels.long().clamp(0, logits.shape[1] - 1)

    def _class_weight(self, logits: Tensor) -> Tensor | None:
        if self.weight is None:
            return None
        return torch.tensor(self.weight, dtype=logits.dtype, device=logits.device)

    def _check_settings(self, outputs: int) -> None:
        if self.weight is not None and len(self.weight) != outputs:
            raise ProblemError(
                f"`weight` has {len(self.weight)} class weights; expected {outputs}, one an output"
            )
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ProblemError(f"`label_smoothing` is {self.label_smoothing}; expected a number from 0 to 1")

    def _check_smoothing(self) -> None:
        if self.label_smoothing and self.weight is not None and 0.0 in self.weight:
            raise ProblemError(
                f"`weight` is 0 for class {self.weight.index(0.0)} while `label_smoothing` is "
                f"{self.label_smoothing}: torch then counts that class's smoothed loss but not the example, "
                "which is no weighted mean of losses. Use `ignore_index`, or a small positive weight"
            )

    def _check_soft(self, logits: Tensor, targets: Tensor) -> None:
        check_real_targets(logits, targets)
        if self.ignore_index >= 0:
            raise ProblemError(
                f"`ignore_index` is {self.ignore_index} but `targets` are probabilities; "
                "leave it at -100, or give class indices"
            )

        def judge(found: list[float]) -> None:
            if any(found):
                raise ProblemError("`targets` has negative entries; expected probabilities")

        require([(targets < 0).any()], judge, Limits("a probability is negative", 0, 0))


@dataclass(frozen=True)
class Robust(Criterion):
    """A loss between 0 and 1 that stops caring about examples it cannot win; targets are class indices.

    >>> Robust(delta=5.0, epsilon=0.5).losses(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.5000])
    """

    name: ClassVar[str] = "robust"
    convex: ClassVar[bool] = False
    likelihood: ClassVar[bool] = False

    delta: float = 5.0
    epsilon: float = 0.2

    def __post_init__(self) -> None:
        check_positive(self.name, delta=self.delta)
        if not math.isfinite(self.epsilon):
            raise SpecError(f"epsilon={self.epsilon} of `robust`: expected a finite number")

    def check(self, logits: Tensor, targets: Tensor) -> None:
        """Raise `ProblemError` unless targets are class indices (m,)."""
        check_logits(logits, targets)
        check_labels(logits, targets)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give ξ_i = φ(p_{y_i})."""
        label_probability = logits.softmax(-1).gather(1, targets.long()[:, None]).squeeze(1)
        return self._phi(label_probability)[0]

    def gradients(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Give φ' u a."""
        _, a, _, covariance_coefficient = self._terms(logits, targets)
        return -covariance_coefficient[:, None] * a

    def hessian_products(self, logits: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """Give ((φ'' u² + φ' u) a aᵀ - φ' u (diag(p) - p pᵀ)) v."""
        p, a, outer_coefficient, covariance_coefficient = self._terms(logits, targets)
        outer = outer_coefficient[:, None] * a * (a * vectors).sum(-1, keepdim=True)
        return outer + covariance_coefficient[:, None] * covariance_products(p, vectors)

    def mean_hessian(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Give the weighted sum of Hessians from two (K, m) by (m, K) products."""
        p, a, outer_coefficient, covariance_coefficient = self._terms(logits, targets)
        outer = (a * (weights * outer_coefficient)[:, None]).T @ a
        return (outer + outer.T) / 2 + weighted_covariance(p, weights * covariance_coefficient)

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Class indices from softmax(logits); the criterion is not their likelihood."""
        return draw(logits.softmax(-1), uniforms[:, 0])

    def label_factor(self, logits: Tensor) -> Tensor:
        """v_c = √p_c ∇ξ(y = c) = √p_c φ'(p_c) p_c (e_c - p)."""
        p = logits.softmax(-1)
        _, slope, _ = self._phi(p)
        identity = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
        return (p.sqrt() * slope * p).T[:, :, None] * (identity[:, None, :] - p)

    def predictions(self, logits: Tensor) -> Tensor:
        """Give the most probable class."""
        return logits.argmax(-1)

    def _phi(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """φ, φ' and φ'' at u."""
        phi = torch.sigmoid(-self.delta * (u - self.epsilon))
        spread = phi * torch.sigmoid(self.delta * (u - self.epsilon))
        return phi, -self.delta * spread, self.delta**2 * spread * (1 - 2 * phi)

    def _terms(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """p, a and the coefficients of a aᵀ and of the covariance in ∇²ξ."""
        p = logits.softmax(-1)
        labels = one_hot(targets, logits)
        u = (labels * p).sum(-1)
        _, slope, bend = self._phi(u)
        return p, labels - p, u * (bend * u + slope), -slope * u
