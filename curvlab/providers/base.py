"""Providers: from a problem to its curvature.

A provider is a frozen dataclass: configuration and no work. It names the statistics it needs and
turns their means into blocks; `estimate` computes the statistics of all providers in one pass. Matrix-free
blocks read the data anew for every product, through a `ProblemSnapshot`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import (
    KroneckerLayer,
    KroneckerPart,
    LayerCurvature,
    PlainLayer,
    SharedLayer,
    Summand,
    TiedLayer,
)
from curvlab.curvature_structures import JointLayer
from curvlab.exceptions import SpecError, StaleError
from curvlab.linalg import Factor
from curvlab.linalg.factors import DiagonalFactor, InputFactors
from curvlab.linalg.pending import askable
from curvlab.model.layers import Layer
from curvlab.model.network import Network
from curvlab.model.recording import Recording
from curvlab.problem import Problem
from curvlab.providers.example_rows import groups_of
from curvlab.providers.sides import MAX_FACTOR, Sharing, Sides
from curvlab.providers.statistics import Inputs, OutputProducts, Statistic, Values, input_statistic
from curvlab.specs import INTERFACE, check_choices
from curvlab.staleness import Versions, change_message

__all__ = [
    "INPUTS",
    "ChainOrRows",
    "Context",
    "ProblemSnapshot",
    "Provider",
    "RowFields",
    "check_draws",
    "example_layers",
    "factor_layers",
    "kronecker_layers",
    "row_layers",
    "side_notes",
]

INPUTS = Inputs()


@dataclass(frozen=True, eq=False)
class Context:
    """What a provider builds its curvature from: the problem and the means over all its rows."""

    problem: Problem
    means: Mapping[Statistic, Values]

    def unfactorised(self) -> Context:
        """The same, of whose factors nobody has remembered anything.

        A batch's own factors live as long as its recording: what solvers factorise of them for a curvature is
        to be freed with that curvature.
        """
        means = {
            statistic: tuple(v if isinstance(v, Tensor) else v.unfactorised() for v in values)
            for statistic, values in self.means.items()
        }
        return replace(self, means=means)

    @property
    def network(self) -> Network:
        """The analysed model."""
        return self.problem.network

    def tensors(self, statistic: Statistic) -> tuple[Tensor, ...]:
        """The means of a statistic that gives tensors."""
        return cast(tuple[Tensor, ...], self.means[statistic])

    def factors(self, statistic: Statistic) -> tuple[Factor, ...]:
        """The means of a statistic that gives Gram factors."""
        return cast(tuple[Factor, ...], self.means[statistic])

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that have blocks, as the model's forward shows them."""
        return self.problem.layers

    @property
    def inputs(self) -> tuple[InputFactors, ...]:
        """E[hhᵀ] and E[h] for each layer with blocks; `INPUTS` must be among the provider's statistics."""
        return cast(tuple[InputFactors, ...], self.means[INPUTS])


@dataclass(frozen=True)
class Provider(ABC):
    """A rule that turns a problem into a curvature.

    `interface` numbers what is described here; a plugin repeats the number that it was written for, so that
    another curvlab can tell.
    """

    interface: ClassVar[int] = INTERFACE
    needs_chain: ClassVar[bool] = True

    @abstractmethod
    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        """The means over rows that `curvature` reads."""

    @abstractmethod
    def curvature(self, context: Context, name: str) -> Curvature:
        """The curvature, from the means of all batches."""

    def check(self, problem: Problem, name: str) -> None:
        """Refuse a problem the provider cannot analyse, before any work is done."""
        if self.needs_chain:
            problem.require_chain(name)

    def for_mean_input(self, problem: Problem) -> Provider:
        """A provider of the same solutions for solvers with the mean input factor, perhaps at less cost."""
        return self

    def resolved(self, problem: Problem) -> Provider:
        """The same with what fields that say `auto` are on this problem: what results are labelled with."""
        return self


Positions = int | Literal["all"]
RowStructure = Literal["kronecker", "ekfac", "diagonal", "block", "layer", "full"]


