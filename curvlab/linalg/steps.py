"""Steps: matrices that may be held in factors, to be added to a parameter.

    TensorStep     X                            as it is
    RowProduct     X = M H', H' = diag(√c) H    rows in the row space of a Gram factor
    Combination    X = c G + U Z                a multiple of a given matrix and a product of thin ones
    ViewStep       X_g for every matrix of a parameter's view, each a step of its own

Of a row product the coefficients M (n × m) are all that is computed with; the wide dimension of H appears in
the m × m Gram matrix K = H'H'ᵀ, which is the metric: ⟨M₁H', M₂H'⟩ = tr(M₁ K M₂ᵀ), and in the one product
that adds X to a parameter. A combination refers to G, which is not copied, and is added in place too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

import torch
from torch import Tensor

from curvlab.linalg.execution import FullPrecision
from curvlab.linalg.factors import COLUMN_CHUNK, GramFactor, frobenius_norm, max_abs
from curvlab.linalg.views import MatrixView

__all__ = ["Combination", "Matrix", "RowProduct", "Step", "TensorStep", "ViewStep", "add_step", "as_step"]


class Step(FullPrecision, ABC):
    """A tensor to be added to a parameter, formed only on demand."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of X."""

    @property
    @abstractmethod
    def borrowed(self) -> Tensor | None:
        """The tensor that the step refers to and has not copied; None where it holds all of its own."""

    @abstractmethod
    def form(self) -> Tensor:
        """X itself."""

    @abstractmethod
    def add_into(self, target: Tensor, scale: float) -> None:
        """target ← target + scale · X, in place; what is not formed is added without being formed."""

    @abstractmethod
    def magnitude(self) -> Tensor:
        """An upper bound of max|X|, with no matrix formed."""

    @abstractmethod
    def checksum(self) -> Tensor:
        """A scalar tensor that is finite only where what was computed of X is.

        The rows of a product, and the matrix and the basis of a combination, were there before.
        """

    def computed(self) -> tuple[Tensor, ...]:
        """Tensors that are finite only where what was computed of X is."""
        return (self.checksum(),)

    def parts(self) -> tuple[Tensor, ...]:
        """Tensors whose norms bound max|X|, and are finite only where what was computed of X is."""
        return (self.magnitude() + 0 * self.checksum(),)

    def bound(self, norms: Sequence[float]) -> float:
        """An upper bound of max|X| from the norms of `parts`."""
        return norms[0]


Matrix = Tensor | Step


def as_step(value: Matrix) -> Step:
    """A step as it is, a tensor as a step.

    >>> as_step(torch.tensor([[1.0, -3.0]])).magnitude().item()
    3.0
    """
    return TensorStep(value) if isinstance(value, Tensor) else value


@torch.no_grad()
def add_step(step: Step, target: Tensor, scale: float) -> None:
    """target ← target + scale · X, in place and in the target's own dtype.

    A target of lower precision than the step has no product of its own dtype: X is formed, and the sum is
    rounded once.

    >>> parameter = torch.ones(2, dtype=torch.bfloat16)
    >>> add_step(TensorStep(torch.ones(2)), parameter, 0.5)
    >>> parameter
    tensor([1.5000, 1.5000], dtype=torch.bfloat16)
    """
    if target.dtype in (torch.bfloat16, torch.float16):
        target.add_(step.form(), alpha=scale)
    else:
        step.add_into(target, scale)


