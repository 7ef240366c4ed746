"""EKFAC: the true second moments of the examples' rows on the eigenvectors of their Kronecker factors.

    A = Q S Qᵀ,  B = U Λ Uᵀ,      λ_ab = E[(u_aᵀ R_i q_b)²],  R_i = Σ_p g_ip h_ipᵀ      block U, Q, λ

Of all matrices that are diagonal on these eigenvectors it is the nearest to the block E[vec R_i vec R_iᵀ].
The eigenvectors are those of the means over all batches and ranks, so that λ takes a pass of its own. With
rows of both signs λ is that of R⁺ minus that of R⁻, then PosEig entry by entry. A weight that is used as
different matrices has no such eigenvectors: it keeps its true diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from curvlab.curvature_layers import KroneckerLayer, LayerCurvature, PlainLayer, SharedLayer
from curvlab.curvature_structures import EigenLayer
from curvlab.linalg import (
    DiagonalFactor,
    EigenBlock,
    EigenPart,
    Factor,
    GramFactor,
    MatrixView,
    poseig_diagonal,
    poseig_difference,
)
from curvlab.linalg.eigenbases import FactorBasis, factor_basis
from curvlab.linalg.factors import InputFactors
from curvlab.model.layers import Layer
from curvlab.model.nodes import Cotangent, NodeInput
from curvlab.model.recording import ChainRecording, GraphRecording, Recording
from curvlab.model.uses import WeightUse
from curvlab.model.watch import SeenWeight
from curvlab.providers.sides import placed_uses, side_count
from curvlab.providers.statistics import OutputProducts, Statistic, Values, input_statistic

__all__ = ["EigenMoments", "eigen_layers", "row_statistics"]

Bases = tuple[FactorBasis, FactorBasis]


@dataclass(frozen=True)
class EigenMoments(Statistic):
    """λ for each part of each weight (of a tied one its diagonal), from the rows of `products`.

    `gammas` has PosEig's γ for each output side, in the order of `OutputSums`; None where rows have one sign.
    """

    products: OutputProducts
    gammas: tuple[float, ...] | None = None
    outputs: tuple[Factor, ...] = field(default=(), compare=False, repr=False)
    inputs: tuple[InputFactors, ...] = field(default=(), compare=False, repr=False)

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return (input_statistic(self.products.sides), self.products)

    def bound(self, values: Mapping[Statistic, Values]) -> EigenMoments:
        factors = cast(tuple[Factor, ...], values[self.products])
        if self.gammas is not None and len(factors) == 2 * len(self.gammas):
            half = len(self.gammas)
            pairs = zip(factors[:half], factors[half:], self.gammas, strict=True)
            factors = tuple(poseig_difference(plus, minus, gamma) for plus, minus, gamma in pairs)
        inputs = cast(tuple[InputFactors, ...], values[input_statistic(self.products.sides)])
        bound = cast(OutputProducts, self.products.bound(values))
        return replace(self, products=bound, outputs=factors, inputs=inputs)

    def of(self, recording: Recording) -> Values:
        bases = dict(_bases(recording.layout, self.outputs, self.inputs))
        found = self.products.collect(recording, _Collector(bases))
        if len(found) == 1:
            return found[0]
        return tuple(plus - minus for plus, minus in zip(*found, strict=True))


def row_statistics(
    products: OutputProducts, structure: str, gammas: tuple[float, ...] | None = None
) -> tuple[Statistic, ...]:
    """What a structure of rows is made from: both sides, λ on their eigenvectors, or the rows alone."""
    if structure not in ("kronecker", "ekfac"):
        return (products,)
    sides = (input_statistic(products.sides), products)
    return (*sides, EigenMoments(products, gammas)) if structure == "ekfac" else sides


def _bases(
    layers: Sequence[Layer], outputs: Sequence[Factor], inputs: Sequence[InputFactors]
) -> Iterator[tuple[Layer, list[Bases]]]:
    """The eigenvectors of the parts of each weight; none of a tied one."""
    given, seen = iter(outputs), iter(inputs)
    for layer in layers:
        sides = [next(given) for _ in range(side_count(layer))]
        if layer.kind == "plain":
            continue
        parts = 1 if layer.kind == "linear" else sum(len(role.parts) for role in layer.roles)
        factors = [next(seen) for _ in range(parts)]
        if layer.weight_name is None:
            continue
        pairs = zip(sides[:parts], factors, strict=True)
        tied = layer.kind == "tied"
        yield layer, [] if tied else [(factor_basis(b), factor_basis(a.full)) for b, a in pairs]


@dataclass(frozen=True, eq=False)
class _Collector:
    """Takes λ from rows, for `OutputProducts.collect`."""

    bases: Mapping[Layer, list[Bases]]

    def of_chain(self, recording: ChainRecording, products: Sequence[GramFactor]) -> Values:
        found = []
        for record, rows in zip(recording.layers, products, strict=True):
            if record.layer.weight_name is None:
                continue
            ((output, inputs),) = self.bases[record.layer]
            examples = len(record.inputs.rows)
            left = _turn(rows.rows, output).square() * rows.root.square()[:, None]
            right = _turn(record.inputs.rows, inputs).square()
            found.append(left.reshape(-1, examples, left.shape[1]).sum(0).T @ right)
        return tuple(found)

    def sums(self, recording: GraphRecording, passes: int) -> EigenSums:
        return EigenSums(recording, self.bases)


def _turn(rows: Tensor, basis: FactorBasis) -> Tensor:
    """The coordinates of rows, (…, n)."""
    return rows if basis.vectors is None else rows @ basis.vectors


class EigenSums:
    """Σ_i c_i (Uᵀ R_i Q)², from one backward pass after the other."""

    def __init__(self, recording: GraphRecording, bases: Mapping[Layer, list[Bases]]) -> None:
        self.recording, self.bases = recording, bases
        self._first = {
            one.seen: one.part
            for layer in bases
            if layer.kind == "shared"
            for one in placed_uses(recording, layer)
        }
        like = recording.network.example.detach()
        self.totals = {
            layer: [like.new_zeros(len(b.values), len(a.values)) for b, a in parts]
            or [torch.zeros_like(layer.weight)]
            for layer, parts in bases.items()
        }

    def add_pass(
        self, cotangent: Tensor, weight: float = 1.0, at_nodes: Mapping[NodeInput, Cotangent] | None = None
    ) -> None:
        """One backward pass, from cotangents at the logits and at nodes; its squares count with `weight`."""
        share = self.recording.row_weights * weight
        held: dict[tuple[Layer, int], Tensor] = {}

        def hear(layer: Layer, seen: SeenWeight, gradient: Tensor) -> None:
            use = seen.use
            if layer not in self.bases:
                return
            if layer.kind == "tied":
                rows = use.example_gradients(gradient, tuple(layer.weight.shape))
                held[layer, 0] = held[layer, 0] + rows if (layer, 0) in held else rows
                return
            alone = len(self.recording.weight_uses(layer)) == 1
            rows, first = use.output_rows(gradient), self._first.get(seen.seen, 0)
            for span in use.ranges(use.parts * use.positions * use.input_size + layer.weight.numel()):
                for part, turned in self._turn_rows(layer, use, rows, first, span):
                    if alone:
                        self.totals[layer][part] += _squares(share[slice(*span)], turned)
                    else:
                        key = (layer, part)
                        if key not in held:
                            held[key] = turned.new_zeros(use.examples, *turned.shape[1:])
                        held[key][slice(*span)] += turned

        self.recording.backward(cotangent, hear, at_nodes)
        for (layer, part), rows in held.items():
            self.totals[layer][part] += _squares(share, rows)

    def _turn_rows(
        self, layer: Layer, use: WeightUse, rows: Tensor, first: int, span: tuple[int, int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Uᵀ R_i Q of some examples, (examples, r, s), for each part of a use."""
        inputs = use.input_rows(*span).to(rows)
        for index in range(use.parts):
            output, side = self.bases[layer][first + index]
            left = _turn(rows[slice(*span), :, index], output)
            yield first + index, torch.einsum("bsr,bsn->brn", left, _turn(inputs[:, :, index], side))

    def factors(self) -> Values:
        """λ of each part of each weight."""
        return tuple(total for totals in self.totals.values() for total in totals)


