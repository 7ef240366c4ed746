"""Means over batches, in memory that does not grow with their number.

    E[f] = Σ_b w_b E_b[f] / Σ_b w_b     with w_b = Σ c_i the weight of batch b

A tensor is summed. A Gram factor keeps the rows it is given until they are as many as it has
columns, or take more than `ROW_BYTES`: from then on the dense form is cheaper and is summed instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvlab.linalg import DenseFactor, Factor, GramFactor
from curvlab.linalg.inputs import InputFactors

__all__ = ["ROW_BYTES", "InputMean", "Mean", "RowMean", "TensorMean", "mean_of"]

ROW_BYTES = 256 * 1024**2


@dataclass
class TensorMean:
    """The mean of a tensor."""

    total: Tensor | None = None
    first: Tensor | None = None
    weight: Tensor | None = None

    def add(self, value: Tensor, weight: Tensor) -> None:
        """Count `value` with `weight`."""
        if self.weight is None:
            self.first, self.weight = value, weight
            return
        if self.first is not None:
            self.total, self.first = self.first * self.weight, None
        assert self.total is not None
        self.total = self.total + value * weight
        self.weight = self.weight + weight

    def value(self) -> Tensor:
        """The mean so far: of a single value, that value itself."""
        if self.first is not None:
            return self.first
        assert self.total is not None
        assert self.weight is not None
        return self.total / self.weight


@dataclass
class RowMean:
    """The mean of the Gram factor Hᵀ diag(c) H."""

    rows: list[Tensor] = field(default_factory=list)
    roots: list[Tensor] = field(default_factory=list)
    single: GramFactor | None = None
    dense: Tensor | None = None
    weight: Tensor | None = None

    def add(self, value: GramFactor, weight: Tensor) -> None:
        """Count the rows of `value` with `weight`."""
        self.single = value if self.weight is None else None
        self.weight = weight if self.weight is None else self.weight + weight
        self.rows.append(value.rows)
        self.roots.append(value.root * weight.sqrt())
        if self.single is None and (self.dense is not None or self._full(value.size)):
            self._sum_rows(value.size)

    def _sum_rows(self, size: int) -> None:
        if self.dense is None:
            self.dense = self.rows[0].new_zeros(size, size)
        for rows, root in zip(self.rows, self.roots, strict=True):
            scaled = rows * root[:, None]
            self.dense.addmm_(scaled.T, scaled)
        self.rows, self.roots = [], []

    def _full(self, size: int) -> bool:
        held = sum(len(rows) for rows in self.rows)
        return held >= size or held * size * self.rows[0].element_size() > ROW_BYTES

    def value(self) -> Factor:
        """The mean so far; that of a single batch is the batch's own factor."""
        assert self.weight is not None
        if self.single is not None:
            return self.single
        if self.dense is not None:
            return DenseFactor(self.dense / self.weight)
        return GramFactor(torch.cat(self.rows), torch.cat(self.roots) / self.weight.sqrt())


@dataclass
class InputMean:
    """The means E[hhᵀ] and E[h] of a layer's inputs."""

    full: RowMean = field(default_factory=RowMean)
    mean: TensorMean = field(default_factory=TensorMean)

    def add(self, value: InputFactors, weight: Tensor) -> None:
        """Count a batch's inputs with `weight`."""
        assert isinstance(value.full, GramFactor)
        self.mean.add(value.mean, weight)
        self.full.add(value.full, weight)

    def value(self) -> InputFactors:
        """The input factors so far."""
        full = self.full.value()
        return InputFactors(full, None if isinstance(full, GramFactor) else self.mean.value())


Mean = TensorMean | RowMean | InputMean


def mean_of(value: Tensor | GramFactor | InputFactors) -> Mean:
    """An empty mean of the kind that `value` needs."""
    if isinstance(value, InputFactors):
        return InputMean()
    return RowMean() if isinstance(value, GramFactor) else TensorMean()

