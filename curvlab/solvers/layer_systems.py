"""Kronecker layers in the coordinates of their input sides, as the operators that CG iterates on.

The stacked systems of several layers, one above the other:

    P = [ Xᵀ  0  uᵀ ]     X the weight's coordinates, u = (c‖G⊥‖, 0, …) its part outside the input factor
        [ bᵀ  0  0  ]     b the bias; then the rows of the next layer, filled up with zeros

    operator  [ Xᵀ ] ↦ s [ Ã Xᵀ ] B + τ [ Xᵀ ],   u ↦ τ u
              [ bᵀ ]     [ bᵀ   ]       [ bᵀ ]

The input factor annihilates G⊥, so D⊥ = c G⊥ with one unknown c. The coordinates are orthonormal, so the
inner products are sums over rows. A vector is a row because a product of few contiguous rows with a matrix
takes as long as reading the matrix; of as many columns it takes several times that.

A stack of equal systems (`linalg.stacks`) has three dimensions instead: P = [ X  u ] for each matrix.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from curvlab.linalg import Factor, Matrix
from curvlab.linalg.cg import StackOperator, SymmetricOperator
from curvlab.linalg.factors import nonzero_or_one
from curvlab.linalg.pending import in_pieces
from curvlab.solvers.base import LayerGradient
from curvlab.solvers.damping import Damping
from curvlab.solvers.input_coordinates import GradientCoordinates, InputCoordinates, Scalar, WeightGradient

__all__ = ["EqualSystems", "LayerSystems", "StackedSystems", "stack_systems"]


class PreparedLayer(Protocol):
    """What CG prepares of a layer: its output factor, and the coordinates of its weight."""

    @property
    def output(self) -> Factor:
        """B."""

    @property
    def coordinates(self) -> InputCoordinates | None:
        """Those of the input side; None where there is no weight."""


@dataclass(frozen=True, eq=False)
class _WeightSystem:
    coordinates: InputCoordinates
    gradient: GradientCoordinates


@dataclass(frozen=True, eq=False)
class LayerSystems:
    """The systems of one layer: its weight's in coordinates, and its bias's."""

    output: Factor
    weight: _WeightSystem | None
    bias: Tensor | None

    @classmethod
    def of(cls, state: PreparedLayer, gradient: LayerGradient) -> LayerSystems:
        """The systems of a prepared layer for a gradient."""
        weight = None
        if state.coordinates is not None and gradient.weight is not None:
            weight = _WeightSystem(state.coordinates, state.coordinates.of(gradient.weight))
        return cls(state.output, weight, gradient.bias)

    @cached_property
    def rank(self) -> int:
        """Rows of Xᵀ."""
        return 0 if self.weight is None else self.weight.gradient.x.shape[1]

    @property
    def rows(self) -> int:
        """Rows of the stack that belong to the layer."""
        return self.rank + (self.bias is not None)

    @property
    def route(self) -> str:
        """What the coordinates are called in a solution."""
        return "bias" if self.weight is None else self.weight.coordinates.route

    @property
    def perp_norm(self) -> Tensor | None:
        """‖G⊥‖; None: zero."""
        return None if self.weight is None else self.weight.gradient.perp_norm

    def diagonal(self, one: Tensor) -> list[Tensor]:
        """What each row is multiplied by: the diagonal of Ã, and `one`, of one entry, for the bias."""
        entries = []
        if self.weight is not None:
            given = self.weight.coordinates.diagonal
            entries.append(self.weight.coordinates.matrix.diagonal() if given is None else given)
        if self.bias is not None:
            entries.append(one)
        return entries


def stack_systems(layers: Sequence[LayerSystems], damping: Damping) -> StackedSystems:
    """The damped systems of several layers, each of one row, or those of one layer, of any rank."""
    if all(layer.rank <= 1 for layer in layers):
        return _OneRowEach(layers, damping)
    if len(layers) > 1:
        raise ValueError("several layers are solved in one iteration only where each system is one row")
    return _OneLayer(layers, damping)


class StackedSystems(SymmetricOperator):
    """The damped systems of Kronecker layers, one above the other, as the module's text draws them."""

    def __init__(self, layers: Sequence[LayerSystems], damping: Damping) -> None:
        self.layers, self.damping = layers, damping
        self.width = max(layer.output.size for layer in layers)
        self.firsts = list(accumulate((layer.rows for layer in layers), initial=0))[:-1]
        example = layers[0].output.example
        outside = any(layer.perp_norm is not None for layer in layers)
        shape = (sum(layer.rows for layer in layers), self.width + outside)
        # Scalars as tensors: a number would be made one in every iteration.
        self._shift = example.new_full((), damping.shift)
        self._image, self._scaled = example.new_empty(shape), example.new_empty(shape)
        self._products = [
            (
                layer.output,
                self._part(self._image, index),
                self._part(self._scaled, index),
                self.systems(index),
            )
            for index, layer in enumerate(layers)
        ]

    def _part(self, p: Tensor, index: int) -> Tensor:
        """The rows and columns of one layer."""
        layer, first = self.layers[index], self.firsts[index]
        return p[first : first + layer.rows, : layer.output.size]

    def right_hand_side(self) -> Tensor:
        """-G and -g."""
        p = torch.zeros_like(self._image)
        for index, layer in enumerate(self.layers):
            part = self._part(p, index)
            if layer.weight is not None:
                torch.neg(layer.weight.gradient.x.detach().T, out=part[: layer.rank])
            if layer.perp_norm is not None:
                torch.neg(layer.perp_norm.detach(), out=p[self.firsts[index], self.width])
            if layer.bias is not None:
                torch.neg(layer.bias.detach(), out=part[-1])
        return p

    def _joined_diagonal(self) -> Tensor:
        """What each row of the stack is multiplied by, as a column."""
        one = self._image.new_ones(1)
        return torch.cat([entry for layer in self.layers for entry in layer.diagonal(one)])[:, None]

    @abstractmethod
    def _times_input(self, p: Tensor) -> None:
        """[ Ã Xᵀ; bᵀ ], into `_scaled`."""

    def matmul(self, x: Tensor) -> Tensor:
        self._times_input(x)
        torch.mul(x, self._shift, out=self._image)
        for output, image, scaled, _ in self._products:
            output.add_product_(image, scaled, self.damping.scale)
        return self._image

    def rest(self, done: Tensor) -> None:
        """Leave out the products with B of layers whose systems have all ended: of these τx is given."""
        ended = done.flatten().tolist()
        if any(ended):
            self._products = [part for part in self._products if not all(ended[part[-1]])]

    @abstractmethod
    def systems(self, index: int) -> slice:
        """Which of the stack's systems are those of a layer: the weight's, then the bias's."""

    def split(self, p: Tensor, index: int) -> tuple[Matrix | None, Tensor | None]:
        """The steps of the weight and the bias of one layer."""
        layer, part = self.layers[index], self._part(p, index)
        bias = None if layer.bias is None else part[-1]
        if layer.weight is None:
            return None, bias
        if layer.perp_norm is None:
            scale = torch.zeros_like(p[0, 0])
        else:  # where the norm is zero, so is its row's entry: there is no G⊥ and c is zero
            scale = p[self.firsts[index], self.width] / nonzero_or_one(layer.perp_norm)
        return layer.weight.gradient.assemble(part[: layer.rank].T, Scalar(scale)), bias


