"""What providers read of a recording, and its mean over batches.

A statistic is a mean over the rows of a batch. It is a value, so two providers that need the same one share
it, and a pass over a stream computes it once per batch. Nothing non-linear happens here: PosEig and the
recursions come after the mean over all batches (and ranks):

    E[f] = Σ_b w_b E_b[f] / Σ_b w_b     with w_b = Σ c_i the weight of batch b

`Means` takes that mean in memory that does not grow with the number of batches. A tensor is summed. A Gram
factor keeps the rows it is given while they are fewer than its columns and take no more than `ROW_BYTES`;
once they are as many, the dense form is smaller and is summed instead.

Random draws (labels, signs, positions) are keyed by the example's content: see `curvlab.providers.draws`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from sys import maxsize
from typing import Any, Protocol

import torch
from torch import Tensor

from curvlab.criteria import Criterion
from curvlab.exceptions import ProblemError
from curvlab.linalg import DenseFactor, ExampleFactor, Factor, GramFactor, eigvalsh, gram
from curvlab.linalg.factors import DiagonalFactor, InputFactors, diagonal_beyond
from curvlab.linalg.steps import RowFactor
from curvlab.model.layers import Layer
from curvlab.model.nodes import Cotangent, NodeInput
from curvlab.model.recording import ChainRecording, GraphRecording, Recording
from curvlab.providers.draws import draw_signs, uniforms
from curvlab.providers.example_rows import ExampleSums, chain_example_factors
from curvlab.providers.sides import (
    MAX_FACTOR,
    DiagonalSums,
    OutputSums,
    Sides,
    check_not_overwritten,
    input_sides,
)
from curvlab.staleness import Stamp

__all__ = [
    "ROW_BYTES",
    "CurvatureProducts",
    "ExpectedGradientProducts",
    "FactorMean",
    "GaussNewtonBlocks",
    "GradientProducts",
    "InputMean",
    "Inputs",
    "Mean",
    "Means",
    "OutputHessian",
    "OutputSpectrum",
    "SampledGradientProducts",
    "SecondOrderTerms",
    "SlopeProducts",
    "Statistic",
    "TensorMean",
    "Values",
    "mean_of",
]

Values = tuple[Tensor | Factor | InputFactors, ...]


class Statistic(ABC):
    """A mean over the rows of a batch: one value per layer, or one for the output.

    A value is a tensor, which is averaged over batches, a factor (of a `GramFactor` the rows are joined), or
    a layer's `InputFactors`, which are both. `row_factor` is set where its Gram factors are, layer by layer,
    those of the weights' gradients (`RowGradient`): several ranks then send their rows once for both.
    """

    @property
    def row_factor(self) -> RowFactor | None:
        """Which factor of the weights' gradients its rows are; None: neither."""
        return None

    @property
    def needs(self) -> tuple[Statistic, ...]:
        """Statistics whose means over all batches and ranks this one reads: they take a pass before it."""
        return ()

    def bound(self, values: Mapping[Statistic, Values]) -> Statistic:
        """The same statistic (it compares equal) with the means of what it `needs`."""
        return self

    def hear_with_gradient(self, recording: Recording) -> bool:
        """Read what a backward pass of the gradient tells in the one that forms it; whether there is any."""
        return False

    @abstractmethod
    def of(self, recording: Recording) -> Values:
        """The means over one batch."""


def _chain(recording: Recording) -> ChainRecording:
    assert isinstance(recording, ChainRecording)
    return recording


@dataclass(frozen=True)
class Inputs(Statistic):
    """E[hhᵀ] and E[h] for each part of each weight.

    `sides` is None where every layer is a Linear one that sees one row per example: a single batch's factors
    are then its rows, which its gradient shares.
    """

    sides: Sides | None = None

    @property
    def row_factor(self) -> RowFactor | None:
        return "inputs" if self.sides is None else None

    def of(self, recording: Recording) -> Values:
        if self.sides is None or isinstance(recording, ChainRecording):
            limit = MAX_FACTOR if self.sides is None else self.sides.max_factor
            return tuple(_input_factors(record.inputs, limit) for record in recording.layers)
        assert isinstance(recording, GraphRecording)
        return tuple(
            factors
            for place, layer in enumerate(recording.layout)
            for factors in input_sides(recording, layer, self.sides, place)
        )


