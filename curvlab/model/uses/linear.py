"""Weights that meet the last dimension of their input: linear maps and bilinear ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import ClassVar, Self

from torch import Tensor

from curvlab.linalg.views import Layout
from curvlab.model.uses.base import WeightUse

__all__ = ["BilinearUse", "LinearUse"]


@dataclass(frozen=True, eq=False)
class LinearUse(WeightUse):
    """z = W h for the last dimension of the input, whatever dimensions lie before it.

    `transposed` where the weight is Wᵀ, as in `x @ weight`. `parts` where the outputs fall into parts of
    equal size that are to have an output factor each, as the packed in-projection of self-attention, whose
    `in_proj_weight` is (3·d, d): all parts see the same h.

    >>> import torch
    >>> use = LinearUse(torch.ones(5, 7, 3), examples=5)
    >>> use.input_rows().shape, use.output_rows(torch.ones(5, 7, 2)).shape
    (torch.Size([5, 7, 1, 3]), torch.Size([5, 7, 1, 2]))
    >>> use.example_gradients(torch.ones(5, 7, 2), shape=(2, 3))[0]
    tensor([[7., 7., 7.],
            [7., 7., 7.]])
    """

    kind: ClassVar[str] = "linear"
    works_on_rows: ClassVar[bool] = True
    transposed: bool = False
    parts: int = 1

    @property
    def layout(self) -> Layout:
        return "transposed" if self.transposed else "rows"

    @cached_property
    def positions(self) -> int:
        return prod(self.inputs.shape[:-1]) // self.examples

    @property
    def positions_shape(self) -> tuple[int, ...] | None:
        return tuple(self.inputs.shape[1:-1]) if self.folds == 1 else None

    @property
    def input_size(self) -> int:
        return self.inputs.shape[-1]

    @property
    def _rows(self) -> Tensor:
        """The rows without the dimension of parts: (examples, S, n)."""
        return self.inputs.reshape(self.examples, self.positions, self.input_size)

    def input_rows(self, first: int = 0, last: int | None = None) -> Tensor:
        return self._rows[first:last, :, None].expand(-1, -1, self.parts, -1)

    def sampled_rows(self, index: Tensor) -> Tensor:
        rows = self._rows.take_along_dim(index[..., None], 1)
        return rows[:, :, None].expand(-1, -1, self.parts, -1)

    def output_rows(self, gradient: Tensor) -> Tensor:
        # The input's dimensions but the last stand in the output too; what precedes them are draws.
        draws = gradient.shape[: gradient.ndim - self.inputs.ndim]
        outputs = gradient.shape[-1] // self.parts
        return gradient.reshape(*draws, self.examples, self.positions, self.parts, outputs)

    def matrix(self, parameter: Tensor) -> Tensor:
        stacked = parameter.mT if self.transposed else parameter
        return stacked.unflatten(-2, (self.parts, -1))

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        stacked = matrix.flatten(-3, -2)
        return stacked.mT if self.transposed else stacked

    def input_second_moment(self, weights: Tensor) -> Tensor:
        if self.parts == 1:
            return super().input_second_moment(weights)
        return replace(self, parts=1).input_second_moment(weights).expand(self.parts, -1, -1)


@dataclass(frozen=True, eq=False)
class BilinearUse(WeightUse):
    """z_o = xᵀ W_o y: linear in W with h = x ⊗ y; `inputs` are x and `second` are y.

    >>> import torch
    >>> use = BilinearUse(torch.ones(5, 2), 5, second=torch.ones(5, 3))
    >>> use.input_rows().shape, use.matrix(torch.ones(4, 2, 3)).shape
    (torch.Size([5, 1, 1, 6]), torch.Size([1, 4, 6]))
    """

    kind: ClassVar[str] = "bilinear"
    unfolds: ClassVar[bool] = True
    second: Tensor

    @property
    def parts(self) -> int:
        return 1

    def narrow(self, first: int, last: int) -> Self:
        second = self.second[first * self.folds : last * self.folds]
        return replace(super().narrow(first, last), second=second)

    @property
    def _sides(self) -> tuple[LinearUse, LinearUse]:
        return LinearUse(self.inputs, self.examples), LinearUse(self.second, self.examples)

    @property
    def positions(self) -> int:
        return self._sides[0].positions

    @property
    def positions_shape(self) -> tuple[int, ...] | None:
        return self._sides[0].positions_shape

    @property
    def input_size(self) -> int:
        return self.inputs.shape[-1] * self.second.shape[-1]

    def input_rows(self, first: int = 0, last: int | None = None) -> Tensor:
        return _row_products(*(side.input_rows(first, last) for side in self._sides))

    def sampled_rows(self, index: Tensor) -> Tensor:
        return _row_products(*(side.sampled_rows(index) for side in self._sides))

    def output_rows(self, gradient: Tensor) -> Tensor:
        return self._sides[0].output_rows(gradient)

    def matrix(self, parameter: Tensor) -> Tensor:
        return parameter.flatten(-2).unsqueeze(-3)

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        return matrix.squeeze(-3).unflatten(-1, shape[1:])


def _row_products(x: Tensor, y: Tensor) -> Tensor:
    """x ⊗ y along the last dimension."""
    return (x[..., :, None] * y[..., None, :]).flatten(-2)
