"""The damped systems of a layer side by side: one pass over B serves the weight and the bias.

    P = [ X  b ]      X the weight's coordinates, b the bias
        [ u  0 ]      u = (c‖G⊥‖, 0, …): the weight's part outside the input factor

    operator  [ X  b ] ↦ s B [ X Ã  b ] + τ [ X  b ],   u ↦ τ u

The input factor annihilates G⊥, so D⊥ = c G⊥ with one unknown c. A side whose metric is K carries each
vector with its image under K, so that no inner product needs a product of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvlab.linalg import Factor
from curvlab.solvers.damping import Damping
from curvlab.solvers.sides import Coordinates, InputSide

__all__ = ["Columns"]


@dataclass(frozen=True, eq=False)
class Columns:
    """The systems of one layer; `side` and `weight` None where only the bias is solved."""

    output: Factor
    damping: Damping
    side: InputSide | None
    weight: Coordinates | None
    bias: Tensor | None

    @property
    def rank(self) -> int:
        """Number of columns of X."""
        return 0 if self.weight is None else self.weight.x.shape[1]

    @property
    def has_perp(self) -> bool:
        """Whether there is a row u."""
        return self.weight is not None and self.weight.perp_norm is not None

    @cached_property
    def _diagonal(self) -> Tensor:
        """Of a single coordinate: what the columns of P are multiplied by."""
        assert self.side is not None
        entry = self.side.matrix[0]
        return entry if self.bias is None else torch.cat([entry, torch.ones_like(entry)])

    def right_hand_side(self) -> Tensor:
        """-G and -g in columns, lifted to the metric."""
        columns = [] if self.weight is None else [-self.weight.x]
        if self.bias is not None:
            columns.append(-self.bias[:, None])
        p = torch.cat(columns, dim=1)
        if self.weight is not None and self.weight.perp_norm is not None:
            u = torch.zeros_like(p[:1])
            u[0, 0] = -self.weight.perp_norm
            p = torch.cat([p, u])
        return self.lift(p)

    def lift(self, p: Tensor) -> Tensor:
        """(P, P K̂) where the side has a metric K, (P,) where it is orthonormal."""
        metric = None if self.side is None else self.side.metric
        if metric is None:
            return p[None]
        r = self.rank
        return torch.stack([p, torch.cat([p[:, :r] @ metric, p[:, r:]], dim=1)])

    def times_input(self, vector: Tensor) -> Tensor:
        """[ X Ã  b ]: with a metric, the image that the vector carries already."""
        top, r = vector[-1][: self.output.size], self.rank
        if len(vector) == 2 or self.side is None:
            return top
        if r == 1:
            return top * self._diagonal
        return torch.cat([top[:, :r] @ self.side.matrix, top[:, r:]], dim=1)

    def operator(self, vector: Tensor) -> Tensor:
        """The damped operator on all columns."""
        image = vector[0] * self.damping.shift
        image[: self.output.size].add_(self.output.matmul(self.times_input(vector)), alpha=self.damping.scale)
        return self.lift(image)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """⟨x, y⟩ of the weight's system, then of the bias's."""
        sums = (x[0] * y[-1]).sum(0)
        if self.rank <= 1:
            return sums
        weight = sums[: self.rank].sum(0, keepdim=True)
        return weight if self.bias is None else torch.cat([weight, sums[-1:]])

    def spread(self, scalars: Tensor) -> Tensor:
        """A scalar a system, laid out over its columns."""
        if self.rank <= 1:
            return scalars
        return torch.cat([scalars[:1].expand(self.rank), scalars[1:]])

    def split(self, vector: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """X, c and b from a vector of columns."""
        p, n, r = vector[0], self.output.size, self.rank
        bias = p[:n, -1] if self.bias is not None else None
        if self.weight is None:
            return None, None, bias
        scale = None
        if self.weight.perp_norm is not None:
            norm = self.weight.perp_norm
            scale = torch.where(norm > 0, p[n, 0] / torch.where(norm > 0, norm, 1), 0)
        return p[:n, :r], scale, bias