def _input_factors(inputs: GramFactor, limit: int) -> InputFactors:
    factor = diagonal_beyond(inputs, limit)
    return InputFactors(factor) if factor is inputs else InputFactors(factor, inputs.mean)


def sides_for(sides: Sides, problem: SeenLayers) -> Sides | None:
    """None where every layer is a Linear one with one row per example, for which all sharing is the same."""
    plain = sides.structure == "kronecker" and all(layer.kind == "linear" for layer in problem.layers)
    usual = sides.max_factor == MAX_FACTOR
    wide = any(max(layer.parameter.shape, default=1) > sides.max_factor for layer in problem.layers)
    return None if plain and (usual or not wide) else sides


class SeenLayers(Protocol):
    """A problem, as far as its layers go."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that have blocks."""


def input_statistic(sides: Sides | None) -> Inputs:
    """The statistic of the input sides that goes with output sides."""
    return Inputs(sides)


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


@dataclass(frozen=True, eq=False)
class Cotangents:
    """What is sent back from the logits to give the rows of an output side.

    `stack` holds, in (r, examples · terms, K), r cotangents of all terms; inside an example term j carries
    `within`_ij. A `negative` one is subtracted. Where terms do not share a pass, each has one of its own.
    """

    stack: Tensor
    within: Tensor
    weight: float
    share_passes: bool
    negative: bool = False


@dataclass(frozen=True)
class OutputProducts(Statistic):
    """E[Σ v vᵀ] of rows v = Jᵀ u for each layer's output side, from cotangents u that a subclass names."""

    sides: Sides | None = None

    @abstractmethod
    def cotangents(self, recording: Recording) -> list[Cotangents]:
        """What is sent back."""

    def signed(self, criterion: Criterion) -> bool:
        """Whether rows may be subtracted; with this criterion all batches and ranks have both signs then."""
        return False

    def of(self, recording: Recording) -> Values:
        found = self.collect(recording, SideCollector(self.sides))
        if self.sides is not None and self.sides.keeps_examples:
            # Rows of both signs apart: their difference comes after the mean.
            return tuple(value for group in found for value in group)
        if len(found) == 1:
            return found[0]
        return tuple(_difference(plus, minus) for plus, minus in zip(*found, strict=True))

    def collect(self, recording: Recording, collector: Collector) -> list[Any]:
        """What a collector makes of the rows that are added and, apart, of those that are subtracted."""
        found = self.cotangents(recording)
        positive = [one for one in found if not one.negative]
        negative = [one for one in found if one.negative]
        if self.signed(recording.criterion) and not negative:
            silent = torch.zeros_like(found[0].stack[:1])
            negative = [replace(found[0], stack=silent, share_passes=True, negative=True)]
        return [self._sums(recording, group, collector) for group in (positive, negative) if group]

    def _sums(self, recording: Recording, cotangents: list[Cotangents], collector: Collector) -> Any:
        if isinstance(recording, ChainRecording):
            return collector.of_chain(recording, _chain_products(recording, cotangents))
        assert isinstance(recording, GraphRecording)
        terms = recording.terms
        each = [1 if one.share_passes else terms.per_example for one in cotangents]
        passes = sum(len(one.stack) * count for one, count in zip(cotangents, each, strict=True))
        sums = collector.sums(recording, passes)
        for one in cotangents:
            each_pass = [one.within] if one.share_passes else passes_of(one.within, terms.per_example)
            for within in each_pass:
                for cotangent in one.stack:
                    sums.add_pass(terms.as_logits(cotangent, within), one.weight)
        return sums.factors()


class Sums(Protocol):
    """Adds up the rows of backward passes."""

    def add_pass(
        self, cotangent: Tensor, weight: float = 1.0, at_nodes: Mapping[NodeInput, Cotangent] | None = None
    ) -> None:
        """One backward pass, from cotangents at the logits and at nodes; it counts with `weight`."""

    def factors(self) -> Values:
        """What the rows gave."""


