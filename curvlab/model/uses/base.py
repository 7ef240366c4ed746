"""How a weight is used: the rows of its input, the rows of its output gradient, and its matrix.

For example i and position p (a pixel, a token, one of several calls) a weight sees h_ip and gives

    z_ip = W h_ip (+ b),      ∇_W ξ_i = Σ_p g_ip h_ipᵀ,      ∇_b ξ_i = Σ_p g_ip,      g_ip = ∂ξ_i/∂z_ip

One class per function that has a weight says what h_ip, g_ip and W are for it. A weight may fall into parts
with an output side of their own (the groups of a convolution, the three projections of an attention layer):
rows are (examples, positions, parts, features), and the matrix of a parameter is (parts, outputs, inputs).

The first dimension of what a function is given holds the examples. It may be a multiple of their number,
where a model folded further dimensions into it, (B, T, …) → (B·T, …): these count as positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from curvlab.linalg.views import Layout
from curvlab.measure import device

__all__ = ["CHUNK_ENTRIES", "Use", "WeightUse", "constant_value"]

# Unfolded inputs are read in pieces of at most this many entries (one example at least). Measured on one
# thread: 4 MiB of float32 are near the caches, and a piece is still long enough for the matrix product.
CHUNK_ENTRIES = 1 << 20


@dataclass(frozen=True, eq=False)
class Use(ABC):
    """One call of a function with a parameter: `inputs` are what the function was given, detached.

    `examples` is the number of examples of the batch.
    """

    kind: ClassVar[str]
    works_on_rows: ClassVar[bool] = False
    """Whether each row of the last dimension is used by itself, wherever the examples stand."""

    inputs: Tensor
    examples: int

    @abstractmethod
    def example_gradients(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        """∂ξ_i/∂θ of every example i, in the parameter's own `shape`: (…, examples, *shape).

        `gradient`, (…, *output), holds the gradients of Σ_i ξ_i at the function's output; leading dimensions
        (several draws of labels, say) are kept.
        """

    def narrow(self, first: int, last: int) -> Self:
        """The same use for the examples from `first` up to `last` only."""
        folds = self.folds
        return replace(self, inputs=self.inputs[first * folds : last * folds], examples=last - first)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape is shared by all examples of the batch."""
        return True

    @property
    def folds(self) -> int:
        """How many entries of the first dimension belong to one example: 1 unless the model folded."""
        return self.inputs.shape[0] // self.examples


