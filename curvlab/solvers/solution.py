"""A solution: the direction by parameter name, and how each block of it was found.

Directions stay in factors. Measures and statuses are computed when they are asked for: see `base`.

What a solver solves are the *units* of the layers. The gradient of a parameter is cut along the parameter's
view; the steps are put together again:

    step        the units' steps, in the view of the parameter: formed no earlier than they are
    residual    √(Σ_g ‖rest_g‖²) / ‖G‖ over the parts g of a weight, each of its own system
    status      the worst of the parts;  iterations: the most;  rank, seconds: the sum

`residual_full` and dᵀCd are those of the layer's own block, which may be another matrix than the units':
the mean input factor goes with B of ḡ, and a tied matrix is solved by its diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from curvlab.curvature_layers import KroneckerLayer, LayerCurvature
from curvlab.exceptions import SolveError
from curvlab.linalg import Block, Matrix, MatrixView, RowProduct, Step, ViewStep
from curvlab.linalg.cg import Outcome
from curvlab.linalg.execution import in_pieces, readable
from curvlab.linalg.factors import binary_scale, nonzero_or_one
from curvlab.linalg.steps import Gradient, LazyTensors, TensorStep, add_step, as_step, view_entry
from curvlab.model.network import unwrap
from curvlab.solvers.base import (
    Damping,
    DampingSplit,
    LayerDirection,
    LayerGradient,
    Measures,
    Solver,
    relative_norm,
    scale_to_gradient,
)
from curvlab.solvers.input_coordinates import WeightGradient
from curvlab.staleness import Versions, change_message

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "BlockSolution",
    "Direction",
    "JoinedMeasures",
    "Solution",
    "SolvedUnit",
    "Status",
    "Unit",
    "check_parameters",
    "entry_of",
    "is_stack",
    "join_units",
    "layer_gradient",
    "units_of",
]


class Status(Enum):
    """How the solve of a block ended.

    >>> Status.CONVERGED.slug
    'converged'
    """

    CONVERGED = "The residual is below the tolerance."
    ITERATION_LIMIT = "The iterations ran out before the residual fell below the tolerance."
    STAGNATED = "Rounding stopped the progress: the true residual is above the tolerance, and stays there."
    NEGATIVE_CURVATURE = "A direction of negative curvature was met; the direction is the best before it."
    BREAKDOWN = "The iteration met a direction of zero curvature and could not go on."

    @property
    def advice(self) -> str:
        """What to do about it."""
        return {
            Status.CONVERGED: "Nothing is left to do",
            Status.ITERATION_LIMIT: "Allow more iterations, or a larger tol or damping",
            Status.STAGNATED: "Use float64, or a tol above the rounding of the dtype, or a larger damping",
            Status.NEGATIVE_CURVATURE: "Use a larger damping, or a curvature that is positive semi-definite",
            Status.BREAKDOWN: "Use a larger damping",
        }[self]

    @property
    def slug(self) -> str:
        """The name as tables show it."""
        return self.name.lower().replace("_", "-")


class Direction(LazyTensors[Matrix]):
    """{parameter name: step}, to be added to the parameters; formed each time an entry is read.

    A step may refer to the gradient it was solved for, or to the rows of the batch: once these were changed
    in place, the step is refused.
    """

    def __init__(self, entries: Mapping[str, Matrix]) -> None:
        # A step that is a tensor is held as one, of which readers get a copy.
        super().__init__({n: e.tensor if isinstance(e, TensorStep) else e for n, e in entries.items()})
        self._steps = {name: as_step(entry) for name, entry in entries.items()}
        borrowed = {name: step.borrowed for name, step in self._steps.items()}
        # One by one: to look at all of them for every step would take a time quadratic in the layers.
        self._borrowed = {
            name: Versions.of({name: tensor}) for name, tensor in borrowed.items() if tensor is not None
        }

    @staticmethod
    def _form(entry: Matrix) -> Tensor:
        return as_step(entry).form()

    def factored(self, name: str) -> Matrix:
        """The entry as it is held: a tensor, or what forms one."""
        self.step(name)
        return super().factored(name)

    def step(self, name: str) -> Step:
        """The step of one parameter; refused where what it refers to has changed since the solve."""
        step = self._steps[name]
        if name in self._borrowed and self._borrowed[name].changed():
            what = "the batch" if isinstance(step, RowProduct) else f"the gradient of `{name}`"
            refers = (
                f"and the step of `{name}` refers to it: read or add the step before, or solve for a copy"
            )
            raise SolveError(change_message([what], "the solve", refers, in_place=True))
        return step

    def is_zero(self) -> bool:
        """Whether every step is zero, so that adding it changes nothing (no step is formed)."""
        return all(float(step.magnitude()) == 0 for step in self._steps.values())

    def computed(self) -> dict[str, tuple[Tensor, ...]]:
        """For each parameter the tensors that are finite where its step is."""
        return {name: step.computed() for name, step in self._steps.items()}

    def sums(self) -> dict[str, Tensor]:
        """For each parameter a scalar tensor that is finite where its step is (nothing is read).

        A step in factors is finite where they are: the rows were checked when they were recorded, the
        gradient when it was given.
        """
        return {name: step.checksum() for name, step in self._steps.items()}

    def finite(self) -> dict[str, Tensor]:
        """For each parameter a scalar tensor: whether its step is free of NaN and infinity."""
        return {name: torch.isfinite(total) for name, total in self.sums().items()}


@dataclass(frozen=True, eq=False)
class BlockSolution:
    """How one block's system was solved; `reads` are the tensors that its measures are computed from."""

    name: str
    layer: str
    measures: Measures
    tolerance: float
    route: str
    rank: int
    outcome: Tensor | None = None
    iteration_count: Tensor | None = None
    history: Tensor | None = None
    split: DampingSplit | None = None
    seconds_prepare: float = float("nan")
    seconds_apply: float = float("nan")
    reads: Versions = field(default_factory=lambda: Versions(()))

    def _measure(self, measure: Callable[[], Tensor]) -> float:
        """A measure of the solve as it was; refused where that can no longer be known."""
        self._check_unchanged()
        return float(measure())

    def _check_unchanged(self) -> None:
        changed = self.reads.changed()
        if changed:
            unknown = f"so its residual and predicted reduction in `{self.name}` can no longer be known"
            advice = "read them before, or solve for a copy"
            raise SolveError(change_message(changed, "the solve", f"{unknown}: {advice}", in_place=True))

    @property
    def counted(self) -> list[Tensor]:
        """Outcome and iterations as tensors, where the solver iterates (nothing is read)."""
        return [own.reshape(()) for own in (self.outcome, self.iteration_count) if own is not None]

    def is_read(self, residual: bool) -> bool:
        """Whether that is known already, with the true residual or without."""
        known = self.__dict__
        return (self.iteration_count is None or "iterations" in known) and (
            not residual or "residual" in known
        )

    def ending(self, residual: bool) -> list[Tensor]:
        """Those, and the true residual if it is asked for."""
        if not residual:
            return self.counted
        self._check_unchanged()
        return [*self.counted, self.measures.residual().reshape(())]

    def remember_ending(self, numbers: Iterator[float], residual: bool) -> None:
        """Take what `ending` gave, as it was read."""
        known = self.__dict__
        if self.outcome is not None:
            known["ended"] = Outcome(int(next(numbers)))
        if self.iteration_count is not None:
            known["iterations"] = int(next(numbers))
        if residual:
            known["residual"] = next(numbers)

    @cached_property
    def residual(self) -> float:
        """The true relative residual of the solver's own system."""
        return self._measure(self.measures.residual)

    @cached_property
    def residual_full(self) -> float:
        """The true relative residual of the full damped system."""
        return self._measure(self.measures.residual_full)

    @cached_property
    def ended(self) -> Outcome:
        """How the iteration ended; a direct method converges."""
        return Outcome.CONVERGED if self.outcome is None else Outcome(int(self.outcome))

    @cached_property
    def iterations(self) -> int:
        """CG iterations; 0 for a direct method."""
        return 0 if self.iteration_count is None else int(self.iteration_count)

    @property
    def pi(self) -> float:
        """π of the factored inverse's weight system; NaN where there is none, or one for each part.

        `split.pi` has all of them.
        """
        return float(self.split.pi) if self.split is not None and self.split.pi.numel() == 1 else float("nan")

    @property
    def pi_clamped(self) -> bool:
        """Whether a π lies at the end of its range because the traces would have it beyond."""
        return self.split is not None and bool(self.split.clamped.any())

    @cached_property
    def status(self) -> Status:
        """How it ended; the true residual has the last word over the recursive one."""
        if self.ended is Outcome.CONVERGED:
            return Status.CONVERGED if self.residual <= self.tolerance else Status.STAGNATED
        return {
            Outcome.LIMIT: Status.ITERATION_LIMIT,
            Outcome.NEGATIVE_CURVATURE: Status.NEGATIVE_CURVATURE,
            Outcome.BREAKDOWN: Status.BREAKDOWN,
        }[self.ended]

    @cached_property
    def slope(self) -> float:
        """gᵀd: negative for a descent direction."""
        return self._measure(self.measures.slope)

    @cached_property
    def predicted_reduction(self) -> float:
        """-(gᵀd + ½ dᵀCd), with the undamped curvature."""
        return -(self.slope + 0.5 * self._measure(self.measures.quadratic))


