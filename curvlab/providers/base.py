"""Providers: from a problem to its curvature, and `estimate`, which runs them.

A provider is a frozen dataclass: configuration and no work. It names the statistics it needs and turns their
means into blocks; `estimate` computes the statistics of any number of providers in one pass over the data, as
many passes before it as some statistics need the means of others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, overload

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
from curvlab.distributed.agreement import agree
from curvlab.distributed.communicator import Communicator, communicator_of
from curvlab.distributed.operators import join_operators
from curvlab.distributed.statistics import JoinedStatistics
from curvlab.exceptions import SpecError
from curvlab.linalg import Factor
from curvlab.linalg.execution import askable, autocast_switched_off, full_precision
from curvlab.linalg.factors import DiagonalFactor, InputFactors
from curvlab.linalg.steps import Gradient
from curvlab.measure import device as devices
from curvlab.model.layers import Layer
from curvlab.model.network import Network
from curvlab.problem import Problem
from curvlab.providers.example_rows import groups_of
from curvlab.providers.sides import MAX_FACTOR, Sharing, Sides
from curvlab.providers.statistics import Inputs, Means, OutputProducts, Statistic, Values, input_statistic
from curvlab.specs import INTERFACE, Registry, check_choices
from curvlab.staleness import Versions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "INPUTS",
    "ChainOrRows",
    "Chosen",
    "Context",
    "Estimates",
    "Provider",
    "RowFields",
    "check_draws",
    "estimate",
    "estimate_jointly",
    "estimate_with_gradient",
    "example_layers",
    "factor_layers",
    "kronecker_layers",
    "providers",
    "resolved_choice",
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


providers: Registry[Provider] = Registry("provider", "curvlab.providers")
"""All providers by name: see `curvlab.providers.registry`."""

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
    if layer.kind == "linear":
        return KroneckerLayer(layer.name, layer.weight_name, layer.bias_name, next(outputs), next(inputs))
    shape = tuple(layer.weight.shape)
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
    looked_up = {layer.name for layer in context.layers if any(role.lookup for role in layer.roles)}
    return layers, side_notes(layers, MAX_FACTOR if sides is None else sides.max_factor, looked_up)


def example_layers(context: Context, factors: Sequence[Factor], structure: str) -> tuple[LayerCurvature, ...]:
    """Layers of blocks that are second moments of the examples' rows, a factor for each group of them."""
    shapes = {name: tuple(p.shape) for name, p in context.network.parameters.items()}
    pairs = zip(groups_of(context.layers, structure), factors, strict=True)
    if structure == "block":
        return tuple(PlainLayer(name, shapes[name], factor) for (name, _), factor in pairs)
    return tuple(JointLayer(name, {n: shapes[n] for n in names}, factor) for (name, names), factor in pairs)


def side_notes(
    layers: Sequence[LayerCurvature], max_factor: int, looked_up: Collection[str]
) -> tuple[str, ...]:
    """What the layers' sides leave out: diagonal sides, and layers whose mean gradient has no curvature.

    The inputs of a lookup are one-hot rows: their diagonal factor leaves nothing out.
    """
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
        if isinstance(layer, KroneckerLayer | SharedLayer):
            notes += _diagonal_sides(layer, max_factor, layer.name in looked_up)
        if layer.name in losing:
            notes.append(
                f"layer `{layer.name}`: the gradients of an example's positions cancel, so that `sm-kfi` "
                f"and `ea-cg` see no curvature there"
            )
    return tuple(notes)


def _diagonal_sides(layer: KroneckerLayer | SharedLayer, max_factor: int, lookup: bool) -> Iterator[str]:
    """Sentences about the sides that are diagonal because they are wide; no factor is formed for them."""
    parts = layer.parts if isinstance(layer, SharedLayer) else (layer,)
    if any(isinstance(part.output, DiagonalFactor) for part in parts):
        yield f"layer `{layer.name}`: its output side is wider than max_factor, and diagonal"
    elif isinstance(layer, SharedLayer) and isinstance(layer.mean_output, DiagonalFactor):
        yield f"layer `{layer.name}`: its bias block is wider than max_factor, and diagonal"
    inputs = [part.inputs for part in parts if part.inputs is not None and not lookup]
    if any(one.formed and isinstance(one.full, DiagonalFactor) for one in inputs):
        yield f"layer `{layer.name}`: its input side is wider than max_factor, and diagonal"
    elif any(not one.formed and one.size > max_factor for one in inputs):
        yield (
            f"layer `{layer.name}`: its input side is wider than max_factor, and diagonal if it has more "
            f"rows than that"
        )


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