@dataclass(frozen=True)
class RowFields(Provider):
    """The fields of providers that make blocks of rows.

    Args:
        sharing: how the positions of an example enter the sides of a weight: `expand` or `reduce`.
        positions: how many positions of an example are drawn for the sides, or `all`.
        structure: `kronecker`, A ⊗ B by weight; `ekfac`, the true diagonal on the eigenvectors of A ⊗ B;
            `diagonal`, the true diagonal; without a Kronecker product `block`, each parameter's own block,
            `layer`, that of a layer's weight and bias together, and `full`, the whole matrix.
        max_factor: where columns and rows of a side both exceed it, the side is diagonal.
        seed: of whatever is drawn.
    """

    needs_chain: ClassVar[bool] = False
    sharing: Sharing = "expand"
    positions: Positions = "all"
    structure: RowStructure = "kronecker"
    max_factor: int = MAX_FACTOR
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        if self.positions != "all" and self.positions < 1:
            raise SpecError(f"positions={self.positions}: expected `all` or a number of at least 1")
        if self.max_factor < 1:
            raise SpecError(f"max_factor={self.max_factor}: expected a number of at least 1")
        if self.structure not in ("kronecker", "diagonal"):
            self._check_positions()

    def _check_positions(self) -> None:
        """Refuse sides that a structure without a Kronecker product does not have."""
        for name, usual in (("sharing", "expand"), ("positions", "all")):
            if getattr(self, name) != usual:
                raise SpecError(
                    f"structure={self.structure} sums up the positions of every example, R_i = Σ_p g_ip "
                    f"h_ipᵀ: {name}={getattr(self, name)} is of structure=kronecker. Leave it out"
                )

    @property
    def sides(self) -> Sides:
        """The fields that say how rows are made."""
        drawn = None if self.positions == "all" else self.positions
        made_of = "kronecker" if self.structure == "ekfac" else self.structure
        return Sides(self.sharing, drawn, self.seed, self.max_factor, made_of)

    def for_mean_input(self, problem: Problem) -> Provider:
        """With the mean input factor B is that of ḡ, so the rows of positions need not be summed up.

        Exceptions are a tied matrix, whose solvers take the diagonal of what `sharing` gives, and output
        sides wider than `max_factor`, whose bias block is diagonal where the rows of positions are many.
        Where every layer sees one row per example there is nothing to sum up.
        """
        if all(layer.kind == "linear" for layer in problem.layers):
            return self
        if self.structure != "kronecker" or any(map(self._needs_positions, problem.layers)):
            return self
        return replace(self, sharing="reduce", positions="all")

    def _needs_positions(self, layer: Layer) -> bool:
        shape = tuple(layer.weight.shape)
        widths = (role.matrix_view(shape).matrix_shape[1] for role in layer.roles)
        return layer.kind == "tied" or any(width > self.max_factor for width in widths)

    def row_notes(self, problem: Problem) -> tuple[str, ...]:
        """What is not as the fields say."""
        lookups = [layer.name for layer in problem.layers if any(role.lookup for role in layer.roles)]
        if self.sharing == "reduce" and lookups:
            return (f"embeddings keep sharing=expand: {', '.join(f'`{name}`' for name in lookups)}",)
        return ()


class ChainOrRows(RowFields):
    """Providers with a recursion on chains of Linear layers and rows on any model; the fields are theirs."""

    kind: str
    samples: int | Literal["all"]

    def resolve(self, problem: Problem) -> str:
        """The kind on this problem."""
        if self.kind != "auto":
            return self.kind
        return "recursive" if problem.chain is not None and self.structure == "kronecker" else "rows"

    def resolved(self, problem: Problem) -> Provider:
        """With the kind, unless that is the recursion, which keeps the short names that the paper has."""
        kind = self.resolve(problem)
        changed: dict[str, Any] = {} if kind in ("recursive", self.kind) else {"kind": kind}
        return replace(self, **changed) if changed else self

    def check(self, problem: Problem, name: str) -> None:
        if self.kind == "recursive":
            problem.require_chain(name)
        if self.samples != "all" and self.resolve(problem) != "recursive":
            check_draws(self.samples, problem, name)


DAY = 86_400.0
PASS_SECONDS, OPERATIONS_PER_SECOND = 1e-4, 1e11


def check_draws(samples: int, problem: Problem, name: str) -> None:
    """Refuse draws that take more than a day: a backward pass for each, 4 operations per weight and row.

    The examples of a stream are not counted for it: a batch of one is assumed.
    """
    examples = 1 if problem.streamed else problem.examples()
    each = PASS_SECONDS + 4.0 * problem.network.numel * examples / OPERATIONS_PER_SECOND
    if samples * each > DAY:
        raise SpecError(
            f"`{name}`: samples={samples:,} takes a backward pass for each draw, at least "
            f"{samples * each / DAY:,.1f} days in all on this problem. The error of a mean falls with the "
            f"root of their number: use {max(1, int(DAY / each)):,} or fewer"
        )


def kronecker_layers(
    context: Context, outputs: Sequence[Factor], inputs: Statistic = INPUTS
) -> tuple[LayerCurvature, ...]:
    """Layers with weight blocks A ⊗ B, from the factors of the output sides in the order of `OutputSums`.

    For Linear layers with one row per example that is one output factor B^t for each layer with blocks.
    """
    sides = iter(cast(tuple[InputFactors, ...], context.means[inputs]))
    factors = iter(outputs)
    return tuple(_layer(layer, factors, sides) for layer in context.layers)


def _layer(layer: Layer, outputs: Iterator[Factor], inputs: Iterator[InputFactors]) -> LayerCurvature:
    shape = tuple(layer.parameter.shape)
    if layer.kind == "linear":
        return KroneckerLayer(layer.name, layer.weight_name, layer.bias_name, next(outputs), next(inputs))
    if layer.kind == "plain":
        return PlainLayer(layer.name, shape, next(outputs))
    summands = [
        Summand(
            role.matrix_view(shape),
            tuple(KroneckerPart(next(outputs), next(inputs)) for _ in role.parts),
        )
        for role in layer.roles
    ]
    if layer.kind == "tied":
        return TiedLayer(str(layer.weight_name), shape, tuple(summands))
    (only,) = summands
    mean = next(outputs)
    if any(isinstance(part.output, DiagonalFactor) for part in only.parts):
        mean = DiagonalFactor(mean.diagonal())  # a stream's rows became many on the way
    return SharedLayer(
        layer.name, layer.weight_name, layer.bias_name, only.view, only.parts, mean_output=mean
    )


