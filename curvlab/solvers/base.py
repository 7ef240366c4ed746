"""What a solver is, what it is given of a layer, and what its answers make of the layer's parameters.

A solver is frozen configuration with two phases, timed apart:

    prepare(layer, damping, gradient)   all that needs only the matrix: factorisations, bases
    apply(state, gradient)              the direction; for all layers at once where that is cheaper

`prepare` sees the gradient's form (not its values) to choose the coordinates it prepares for. The layer it is
given is a *unit*: a Kronecker layer with at most one weight matrix and one bias vector, whatever the layer of
the curvature is (see `curvature_layers`). Where the weight is many small matrices of one shape and the solver
says that it `solves_stacks`, the unit is all of them at once. The gradient of a parameter is cut along the
parameter's view; the steps are put together again:

    step        the units' steps, in the view of the parameter: formed no earlier than they are
    residual    √(Σ_g ‖rest_g‖²) / ‖G‖ over the parts g of a weight, each of its own system
    status      the worst of the parts;  iterations: the most;  rank, seconds: the sum

`residual_full` and dᵀCd are those of the layer's own block, which may be another matrix than the units':
the mean input factor goes with B of ḡ, and a tied matrix is solved by its diagonal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import KroneckerLayer, LayerCurvature
from curvlab.exceptions import PairError, SpecError
from curvlab.linalg import Block, Matrix, MatrixView, Step, TensorStep, ViewStep
from curvlab.linalg.cg import Outcome
from curvlab.linalg.factors import InputKind, binary_scale, nonzero_or_one
from curvlab.linalg.steps import Gradient, as_step, view_entry
from curvlab.solvers.input_coordinates import Route, WeightGradient
from curvlab.solvers.solution import BlockSolution
from curvlab.solvers.systems import (
    Damping,
    DampingSplit,
    LayerGradient,
    Measures,
    System,
    relative_norm,
    scale_to_gradient,
)
from curvlab.specs import INTERFACE, check_choices
from curvlab.staleness import Versions

__all__ = [
    "Formulation",
    "Guidance",
    "JoinedMeasures",
    "LayerDirection",
    "LayerGradient",
    "Preconditioner",
    "SolvedUnit",
    "Solver",
    "Unit",
    "check_mean_above",
    "entry_of",
    "is_stack",
    "join_units",
    "layer_gradient",
    "units_of",
]


Formulation = Literal["reduced", "explicit"]
"""`reduced` is the sample-space form, `explicit` the textbook form: the paper's equations to the letter."""

Preconditioner = Callable[[str, Tensor], Tensor]
"""x ↦ M⁻¹ x for the parameter of this name."""


@dataclass(frozen=True, eq=False)
class Guidance:
    """What a caller gives an iteration beside the system: a first guess, a preconditioner."""

    start: Mapping[str, Tensor] | None = None
    preconditioner: Preconditioner | None = None

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return self.start is not None or self.preconditioner is not None


@dataclass(frozen=True, eq=False)
class LayerDirection:
    """What `apply` returns: the steps of one layer and how they were found.

    `outcomes`, `iterations` and `history` have one column per system: the weight's, then the bias's;
    None for a direct method. `split` is how the damping of the weight's system was split, where it was.
    """

    weight: Matrix | None
    bias: Tensor | None
    system: System
    route: str
    rank: int
    outcomes: Tensor | None = None
    iterations: Tensor | None = None
    history: Tensor | None = None
    split: DampingSplit | None = None