@overload
def estimate(  # type: ignore[overload-overlap]
    provider: str | Provider, problem: Problem, *, process_group: ProcessGroup | None = None
) -> Curvature: ...
@overload
def estimate(
    provider: Sequence[str | Provider], problem: Problem, *, process_group: ProcessGroup | None = None
) -> list[Curvature]: ...
def estimate(
    provider: str | Provider | Sequence[str | Provider],
    problem: Problem,
    *,
    process_group: ProcessGroup | None = None,
) -> Curvature | list[Curvature]:
    """The curvature of `problem` by one provider, or by several in a single pass.

    With a `process_group` it is the curvature over the rows of all its ranks, each of which must make this
    call; products with a matrix-free one (`hessian`, `gauss-newton[kind=exact]`) are then calls that all
    ranks must make, too. Without the argument nothing communicates.

    >>> import torch, curvlab
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    >>> problem = curvlab.Problem(model, "cross-entropy", torch.ones(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    >>> [c.provider for c in estimate(["fisher", "pch-1"], problem)]
    ['fisher', 'pch-1']
    """
    if isinstance(provider, str) or not isinstance(provider, Sequence):
        return _estimate([provider], problem, process_group)[0]
    return _estimate(provider, problem, process_group)


@full_precision
def _estimate(
    provider: Sequence[str | Provider], problem: Problem, process_group: ProcessGroup | None
) -> list[Curvature]:
    if process_group is not None:
        communicator = communicator_of(process_group)
        chosen = Chosen.jointly(provider, problem, communicator)
        return estimate_jointly(chosen, problem, communicator).curvatures
    chosen = Chosen.of(provider, problem)
    return _curvatures(chosen, problem, _stages(chosen.statistics))


def _curvatures(chosen: Chosen, problem: Problem, stages: _Stages) -> list[Curvature]:
    versions = problem.versions
    return chosen.curvatures(Context(problem, _means(problem, stages)), versions)


@full_precision
def estimate_with_gradient(provider: str | Provider, problem: Problem) -> tuple[Curvature, Gradient]:
    """The curvature and the gradient of one batch, whose backward pass has its share in the curvature's.

    >>> import torch
    >>> problem = Problem(torch.nn.Linear(2, 2), "cross-entropy", torch.eye(2), torch.tensor([0, 1]))
    >>> curvature, gradient = estimate_with_gradient("pch[kind=rows]", problem)
    >>> curvature.provider, sorted(gradient)
    ('pch[kind=rows,poseig=last]', ['bias', 'weight'])
    """
    chosen = Chosen.of([provider], problem)
    stages = _stages(chosen.statistics)
    if not problem.streamed:
        for statistic in (statistic for stage in stages for statistic in stage):
            statistic.hear_with_gradient(problem.recording())
    gradient = problem.gradient()
    return _curvatures(chosen, problem, stages)[0], gradient


@dataclass(frozen=True)
class Chosen:
    """Providers that were found fit for a problem, under their names, and all statistics they need."""

    named: tuple[tuple[str, Provider], ...]
    statistics: tuple[Statistic, ...]

    @classmethod
    def of(cls, chosen: Sequence[str | Provider], problem: Problem) -> Chosen:
        """Look the providers up and let them check the problem, before any work is done."""
        asked = [_named(spec) for spec in chosen]
        for name, provider in asked:
            provider.check(problem, name)
        labels = [_label(spec, *given, problem) for spec, given in zip(chosen, asked, strict=True)]
        named = tuple((label, provider) for label, (_, provider) in zip(labels, asked, strict=True))
        wanted = {statistic: None for _, provider in named for statistic in provider.statistics(problem)}
        return cls(named, tuple(wanted))

    @classmethod
    def jointly(
        cls, chosen: Sequence[str | Provider], problem: Problem, communicator: Communicator
    ) -> Chosen:
        """The same on each rank, before `estimate_jointly`: an error on one is raised on all."""
        try:
            return cls.of(chosen, problem)
        except Exception as error:
            communicator.raise_on_all(error)

    def curvatures(self, context: Context, versions: Versions) -> list[Curvature]:
        """What the providers make of the statistics, dated as of `versions`."""
        context = context.unfactorised()
        made = [provider.curvature(context, name) for name, provider in self.named]
        problem = context.problem
        said = problem.notes
        left_out: dict[str, tuple[int, ...]] = {}
        if problem.network.left_out:
            shapes = {name: tuple(p.shape) for name, p in problem.model.named_parameters()}
            left_out = {name: shapes[name] for name in problem.network.left_out}
        if autocast_switched_off():
            dtype = str(problem.network.example.dtype).removeprefix("torch.")
            said = (*said, f"autocast is switched off inside: this is the curvature of the {dtype} function")
        example = problem.network.example
        if not devices.has_eigh(example):
            kind = example.device.type
            said = (*said, f"`{kind}` has no eigendecompositions: those that are needed run on the CPU")
        return [
            replace(
                one,
                versions=versions if one.versions is None else one.versions,
                shift=problem.l2,
                notes=(*one.notes, *said),
                left_out=left_out,
            )
            for one in made
        ]


