"""Means over batches, in memory that does not grow with their number.

    E[f] = Σ_b w_b E_b[f] / Σ_b w_b     with w_b = Σ c_i the weight of batch b

A tensor is summed. A Gram factor keeps the rows it is given while they are fewer than its columns and
take no more than `ROW_BYTES`; once they are as many, the dense form is smaller and is summed instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvlab.exceptions import ProblemError, StaleError
from curvlab.linalg import DenseFactor, Factor, GramFactor
from curvlab.linalg.inputs import InputFactors
from curvlab.model.recording import Recording
from curvlab.providers.statistics import Statistic, Values
from curvlab.staleness import Stamp

__all__ = ["ROW_BYTES", "InputMean", "Mean", "Means", "RowMean", "TensorMean", "mean_of"]

ROW_BYTES = 2 * 1024**3


@dataclass
class TensorMean:
    """The mean of a tensor.

    >>> mean = TensorMean()
    >>> mean.add(torch.tensor(1.0), torch.tensor(3.0))
    >>> mean.add(torch.tensor(5.0), torch.tensor(1.0))
    >>> mean.value()
    tensor(2.)
    """

    first: Tensor | None = None
    total: Tensor | None = None
    weight: Tensor | None = None

    def add(self, value: Tensor, weight: Tensor) -> None:
        """Count `value` with `weight`."""
        if self.weight is None:
            self.first, self.weight = value, weight
            return
        if self.first is not None:
            self.total, self.first = self.first * self.weight, None
        assert self.total is not None
        self.total.add_(value * weight)
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

    single: GramFactor | None = None
    rows: list[tuple[Tensor, Tensor, Stamp]] = field(default_factory=list)
    dense: Tensor | None = None
    weight: Tensor | None = None

    def add(self, value: GramFactor, weight: Tensor) -> None:
        """Count the rows of `value` with `weight`."""
        self.single = value if self.weight is None else None
        self.weight = weight if self.weight is None else self.weight + weight
        self.rows.append((value.rows, value.root * weight.sqrt(), Stamp.of(value.rows)))
        if self.single is None and (self.dense is not None or self._held() >= value.size):
            self._sum_rows(value.size)
        _check_bytes(self._held(), value.rows)

    def value(self) -> Factor:
        """The mean so far; that of a single batch is the batch's own factor."""
        assert self.weight is not None
        if self.single is not None:
            return self.single
        if self.dense is not None:
            return DenseFactor(self.dense / self.weight)
        rows, roots = zip(*self._unchanged(), strict=True)
        return GramFactor(torch.cat(rows), torch.cat(roots) / self.weight.sqrt())

    def _held(self) -> int:
        return sum(len(rows) for rows, _, _ in self.rows)

    def _sum_rows(self, size: int) -> None:
        if self.dense is None:
            self.dense = self.rows[0][0].new_zeros(size, size)
        for rows, root in self._unchanged():
            scaled = rows * root[:, None]
            self.dense.addmm_(scaled.T, scaled)
        self.rows = []

    def _unchanged(self) -> list[tuple[Tensor, Tensor]]:
        if any(Stamp.of(rows) != stamp for rows, _, stamp in self.rows):
            raise StaleError(
                "a batch was overwritten while the pass went on, and its rows are still needed: let the "
                "re-iterable give a new tensor for every batch"
            )
        return [(rows, root) for rows, root, _ in self.rows]


def _check_bytes(held: int, rows: Tensor) -> None:
    needed = held * rows.shape[1] * rows.element_size()
    if needed > ROW_BYTES and held > len(rows):
        raise ProblemError(
            f"a layer with {rows.shape[1]:,} inputs has seen {held:,} rows, {needed:,} bytes, and its dense "
            f"factor would be larger still; the limit is {ROW_BYTES:,} bytes. Stream fewer examples, or "
            f"leave the layer out with layers=[…]"
        )


@dataclass
class InputMean:
    """The means E[hhᵀ] and E[h] of a layer's inputs."""

    full: RowMean = field(default_factory=RowMean)
    mean: TensorMean = field(default_factory=TensorMean)

    def add(self, value: InputFactors, weight: Tensor) -> None:
        """Count a batch's inputs with `weight`."""
        assert isinstance(value.full, GramFactor)
        if self.full.weight is not None:
            self._add_mean(value.mean, weight)
        self.full.add(value.full, weight)

    def _add_mean(self, mean: Tensor, weight: Tensor) -> None:
        """E[h] is needed from the second batch on; until then the Gram factor brings its own."""
        if self.full.single is not None:
            assert self.full.weight is not None
            self.mean.add(self.full.single.mean, self.full.weight)
        self.mean.add(mean, weight)

    def value(self) -> InputFactors:
        """The input factors so far."""
        full = self.full.value()
        return InputFactors(full, None if isinstance(full, GramFactor) else self.mean.value())


Mean = TensorMean | RowMean | InputMean


def mean_of(value: Tensor | Factor | InputFactors) -> Mean:
    """An empty mean of the kind that `value` needs."""
    if isinstance(value, InputFactors):
        return InputMean()
    return RowMean() if isinstance(value, GramFactor) else TensorMean()


class Means:
    """The means of several statistics, from one recording after the other.

    `first_row` is the number of the first row among the rows of all workers.
    """

    def __init__(self, statistics: Sequence[Statistic], first_row: int = 0) -> None:
        self.statistics, self.first_row = tuple(statistics), first_row
        self._held: dict[Statistic, list[Mean]] = {}

    def add(self, recording: Recording) -> None:
        """Count a batch with its weight."""
        for statistic in self.statistics:
            numbered = recording
            if statistic.keyed_by_row and self.first_row:
                numbered = recording.numbered_from(self.first_row + recording.first_row)
            values = statistic.of(numbered)
            held = self._held.setdefault(statistic, [mean_of(value) for value in values])
            for mean, value in zip(held, values, strict=True):
                mean.add(value, recording.total_weight)  # type: ignore[arg-type]

    def values(self) -> dict[Statistic, Values]:
        """The means so far."""
        return {statistic: tuple(mean.value() for mean in held) for statistic, held in self._held.items()}