@dataclass(frozen=True)
class Solver(ABC):
    """A rule that turns a curvature and a gradient into a direction.

    `interface` numbers what is described here; a plugin repeats the number that it was written for, so that
    another curvlab can tell.
    """

    interface: ClassVar[int] = INTERFACE
    input_factor: ClassVar[InputKind] = "full"
    needs_psd: ClassVar[bool] = True
    needs_kronecker: ClassVar[bool] = True
    layers_apart: ClassVar[bool] = True
    """Whether a rank can solve one layer without the others taking part."""
    structures: ClassVar[tuple[str, ...]] = ("kronecker",)
    """The structures of curvatures that it solves."""

    route: Route = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        """Refuse a field that is none of the choices it has; a subclass with its own calls this one."""
        check_choices(self)

    def adapt(self, curvature: Curvature, name: str, guidance: Guidance) -> Solver:
        """The solver that does the work on this curvature: itself, layer by layer on Kronecker factors.

        `name` is what messages call it. A solver that can do without the factors returns another one here.
        """
        if guidance.given:
            raise self._takes_no_guidance(name)
        for layer in curvature.layers:
            incomplete = isinstance(layer, KroneckerLayer) and not layer.complete
            if layer.matrix_free or incomplete:
                raise PairError(
                    f"layer `{layer.name}` of `{curvature.provider}` has no Kronecker factors to solve by: "
                    f"use `cg`, which needs products only"
                )
        return self

    def for_layer(self, layer: LayerCurvature, curvature: Curvature) -> Solver:
        """The solver of one layer: itself, where it does not treat some layers in another way."""
        return self

    @property
    def solves_stacks(self) -> bool:
        """Whether its phases take a stack of equal systems as they take one (see `linalg.stacks`)."""
        return False

    def units(self, layer: LayerCurvature) -> Sequence[LayerCurvature]:
        """What of a layer the solver prepares and applies, one after the other."""
        return layer.units(self.input_factor, stacked=self.solves_stacks)

    @staticmethod
    def _takes_no_guidance(name: str) -> PairError:
        return PairError(f"`{name}` takes no start vector and no preconditioner; `cg` does")

    @abstractmethod
    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> object:
        """All that needs only the matrix."""

    @abstractmethod
    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        """The direction d, to be added to the parameters."""

    def apply_jointly(
        self, states: Sequence[object], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection] | None:
        """What `apply` gives for each layer, for less than one after the other; None: no such way."""
        return None

    def tolerance(self, dtype: torch.dtype) -> float:
        """The relative residual up to which the true residual counts as converged.

        By default that of a direct method: the root of the rounding unit.
        """
        return float(torch.finfo(dtype).eps ** 0.5)

    def check(self, curvature: Curvature, name: str) -> None:
        """Refuse a curvature the solver cannot work with, in a sentence."""
        if self.needs_kronecker and curvature.matrix_free:
            raise PairError(
                f"`{name}` works on Kronecker factors; `{curvature.provider}` is matrix-free. "
                f"Use `cg`, or one of `fisher`, `gauss-newton`, `pch-1`, `pch-2`"
            )
        if curvature.structure not in self.structures:
            raise PairError(
                f"`{name}` is for curvatures of structure {' or '.join(f'`{s}`' for s in self.structures)}; "
                f"that of `{curvature.provider}` is `{curvature.structure}`. Use `exact` or `cg`"
            )
        if self.needs_psd and not curvature.psd:
            raise PairError(
                f"`{name}` needs a positive semi-definite curvature; `{curvature.provider}` with criterion "
                f"`{curvature.criterion}` is indefinite here ({curvature.definiteness.why}). "
                f"Use `pch-1`, `pch-2` or `fisher`, or solver `cg`, which stops at negative curvature"
            )


def check_mean_above(mean_above: int | None, kind: InputKind) -> None:
    """Refuse a limit that is no number of inputs, or that a solver with the mean input factor is given."""
    if mean_above is None:
        return
    if kind == "mean":
        raise SpecError(
            "mean_above is a field of `kfi` and `cg`: this solver takes the mean factor everywhere"
        )
    if mean_above < 0:
        raise SpecError(f"mean_above={mean_above}: expected a number of inputs, 0 or more")


@dataclass(frozen=True, eq=False)
class Unit:
    """A part of a layer that a solver solves by itself: `given` is what the solver is given of it."""

    layer: LayerCurvature
    given: LayerCurvature
    gradient: LayerGradient
    solver: Solver


def entry_of(gradient: Mapping[str, Tensor], name: str) -> WeightGradient:
    """A gradient's entry as it is held: in factors where it has them."""
    return gradient.factored(name) if isinstance(gradient, Gradient) else gradient[name]


def layer_gradient(layer: LayerCurvature, gradient: Mapping[str, Tensor]) -> LayerGradient:
    """The gradient of the weight and the bias of one layer, in factors where it has them."""
    return LayerGradient(
        None if layer.weight_name is None else entry_of(gradient, layer.weight_name),
        None if layer.bias_name is None else view_entry(gradient, layer.bias_name),
    )


