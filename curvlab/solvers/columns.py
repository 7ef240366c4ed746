"""The damped systems of a layer side by side: one pass over B serves the weight and the bias.

    P = [ X  b ]      X the weight's coordinates, b the bias
        [ u  0 ]      u = (c‖G⊥‖, 0, …): the weight's part outside the input factor

    operator  [ X  b ] ↦ s B [ X Ã  b ] + τ [ X  b ],   u ↦ τ u

The input factor annihilates G⊥, so D⊥ = c G⊥ with one unknown c. The coordinates are orthonormal, so the
inner products are sums over columns.
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

    @cached_property
    def rank(self) -> int:
        """Number of columns of X."""
        return 0 if self.weight is None else self.weight.x.shape[1]

    @cached_property
    def _diagonal(self) -> Tensor | None:
        """What the columns of P are multiplied by, where Ã is diagonal."""
        if self.side is None or self.side.diagonal is None:
            return None
        entries = self.side.diagonal
        return entries if self.bias is None else torch.cat([entries, torch.ones_like(entries[:1])])

    def right_hand_side(self) -> Tensor:
        """-G and -g in columns."""
        columns = [] if self.weight is None else [-self.weight.x]
        if self.bias is not None:
            columns.append(-self.bias[:, None])
        p = torch.cat(columns, dim=1)
        if self.weight is not None and self.weight.perp_norm is not None:
            u = torch.zeros_like(p[:1])
            u[0, 0] = -self.weight.perp_norm
            p = torch.cat([p, u])
        return p

    def times_input(self, top: Tensor) -> Tensor:
        """[ X Ã  b ]."""
        if self.side is None:
            return top
        if self._diagonal is not None:
            return top * self._diagonal
        r = self.rank
        return torch.cat([top[:, :r] @ self.side.matrix, top[:, r:]], dim=1)

    def operator(self, p: Tensor) -> Tensor:
        """The damped operator on all columns."""
        n = self.output.size
        image = p * self.damping.shift
        image[:n].add_(self.output.matmul(self.times_input(p[:n])), alpha=self.damping.scale)
        return image

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """⟨x, y⟩ of the weight's system, then of the bias's."""
        sums = (x * y).sum(0)
        if self.rank <= 1:
            return sums
        weight = sums[: self.rank].sum(0, keepdim=True)
        return weight if self.bias is None else torch.cat([weight, sums[-1:]])

    def spread(self, scalars: Tensor) -> Tensor:
        """A scalar a system, laid out over its columns."""
        if self.rank <= 1:
            return scalars
        return torch.cat([scalars[:1].expand(self.rank), scalars[1:]])

    def split(self, p: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """X, c and b from a vector of columns."""
        n, r = self.output.size, self.rank
        bias = p[:n, -1] if self.bias is not None else None
        if self.weight is None:
            return None, None, bias
        scale = None
        if self.weight.perp_norm is not None:
            norm = self.weight.perp_norm
            scale = torch.where(norm > 0, p[n, 0] / torch.where(norm > 0, norm, 1), 0)
        return p[:n, :r], scale, bias
