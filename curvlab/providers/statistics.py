"""What providers read of a recording, and its mean over batches.

A statistic is a mean over the rows of a batch. It is a value, so two providers that need the same one share
it, and a pass over a stream computes it once per batch. Nothing non-linear happens here: PosEig and the
recursions come after the mean over all batches (and ranks):

    E[f] = Σ_b w_b E_b[f] / Σ_b w_b     with w_b = Σ c_i the weight of batch b

`Means` takes that mean in memory that does not grow with the number of batches. A tensor is summed. A Gram
factor keeps the rows it is given while they are fewer than its columns and take no more than `ROW_BYTES`;
once they are as many, the dense form is smaller and is summed instead.

Sampled labels come from `uniforms`: each number is a hash of (seed, draw, row, output), the same whatever the
batching, the order of calls or the machine, so no generator state exists to disturb.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.exceptions import ProblemError, StaleError
from curvlab.gradient import RowFactor
from curvlab.linalg import DenseFactor, Factor, GramFactor, gram
from curvlab.linalg.factors import InputFactors
from curvlab.model.recording import ChainRecording, Recording
from curvlab.staleness import Stamp, logical_shift, mix

__all__ = [
    "ROW_BYTES",
    "ExpectedGradientProducts",
    "GaussNewtonBlocks",
    "GradientProducts",
    "InputMean",
    "Inputs",
    "Mean",
    "Means",
    "OutputHessian",
    "OutputSpectrum",
    "RowMean",
    "SampledGradientProducts",
    "SecondOrderTerms",
    "SlopeProducts",
    "Statistic",
    "TensorMean",
    "Values",
    "mean_of",
    "uniforms",
]

Values = tuple[Tensor | Factor | InputFactors, ...]


class Statistic(ABC):
    """A mean over the rows of a batch: one value a layer, or one for the output.

    A value is a tensor, which is averaged over batches, a `GramFactor`, whose rows are joined, or a
    layer's `InputFactors`, which are both. `keyed_by_row` is whether it reads the rows' numbers, which
    then must be those of the whole data, also on a rank that has a part of it. `row_factor` is set where
    its Gram factors are, layer by layer, those of the weights' gradients (`RowGradient`): several ranks then
    send their rows once for both.
    """

    keyed_by_row: ClassVar[bool] = False
    row_factor: ClassVar[RowFactor | None] = None

    @abstractmethod
    def of(self, recording: Recording) -> Values:
        """The means over one batch."""


def _chain(recording: Recording) -> ChainRecording:
    assert isinstance(recording, ChainRecording)
    return recording


@dataclass(frozen=True)
class Inputs(Statistic):
    """E[hhᵀ] and E[h] for each layer with blocks."""

    row_factor: ClassVar[RowFactor | None] = "inputs"

    def of(self, recording: Recording) -> Values:
        return tuple(InputFactors(record.inputs) for record in recording.layers)


@dataclass(frozen=True)
class OutputHessian(Statistic):
    """E[∇²ξ(h^k)]."""

    def of(self, recording: Recording) -> Values:
        return (recording.output_hessian,)


@dataclass(frozen=True)
class SlopeProducts(Statistic):
    """E[σ'σ'ᵀ] for each hidden layer."""

    def of(self, recording: Recording) -> Values:
        recording = _chain(recording)
        return tuple(
            gram((slope * recording.sqrt_row_weights[:, None]).T) for slope in recording.activation_slopes
        )


@dataclass(frozen=True)
class SecondOrderTerms(Statistic):
    """E[σ'' ⊙ (Wᵀg)] for each hidden layer."""

    def of(self, recording: Recording) -> Values:
        recording = _chain(recording)
        weights = recording.row_weights
        return tuple(
            weights.new_zeros(slope.shape[1]) if term is None else weights @ term
            for slope, term in zip(recording.activation_slopes, recording.second_order_terms, strict=True)
        )


@dataclass(frozen=True)
class GradientProducts(Statistic):
    """E[g gᵀ] for each layer with blocks, as Gram factors, with the given labels."""

    row_factor: ClassVar[RowFactor | None] = "gradients"

    def of(self, recording: Recording) -> Values:
        return tuple(record.gradients for record in recording.layers)


@dataclass(frozen=True)
class SampledGradientProducts(Statistic):
    """E[g gᵀ] with labels drawn from the model's own prediction."""

    keyed_by_row: ClassVar[bool] = True
    samples: int
    seed: int

    def of(self, recording: Recording) -> Values:
        criterion, logits = recording.criterion, recording.logits
        draws = [
            criterion.sample(logits, uniforms(self.seed, draw, recording.first_row, logits))
            for draw in range(self.samples)
        ]
        gradients = torch.stack([criterion.gradients(logits, labels) for labels in draws])
        return _products(recording, gradients, self.samples)


@dataclass(frozen=True)
class ExpectedGradientProducts(Statistic):
    """E[g gᵀ] in expectation over the model's own labels."""

    def of(self, recording: Recording) -> Values:
        return _products(recording, recording.criterion.label_factor(recording.logits), 1)


def _products(recording: Recording, cotangents: Tensor, draws: int) -> Values:
    """E[Σ_r (Jᵀv_r)(Jᵀv_r)ᵀ] / draws for cotangents v (r, m, K), as Gram factors of r·m rows."""
    root = (recording.sqrt_row_weights / draws**0.5).repeat(len(cotangents))
    return tuple(GramFactor(rows.flatten(0, 1), root) for rows in recording.pullback(cotangents))


@dataclass(frozen=True)
class GaussNewtonBlocks(Statistic):
    """E[Jᵀ ∇²ξ J] for each layer with blocks, J the Jacobian of the logits."""

    def of(self, recording: Recording) -> Values:
        return tuple(_gauss_newton(recording, jacobian) for jacobian in recording.jacobians)


def _gauss_newton(recording: Recording, jacobian: Tensor) -> Tensor:
    curved = recording.apply_output_hessian(jacobian).mul_(recording.row_weights[:, None])
    block = jacobian.flatten(0, 1).T @ curved.flatten(0, 1)
    return (block + block.T) / 2


@dataclass(frozen=True)
class OutputSpectrum(Statistic):
    """E[Σ|λ|] over the negative eigenvalues of each example's ∇²ξ, and over all of them."""

    def of(self, recording: Recording) -> Values:
        hessians = recording.criterion.hessians(recording.logits, recording.targets)
        eigenvalues = torch.linalg.eigvalsh(hessians)
        return (
            recording.row_weights @ eigenvalues.clamp(max=0).abs().sum(1),
            recording.row_weights @ eigenvalues.abs().sum(1),
        )


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


BITS = 23  # k + ½ for k < 2²³ is exact in float32: every dtype and device draws the same numbers


def uniforms(seed: int, draw: int, first_row: int, like: Tensor) -> Tensor:
    """Numbers in (0, 1), one for each entry of `like` (rows × outputs); its first row is row `first_row`.

    >>> a = uniforms(0, 0, 0, torch.empty(4, 3))
    >>> b = uniforms(0, 0, 2, torch.empty(2, 3))
    >>> bool((a[2:] == b).all())
    True
    """
    rows, outputs = like.shape
    row = torch.arange(first_row, first_row + rows, dtype=torch.int64, device=like.device)[:, None]
    output = torch.arange(outputs, dtype=torch.int64, device=like.device)
    key = mix(torch.full((1, 1), seed, dtype=torch.int64, device=like.device))
    key = mix(mix(mix(key ^ draw) ^ row) ^ output)
    return (logical_shift(key, 64 - BITS).to(like.dtype) + 0.5).mul_(2.0**-BITS)
