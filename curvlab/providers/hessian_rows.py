"""The Hessian's blocks as signed second moments of rows: `hessian[kind=rows]`.

    E[vec R⁺ vec R⁺ᵀ] - E[vec R⁻ vec R⁻ᵀ] = E[Jᵀ ∇²ξ_i J + Σ_n J_nᵀ M_{i,n} J_n]      by parameter

Signed curvature propagation (`curvlab.providers.propagation`) with every example's own local Hessians
(`curvlab.model.own_curvature`) in the place of their means, and of every non-linear function: the blocks by
parameter are then the Hessian's, in expectation over the random signs, or as they are with every column sent
back. Nothing is made positive, and between the uses of a weight at several depths the Hessian has bilinear
terms more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.criteria import Criterion
from curvlab.exceptions import ProblemError
from curvlab.linalg import GramFactor
from curvlab.model.nodes import NodeInput
from curvlab.model.own_curvature import OwnCurvature
from curvlab.model.recording import ChainRecording, GraphRecording, Recording
from curvlab.providers.draws import draw_signs
from curvlab.providers.propagation import NODES
from curvlab.providers.sides import Sides
from curvlab.providers.statistics import (
    MOST_PASSES,
    CurvatureProducts,
    Values,
    chain_sides,
    passes_of,
    sums_of,
)

__all__ = ["HessianRows"]

BY_PARAMETER = Sides(structure="block")


@dataclass(frozen=True, eq=False)
class _Start:
    """What a backward pass starts from: a cotangent of the loss terms, ε of some nodes by their number."""

    logits: Tensor
    within: Tensor
    coordinates: dict[int, Tensor]
    weight: float


@dataclass(frozen=True)
class HessianRows(CurvatureProducts):
    """The rows of v⁺, and then those of v⁻, of every parameter."""

    sides: Sides | None = BY_PARAMETER

    def signed(self, criterion: Criterion) -> bool:
        """Always: second-order terms of both signs are the rule."""
        return True

    def of(self, recording: Recording) -> Values:
        nodes: Sequence[_Node]
        if isinstance(recording, ChainRecording):
            nodes = [_ChainNode(term) for term in recording.second_order_terms]
        else:
            assert isinstance(recording, GraphRecording)
            nodes = [_GraphNode(one) for one in recording.own_curvatures()]
        groups = (
            self._columns(recording, nodes)
            if self.samples is None
            else self._draws(recording, nodes, self.samples)
        )
        return tuple(
            factor
            for negative, starts in enumerate(groups)
            for factor in self._factors(recording, nodes, starts, bool(negative))
        )

    def _draws(
        self, recording: Recording, nodes: Sequence[_Node], samples: int
    ) -> tuple[list[_Start], list[_Start]]:
        within, weight, keys = recording.terms.within.sqrt(), 1 / samples, recording.example_keys
        groups: tuple[list[_Start], list[_Start]] = ([], [])
        for draw in range(samples):
            plus, minus = self._draw(recording, draw)
            for sign, logits in enumerate((plus, torch.zeros_like(plus) if minus is None else minus)):
                signs = {
                    number: draw_signs(
                        self.seed, NODES * (number + 1) + 2 * draw + sign, keys, node.columns, plus.dtype
                    )
                    for number, node in enumerate(nodes)
                    if node.columns
                }
                groups[sign].append(_Start(logits, within, signs, weight))
        return groups

    def _columns(self, recording: Recording, nodes: Sequence[_Node]) -> tuple[list[_Start], list[_Start]]:
        """A pass for every column of L⁺ and L⁻, and of every node's N⁺ and N⁻."""
        terms, examples = recording.terms, recording.examples
        self._refuse_many(recording, terms.outputs * terms.per_example + sum(n.columns for n in nodes))
        silent = torch.zeros_like(recording.logits)
        groups: tuple[list[_Start], list[_Start]] = ([], [])
        both = recording.criterion.hessian_factors(recording.logits, recording.targets)
        for group, stack in zip(groups, both, strict=True):
            columns = () if stack is None else tuple(stack)
            for within in passes_of(terms.within.sqrt(), terms.per_example) if columns else ():
                group.extend(_Start(column, within, {}, 1.0) for column in columns)
            for number, node in enumerate(nodes):
                for column in _units(examples, node.columns, silent):
                    group.append(_Start(silent, terms.within, {number: column}, 1.0))
            if not group:
                group.append(_Start(silent, terms.within, {}, 1.0))
        return groups

    def _refuse_many(self, recording: Recording, passes: int) -> None:
        if isinstance(recording, GraphRecording) and passes > MOST_PASSES:
            raise ProblemError(
                f"samples=all takes {passes:,} backward passes for each sign, one per output and loss term "
                f"and one per entry of every non-linear function; the limit is {MOST_PASSES:,}. Draw "
                f"instead: `hessian[kind=rows,samples=1]`"
            )

    def _factors(
        self, recording: Recording, nodes: Sequence[_Node], starts: Sequence[_Start], negative: bool
    ) -> Values:
        if isinstance(recording, ChainRecording):
            return chain_sides(recording, _chain_rows(recording, nodes, starts, negative), self.sides)
        assert isinstance(recording, GraphRecording)
        sums = sums_of(recording, self.sides or Sides(), len(starts))
        for start in starts:
            at_nodes: dict[NodeInput, Tensor] = {}
            for number, coordinates in start.coordinates.items():
                node = nodes[number]
                assert isinstance(node, _GraphNode)
                for place, rows in node.times(coordinates, negative):
                    at_nodes[place] = at_nodes[place] + rows if place in at_nodes else rows
            sums.add_pass(recording.terms.as_logits(start.logits, start.within), start.weight, at_nodes)
        return sums.factors()