def _named(spec: str | Provider) -> tuple[str, Provider]:
    """A provider under the text that asked for it, or its own text, or its class's name if unregistered."""
    instance = providers.make(spec)
    if not isinstance(instance, Provider):
        raise SpecError(
            f"provider: got an instance of `{type(instance).__name__}`; expected a name or a Provider"
        )
    if isinstance(spec, str):
        return spec, instance
    try:
        return providers.canonical(instance), instance
    except SpecError:
        return type(instance).__name__, instance


def _label(spec: str | Provider, name: str, provider: Provider, problem: Problem) -> str:
    """The name with the values that fields which say `auto` have on this problem."""
    resolved = provider.resolved(problem)
    if resolved == provider:
        return name
    return providers.label(resolved) if isinstance(spec, str) else _named(resolved)[0]


def resolved_choice(spec: str | Provider, problem: Problem) -> str | Provider:
    """What was asked for, with the values that fields which say `auto` have on this problem.

    >>> import torch
    >>> image = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Flatten(), torch.nn.Linear(2, 2))
    >>> problem = Problem(image, "cross-entropy", torch.ones(3, 1, 1, 1), torch.tensor([0, 1, 0]))
    >>> resolved_choice("pch-1", problem), resolved_choice("fisher", problem)
    ('pch[kind=rows,poseig=last]', 'fisher')
    """
    name, provider = _named(spec)
    return _label(spec, name, provider, problem) if isinstance(spec, str) else provider.resolved(problem)


_Stages = Sequence[tuple[Statistic, ...]]


def _means(problem: Problem, stages: _Stages) -> dict[Statistic, Values]:
    """The means of all statistics over all rows, from one pass for each stage."""
    values: dict[Statistic, Values] = {}
    for stage in stages:
        means = Means([statistic.bound(values) for statistic in stage])
        for recording in problem.recordings():
            means.add(recording)
        values |= means.values()
    return values


def _stages(wanted: Sequence[Statistic]) -> list[tuple[Statistic, ...]]:
    """What is needed first, by how many passes come before it, and all that nothing needs with the last."""
    depths: dict[Statistic, int] = {}
    needed: set[Statistic] = set()

    def depth(statistic: Statistic) -> int:
        needs = statistic.needs
        needed.update(needs)
        depths[statistic] = max((depth(one) + 1 for one in needs), default=0)
        return depths[statistic]

    last = max((depth(statistic) for statistic in wanted), default=0)
    places = {s: place if s in needed else last for s, place in depths.items()}
    stages = [tuple(s for s, place in places.items() if place == stage) for stage in range(last + 1)]
    return [stage for stage in stages if stage]


@dataclass(frozen=True, eq=False)
class Estimates:
    """The curvatures over the rows of all ranks, and what was joined with them."""

    curvatures: list[Curvature]
    joined: JoinedStatistics


def estimate_jointly(
    chosen: Chosen,
    problem: Problem,
    communicator: Communicator,
    *,
    gradient: bool = False,
    loss: bool = False,
    settings: Mapping[str, object] | None = None,
) -> Estimates:
    """What the providers make of all ranks' rows, with the gradient and the loss if asked for.

    It takes one exchange, and others before it where statistics need the means of others. Every rank must
    make this call, with the same providers and `settings`.
    """
    versions = problem.versions
    agreed = {"the providers": [provider for _, provider in chosen.named], **(settings or {})}
    *before, last = _stages(chosen.statistics) or [()]
    means: dict[Statistic, Values] = {}
    for stage in before:
        needed = [statistic.bound(means) for statistic in stage]
        found = problem.join(communicator, needed, Means, settings=agreed)
        means |= {statistic: found.values[statistic] for statistic in stage}
    bound = [statistic.bound(means) for statistic in last]
    joined = problem.join(communicator, bound, Means, gradient=gradient, loss=loss, settings=agreed)
    own = problem if joined.share else problem.empty_like()
    means |= {statistic: joined.values[statistic] for statistic in last}
    # What is made of one rank's own rows (matrix-free blocks) may fail there alone.
    made = agree(
        communicator,
        lambda: chosen.curvatures(Context(own, means), versions),
        on=problem.network.example.device,
    )
    return Estimates([join_operators(one, communicator, joined.share) for one in made], joined)