def row_layers(
    context: Context, products: OutputProducts
) -> tuple[tuple[LayerCurvature, ...], tuple[str, ...]]:
    """The layers whose output sides a statistic of rows gives, and what is to be said of them."""
    return factor_layers(context, context.factors(products), products.sides)


def factor_layers(
    context: Context, factors: Sequence[Factor], sides: Sides | None
) -> tuple[tuple[LayerCurvature, ...], tuple[str, ...]]:
    """The layers with output sides in the order of `OutputSums`, and what is to be said of them."""
    if sides is not None and sides.diagonal:
        names = [name for layer in context.layers for name in layer.names]
        parameters = context.network.parameters
        return tuple(
            PlainLayer(name, tuple(parameters[name].shape), factor)
            for name, factor in zip(names, factors, strict=True)
        ), ()
    if sides is not None and sides.keeps_examples:
        return example_layers(context, factors, sides.structure), ()
    layers = kronecker_layers(context, factors, input_statistic(sides))
    return layers, side_notes(layers)


def example_layers(context: Context, factors: Sequence[Factor], structure: str) -> tuple[LayerCurvature, ...]:
    """Layers of blocks that are second moments of the examples' rows, a factor for each group of them."""
    shapes = {name: tuple(p.shape) for name, p in context.network.parameters.items()}
    pairs = zip(groups_of(context.layers, structure), factors, strict=True)
    if structure == "block":
        return tuple(PlainLayer(name, shapes[name], factor) for (name, _), factor in pairs)
    return tuple(JointLayer(name, {n: shapes[n] for n in names}, factor) for (name, names), factor in pairs)


def side_notes(layers: Sequence[LayerCurvature]) -> tuple[str, ...]:
    """What the layers' sides leave out: diagonal sides, and layers whose mean gradient has no curvature."""
    notes = []
    losing = _losing_their_mean([layer for layer in layers if isinstance(layer, SharedLayer)])
    for layer in layers:
        if isinstance(layer, PlainLayer) and isinstance(layer.factor, DiagonalFactor):
            notes.append(f"`{layer.name}` is wider than max_factor: its block is diagonal")
        if isinstance(layer, TiedLayer):
            notes.append(
                f"`{layer.name}` is used as different matrices: a sum of Kronecker products for `cg`, its "
                f"diagonal for every other solver"
            )
        if isinstance(layer, SharedLayer):
            if any(isinstance(part.output, DiagonalFactor) for part in layer.parts):
                notes.append(f"layer `{layer.name}`: its output side is wider than max_factor, and diagonal")
            if layer.name in losing:
                notes.append(
                    f"layer `{layer.name}`: the gradients of an example's positions cancel, so that `sm-kfi` "
                    f"and `ea-cg` see no curvature there"
                )
    return tuple(notes)


def _losing_their_mean(layers: Sequence[SharedLayer]) -> set[str]:
    """The layers in which ḡ vanishes for all of a part though the gradients at its positions do not."""
    names, sums = [], []
    for layer in layers:
        start, means = 0, layer.mean_output.diagonal()
        for part in layer.parts:
            size = part.output.size
            names.append(layer.name)
            sums.append(torch.stack([part.output.trace(), means[start : start + size].sum()]))
            start += size
    if not sums or not askable(sums[0]):
        return set()
    read = torch.stack(sums).tolist()  # once, for all layers
    return {
        name for name, (own, mean) in zip(names, read, strict=True) if own > 0 and mean <= CANCELLED * own
    }


CANCELLED = 1e-10


@dataclass(frozen=True, eq=False)
class ProblemSnapshot:
    """A problem as it was: a single batch's recording is kept, a stream is recorded for every product."""

    problem: Problem
    versions: Versions

    @classmethod
    def of(cls, problem: Problem) -> ProblemSnapshot:
        """The problem as it is now."""
        return cls(problem, problem.versions)

    def check_unchanged(self) -> None:
        """Refuse to go on with a model or a batch that have changed."""
        self.problem.network.check_unchanged()
        if changed := self.versions.differing(self.problem.tensors):
            again = "and its blocks read them: call estimate() again"
            raise StaleError(change_message(changed, "the curvature was estimated", again))

    def batches(self) -> Iterator[tuple[Recording, Tensor]]:
        """Each batch's recording, with its rows' weights in the mean over all."""
        self.check_unchanged()
        if not self.problem.streamed:
            recording = self.problem.recording()
            yield recording, recording.row_weights
            return
        total = self._total_weight
        for recording in self.problem.recordings():
            yield recording, recording.weights / total

    @cached_property
    def _total_weight(self) -> Tensor:
        """Σ c_i of a stream, from one pass: every product has the same."""
        return self.problem.total_weight()