class Collector(Protocol):
    """What is made of the rows at the layers' outputs."""

    def of_chain(self, recording: ChainRecording, products: tuple[GramFactor, ...]) -> Values:
        """From the rows of a chain's layers."""

    def sums(self, recording: GraphRecording, passes: int) -> Sums:
        """From so many backward passes through a graph."""


@dataclass(frozen=True)
class SideCollector:
    """The output sides, in the structure that is asked for."""

    sides: Sides | None

    def of_chain(self, recording: ChainRecording, products: tuple[GramFactor, ...]) -> Values:
        """From the rows of a chain's layers."""
        return chain_sides(recording, products, self.sides)

    def sums(self, recording: GraphRecording, passes: int) -> Sums:
        """From so many backward passes through a graph."""
        return sums_of(recording, self.sides or Sides(), passes)


MOST_PASSES = 1000


def sums_of(recording: GraphRecording, sides: Sides, passes: int) -> Sums:
    """What adds up the rows of so many backward passes, for the structure that is asked for."""
    if sides.keeps_examples:
        return ExampleSums(recording, sides.structure)
    return DiagonalSums(recording) if sides.diagonal else OutputSums(recording, sides, passes)


def chain_sides(
    recording: ChainRecording, products: tuple[GramFactor, ...], sides: Sides | None
) -> tuple[Factor, ...]:
    """The output sides of a chain's layers, from their rows."""
    if sides is not None and sides.keeps_examples:
        return chain_example_factors(recording, products, sides.structure)
    if sides is not None and sides.diagonal:
        return _chain_diagonals(recording, products)
    limit = MAX_FACTOR if sides is None else sides.max_factor
    return tuple(diagonal_beyond(product, limit) for product in products)


def passes_of(within: Tensor, terms: int) -> Iterator[Tensor]:
    """The weights inside the examples, for one pass per term."""
    for term in range(terms):
        alone = torch.zeros_like(within)
        alone[:, term] = within[:, term]
        yield alone


def _chain_products(recording: ChainRecording, cotangents: list[Cotangents]) -> tuple[GramFactor, ...]:
    """E[Σ_r (Jᵀv_r)(Jᵀv_r)ᵀ] as Gram factors of r·m rows, for all cotangents at once."""
    stack = torch.cat([one.stack for one in cotangents])
    root = (recording.sqrt_row_weights * cotangents[0].weight ** 0.5).repeat(len(stack))
    return tuple(GramFactor(rows.flatten(0, 1), root) for rows in recording.pullback(stack))


def _chain_diagonals(recording: ChainRecording, outputs: tuple[GramFactor, ...]) -> tuple[Factor, ...]:
    """E[(g ⊗ h)²] for weights and E[g²] for biases, from the rows of the output sides."""
    found: list[Factor] = []
    for record, output in zip(recording.layers, outputs, strict=True):
        squares = output.rows.square() * output.root.square()[:, None]
        inputs = record.inputs.rows.square()
        if record.layer.weight_name is not None:
            per_example = squares.reshape(-1, *inputs.shape[:1], squares.shape[1]).sum(0)
            found.append(DiagonalFactor((per_example.T @ inputs).flatten()))
        if record.layer.bias_name is not None:
            found.append(DiagonalFactor(squares.sum(0)))
    return tuple(found)


def _difference(plus: Factor, minus: Factor) -> Factor:
    if isinstance(plus, DiagonalFactor) or isinstance(minus, DiagonalFactor):
        return DiagonalFactor(plus.diagonal() - minus.diagonal())
    return DenseFactor(plus.to_dense() - minus.to_dense())


@dataclass(frozen=True)
class GradientProducts(OutputProducts):
    """E[g gᵀ] with the given labels: the second moment of the examples' own gradients."""

    @property
    def row_factor(self) -> RowFactor | None:
        return "gradients" if self.sides is None else None

    def of(self, recording: Recording) -> Values:
        if self.sides is None:
            return tuple(diagonal_beyond(record.gradients, MAX_FACTOR) for record in recording.layers)
        return super().of(recording)

    def cotangents(self, recording: Recording) -> list[Cotangents]:
        gradients = recording.criterion.gradients(recording.logits, recording.targets)
        return [Cotangents(gradients[None], recording.terms.within, 1.0, True)]