class _ChainNode:
    """An activation of a chain: M is diagonal, (m, n); None where there is none."""

    def __init__(self, term: Tensor | None) -> None:
        self.term = term

    @property
    def columns(self) -> int:
        return 0 if self.term is None else self.term.shape[1]

    def rows(self, coordinates: Sequence[Tensor | None], negative: bool) -> Tensor | None:
        """N ε of several ε, (r, m, n), 0 for those that are None; None without a term."""
        if self.term is None:
            return None
        root = (-self.term if negative else self.term).clamp(min=0).sqrt()
        return torch.stack([torch.zeros_like(root) if one is None else root * one for one in coordinates])


class _GraphNode:
    """A node of any graph; None where the loss does not depend on it."""

    def __init__(self, curvature: OwnCurvature | None) -> None:
        self.curvature = curvature

    @property
    def columns(self) -> int:
        return 0 if self.curvature is None else self.curvature.columns

    def times(self, coordinates: Tensor, negative: bool) -> list[tuple[NodeInput, Tensor]]:
        """N ε at each of its inputs."""
        return [] if self.curvature is None else self.curvature.times(coordinates, negative)


_Node = _ChainNode | _GraphNode


def _units(examples: int, columns: int, like: Tensor) -> Iterator[Tensor]:
    """The unit vectors ε, the same for every example."""
    for column in range(columns):
        unit = like.new_zeros(examples, columns)
        unit[:, column] = 1
        yield unit


def _chain_rows(
    recording: ChainRecording, nodes: Sequence[_Node], starts: Sequence[_Start], negative: bool
) -> tuple[GramFactor, ...]:
    """The rows v of all passes through a chain, r·m for each layer."""
    at_nodes: list[Tensor | None] = []
    for number, node in enumerate(nodes):
        assert isinstance(node, _ChainNode)
        at_nodes.append(node.rows([start.coordinates.get(number) for start in starts], negative))
    logits = torch.stack([start.logits for start in starts])
    root = (recording.sqrt_row_weights * starts[0].weight ** 0.5).repeat(len(starts))
    return tuple(GramFactor(rows.flatten(0, 1), root) for rows in recording.pullback(logits, at_nodes))