def units_of(layer: LayerCurvature, solver: Solver, gradient: Mapping[str, Tensor]) -> list[Unit]:
    """The units of a layer for a solver, each with its part of the gradient."""
    given = solver.units(layer)
    if isinstance(layer, KroneckerLayer) or all(one.matrix_free for one in given):
        return [Unit(layer, one, layer_gradient(one, gradient), solver) for one in given]
    matrices, place = None, 0
    if layer.view is not None and layer.weight_name is not None:
        matrices = layer.view.matrices(view_entry(gradient, layer.weight_name))
    units = []
    for one in given:
        weight = None
        if one.weight_name is not None and matrices is not None:
            weight = matrices if is_stack(one) else matrices[place]
            place += 1
        bias = None if one.bias_name is None else view_entry(gradient, one.bias_name).reshape(-1)
        units.append(Unit(layer, one, LayerGradient(weight, bias), solver))
    return units


def is_stack(unit: LayerCurvature) -> bool:
    """Whether the unit is all matrices of a weight at once."""
    return unit.output is not None and unit.output.count > 1


@dataclass(frozen=True, eq=False)
class SolvedUnit:
    """The systems of one unit and what a solver made of them."""

    given: LayerCurvature
    gradient: LayerGradient
    direction: LayerDirection
    damping: Damping
    tolerance: float
    seconds_prepare: float
    seconds_apply: float

    def entries(self) -> dict[str, Matrix]:
        """The steps by parameter name."""
        named = ((self.given.weight_name, self.direction.weight), (self.given.bias_name, self.direction.bias))
        return {name: step for name, step in named if name is not None and step is not None}

    def blocks(self) -> dict[str, BlockSolution]:
        """How each was found, by parameter name."""
        found = self.direction
        measures = found.system.measures(self.given, self.gradient, found.weight, found.bias, self.damping)
        return {
            name: self._block(name, measures[name], column, len(measures))
            for column, name in enumerate(self.entries())
        }

    def _block(self, name: str, measures: Measures, column: int, count: int) -> BlockSolution:
        """Block `column` of `count`; the unit's time is theirs in equal parts."""
        found, of_weight = self.direction, name == self.given.weight_name
        systems = slice(None) if is_stack(self.given) else column
        return BlockSolution(
            name=name,
            layer=self.given.name,
            measures=measures,
            tolerance=self.tolerance,
            route=found.route,
            rank=found.rank if of_weight else found.system.bias_rank(self.given),
            outcome=None if found.outcomes is None else found.outcomes[systems],
            iteration_count=None if found.iterations is None else found.iterations[systems],
            history=None if found.history is None else found.history[:, systems],
            split=found.split if of_weight else None,
            seconds_prepare=self.seconds_prepare / count,
            seconds_apply=self.seconds_apply / count,
            reads=measures.reads,
        )


def join_units(
    layer: LayerCurvature, solved: Sequence[SolvedUnit], gradient: Mapping[str, Tensor], damping: Damping
) -> tuple[dict[str, Matrix], dict[str, BlockSolution]]:
    """The steps of a layer's parameters, and how they were found, from those of its units."""
    if isinstance(layer, KroneckerLayer) or all(one.given.matrix_free for one in solved):
        # The units are the layer itself, or its blocks as they are.
        return (
            {name: step for one in solved for name, step in one.entries().items()},
            {name: block for one in solved for name, block in one.blocks().items()},
        )
    answers = [(one, one.entries(), one.blocks()) for one in solved]
    steps: dict[str, Matrix] = {}
    blocks: dict[str, BlockSolution] = {}
    for name, block in layer.blocks.items():
        own = [answer for answer in answers if name in answer[1]]
        found = [solutions[name] for _, _, solutions in own]
        whole = view_entry(gradient, name)
        if name == layer.weight_name and layer.view is not None:
            parts = layer.view.matrices(whole)
            steps[name] = _join_steps(layer.view, own[0][0].given, [entries[name] for _, entries, _ in own])
        else:
            parts = whole[None]
            steps[name] = as_step(own[0][1][name]).form().reshape(block.shape)
        measures = JoinedMeasures(
            tuple(one.measures for one in found),
            parts,
            block,
            as_step(steps[name]),
            whole,
            damping,
            Versions.of({f"the gradient of `{name}`": whole}),
        )
        blocks[name] = _join_blocks(layer.name, found, measures)
    return steps, blocks


