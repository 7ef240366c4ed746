"""A weight block that is diagonal on given vectors: X ↦ U [λ ∘ (Uᵀ X Q)] Qᵀ, for each matrix of its view.

With fewer vectors than dimensions the block is zero on what is orthogonal to them, so that

    (s C + τI)⁻¹ X = U [(Uᵀ X Q) / (s λ + τ)] Qᵀ + (X - U (Uᵀ X Q) Qᵀ) / τ
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.linalg.blocks import Block
from curvlab.linalg.views import MatrixView

__all__ = ["EigenBlock", "EigenPart"]


@dataclass(frozen=True, eq=False)
class EigenPart:
    """λ, (r, s), on the columns of U, (outputs, r), and Q, (inputs, s); None: the unit vectors."""

    outputs: int
    inputs: int
    values: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    def coordinates(self, x: Tensor) -> Tensor:
        """Uᵀ X Q."""
        inner = x if self.left is None else self.left.T @ x
        return inner if self.right is None else inner @ self.right

    def combination(self, x: Tensor) -> Tensor:
        """U X Qᵀ."""
        outer = x if self.left is None else self.left @ x
        return outer if self.right is None else outer @ self.right.T

    def tensors(self) -> dict[str, Tensor]:
        """What it is made of, by field."""
        named = {"values": self.values, "left": self.left, "right": self.right}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> EigenPart:
        """The same with `function` applied to each tensor."""
        mapped = {name: function(tensor) for name, tensor in self.tensors().items()}
        return EigenPart(self.outputs, self.inputs, **mapped)


@dataclass(frozen=True, eq=False, repr=False)
class EigenBlock(Block):
    """The block of a weight, one part for each matrix of its view.

    >>> part = EigenPart(1, 2, torch.tensor([[2.0, 3.0]]))
    >>> (EigenBlock(MatrixView((1, 2)), (part,)) @ torch.ones(1, 2)).tolist()
    [[2.0, 3.0]]
    """

    kind: ClassVar[str] = "eigen"
    view: MatrixView
    parts: tuple[EigenPart, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def example(self) -> Tensor:
        return self.parts[0].values

    @property
    def form(self) -> str:
        return "diagonal in eigenvectors"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors().values())

    def _by_part(self, x: Tensor, function: Callable[[EigenPart, Tensor], Tensor]) -> Tensor:
        pairs = zip(self.parts, self.view.matrices(x), strict=True)
        return self.view.parameter(torch.stack([function(part, matrix) for part, matrix in pairs]))

    def matmul(self, x: Tensor) -> Tensor:
        return self._by_part(x, lambda part, m: part.combination(part.values * part.coordinates(m)))

    def solve(self, x: Tensor, scale: float, shift: float) -> Tensor:
        """(s C + τI)⁻¹ X."""

        def inverse(part: EigenPart, matrix: Tensor) -> Tensor:
            inner = part.coordinates(matrix)
            outside = (matrix - part.combination(inner)) / shift
            return part.combination(inner / (scale * part.values + shift)) + outside

        return self._by_part(x, inverse)

    def smallest(self) -> Tensor:
        """The smallest λ."""
        return torch.stack([part.values.amin() for part in self.parts]).amin()

    def map(self, function: Callable[[Tensor], Tensor]) -> EigenBlock:
        """The same with `function` applied to each tensor."""
        return EigenBlock(self.view, tuple(part.map(function) for part in self.parts))

    def trace(self) -> Tensor:
        return torch.stack([part.values.sum() for part in self.parts]).sum()

    def diagonal(self) -> Tensor:
        found = []
        for part in self.parts:
            left = part.values if part.left is None else part.left.square() @ part.values
            found.append(left if part.right is None else left @ part.right.square().T)
        return self.view.parameter(torch.stack(found))

    def frobenius_norm(self) -> Tensor:
        return torch.linalg.vector_norm(torch.cat([part.values.flatten() for part in self.parts]))

    def eigvalsh(self, max_bytes: int = 0) -> Tensor:
        """All eigenvalues, ascending; nothing is formed for them."""
        values = torch.cat([part.values.flatten() for part in self.parts])
        return torch.cat([values.new_zeros(self.numel - len(values)), values]).sort().values
