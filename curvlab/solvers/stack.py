"""The damped systems of one or several layers, one above the other: one iteration serves them all.

    P = [ Xᵀ  0  uᵀ ]     X the weight's coordinates, u = (c‖G⊥‖, 0, …) its part outside the input factor
        [ bᵀ  0  0  ]     b the bias; then the rows of the next layer, filled up with zeros

    operator  [ Xᵀ ] ↦ s [ Ã Xᵀ ] B + τ [ Xᵀ ],   u ↦ τ u
              [ bᵀ ]     [ bᵀ   ]       [ bᵀ ]

The input factor annihilates G⊥, so D⊥ = c G⊥ with one unknown c. The coordinates are orthonormal, so the
inner products are sums over rows. A vector is a row because a product of few contiguous rows with a matrix
takes as long as reading the matrix; of as many columns it takes several times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvlab.linalg import Factor
from curvlab.linalg.norms import positive
from curvlab.solvers.damping import Damping
from curvlab.solvers.sides import Coordinates, InputSide

__all__ = ["LayerSystems", "Solved", "Stack"]


@dataclass(frozen=True, eq=False)
class LayerSystems:
    """The systems of one layer; `side` and `weight` None where only the bias is solved."""

    output: Factor
    side: InputSide | None
    weight: Coordinates | None
    bias: Tensor | None

    @cached_property
    def rank(self) -> int:
        """Rows of Xᵀ."""
        return 0 if self.weight is None else self.weight.x.shape[1]

    @property
    def rows(self) -> int:
        """Rows of the stack that belong to the layer."""
        return self.rank + (self.bias is not None)

    def diagonal(self) -> Tensor:
        """What each row is multiplied by: the diagonal of Ã, and 1 for the bias."""
        entries = []
        if self.side is not None:
            given = self.side.diagonal
            entries.append(self.side.matrix.diagonal() if given is None else given)
        if self.bias is not None:
            entries.append(torch.ones_like(self.bias[:1]))
        return torch.cat(entries)


@dataclass(frozen=True, eq=False)
class Solved:
    """What a vector of the stack says of one layer: X, c (None: there is no G⊥) and b."""

    x: Tensor | None
    scale: Tensor | None
    bias: Tensor | None


class Stack:
    """The systems of one layer, or of several where each system is one row, as with the mean factor."""

    def __init__(self, layers: Sequence[LayerSystems], damping: Damping) -> None:
        self.layers, self.damping = layers, damping
        self.single = all(layer.rank <= 1 for layer in layers)
        assert self.single or len(layers) == 1
        self.width = max(layer.output.size for layer in layers)
        self.firsts = [sum(layer.rows for layer in layers[:index]) for index in range(len(layers))]
        example = layers[0].output.example
        outside = any(layer.weight is not None and layer.weight.perp_norm is not None for layer in layers)
        shape = (sum(layer.rows for layer in layers), self.width + outside)
        # Scalars as tensors: a number would be made one in every iteration.
        self._shift = example.new_full((), damping.shift)
        self._image, self._scaled = example.new_empty(shape), example.new_empty(shape)
        self._products = [
            (layer.output, self._part(self._image, index), self._part(self._scaled, index))
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
                part[: layer.rank] = -layer.weight.x.detach().T
                if layer.weight.perp_norm is not None:
                    p[self.firsts[index], self.width] = -layer.weight.perp_norm.detach()
            if layer.bias is not None:
                part[-1] = -layer.bias.detach()
        return p

    @cached_property
    def _matrix(self) -> Tensor | None:
        """Ã, where it is not diagonal."""
        side = self.layers[0].side
        return None if self.single or side is None or side.diagonal is not None else side.matrix

    @cached_property
    def _diagonal(self) -> Tensor:
        return torch.cat([layer.diagonal() for layer in self.layers])[:, None]

    def _scale(self, p: Tensor) -> None:
        """[ Ã Xᵀ; bᵀ ], into the stack's own memory."""
        if self._matrix is None:
            torch.mul(p, self._diagonal, out=self._scaled)
            return
        r, n = self.layers[0].rank, self.width
        self._scaled[r:].copy_(p[r:])
        self._scaled[:r, :n] = self._matrix @ p[:r, :n]

    def operator(self, p: Tensor) -> Tensor:
        """The damped operator on all systems; overwritten by the next call."""
        self._scale(p)
        torch.mul(p, self._shift, out=self._image)
        for output, image, scaled in self._products:
            output.add_product_(image, scaled, self.damping.scale)
        return self._image

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """⟨x, y⟩ of every system, in a column."""
        sums = (x * y).sum(1, keepdim=True)
        if self.single:
            return sums
        r = self.layers[0].rank
        return torch.cat([sums[:r].sum(0, keepdim=True), sums[r:]])

    def peak(self, x: Tensor) -> Tensor:
        """max|x| of every system, in a column."""
        low, high = torch.aminmax(x, dim=1, keepdim=True)
        peaks = torch.maximum(high, -low)
        if self.single:
            return peaks
        r = self.layers[0].rank
        return torch.cat([peaks[:r].amax(0, keepdim=True), peaks[r:]])

    def spread(self, scalars: Tensor) -> Tensor:
        """A scalar a system, laid out over its rows."""
        if self.single:
            return scalars
        return torch.cat([scalars[:1].expand(self.layers[0].rank, 1), scalars[1:]])

    def systems(self, index: int) -> slice:
        """Which of the stack's systems are those of a layer: the weight's, then the bias's."""
        if not self.single:
            return slice(None)
        return slice(self.firsts[index], self.firsts[index] + self.layers[index].rows)

    def split(self, p: Tensor, index: int) -> Solved:
        """X, c and b of one layer."""
        layer, part = self.layers[index], self._part(p, index)
        bias = None if layer.bias is None else part[-1]
        if layer.weight is None:
            return Solved(None, None, bias)
        scale = None
        if layer.weight.perp_norm is not None:
            # Where the norm is zero, so is its row's entry: there is no G⊥ and c is zero.
            scale = p[self.firsts[index], self.width] / positive(layer.weight.perp_norm)
        return Solved(part[: layer.rank].T, scale, bias)
