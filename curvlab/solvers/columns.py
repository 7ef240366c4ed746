"""The damped systems of a layer side by side: one pass over B serves the weight and the bias.

    columns   [ X | u | b ]     X the weight's coordinates, u its G⊥ part, b the bias
    operator  P ↦ s B (P Â) + τ P     with Â = blockdiag(Ã, 0, 1)

G⊥ is annihilated by the input factor, so D⊥ = c G⊥ with one unknown c, carried as u = (c‖G⊥‖, 0, …, 0)ᵀ. A
side whose metric is K carries each vector with its image under K, so that no inner product needs a
product of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        """Whether there is a column u."""
        return self.weight is not None and self.weight.perp_norm is not None

    @property
    def owners(self) -> list[int]:
        """The number of the system that each column belongs to: the weight's, then the bias's."""
        weight = self.rank + self.has_perp
        return [0] * weight + ([1 if weight else 0] if self.bias is not None else [])

    def right_hand_side(self) -> Tensor:
        """-G and -g in columns, lifted to the metric."""
        columns = []
        if self.weight is not None:
            columns.append(-self.weight.x)
            if self.weight.perp_norm is not None:
                perp = torch.zeros_like(self.weight.x[:, :1])
                perp[0, 0] = -self.weight.perp_norm
                columns.append(perp)
        if self.bias is not None:
            columns.append(-self.bias[:, None])
        return self.lift(torch.cat(columns, dim=1))

    def lift(self, p: Tensor) -> Tensor:
        """(P, P K̂) where the side has a metric K, (P,) where it is orthonormal."""
        metric = None if self.side is None else self.side.metric
        if metric is None:
            return p[None]
        r = self.rank
        return torch.stack([p, torch.cat([p[:, :r] @ metric, p[:, r:]], dim=1)])

    def times_input(self, vector: Tensor) -> Tensor:
        """P Â: with a metric, the image that the vector carries already."""
        if len(vector) == 2 or self.side is None:
            return vector[-1]
        p, r = vector[0], self.rank
        if r == 1:
            return p * self._diagonal(p)
        parts = [p[:, :r] @ self.side.matrix]
        if self.has_perp:
            parts.append(torch.zeros_like(p[:, :1]))
        return torch.cat([*parts, p[:, r + self.has_perp :]], dim=1)

    def _diagonal(self, p: Tensor) -> Tensor:
        assert self.side is not None
        entries = [self.side.matrix[0, 0]]
        if self.has_perp:
            entries.append(torch.zeros_like(entries[0]))
        if self.bias is not None:
            entries.append(torch.ones_like(entries[0]))
        return torch.stack(entries)

    def operator(self, vector: Tensor) -> Tensor:
        """The damped operator on all columns."""
        product = self.output.matmul(self.times_input(vector))
        return self.lift(product.mul_(self.damping.scale).add_(vector[0], alpha=self.damping.shift))

    def split(self, vector: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """X, c and b from a vector of columns."""
        p, r = vector[0], self.rank
        if self.weight is None:
            return None, None, p[:, 0]
        scale = None
        if self.weight.perp_norm is not None:
            norm = self.weight.perp_norm
            scale = torch.where(norm > 0, p[0, r] / torch.where(norm > 0, norm, 1), 0)
        return p[:, :r], scale, p[:, -1] if self.bias is not None else None
