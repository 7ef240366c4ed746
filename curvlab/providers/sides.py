"""The two sides of a layer's weight block in any network: rows of inputs, and rows of output gradients.

For example i and position p (a pixel, a token, one of several calls) a weight sees h_ip, with ḡ_i = Σ_p g_ip:

    sharing    A (input side)                   B (output side)         beside it, always
    expand     E[mean_p h_ip h_ipᵀ]             E[Σ_p g_ip g_ipᵀ]       E[ḡ_i ḡ_iᵀ], the bias block
    reduce     E[h̄_i h̄_iᵀ], h̄_i = mean_p h_ip   E[ḡ_i ḡ_iᵀ]             E[mean_p h_ip], the mean input

A is a mean and the sum over positions is in B; only the product has a meaning. mean_p is weighted by the loss
terms where the layer's positions are theirs. With `positions` = q only q positions of each example are taken,
drawn without replacement, by a hash of the example: A and B are then S/q times their sums, and have few rows.

A side is kept as its rows (a Gram factor) while they are fewer than its columns and as a matrix otherwise;
where columns and rows both exceed `max_factor` it is diagonal, and so is the bias block of such a side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Literal

import torch
from torch import Tensor

from curvlab.exceptions import StaleError
from curvlab.linalg import DenseFactor, Factor, GramFactor
from curvlab.linalg.factors import DiagonalFactor, InputFactors, diagonal_beyond, gram
from curvlab.model.layers import Layer, MatrixRole, view_of_use
from curvlab.model.nodes import Cotangent, NodeInput
from curvlab.model.recording import GraphRecording
from curvlab.model.uses import EmbeddingUse, WeightUse
from curvlab.model.watch import SeenUse, SeenWeight
from curvlab.providers.draws import draw_positions
from curvlab.staleness import Stamp

__all__ = [
    "MAX_FACTOR",
    "DiagonalSums",
    "FactorSum",
    "OutputSums",
    "Sharing",
    "Sides",
    "check_not_overwritten",
    "input_sides",
    "placed_uses",
    "side_count",
]

Sharing = Literal["expand", "reduce"]
AtNodes = Mapping[NodeInput, Cotangent] | None
MAX_FACTOR = 8192


@dataclass(frozen=True)
class Sides:
    """How rows are made of positions: the fields of the providers that speak of it."""

    sharing: Sharing = "expand"
    positions: int | None = None
    seed: int = 0
    max_factor: int = MAX_FACTOR
    structure: str = "kronecker"

    @property
    def diagonal(self) -> bool:
        """Whether only the diagonal is asked for."""
        return self.structure == "diagonal"

    @property
    def keeps_examples(self) -> bool:
        """Whether the rows of the examples are kept for whole parameters."""
        return self.structure in ("block", "layer", "full")

    def sampled(self, positions: int) -> int | None:
        """How many of so many positions are drawn; None for all."""
        drawn = self.sharing == "expand" and self.positions is not None and self.positions < positions
        return self.positions if drawn else None


@dataclass
class FactorSum:
    """Σ_r rows_rᵀ diag(c_r) rows_r of one side, or of each of several `parts`, in the form that is smallest.

    `expected` is how many rows will be added in all; `plain` where the side is a whole parameter, or goes
    with a diagonal one: it is diagonal as soon as it is wider than `limit`. Parts are the groups of a
    convolution: their rows come together, and are multiplied together.
    """

    size: int
    expected: int
    limit: int
    plain: bool = False
    parts: int = 1
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    total: Tensor | None = None

    @property
    def diagonal(self) -> bool:
        """Whether only the diagonal is kept."""
        return self.size > self.limit and (self.plain or self.expected > self.limit)

    @property
    def keeps_rows(self) -> bool:
        """Whether the rows themselves are kept."""
        return not self.diagonal and self.expected < self.size

    def add(self, rows: Tensor, root: Tensor) -> None:
        """Count rows, (r, parts, n), with the roots of their weights, (r,)."""
        if self.keeps_rows:
            self.rows.append((rows, root))
        elif self.diagonal:
            self._sum(torch.tensordot(root.square(), rows.square(), 1))
        else:
            self._sum_products((rows * root[:, None, None]).permute(1, 2, 0))

    def add_by_example(self, rows: Tensor, root: Tensor) -> None:
        """Count rows (m, S, parts, n) with one root per example, (m,); they may lie as (m, parts, n, S)."""
        examples, positions, parts, size = rows.shape
        if self.keeps_rows or self.diagonal or positions == 1 or (parts == 1 and rows.stride(3) == 1):
            self.add(rows.reshape(-1, parts, size), root.repeat_interleave(positions))
            return
        columns = rows.permute(2, 3, 0, 1).reshape(parts, size, examples, positions)
        self._sum_products((columns * root[:, None]).flatten(2))

    def _sum_products(self, columns: Tensor) -> None:
        """Add C Cᵀ of every part, for scaled columns (parts, n, r)."""
        self._sum(gram(columns[0])[None] if self.parts == 1 else columns @ columns.mT)

    def _sum(self, value: Tensor) -> None:
        self.total = value if self.total is None else self.total.add_(value)

    def factors(self, like: Tensor) -> list[Factor]:
        """The sums so far, one for each part; zero where nothing was added."""
        if self.rows:
            rows, roots = zip(*self.rows, strict=True)
            whole, root = (rows[0], roots[0]) if len(rows) == 1 else (torch.cat(rows), torch.cat(roots))
            return [GramFactor(part, root) for part in whole.unbind(1)]
        if self.diagonal or (self.total is None and self.size > self.limit):
            zero = like.new_zeros(self.parts, self.size)
            return [DiagonalFactor(one) for one in (zero if self.total is None else self.total).unbind()]
        if self.total is None:
            return [DenseFactor(one) for one in like.new_zeros(self.parts, self.size, self.size).unbind()]
        return [DenseFactor(one) for one in self.total.unbind()]


@dataclass(frozen=True, eq=False)
class PlacedUse:
    """One use of a weight among all uses of the same rows of it.

    `role` is its number among the layer's roles and `part` its first part there; its positions are numbered
    from `first` on, among `total`.
    """

    seen: SeenUse
    use: WeightUse
    role: int
    part: int
    first: int
    total: int


def placed_uses(recording: GraphRecording, layer: Layer) -> list[PlacedUse]:
    """All uses of a layer's weight, with their places."""
    placed = []
    for number, role in enumerate(layer.roles):
        for start in range(0, len(role.parts), role.groups):
            rows = role.parts[start].rows
            uses = [
                (seen, seen.use)
                for seen in recording.weight_uses(layer)
                if isinstance(seen.use, WeightUse) and seen.view is not None
                if seen.view.rows == rows and view_of_use(seen.use) == (role.view, role.groups, role.lookup)
            ]
            total, first = sum(use.positions for _, use in uses), 0
            for seen, use in uses:
                placed.append(PlacedUse(seen, use, number, start, first, total))
                first += use.positions
    return placed


