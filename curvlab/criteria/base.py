"""What a criterion is: the loss ξ of one example as a function of its logits, with two derivatives.

Everything here is per example and unweighted; the mean over a batch is

    E[f] = Σ_i c_i f_i / Σ_i c_i

with c_i from `weights`. For every criterion curvlab ships, E[ξ] is torch's own mean-reduced loss.
In shapes, m is the number of examples and K the number of outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.exceptions import ProblemError
from curvlab.linalg import eigh

__all__ = ["Criterion"]


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
        """Σ_i weights_i ∇²ξ_i, (K, K), without holding one matrix an example."""

    def hessians(self, logits: Tensor, targets: Tensor) -> Tensor:
        """∇²ξ_i, (m, K, K)."""
        m, k = logits.shape
        basis = torch.eye(k, dtype=logits.dtype, device=logits.device)[:, None, :].expand(k, m, k)
        return self.hessian_products(logits, targets, basis).movedim(0, 1)

    def hessian_factors(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """L⁺ and L⁻, each (columns, m, K), with ∇²ξ = L⁺L⁺ᵀ - L⁻L⁻ᵀ; None where nothing is negative."""
        values, vectors = eigh(self.hessians(logits, targets))
        columns = vectors.permute(2, 0, 1)
        plus = columns * values.clamp(min=0).sqrt().T[..., None]
        rounding = 8 * torch.finfo(values.dtype).eps * values.abs().amax()
        if self.convex or not bool((values < -rounding).any()):
            return plus, None
        return plus, columns * (-values).clamp(min=0).sqrt().T[..., None]

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