@dataclass(frozen=True, eq=False)
class TensorStep(Step):
    """A tensor as it is.

    >>> parameter = torch.ones(2)
    >>> TensorStep(torch.ones(2)).add_into(parameter, 0.5)
    >>> parameter.tolist()
    [1.5, 1.5]
    """

    tensor: Tensor

    def computed(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def parts(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def borrowed(self) -> Tensor | None:
        return None

    def form(self) -> Tensor:
        return self.tensor

    @torch.no_grad()
    def add_into(self, target: Tensor, scale: float) -> None:
        target.add_(self.tensor, alpha=scale)

    def magnitude(self) -> Tensor:
        return max_abs(self.tensor)

    def checksum(self) -> Tensor:
        return self.tensor.sum()


@dataclass(frozen=True, eq=False)
class RowProduct(Step):
    """X = M diag(√c) H, formed only on demand.

    >>> x = RowProduct(torch.ones(2, 1), GramFactor(torch.ones(1, 3), torch.ones(1)))
    >>> x.shape, x.form().sum().item()
    ((2, 3), 6.0)
    """

    coefficients: Tensor
    gram: GramFactor

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.coefficients.shape[0], self.gram.size)

    @property
    def borrowed(self) -> Tensor | None:
        return self.gram.rows

    @property
    def left(self) -> Tensor:
        """M diag(√c), so that X = left @ H."""
        return self.coefficients * self.gram.root

    def form(self) -> Tensor:
        return self.left @ self.gram.rows

    @torch.no_grad()
    def add_into(self, target: Tensor, scale: float) -> None:
        target.addmm_(self.left, self.gram.rows, alpha=scale)

    def magnitude(self) -> Tensor:
        """‖M‖ √tr K."""
        return frobenius_norm(self.coefficients) * self.gram.trace().clamp(min=0).sqrt()

    def parts(self) -> tuple[Tensor, ...]:
        return self.coefficients, self.gram.root, self.gram.rows

    def computed(self) -> tuple[Tensor, ...]:
        return (self.coefficients,)

    def bound(self, norms: Sequence[float]) -> float:
        """‖M‖ ‖√c‖ ‖H‖."""
        return norms[0] * norms[1] * norms[2]

    def checksum(self) -> Tensor:
        return self.coefficients.sum()

    def square_norm(self) -> Tensor:
        """‖X‖², a chunk of columns at a time.

        tr(M K Mᵀ) would be cheaper, but loses half of the digits where M is large in the null space
        of K: it sees the difference of what cancels, not what is left.
        """
        left = self.left
        chunks = self.gram.rows.split(COLUMN_CHUNK, dim=1)
        return torch.stack([(left @ chunk).square().sum() for chunk in chunks]).sum()

    def dot(self, other: RowProduct) -> Tensor:
        """⟨X, Y⟩ for two matrices over the same rows."""
        return (self.coefficients * (other.coefficients @ self.gram.gram)).sum()


@dataclass(frozen=True, eq=False)
class Combination(Step):
    """X = c G + U Z, with c a scalar tensor, U of few columns and Z of as many rows; formed on demand.

    >>> x = Combination(torch.tensor(2.0), torch.ones(2, 3), torch.ones(2, 1), torch.ones(1, 3))
    >>> x.shape, x.form().sum().item()
    ((2, 3), 18.0)
    """

    scale: Tensor
    matrix: Tensor
    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    @property
    def borrowed(self) -> Tensor | None:
        return self.matrix

    def form(self) -> Tensor:
        return (self.scale * self.matrix).addmm_(self.left, self.right)

    @torch.no_grad()
    def add_into(self, target: Tensor, scale: float) -> None:
        target.addcmul_(self.scale, self.matrix, value=scale)
        target.addmm_(self.left, self.right, alpha=scale)

    def magnitude(self) -> Tensor:
        """|c| max|G| + ‖U‖ ‖Z‖."""
        thin = frobenius_norm(self.left) * frobenius_norm(self.right)
        return self.scale.abs() * max_abs(self.matrix) + thin

    def parts(self) -> tuple[Tensor, ...]:
        return self.scale, self.left, self.matrix, self.right

    def computed(self) -> tuple[Tensor, ...]:
        return self.scale, self.left

    def bound(self, norms: Sequence[float]) -> float:
        """|c| ‖G‖ + ‖U‖ ‖Z‖."""
        return norms[0] * norms[2] + norms[1] * norms[3]

    def checksum(self) -> Tensor:
        return self.scale + self.left.sum()


@dataclass(frozen=True, eq=False)
class ViewStep(Step):
    """The steps of the matrices that a parameter is seen as; each is added in place where strides allow it.

    >>> kernel = torch.zeros(1, 1, 2, 2)
    >>> ViewStep(MatrixView((1, 1, 2, 2)), (TensorStep(torch.ones(1, 4)),)).add_into(kernel, 0.5)
    >>> kernel.flatten().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """

    view: MatrixView
    steps: tuple[Step, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def borrowed(self) -> Tensor | None:
        """That of the first part: all parts see the same gradient."""
        return next((part.borrowed for part in self.steps if part.borrowed is not None), None)

    def form(self) -> Tensor:
        return self.view.parameter(torch.stack([part.form() for part in self.steps]))

    @torch.no_grad()
    def add_into(self, target: Tensor, scale: float) -> None:
        matrices = self.view.matrices_in_place(target)
        if matrices is None:
            target.add_(self.form(), alpha=scale)
            return
        for part, matrix in zip(self.steps, matrices, strict=True):
            part.add_into(matrix, scale)

    def magnitude(self) -> Tensor:
        return torch.stack([part.magnitude() for part in self.steps]).amax()

    def parts(self) -> tuple[Tensor, ...]:
        return tuple(tensor for step in self.steps for tensor in step.parts())

    def computed(self) -> tuple[Tensor, ...]:
        return tuple(tensor for step in self.steps for tensor in step.computed())

    def bound(self, norms: Sequence[float]) -> float:
        """The largest of the steps' own."""
        bounds, place = [], 0
        for step in self.steps:
            count = len(step.parts())
            bounds.append(step.bound(norms[place : place + count]))
            place += count
        return nan if any(isnan(bound) for bound in bounds) else max(bounds)

    def checksum(self) -> Tensor:
        return torch.stack([part.checksum() for part in self.steps]).sum()