def _join_steps(view: MatrixView, first: LayerCurvature, steps: Sequence[Matrix]) -> Step:
    """The step of a weight from those of its units, of which a stack is the only one."""
    if is_stack(first):
        return TensorStep(view.parameter(as_step(steps[0]).form()))
    return ViewStep(view, tuple(as_step(step) for step in steps))


@dataclass(frozen=True, eq=False)
class JoinedMeasures(Measures):
    """Measures of a parameter from those of its units, and from the block that the curvature has for it.

    `gradients` are those of its parts, along the first dimension.
    """

    units: tuple[Measures, ...]
    gradients: Tensor
    block: Block
    direction: Step
    gradient: Tensor
    damping: Damping
    reads: Versions

    def share(self, relative: Tensor) -> Tensor:
        """√(Σ_g (r_g ‖G_g‖)²) / ‖G‖ for r_g relative to ‖G_g‖, along the first dimension."""
        size = binary_scale(self.gradient)
        norms = torch.linalg.vector_norm((self.gradients / size).flatten(1), dim=1)
        # Of a part without a gradient it is the rest itself.
        absolute = relative * torch.where(norms > 0, norms, 1 / size).reshape(-1, *(1,) * (relative.ndim - 1))
        return torch.linalg.vector_norm(absolute, dim=0) / nonzero_or_one(torch.linalg.vector_norm(norms))

    def residual(self) -> Tensor:
        if len(self.units) == 1:
            return self.units[0].residual()
        return self.share(torch.stack([unit.residual() for unit in self.units]))

    def residual_full(self) -> Tensor:
        d, g = scale_to_gradient(self.direction.form(), self.gradient)
        rest = self.damping.scale * self.block.matmul(d) + self.damping.shift * d + g
        return relative_norm(rest.square().sum(), g.square().sum())

    def slope(self) -> Tensor:
        return torch.stack([unit.slope() for unit in self.units]).sum()

    def quadratic(self) -> Tensor:
        d = self.direction.form()
        data = (d * self.block.matmul(d)).sum()
        return data + self.damping.l2 * d.square().sum() if self.damping.l2 else data


def _join_blocks(layer: str, found: Sequence[BlockSolution], measures: JoinedMeasures) -> BlockSolution:
    first = replace(found[0], layer=layer, measures=measures, reads=measures.reads)
    if len(measures.gradients) == 1:
        return first
    # One entry for each part: from units of one part each, or from a stack that has them all.
    outcomes = [one.outcome.reshape(-1) for one in found if one.outcome is not None]
    counts = [one.iteration_count.reshape(-1) for one in found if one.iteration_count is not None]
    histories = [one.history.reshape(len(one.history), -1) for one in found if one.history is not None]
    splits = [one.split for one in found if one.split is not None]
    return replace(
        first,
        route=", ".join(dict.fromkeys(one.route for one in found)),
        rank=sum(one.rank for one in found),
        outcome=_worst(torch.cat(outcomes)) if outcomes else None,
        iteration_count=torch.cat(counts).amax() if counts else None,
        history=measures.share(_to_one_length(histories)) if histories else None,
        split=_join_splits(splits) if splits else None,
        seconds_prepare=sum(one.seconds_prepare for one in found),
        seconds_apply=sum(one.seconds_apply for one in found),
    )


SEVERITY = (Outcome.CONVERGED, Outcome.LIMIT, Outcome.NEGATIVE_CURVATURE, Outcome.BREAKDOWN)


def _worst(outcomes: Tensor) -> Tensor:
    """The outcome that is the last in `SEVERITY` (nothing is read)."""
    worst = outcomes[0]
    for severe in SEVERITY:
        worst = torch.where((outcomes == int(severe)).any(), int(severe), worst)
    return worst


def _to_one_length(histories: Sequence[Tensor]) -> Tensor:
    """One row per part; a history that ended earlier stays at its last values."""
    length = max(len(history) for history in histories)
    return torch.cat([torch.cat([h, h[-1:].expand(length - len(h), -1)]).T for h in histories])


def _join_splits(splits: Sequence[DampingSplit]) -> DampingSplit:
    return DampingSplit(
        torch.cat([split.pi.reshape(-1) for split in splits]),
        torch.cat([split.clamped.reshape(-1) for split in splits]),
    )