def position_weights(recording: GraphRecording, uses: Sequence[WeightUse]) -> list[Tensor]:
    """c_i/Σc w_ip for the rows of each use, (m, S): mean_p runs over all rows of all uses together."""
    terms = recording.terms
    total = sum(use.positions for use in uses)
    weights = []
    for use in uses:
        own = use.positions_shape
        if own is not None and len(terms.shape) > 1 and own == terms.shape[1:]:
            inside = terms.within * (use.positions / total)
            weights.append(recording.row_weights[:, None] * inside)
        else:
            each = recording.row_weights[:, None] / total
            if terms.equal_weights:  # shown by the layout, so that no use has to look at the values
                each = each[:1]
            weights.append(each.expand(recording.examples, use.positions))
    return weights


def check_not_overwritten(held: Iterable[Tensor], stamps: Iterable[Stamp]) -> None:
    """Refuse to go on where tensors that are held from a batch have changed since they were stamped."""
    if any(Stamp.of(tensor) != stamp for tensor, stamp in zip(held, stamps, strict=True)):
        raise StaleError(
            "a batch was overwritten while the pass went on, and its rows are still needed: let the "
            "re-iterable give a new tensor for every batch"
        )


def input_sides(recording: GraphRecording, layer: Layer, sides: Sides, place: int) -> Iterator[InputFactors]:
    """A and E[h] of each part of a layer's weight, in each of its roles; A is formed when first asked for."""
    if layer.kind == "linear":
        rows = GramFactor(recording.linear_inputs(layer), recording.sqrt_row_weights)
        factor = diagonal_beyond(rows, sides.max_factor)
        yield InputFactors(factor) if factor is rows else InputFactors(factor, rows.mean)
        return
    placed = placed_uses(recording, layer)
    for number, role in enumerate(layer.roles):
        for start in range(0, len(role.parts), role.groups):
            uses = [one.use for one in placed if (one.role, one.part) == (number, start)]
            yield from _input_sides_of(recording, layer, role, uses, sides, place)