def _row_peaks(x: Tensor) -> Tensor:
    """max|x| of every row, as a column."""
    if not in_pieces(x):
        return torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True)
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    return torch.maximum(high, -low)


class _OneRowEach(StackedSystems):
    """Every system is one row, as with the mean input factor."""

    @cached_property
    def _diagonal(self) -> Tensor:
        return self._joined_diagonal()

    def _times_input(self, p: Tensor) -> None:
        torch.mul(p, self._diagonal, out=self._scaled)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(1, keepdim=True)

    def max_abs(self, x: Tensor) -> Tensor:
        return _row_peaks(x)

    def spread(self, scalars: Tensor) -> Tensor:
        return scalars

    def systems(self, index: int) -> slice:
        return slice(self.firsts[index], self.firsts[index] + self.layers[index].rows)


class _OneLayer(StackedSystems):
    """One layer, whose weight takes the first `rank` rows together and whose bias takes the last one."""

    def __init__(self, layers: Sequence[LayerSystems], damping: Damping) -> None:
        super().__init__(layers, damping)
        (layer,) = layers
        self.rank = layer.rank
        self._diagonal: Tensor | None = None
        self._matrix: Tensor | None = None
        if layer.weight is not None and layer.weight.coordinates.diagonal is None:
            self._matrix = layer.weight.coordinates.matrix
        else:
            self._diagonal = self._joined_diagonal()

    def _times_input(self, p: Tensor) -> None:
        if self._diagonal is not None:
            torch.mul(p, self._diagonal, out=self._scaled)
        if self._matrix is not None:
            r, n = self.rank, self.width
            self._scaled[r:].copy_(p[r:])
            torch.mm(self._matrix, p[:r, :n], out=self._scaled[:r, :n])

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        sums = (x * y).sum(1, keepdim=True)
        if self._selector is not None:
            return self._selector @ sums
        return torch.cat([sums[: self.rank].sum(0, keepdim=True), sums[self.rank :]])

    def max_abs(self, x: Tensor) -> Tensor:
        peaks = _row_peaks(x)
        return torch.cat([peaks[: self.rank].amax(0, keepdim=True), peaks[self.rank :]])

    def spread(self, scalars: Tensor) -> Tensor:
        return torch.cat([scalars[:1].expand(self.rank, 1), scalars[1:]])

    @cached_property
    def _selector(self) -> Tensor | None:
        """Which rows belong to which system, (2, rows), where one product is less than a sum and a copy.

        NaN or infinity in one of the two systems of a layer then reaches the other: both are breakdowns.
        """
        rows = len(self._image)
        if in_pieces(self._image) or rows != self.rank + 1 or not self.rank:
            return None
        selector = self._image.new_zeros(2, rows)
        selector[0, : self.rank] = 1
        selector[1, self.rank] = 1
        return selector

    def systems(self, index: int) -> slice:
        return slice(None)