@dataclass(frozen=True, eq=False)
class WeightUse(Use):
    """A use whose output is linear in the weight, row by row: z_ip = W h_ip.

    `unfolds` where the rows take more memory than the inputs: they are then read in pieces. `lookup` where
    the rows are one-hot, so that the input factor is diagonal.
    """

    unfolds: ClassVar[bool] = False
    lookup: ClassVar[bool] = False

    @property
    @abstractmethod
    def parts(self) -> int:
        """G: into how many parts with an output side of their own the weight falls."""

    @property
    def layout(self) -> Layout:
        """How the weight's own shape is seen as matrices, as `curvlab.linalg.MatrixView` names it."""
        return "rows"

    @property
    @abstractmethod
    def positions(self) -> int:
        """S: how many positions an example has."""

    @property
    @abstractmethod
    def positions_shape(self) -> tuple[int, ...] | None:
        """The dimensions between batch and features; None where the model folded them into the batch."""

    @property
    @abstractmethod
    def input_size(self) -> int:
        """n: entries of h_ip."""

    @abstractmethod
    def input_rows(self, first: int = 0, last: int | None = None) -> Tensor:
        """h_ip of the examples from `first` up to `last`: (examples, S, G, n)."""

    @abstractmethod
    def sampled_rows(self, index: Tensor) -> Tensor:
        """h_ip of some positions only: (examples, q, G, n) for positions `index`, (examples, q).

        Equal to `input_rows()` at these positions; the others are never formed.
        """

    @abstractmethod
    def output_rows(self, gradient: Tensor) -> Tensor:
        """g_ip from gradients at the function's output, (…, *output): (…, examples, S, G, o)."""

    @abstractmethod
    def matrix(self, parameter: Tensor) -> Tensor:
        """W of a tensor of the weight's own shape, (…, *shape): (…, G, o, n)."""

    @abstractmethod
    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tensor of the weight's own `shape`, (…, *shape), whose matrix is (…, G, o, n)."""

    def mean_input(self, weights: Tensor) -> Tensor:
        """Σ_ip w_ip h_ip, (G, n), for weights (examples, S) of the positions."""
        total = self.inputs.new_zeros(self.parts, self.input_size)
        for first, last in self.chunks():
            total += torch.einsum("bs,bsgn->gn", weights[first:last], self.input_rows(first, last))
        return total

    def example_mean_inputs(self, weights: Tensor) -> Tensor:
        """Σ_p w_ip h_ip of every example, (examples, G, n), for weights (examples, S)."""
        pieces = [
            torch.einsum("bs,bsgn->bgn", weights[first:last], self.input_rows(first, last))
            for first, last in self.chunks()
        ]
        return torch.cat(pieces)

    def input_second_moment(self, weights: Tensor) -> Tensor:
        """Σ_ip w_ip h_ip h_ipᵀ, (G, n, n), for weights (examples, S), in bounded memory."""
        total = self.inputs.new_zeros(self.parts, self.input_size, self.input_size)
        common = constant_value(weights)
        for first, last in self.ranges(self.positions * self.parts * self.input_size):
            rows = self.input_rows(first, last).flatten(0, 1)
            scaled = rows if common is not None else rows * weights[first:last].reshape(-1, 1, 1)
            total.baddbmm_(scaled.permute(1, 2, 0), rows.transpose(0, 1))
        return total if common is None else total.mul_(common)

    def gradient(self, rows: Tensor, shape: tuple[int, ...], weights: Tensor | None = None) -> Tensor:
        """Σ_i w_i Σ_p g_ip h_ipᵀ in the weight's own shape, for rows g (examples, S, G, o)."""
        scaled = rows if weights is None else rows * weights[:, None, None, None]
        total = rows.new_zeros(self.parts, rows.shape[-1], self.input_size)
        for first, last in self.chunks():
            total += torch.einsum("bsgo,bsgn->gon", scaled[first:last], self.input_rows(first, last))
        return self.from_matrix(total, shape)

    def example_gradients(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        """R_i = Σ_p g_ip h_ipᵀ of every example i, in the weight's own `shape`: (…, examples, *shape)."""
        rows = self.output_rows(gradient)
        pieces = []
        for first, last in self.chunks():
            left, right = rows[..., first:last, :, :, :], self.input_rows(first, last)
            pieces.append(torch.einsum("...bsgo,bsgn->...bgon", left, right))
        return self.from_matrix(torch.cat(pieces, -4), shape)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of examples whose rows fit into `CHUNK_ENTRIES`; one range where rows cost no memory."""
        entries = self.positions * self.parts * self.input_size
        return self.ranges(entries) if self.unfolds else iter([(0, self.examples)])

    def ranges(self, entries: int) -> Iterator[tuple[int, int]]:
        """Ranges of examples that need at most `CHUNK_ENTRIES` where one example needs `entries`."""
        step = max(1, CHUNK_ENTRIES // max(1, entries))
        return ((first, min(first + step, self.examples)) for first in range(0, self.examples, step))


def constant_value(values: Tensor) -> float | None:
    """The number that all `values` are, None where they differ; without values they are taken for equal.

    >>> constant_value(torch.full((2, 3), 0.5)), constant_value(torch.arange(3.0))
    (0.5, None)
    """
    if not device.readable(values):
        return 1.0  # as those of a batch without class weights or masks are
    low, high = values.aminmax()
    return float(low) if bool(low == high) else None