def _input_sides_of(
    recording: GraphRecording,
    layer: Layer,
    role: MatrixRole,
    uses: Sequence[WeightUse],
    sides: Sides,
    place: int,
) -> Iterator[InputFactors]:
    """The input sides of the parts that the same uses have: the groups of a convolution."""
    size = role.matrix_view(tuple(layer.weight.shape)).matrix_shape[2]
    if not uses:
        zero = layer.weight.new_zeros(size)
        yield from [InputFactors(DiagonalFactor(zero), zero)] * role.groups
        return
    weights = position_weights(recording, uses)
    if role.lookup:
        counts = [u.frequencies(w) for u, w in zip(uses, weights, strict=True) if isinstance(u, EmbeddingUse)]
        frequencies = torch.stack(counts).sum(0)
        yield InputFactors(DiagonalFactor(frequencies), frequencies)
        return
    means = torch.stack([u.mean_input(w) for u, w in zip(uses, weights, strict=True)]).sum(0)
    side = _InputSide(recording, uses, weights, sides, place, size)
    for part, mean in enumerate(means.unbind()):
        yield InputFactors(partial(side.factor, part), mean)


@dataclass(frozen=True, eq=False)
class _InputSide:
    """What A of the parts of some uses is made from."""

    recording: GraphRecording
    uses: Sequence[WeightUse]
    weights: Sequence[Tensor]
    sides: Sides
    place: int
    size: int
    stamps: tuple[Stamp, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stamps", tuple(Stamp.of(use.inputs) for use in self.uses))

    @property
    def positions(self) -> int:
        return sum(use.positions for use in self.uses)

    def factor(self, part: int) -> Factor:
        """A of one part."""
        return self._factors[part]

    @cached_property
    def _factors(self) -> Sequence[Factor]:
        check_not_overwritten((use.inputs for use in self.uses), self.stamps)
        with torch.no_grad():
            if self.sides.sharing == "reduce":
                return self._reduce_factors()
            drawn = self.sides.sampled(self.positions)
            return self._expand_factors() if drawn is None else self._sample_factors(drawn)

    def _expand_factors(self) -> Sequence[Factor]:
        rows, limit = self.recording.examples * self.positions, self.sides.max_factor
        pairs = list(zip(self.uses, self.weights, strict=True))
        if self.size > limit and rows > limit:
            squares = [replace(use, inputs=use.inputs.square()).mean_input(w) for use, w in pairs]
            return [DiagonalFactor(diagonal) for diagonal in torch.stack(squares).sum(0).unbind()]
        if rows < self.size:
            whole = torch.cat([use.input_rows().flatten(0, 1) for use in self.uses])
            root = torch.cat([w.sqrt().flatten() for w in self.weights])
            return [GramFactor(part, root) for part in whole.unbind(1)]
        moments = [use.input_second_moment(w) for use, w in pairs]
        return [DenseFactor(matrix) for matrix in _total(moments).unbind()]

    def _reduce_factors(self) -> Sequence[Factor]:
        share = self.recording.row_weights
        # The weights of mean_p without those of the examples, so that an example of weight 0 is no 0/0.
        inner = [w / torch.where(share > 0, share, 1)[:, None] for w in self.weights]
        means = [use.example_mean_inputs(w) for use, w in zip(self.uses, inner, strict=True)]
        whole = torch.stack(means).sum(0)
        return [GramFactor(part, self.recording.sqrt_row_weights) for part in whole.unbind(1)]

    def _sample_factors(self, drawn: int) -> Sequence[Factor]:
        index = draw_positions(self.recording, self.sides.seed, self.place, self.positions, drawn)
        if len(self.uses) == 1:
            (use,), (w,) = self.uses, self.weights
            root = (w.take_along_dim(index, 1) * (self.positions / drawn)).sqrt().flatten()
            return [GramFactor(part, root) for part in use.sampled_rows(index).flatten(0, 1).unbind(1)]
        rows, weights, first = [], [], 0
        for use, w in zip(self.uses, self.weights, strict=True):
            inside, here = _inside(index, first, use.positions)
            rows.append(use.sampled_rows(inside) * here[..., None, None].to(w))
            weights.append(w.take_along_dim(inside, 1) * here)
            first += use.positions
        whole, weight = torch.stack(rows).sum(0).flatten(0, 1), torch.stack(weights).sum(0)
        root = (weight * (self.positions / drawn)).sqrt().flatten()
        return [GramFactor(part, root) for part in whole.unbind(1)]


def _total(tensors: Sequence[Tensor]) -> Tensor:
    """Their sum; of a single one itself, which may be as large as all factors together."""
    return tensors[0] if len(tensors) == 1 else torch.stack(tuple(tensors)).sum(0)


def _inside(index: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Positions among the `count` that begin at `first`, and which of them are there at all."""
    return (index - first).clamp(0, count - 1), (index >= first) & (index < first + count)


def side_count(layer: Layer) -> int:
    """How many factors `OutputSums` has of a layer."""
    if layer.kind in ("linear", "plain"):
        return 1
    return sum(len(role.parts) for role in layer.roles) + (layer.kind == "shared")


class OutputSums:
    """The output sides of all layers, from one backward pass after the other.

    For each layer in order: the factor of a Linear layer with one row per example; of each part of any other
    weight, and of ḡ beside them (a tied weight has none); of a plain parameter.
    """

    def __init__(self, recording: GraphRecording, sides: Sides, passes: int) -> None:
        self.recording, self.sides = recording, sides
        weights = [layer for layer in recording.layout if layer.roles and layer.kind != "linear"]
        self._placed = {one.seen: one for layer in weights for one in placed_uses(recording, layer)}
        self.sums = {layer: list(self._empty_sums(layer, passes)) for layer in recording.layout}

    def _empty_sums(self, layer: Layer, passes: int) -> Iterator[FactorSum]:
        examples, limit, shape = self.recording.examples, self.sides.max_factor, tuple(layer.weight.shape)
        if layer.kind in ("linear", "plain"):
            size = layer.out_features if layer.kind == "linear" else prod(shape)
            yield FactorSum(size, passes * examples, limit, layer.kind == "plain")
            return
        diagonal = False
        for number, role in enumerate(layer.roles):
            parts, outputs, _ = role.matrix_view(shape).matrix_shape
            total = max((one.total for one in self._placed_in(layer, number)), default=1)
            rows = 1 if self._reduces(role) else self.sides.sampled(total) or total
            for _ in role.slices:
                yield (own := FactorSum(outputs, passes * examples * rows, limit, parts=role.groups))
                diagonal = diagonal or own.diagonal
        if layer.kind == "shared":
            # The bias block of a diagonal side is diagonal too, however few its rows.
            yield FactorSum(parts * outputs, passes * examples, limit, plain=diagonal)

    def _placed_in(self, layer: Layer, number: int) -> list[PlacedUse]:
        found = (self._placed.get(seen) for seen in self.recording.weight_uses(layer))
        return [one for one in found if one is not None and one.role == number]

    def _reduces(self, role: MatrixRole) -> bool:
        """Whether a role's rows are those of examples; rows that are looked up stay apart."""
        return self.sides.sharing == "reduce" and not role.lookup

    def add_pass(self, cotangent: Tensor, weight: float = 1.0, at_nodes: AtNodes = None) -> None:
        """One backward pass, from cotangents at the logits and at nodes; its rows count with `weight`."""
        recording = self.recording
        root = recording.sqrt_row_weights * weight**0.5
        sums: dict[tuple[Layer, int], Tensor] = {}

        def hear(layer: Layer, seen: SeenWeight, gradient: Tensor) -> None:
            if layer.kind == "linear":
                self.sums[layer][0].add(gradient[:, None], root)
                return
            self._add_rows(layer, self._placed[seen.seen], gradient, root, sums)

        plain = recording.backward(cotangent, hear, at_nodes)
        for layer in recording.layout:
            if layer.kind == "plain" and layer.bias_name is not None:
                rows = plain[layer.bias_name]
                self.sums[layer][0].add(rows.reshape(len(rows), 1, -1), root)
        for (layer, number), total in sums.items():
            self._add_sums(layer, number, total, root)

    def _add_rows(
        self,
        layer: Layer,
        placed: PlacedUse,
        gradient: Tensor,
        root: Tensor,
        sums: dict[tuple[Layer, int], Tensor],
    ) -> None:
        """Count the rows of one use, (m, S, G, o), and add them up over positions."""
        role, number = layer.roles[placed.role], placed.role
        rows = placed.use.output_rows(gradient)
        parts, outputs, _ = role.matrix_view(tuple(layer.weight.shape)).matrix_shape
        if (layer, number) not in sums:
            sums[layer, number] = rows.new_zeros(len(rows), parts * outputs)
        first = placed.part * outputs
        sums[layer, number][:, first : first + role.groups * outputs] += rows.sum(1).flatten(1)
        if self._reduces(role):
            return
        drawn = self.sides.sampled(placed.total)
        if drawn is not None:
            index = draw_positions(
                self.recording, self.sides.seed, self.recording.layout.index(layer), placed.total, drawn
            )
            if placed.total == rows.shape[1]:  # of one use, which has all positions
                rows = rows.take_along_dim(index[..., None, None], 1)
            else:
                inside, here = _inside(index, placed.first, rows.shape[1])
                rows = rows.take_along_dim(inside[..., None, None], 1) * here[..., None, None]
            root = root * (placed.total / drawn) ** 0.5
        place = self._base(layer, number) + placed.part // role.groups
        self.sums[layer][place].add_by_example(rows, root)

    def _base(self, layer: Layer, number: int) -> int:
        """Where the sums of a role begin among those of its layer: one for each of its slices."""
        return sum(len(role.slices) for role in layer.roles[:number])

    def _add_sums(self, layer: Layer, number: int, total: Tensor, root: Tensor) -> None:
        """Count the rows ḡ_i of one role."""
        role, base = layer.roles[number], self._base(layer, number)
        if self._reduces(role):
            each = total.unflatten(1, (len(role.slices), role.groups, -1))
            for index, rows in enumerate(each.unbind(1)):
                self.sums[layer][base + index].add(rows, root)
        if layer.kind == "shared":
            self.sums[layer][-1].add(total[:, None], root)

    def factors(self) -> tuple[Factor, ...]:
        """All factors, layer by layer."""
        example = self.recording.network.example.detach()
        return tuple(
            factor for found in self.sums.values() for one in found for factor in one.factors(example)
        )


class DiagonalSums:
    """The true diagonal, Σ_r E[(∇_θ)²] of every parameter, from one backward pass after the other."""

    def __init__(self, recording: GraphRecording) -> None:
        self.recording = recording
        self.totals = {
            name: torch.zeros_like(recording.network.parameters[name]).detach()
            for layer in recording.layout
            for name in layer.names
        }

    def add_pass(self, cotangent: Tensor, weight: float = 1.0, at_nodes: AtNodes = None) -> None:
        """One backward pass, from cotangents at the logits and at nodes; its squares count with `weight`."""
        recording, share = self.recording, self.recording.row_weights * weight
        held: dict[str, Tensor] = {}

        def hear(layer: Layer, seen: SeenWeight, gradient: Tensor) -> None:
            use, view = seen.use, seen.view
            if layer.bias_name is not None:
                sums = use.output_rows(gradient).sum(1).flatten(1)
                self._hold(held, layer.bias_name, view.rows, sums)
            if layer.weight_name is None:
                return
            if len(recording.weight_uses(layer)) == 1:
                self._square(layer.weight_name, use, gradient, share)
            else:
                shape = tuple(layer.weight.shape)
                shape = shape if view.rows is None else (view.rows[1] - view.rows[0], *shape[1:])
                self._hold(held, layer.weight_name, view.rows, use.example_gradients(gradient, shape))

        held |= recording.backward(cotangent, hear, at_nodes) | held
        for name, rows in held.items():
            self.totals[name] += torch.tensordot(share, rows.square(), 1)

    def _hold(self, held: dict[str, Tensor], name: str, place: tuple[int, int] | None, rows: Tensor) -> None:
        """Add up the examples' gradients over the uses of a parameter, or of some of its rows."""
        if name not in held:
            held[name] = rows.new_zeros(len(rows), *self.totals[name].shape)
        first, last = place or (0, held[name].shape[1])
        held[name][:, first:last] += rows

    def _square(self, name: str, use: WeightUse, gradient: Tensor, share: Tensor) -> None:
        """Σ_i c_i R_i² of the only use of a weight, some examples at a time."""
        shape = tuple(self.totals[name].shape)
        rows = use.examples * use.folds
        for first, last in use.ranges(prod(shape)):
            part = gradient[first * use.folds : last * use.folds]
            assert len(gradient) == rows
            gradients = use.narrow(first, last).example_gradients(part, shape)
            self.totals[name] += torch.tensordot(share[first:last], gradients.square(), 1)

    def factors(self) -> tuple[Factor, ...]:
        """The diagonals, parameter by parameter."""
        return tuple(DiagonalFactor(total.flatten()) for total in self.totals.values())