@dataclass(frozen=True)
class SampledGradientProducts(OutputProducts):
    """E[g gᵀ] with labels drawn from the model's own prediction."""

    samples: int = 1
    seed: int = 0

    def cotangents(self, recording: Recording) -> list[Cotangents]:
        criterion, logits, terms = recording.criterion, recording.logits, recording.terms
        count = terms.per_example * terms.outputs
        stack = []
        for draw in range(self.samples):
            numbers = uniforms(self.seed, draw, recording.example_keys, count, logits.dtype)
            labels = criterion.sample(logits, numbers.reshape(logits.shape))
            gradients = criterion.gradients(logits, labels)
            stack.append(gradients * _term_signs(recording, self.seed, draw))
        return [Cotangents(torch.stack(stack), terms.within.sqrt(), 1 / self.samples, True)]


def _term_signs(recording: Recording, seed: int, draw: int) -> Tensor:
    """A sign for each term: terms that share a backward pass must not add up to a mean of their own."""
    terms = recording.terms
    if terms.per_example == 1:
        return recording.logits.new_ones(1, 1)
    signs = draw_signs(seed, draw, recording.example_keys, terms.per_example, recording.logits.dtype)
    return signs.reshape(-1, 1)


@dataclass(frozen=True)
class ExpectedGradientProducts(OutputProducts):
    """E[g gᵀ] in expectation over the model's own labels."""

    def cotangents(self, recording: Recording) -> list[Cotangents]:
        _check_passes(recording)
        factor = recording.criterion.label_factor(recording.logits)
        return [Cotangents(factor, recording.terms.within.sqrt(), 1.0, False)]


@dataclass(frozen=True)
class CurvatureProducts(OutputProducts):
    """E[Jᵀ ∇²ξ J] of rows: every column of ∇²ξ = L⁺L⁺ᵀ - L⁻L⁻ᵀ, or `samples` random combinations."""

    samples: int | None = None
    seed: int = 0

    def signed(self, criterion: Criterion) -> bool:
        return not criterion.convex

    def cotangents(self, recording: Recording) -> list[Cotangents]:
        criterion, logits, targets = recording.criterion, recording.logits, recording.targets
        within = recording.terms.within.sqrt()
        if self.samples is None:
            _check_passes(recording)
            both: Sequence[Tensor | None] = criterion.hessian_factors(logits, targets)
            weight, share_passes = 1.0, False
        else:
            drawn = [self._draw(recording, draw) for draw in range(self.samples)]
            both = tuple(_stack_drawn(one) for one in zip(*drawn, strict=True))
            weight, share_passes = 1 / self.samples, True
        return [
            Cotangents(stack, within, weight, share_passes, negative)
            for negative, stack in zip((False, True), both, strict=True)
            if stack is not None
        ]

    def _draw(self, recording: Recording, draw: int) -> tuple[Tensor, Tensor | None]:
        """L⁺ε and L⁻ε with independent signs ε for every example, term and column."""
        logits, terms = recording.logits, recording.terms
        keys, count = recording.example_keys, terms.per_example * terms.outputs
        signs = [draw_signs(self.seed, 2 * draw + s, keys, count, logits.dtype) for s in (0, 1)]
        plus, minus = (sign.reshape(logits.shape) for sign in signs)
        return recording.criterion.draw_hessian(logits, recording.targets, plus, minus)


def _stack_drawn(drawn: tuple[Tensor | None, ...]) -> Tensor | None:
    found = [one for one in drawn if one is not None]
    return torch.stack(found) if found else None


def _check_passes(recording: Recording) -> None:
    """Refuse more backward passes, one per output and loss term, than anyone would wait for."""
    passes = recording.terms.outputs * recording.terms.per_example
    if isinstance(recording, GraphRecording) and passes > MOST_PASSES:
        raise ProblemError(
            f"this takes {passes:,} backward passes, one per output and loss term; the limit is "
            f"{MOST_PASSES:,}. Draw instead: `gauss-newton[samples=1]` or `fisher[kind=mc]`"
        )


