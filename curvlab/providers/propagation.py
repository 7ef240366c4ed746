"""Signed curvature propagation: rows whose second moments are a layer's block of the Hessian, on any graph.

The Hessian at a layer's output is the Gauss-Newton matrix of the network whose outputs are the logits and the
inputs u_n of its non-linear nodes (`curvlab.model.nodes`), with output curvature blockdiag(∇²ξ, M_1, …, M_N).
With the nodes' means M̄_n over examples and positions, split as ∇²ξ_i = L⁺L⁺ᵀ - L⁻L⁻ᵀ, M̄_n = N⁺N⁺ᵀ - N⁻N⁻ᵀ,
and independent random signs ε, one backward pass starts from all of them at once:

    v^± = Jᵀ L^± ε_0 + Σ_n J_nᵀ N^±_n ε_n
    E[v⁺v⁺ᵀ] - E[v⁻v⁻ᵀ] = E[Jᵀ ∇²ξ J + Σ_n J_nᵀ M̄_n J_n]

`PropagatedCurvature` gives the sides of v⁺ and of v⁻ apart, so that PosEig can be taken of their difference
after the mean over all batches and ranks; or, with `gammas`, of one v with L⁻ scaled by √|γ_out| and N⁻ by
√|γ|: PosEig at the nodes. Signs are keyed by the content of the example. Without draws every column is a
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from curvlab.criteria import Criterion
from curvlab.exceptions import ProblemError
from curvlab.linalg import GramFactor
from curvlab.linalg.execution import askable
from curvlab.model.nodes import Cotangent, CurvatureRoot, NodeInput
from curvlab.model.recording import ChainRecording, GraphRecording, Recording
from curvlab.providers.draws import draw_signs
from curvlab.providers.statistics import (
    MOST_PASSES,
    Collector,
    CurvatureProducts,
    SideCollector,
    Statistic,
    Values,
    passes_of,
)

__all__ = ["NODE_CURVATURES", "NodeCurvatures", "PropagatedCurvature"]

NODES = 1 << 20  # streams of signs apart from those of the logits
# What was read of means, by the first of them: the statistic and the curvature made of it ask the same.
_PRESENT: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(frozen=True)
class NodeCurvatures(Statistic):
    """M̄_n of every non-linear node: (G, n) where it is diagonal, (G, n, n) where not."""

    def hear_with_gradient(self, recording: Recording) -> bool:
        if isinstance(recording, ChainRecording):
            return False
        assert isinstance(recording, GraphRecording)
        recording.node_curvatures(with_gradient=True)
        return True

    def of(self, recording: Recording) -> Values:
        if isinstance(recording, ChainRecording):
            weights = recording.row_weights
            pairs = zip(recording.activation_slopes, recording.second_order_terms, strict=True)
            return tuple(
                weights.new_zeros(1, slope.shape[1]) if term is None else (weights @ term)[None]
                for slope, term in pairs
            )
        assert isinstance(recording, GraphRecording)
        return recording.node_curvatures()


NODE_CURVATURES = NodeCurvatures()


@dataclass(frozen=True, eq=False)
class Start:
    """What one backward pass starts from: a cotangent of the loss terms, and rows at the nodes by number.

    Rows are made where the pass comes to their node: those of all nodes together are as large as all that the
    forward has kept.
    """

    logits: Tensor
    within: Tensor
    nodes: Mapping[int, Callable[[], Tensor]]
    weight: float


@dataclass(frozen=True)
class PropagatedCurvature(CurvatureProducts):
    """The output sides of v⁺, and of v⁻ where anything is negative; with `gammas`, (γ, γ_out), of one v.

    `means` are the nodes' M̄ over all batches and ranks: `bound` to them it is the same statistic.
    """

    gammas: tuple[float, float] | None = None
    means: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)

    @property
    def needs(self) -> tuple[Statistic, ...]:
        return (NODE_CURVATURES,)

    def bound(self, values: Mapping[Statistic, Values]) -> PropagatedCurvature:
        return replace(self, means=cast(tuple[Tensor, ...], values[NODE_CURVATURES]))

    @cached_property
    def _roots(self) -> tuple[tuple[CurvatureRoot, CurvatureRoot], ...]:
        return tuple(CurvatureRoot.split(mean) for mean in self.means)

    @cached_property
    def _positive_roots(self) -> tuple[CurvatureRoot, ...]:
        assert self.gammas is not None
        return tuple(CurvatureRoot.joined(*both, self.gammas[0]) for both in self._roots)

    @cached_property
    def present(self) -> tuple[tuple[bool, bool], ...]:
        """Whether N⁺ and N⁻ of each node have an entry: one read for all; all have where none may be."""
        if not self.means or not askable(self.means[0]):
            return ((True, True),) * len(self.means)
        key = self.means[0]
        if key not in _PRESENT:
            found = [(root.values > 0).any() for pair in self._roots for root in pair]
            flags = torch.stack(found).tolist()
            _PRESENT[key] = tuple(zip(flags[::2], flags[1::2], strict=True))
        return _PRESENT[key]

    def signed(self, criterion: Criterion) -> bool:
        """Whether there are sides of v⁻; the same on all batches and ranks."""
        if self.gammas is not None:
            return False
        return not criterion.convex or any(minus for _, minus in self.present)

    def of(self, recording: Recording) -> Values:
        found = self.collect(recording, SideCollector(self.sides))
        return tuple(value for group in found for value in group)

    def collect(self, recording: Recording, collector: Collector) -> list[Any]:
        positive, negative = self._starts(recording)
        if self.gammas is not None:
            starts = [*positive, *negative] if self.samples is None else positive
            return [_rows_of(recording, starts, collector)]
        groups = [positive, negative] if self.signed(recording.criterion) else [positive]
        return [_rows_of(recording, group, collector) for group in groups]

    def _starts(self, recording: Recording) -> tuple[list[Start], list[Start]]:
        """The passes of both signs; with `gammas` a draw is one pass for both, in the first list."""
        if self.samples is None:
            self._check_passes(recording)
            return self._columns(recording)
        within, weight = recording.terms.within.sqrt(), 1 / self.samples
        groups: tuple[list[Start], list[Start]] = ([], [])
        for draw in range(self.samples):
            plus, minus = self._draw(recording, draw)
            negative = torch.zeros_like(plus) if minus is None else minus
            if self.gammas is not None:
                total = plus if minus is None else plus + abs(self.gammas[1]) ** 0.5 * minus
                groups[0].append(Start(total, within, self._draw_nodes(recording, draw, None), weight))
                continue
            for sign, logits in enumerate((plus, negative)):
                nodes = self._draw_nodes(recording, draw, sign)
                groups[sign].append(Start(logits, within, nodes, weight))
        return groups

    def _draw_nodes(
        self, recording: Recording, draw: int, sign: int | None
    ) -> dict[int, Callable[[], Tensor]]:
        """N ε for every node, of one sign; or of both, N⁻ scaled by √|γ|: they share no direction."""
        found: dict[int, Callable[[], Tensor]] = {}
        for number, (roots, counts) in enumerate(zip(self._roots, _counts(recording), strict=True)):
            plus, minus = self.present[number]
            if sign is None:
                assert self.gammas is not None
                root, there = self._positive_roots[number], plus or (minus and self.gammas[0] != 0)
            else:
                root, there = roots[sign], self.present[number][sign]
            if not there:
                continue
            stream = NODES * (number + 1) + 2 * draw + (sign or 0)
            found[number] = partial(self._draw_node, recording, root, counts, stream)
        return found

    def _draw_node(
        self, recording: Recording, root: CurvatureRoot, counts: tuple[int, int, int], stream: int
    ) -> Tensor:
        """N ε for one node."""
        signs = draw_signs(self.seed, stream, recording.example_keys, prod(counts), root.values.dtype)
        return root.times(signs.reshape(-1, *counts))

    def _columns(self, recording: Recording) -> tuple[list[Start], list[Start]]:
        """A pass for every column of L⁺, L⁻ and of every node's N⁺ and N⁻."""
        terms = recording.terms
        both = recording.criterion.hessian_factors(recording.logits, recording.targets)
        scales = (
            (1.0, 1.0) if self.gammas is None else (abs(self.gammas[0]) ** 0.5, abs(self.gammas[1]) ** 0.5)
        )
        groups: tuple[list[Start], list[Start]] = ([], [])
        for sign, stack in enumerate(both):
            if stack is not None:
                scaled = stack * scales[1] if sign else stack
                for within in passes_of(terms.within.sqrt(), terms.per_example):
                    groups[sign].extend(Start(column, within, {}, 1.0) for column in scaled)
        silent = torch.zeros_like(recording.logits)
        for number, (roots, counts) in enumerate(zip(self._roots, _counts(recording), strict=True)):
            for sign, root in enumerate(roots):
                scaled_root = root.scaled(scales[0]) if sign else root
                for rows in _node_columns(scaled_root, counts, recording.examples):
                    groups[sign].append(Start(silent, terms.within, {number: rows}, 1.0))
        if not groups[1] and self.gammas is None:
            groups[1].append(Start(silent, terms.within, {}, 1.0))  # zero, where other batches have some
        return groups

    def _check_passes(self, recording: Recording) -> None:
        """Refuse more backward passes than anyone would wait for."""
        at_nodes = sum(positions * groups * units for positions, groups, units in _counts(recording))
        passes = recording.terms.outputs * recording.terms.per_example + at_nodes
        if isinstance(recording, GraphRecording) and passes > MOST_PASSES:
            raise ProblemError(
                f"samples=all takes {passes:,} backward passes, one per output and loss term and one per "
                f"unit of every non-linear function; the limit is {MOST_PASSES:,}. Draw instead: "
                f"`pch[samples=1]`"
            )