class EqualSystems(StackOperator):
    """The damped systems of a stack of equal matrices: P = [ X  u ], (G, o, r) and one column for G⊥.

    X ↦ s B X Ã + τX for every matrix, and u ↦ τu, of which the first entry is c‖G⊥‖.
    """

    def __init__(
        self, output: Factor, coordinates: InputCoordinates, gradient: WeightGradient, damping: Damping
    ) -> None:
        super().__init__()
        self.output, self.damping = output, damping
        self.gradient = coordinates.of(gradient)
        self.rank, self._matrix = self.gradient.x.shape[-1], coordinates.matrix

    def right_hand_side(self) -> Tensor:
        """-G."""
        x, norm = self.gradient.x.detach(), self.gradient.perp_norm
        if norm is None:
            return -x
        outside = torch.zeros_like(x[..., :1])
        outside[:, 0, 0] = norm
        return -torch.cat([x, outside], dim=-1)

    def matmul(self, x: Tensor) -> Tensor:
        image = self.damping.shift * x
        inside = self.output.matmul(x[..., : self.rank] @ self._matrix)
        image[..., : self.rank].add_(inside, alpha=self.damping.scale)
        return image

    def step(self, p: Tensor) -> Matrix:
        """The steps of all matrices."""
        scale = torch.zeros_like(p[:, :1, :1])
        if self.gradient.perp_norm is not None:
            # Where the norm is zero, so is its entry: there is no G⊥ and c is zero.
            scale = p[:, :1, self.rank :] / nonzero_or_one(self.gradient.perp_norm)[:, None, None]
        return self.gradient.assemble(p[..., : self.rank], Scalar(scale))