@dataclass(frozen=True)
class GaussNewtonBlocks(Statistic):
    """E[Jᵀ ∇²ξ J] for each layer with blocks, J the Jacobian of the logits."""

    def of(self, recording: Recording) -> Values:
        chain = _chain(recording)
        return tuple(_gauss_newton(chain, jacobian) for jacobian in chain.jacobians)


def _gauss_newton(recording: ChainRecording, jacobian: Tensor) -> Tensor:
    curved = recording.apply_output_hessian(jacobian).mul_(recording.row_weights[:, None])
    block = jacobian.flatten(0, 1).T @ curved.flatten(0, 1)
    return (block + block.T) / 2


@dataclass(frozen=True)
class OutputSpectrum(Statistic):
    """E[Σ|λ|] over the negative eigenvalues of each example's ∇²ξ, and over all of them."""

    def of(self, recording: Recording) -> Values:
        hessians = recording.criterion.hessians(recording.logits, recording.targets)
        eigenvalues = eigvalsh(hessians)
        weights = (recording.row_weights[:, None] * recording.terms.within).flatten()
        return (
            weights @ eigenvalues.clamp(max=0).abs().sum(1),
            weights @ eigenvalues.abs().sum(1),
        )


ROW_BYTES = 2 * 1024**3


@dataclass
class TensorMean:
    """The mean of a tensor.

    >>> mean = TensorMean(torch.tensor(1.0), torch.tensor(3.0))
    >>> mean.add(torch.tensor(5.0), torch.tensor(1.0))
    >>> mean.value()
    tensor(2.)
    """

    held: Tensor
    weight: Tensor
    single: bool = field(default=True, init=False)

    def add(self, value: Tensor, weight: Tensor) -> None:
        """Count `value` with `weight`, beside those before."""
        if self.held.shape != value.shape:
            raise ProblemError(
                f"the batches give means of different shapes, {tuple(self.held.shape)} and "
                f"{tuple(value.shape)}: use batches of one size"
            )
        if self.single:
            self.held, self.single = self.held * self.weight, False
        self.held.add_(value * weight)
        self.weight = self.weight + weight

    def value(self) -> Tensor:
        """The mean so far: of a single value, that value itself."""
        return self.held if self.single else self.held / self.weight


@dataclass
class FactorMean:
    """The mean of a factor; a Gram factor keeps its rows while they are few.

    Once there are as many rows as columns the dense form is summed; where both exceed `limit`, the diagonal.
    """

    single: Factor | None
    weight: Tensor
    limit: int = MAX_FACTOR
    stamp: Stamp | None = None
    rows: list[tuple[Tensor, Tensor, Stamp]] = field(default_factory=list)
    total: Tensor | None = None

    def __post_init__(self) -> None:
        """`stamp` is that of the rows when they were first seen."""
        self.stamp = self.stamp or _row_stamp(self.single)

    def add(self, value: Factor, weight: Tensor) -> None:
        """Count `value` with `weight`, beside those before."""
        if self.single is not None:
            self._count(self.single, self.weight, self.stamp)
            self.single = None
        self.weight = self.weight + weight
        self._count(value, weight, None)

    def value(self) -> Factor:
        """The mean so far; that of a single batch is the batch's own factor."""
        if self.single is not None:
            return self.single
        if self.total is not None:
            mean = self.total / self.weight
            return DiagonalFactor(mean) if mean.ndim == 1 else DenseFactor(mean)
        rows, roots = zip(*self._check_rows(), strict=True)
        return GramFactor(torch.cat(rows), torch.cat(roots) / self.weight.sqrt())

    def _count(self, value: Factor, weight: Tensor, stamp: Stamp | None) -> None:
        size = value.size
        if isinstance(value, ExampleFactor):
            value, stamp = value.formed(), None
        if isinstance(value, GramFactor) and self.total is None:
            self.rows.append((value.rows, value.root * weight.sqrt(), stamp or Stamp.of(value.rows)))
            held = self._row_count()
            if held >= min(size, max(self.limit, 1)) and (held >= size or held > self.limit):
                self._sum_rows(size)
            _check_bytes(self._row_count(), value.rows)
            return
        total = self._sum_rows(size, diagonal=isinstance(value, DiagonalFactor))
        counted = value.diagonal() if total.ndim == 1 else value.to_dense()
        total.add_(counted * weight)

    def _row_count(self) -> int:
        return sum(len(rows) for rows, _, _ in self.rows)

    def _sum_rows(self, size: int, *, diagonal: bool = False) -> Tensor:
        """Turn what is held into a sum, dense or (from here on) diagonal."""
        example = self.rows[0][0] if self.rows else self.weight
        diagonal = diagonal or (size > self.limit and self._row_count() > self.limit)
        total = self.total
        if total is None:
            total = example.new_zeros(size) if diagonal else example.new_zeros(size, size)
        elif diagonal and total.ndim == 2:
            total = total.diagonal().clone()
        for rows, root in self._check_rows():
            scaled = rows * root[:, None]
            if total.ndim == 1:
                total.add_(scaled.square().sum(0))
            else:
                total.addmm_(scaled.T, scaled)
        self.total, self.rows = total, []
        return total

    def _check_rows(self) -> list[tuple[Tensor, Tensor]]:
        check_not_overwritten((rows for rows, _, _ in self.rows), (stamp for _, _, stamp in self.rows))
        return [(rows, root) for rows, root, _ in self.rows]