@dataclass(frozen=True, eq=False)
class Solution:
    """The direction and, for each block, how it was found; `notes` are those of the curvature."""

    solver: str
    provider: str
    damping: Damping
    direction: Direction
    blocks: dict[str, BlockSolution]
    notes: tuple[str, ...] = ()

    def read(self, residuals: bool = True) -> None:
        """Read how all blocks ended at once, so that to ask block after block waits for no accelerator."""
        if all(block.is_read(residuals) for block in self.blocks.values()):
            return
        example = [one for block in self.blocks.values() for one in block.counted][:1]
        if residuals and not example:
            example = [one for found in self.direction.computed().values() for one in found][:1]
        if not example or in_pieces(example[0]) or not readable(example[0]):
            return
        tensors = [one for block in self.blocks.values() for one in block.ending(residuals)]
        dtype = torch.promote_types(torch.float32, tensors[-1].dtype)
        numbers = iter(torch.stack([one.to(dtype) for one in tensors]).tolist())
        for block in self.blocks.values():
            block.remember_ending(numbers, residuals)

    def add_to(self, model: nn.Module, lr: float = 1.0) -> None:
        """θ ← θ + lr · d, in place, with no direction of a weight's size formed; all of it or nothing."""
        if not math.isfinite(lr):
            raise SolveError(f"lr={lr}: expected a finite number")
        parameters = dict(unwrap(model).named_parameters())
        missing = [name for name in self.direction if name not in parameters]
        if missing:
            raise SolveError(
                f"the model has no parameter {missing}; this solution is for {list(self.direction)}"
            )
        steps = {name: self.direction.step(name) for name in self.direction}
        for name, step in steps.items():
            given, expected = tuple(parameters[name].shape), step.shape
            if given != expected:
                raise SolveError(
                    f"the model's `{name}` has shape {given}; this solution is for one of shape {expected}"
                )
        check_parameters({name: parameters[name] for name in steps})
        for name, step in steps.items():
            add_step(step, parameters[name], lr)

    @property
    def predicted_reduction(self) -> float:
        """The sum over blocks of -(gᵀd + ½ dᵀCd)."""
        return sum(block.predicted_reduction for block in self.blocks.values())

    def frame(self) -> pd.DataFrame:
        """One row per block: how it ended, iterations, residuals, gᵀd, predicted reduction, π, times."""
        import pandas as pd

        rows = [
            {
                "block": name,
                "solver": self.solver,
                "provider": self.provider,
                "damping": str(self.damping),
                "status": block.status.slug,
                "iterations": block.iterations,
                "residual": block.residual,
                "residual_full": block.residual_full,
                "slope": block.slope,
                "predicted_reduction": block.predicted_reduction,
                "rank": block.rank,
                "route": block.route,
                "pi": block.pi,
                "pi_clamped": block.pi_clamped,
                "seconds_prepare": block.seconds_prepare,
                "seconds_apply": block.seconds_apply,
            }
            for name, block in self.blocks.items()
        ]
        frame = pd.DataFrame(rows)
        frame.attrs["notes"] = list(self.notes)
        return frame

    def trace(self) -> pd.DataFrame:
        """The recursive relative residual by block and iteration, to plot."""
        import pandas as pd

        rows = [
            {"block": name, "iteration": iteration, "residual": float(value)}
            for name, block in self.blocks.items()
            if block.history is not None
            for iteration, value in enumerate(block.history[: block.iterations + 1].tolist())
        ]
        return pd.DataFrame(rows, columns=["block", "iteration", "residual"])

    def check(self) -> None:
        """Raise unless every block converged: what `strict=True` does."""
        bad = {name: block for name, block in self.blocks.items() if block.status is not Status.CONVERGED}
        if bad:
            name, block = next(iter(bad.items()))
            raise SolveError(
                f"`{self.solver}` on `{self.provider}`: {len(bad)} of {len(self.blocks)} blocks did not "
                f"converge; `{name}`: {block.status.value} (residual {block.residual:.2g} after "
                f"{block.iterations} iterations). {block.status.advice}, or use strict=False"
            )

    def __repr__(self) -> str:
        return (
            f"Solution({self.solver} on {self.provider}, damping={self.damping}, {len(self.blocks)} blocks)"
        )

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p>{escape(repr(self))}</p>{notes}{self.frame().to_html(index=False)}"


def check_parameters(parameters: Mapping[str, Tensor]) -> None:
    """Refuse parameters that cannot be changed in place: with entries that share memory, or made to be read.

    >>> check_parameters({"w": torch.zeros(1).expand(3)})
    Traceback (most recent call last):
    curvlab.exceptions.SolveError: `w` of shape (3,) has entries that share memory ...
    """
    for name, parameter in parameters.items():
        if _overlaps(parameter):
            raise SolveError(
                f"`{name}` of shape {tuple(parameter.shape)} has entries that share memory (an expanded "
                f"tensor), so no step can be written into it; nothing was changed. Make it a parameter of "
                f"its own with .clone()"
            )
        if parameter.is_inference() and not torch.is_inference_mode_enabled():
            raise SolveError(
                f"`{name}` was made in torch.inference_mode() and cannot be changed outside of it; nothing "
                f"was changed. Make it a parameter of its own with .clone()"
            )


def _overlaps(tensor: Tensor) -> bool:
    """Whether two entries certainly lie in the same place: a dimension with no stride between its entries."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


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