def _rows_of(recording: Recording, starts: Sequence[Start], collector: Collector) -> Values:
    """What a collector makes of the rows of some passes."""
    if isinstance(recording, ChainRecording):
        return collector.of_chain(recording, _chain_rows(recording, starts))
    assert isinstance(recording, GraphRecording)
    sums, nodes = collector.sums(recording, len(starts)), recording.forward.nodes
    for start in starts:
        at_nodes: dict[NodeInput, Cotangent] = {
            nodes[number]: partial(_at_input, nodes[number], rows) for number, rows in start.nodes.items()
        }
        sums.add_pass(recording.terms.as_logits(start.logits, start.within), start.weight, at_nodes)
    return sums.factors()


def _at_input(node: NodeInput, rows: Callable[[], Tensor]) -> Tensor:
    return node.rows.back(rows())


def _counts(recording: Recording) -> tuple[tuple[int, int, int], ...]:
    """Positions, groups and units of every node."""
    if isinstance(recording, ChainRecording):
        return tuple((1, 1, slope.shape[1]) for slope in recording.activation_slopes)
    assert isinstance(recording, GraphRecording)
    return tuple(node.rows.counts for node in recording.forward.nodes)


def _node_columns(
    root: CurvatureRoot, counts: tuple[int, int, int], examples: int
) -> Iterator[Callable[[], Tensor]]:
    """Columns whose outer products sum to N², at every position, where they are not zero."""
    positions, groups, units = counts
    for group in range(groups):
        for unit in range(units):
            if float(root.values[group, unit]) > 0:
                for position in range(positions):
                    place = (examples, position, group)
                    yield partial(_node_column, root.column(group, unit), counts, place)


def _node_column(column: Tensor, counts: tuple[int, int, int], place: tuple[int, int, int]) -> Tensor:
    examples, position, group = place
    rows = column.new_zeros(examples, *counts)
    rows[:, position, group] = column
    return rows


def _chain_rows(recording: ChainRecording, starts: Sequence[Start]) -> tuple[GramFactor, ...]:
    """The rows v of all passes through a chain, r·m for each layer."""
    logits = torch.stack([start.logits for start in starts])
    at_nodes: list[Tensor | None] = []
    for number, slope in enumerate(recording.activation_slopes):
        rows = [start.nodes.get(number) for start in starts]
        silent = torch.zeros_like(slope)
        stacked = [silent if one is None else one().reshape(slope.shape) for one in rows]
        at_nodes.append(None if all(one is None for one in rows) else torch.stack(stacked))
    root = (recording.sqrt_row_weights * starts[0].weight ** 0.5).repeat(len(starts))
    return tuple(GramFactor(rows.flatten(0, 1), root) for rows in recording.pullback(logits, at_nodes))