def _squares(share: Tensor, rows: Tensor) -> Tensor:
    return torch.tensordot(share, rows.square(), 1)


def eigen_layers(
    problem_layers: Sequence[Layer],
    layers: Sequence[LayerCurvature],
    values: Sequence[Tensor],
    gammas: Mapping[str, float] | None = None,
) -> tuple[LayerCurvature, ...]:
    """Kronecker layers with λ in the place of the products of their eigenvalues; `gammas` by layer name."""
    given = iter(values)
    found: list[LayerCurvature] = []
    for layer, made in zip(problem_layers, layers, strict=True):
        if layer.weight_name is None:
            found.append(made)
            continue
        gamma = None if gammas is None else gammas[layer.name]

        def moments(gamma: float | None = gamma) -> Tensor:
            value = next(given)
            return value if gamma is None else poseig_diagonal(value, gamma)

        parts: tuple[EigenPart, ...]
        if isinstance(made, KroneckerLayer) and made.inputs is not None:
            parts = (_part(made.output, made.inputs, moments()),)
            view, mean = MatrixView(tuple(layer.weight.shape)), made.output
        elif isinstance(made, SharedLayer) and made.view is not None:
            parts = tuple(_part(one.output, one.inputs, moments()) for one in made.parts)
            view, mean = made.view, made.mean_output
        else:
            diagonal = DiagonalFactor(moments().flatten())
            found.append(PlainLayer(str(layer.weight_name), tuple(layer.weight.shape), diagonal))
            continue
        block = EigenBlock(view, parts)
        found.append(EigenLayer(made.name, made.weight_name, made.bias_name, block, mean))
    return tuple(found)


def _part(output: Factor, inputs: InputFactors, values: Tensor) -> EigenPart:
    left, right = factor_basis(output), factor_basis(inputs.full)
    return EigenPart(output.size, inputs.size, values, left.vectors, right.vectors)