def _row_stamp(value: object) -> Stamp | None:
    """The version of a Gram factor's rows, which may be a batch's own tensor."""
    return Stamp.of(value.rows) if isinstance(value, GramFactor) else None


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
    """The means E[hhᵀ] and E[h] of a layer's inputs; those of a single batch are not even looked at."""

    held: InputFactors | tuple[FactorMean, TensorMean]
    weight: Tensor
    limit: int = MAX_FACTOR

    def __post_init__(self) -> None:
        self._stamp = _row_stamp(self.held.source) if isinstance(self.held, InputFactors) else None

    def add(self, value: InputFactors, weight: Tensor) -> None:
        """Count a batch's inputs with `weight`, beside those before."""
        if isinstance(self.held, InputFactors):
            mean = TensorMean(self.held.mean, self.weight)
            self.held = FactorMean(self.held.full, self.weight, self.limit, self._stamp), mean
        full, mean = self.held
        mean.add(value.mean, weight)
        full.add(value.full, weight)

    def value(self) -> InputFactors:
        """The input factors so far."""
        if isinstance(self.held, InputFactors):
            return self.held
        full, mean = self.held
        return InputFactors(full.value(), mean.value())


Mean = TensorMean | FactorMean | InputMean


def mean_of(value: Tensor | Factor | InputFactors, weight: Tensor, limit: int = MAX_FACTOR) -> Mean:
    """The mean of one `value`, of the kind that it needs: more are added."""
    if isinstance(value, InputFactors):
        return InputMean(value, weight, limit)
    return FactorMean(value, weight, limit) if isinstance(value, Factor) else TensorMean(value, weight)


class Means:
    """The means of several statistics, from one recording after the other."""

    def __init__(self, statistics: Sequence[Statistic]) -> None:
        self.statistics = tuple(statistics)
        self._held: dict[Statistic, list[Mean]] = {}

    def add(self, recording: Recording) -> None:
        """Count a batch with its weight."""
        weight = recording.total_weight
        for statistic in self.statistics:
            values = statistic.of(recording)
            limit = getattr(statistic, "sides", None)
            most = MAX_FACTOR if limit is None else maxsize if limit.keeps_examples else limit.max_factor
            held = self._held.get(statistic)
            if held is None:
                self._held[statistic] = [mean_of(value, weight, most) for value in values]
                continue
            for mean, value in zip(held, values, strict=True):
                mean.add(value, weight)  # type: ignore[arg-type]

    def values(self) -> dict[Statistic, Values]:
        """The means so far."""
        return {statistic: tuple(mean.value() for mean in held) for statistic, held in self._held.items()}
