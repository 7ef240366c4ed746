"""A solution: the direction by parameter name, the systems it solves, and what can be measured of it.

    damped system      s B D A + τ D = -G                (s, τ) from the damping, A the input factor
    factored system    (B + β I) D (A + γ I) = -G        what the factored inverse solves
    block system       s C d + τ d = -g                  C by its products, of one block or of several

Directions stay in factors. Residuals, gᵀd, dᵀCd and statuses are computed when they are asked for, from the
direction alone; residuals are the true ones, relative to ‖G‖. Those of Kronecker factors share nothing with
the solvers but the factors and stay in the sample space when the direction and the gradient do. A block
system keeps C d from the time of the solve: a matrix-free curvature reads the model, whose parameters
the step is about to change.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from curvlab.curvature import LayerCurvature
from curvlab.exceptions import PairError, SolveError
from curvlab.gradient import LazyTensors, RowGradient
from curvlab.linalg import Factor, GramFactor, Matrix, RowProduct, Step
from curvlab.linalg.cg import Outcome
from curvlab.linalg.factors import InputFactors, InputKind, binary_scale
from curvlab.linalg.steps import as_step
from curvlab.measure import device
from curvlab.model.graph import unwrap
from curvlab.solvers.damping import Damping, DampingSplit
from curvlab.solvers.input_coordinates import WeightGradient, form_gradient
from curvlab.staleness import Versions, change_message

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "BiasMeasures",
    "BlockMeasures",
    "BlockSolution",
    "BlockSystem",
    "DampedSystem",
    "Direction",
    "FactoredSystem",
    "KroneckerSystem",
    "LayerGradient",
    "Measures",
    "Solution",
    "SolvedBlock",
    "Status",
    "System",
    "WeightMeasures",
    "input_factors",
    "output_factor",
]

NOTHING_READ = Versions(())
SIGNIFICANT = 1e3  # times its rounding: the least square norm that counts as accurate


def output_factor(layer: LayerCurvature) -> Factor:
    """B of a layer; refused where the layer has none."""
    if layer.output is None:
        raise PairError(_no_factors(layer))
    return layer.output


def input_factors(layer: LayerCurvature) -> InputFactors:
    """E[hhᵀ] and E[h] of a layer; refused where the layer has none."""
    if layer.inputs is None:
        raise PairError(_no_factors(layer))
    return layer.inputs


def _no_factors(layer: LayerCurvature) -> str:
    return f"layer `{layer.name}` has no Kronecker factors to solve by: use `cg`, which needs products only"


@dataclass(frozen=True, eq=False)
class LayerGradient:
    """The gradient of one layer's parameters (None: the parameter has no block)."""

    weight: WeightGradient | None
    bias: Tensor | None


class Measures(ABC):
    """What can be asked of a solved block, as tensors; `reads` are the tensors it is computed from."""

    reads: Versions

    @abstractmethod
    def residual(self) -> Tensor:
        """Relative residual of the solver's own system."""

    @abstractmethod
    def residual_full(self) -> Tensor:
        """Relative residual of (s E[hhᵀ] ⊗ B + τI) d = -g, which compares across solvers."""

    @abstractmethod
    def slope(self) -> Tensor:
        """gᵀd."""

    @abstractmethod
    def quadratic(self) -> Tensor:
        """dᵀCd with the undamped curvature."""


class System(ABC):
    """The linear system that the direction of one layer solves."""

    @abstractmethod
    def measures(
        self,
        layer: LayerCurvature,
        gradient: LayerGradient,
        weight: Matrix | None,
        bias: Tensor | None,
        damping: Damping,
    ) -> dict[str, Measures]:
        """The measures of the steps `weight` and `bias`, by parameter name."""

    @abstractmethod
    def bias_rank(self, layer: LayerCurvature) -> int:
        """What the rank of the bias's block cannot exceed."""


class KroneckerSystem(System):
    """A system made of the Kronecker factors of a layer."""

    kind: InputKind

    @abstractmethod
    def times_weight(self, output: Factor, d: Tensor, d_times_input: Tensor) -> Tensor:
        """The system's matrix times D, given D A."""

    @abstractmethod
    def times_bias(self, output: Factor, d: Tensor) -> Tensor:
        """The same for a bias."""

    def measures(
        self,
        layer: LayerCurvature,
        gradient: LayerGradient,
        weight: Matrix | None,
        bias: Tensor | None,
        damping: Damping,
    ) -> dict[str, Measures]:
        found: dict[str, Measures] = {}
        reads = _gradient_versions(layer, gradient)
        if layer.weight_name is not None and weight is not None and gradient.weight is not None:
            found[layer.weight_name] = WeightMeasures(self, layer, weight, gradient.weight, damping, reads)
        if layer.bias_name is not None and bias is not None and gradient.bias is not None:
            found[layer.bias_name] = BiasMeasures(self, layer, bias, gradient.bias, damping, reads)
        return found

    def bias_rank(self, layer: LayerCurvature) -> int:
        return output_factor(layer).rank_bound


def _gradient_versions(layer: LayerCurvature, gradient: LayerGradient) -> Versions:
    """What measures are computed from that others can change: the gradient, in factors or formed."""
    weight, bias = gradient.weight, gradient.bias
    named: dict[str, Tensor | None] = {f"the gradient of `{layer.bias_name}`": bias}
    if isinstance(weight, RowGradient):
        named["the batch"] = weight.inputs.rows
    else:
        named[f"the gradient of `{layer.weight_name}`"] = weight
    return Versions.of({name: tensor for name, tensor in named.items() if tensor is not None})


@dataclass(frozen=True, eq=False)
class DampedSystem(KroneckerSystem):
    """(s A ⊗ B + τ I) d = -g, for a bias (s B + τ I) d = -g."""

    kind: InputKind
    scale: float
    shift: float

    def times_weight(self, output: Factor, d: Tensor, d_times_input: Tensor) -> Tensor:
        return self.scale * output.matmul(d_times_input) + self.shift * d

    def times_bias(self, output: Factor, d: Tensor) -> Tensor:
        return self.scale * output.matmul(d[:, None])[:, 0] + self.shift * d


@dataclass(frozen=True, eq=False)
class FactoredSystem(KroneckerSystem):
    """(B + β I) D (A + γ I) = -G, for a bias (B + τ I) d = -g."""

    kind: InputKind
    beta: Tensor
    gamma: Tensor
    shift: float

    def times_weight(self, output: Factor, d: Tensor, d_times_input: Tensor) -> Tensor:
        right = d_times_input + self.gamma * d
        return output.matmul(right) + self.beta * right

    def times_bias(self, output: Factor, d: Tensor) -> Tensor:
        return output.matmul(d[:, None])[:, 0] + self.shift * d


class _RowSpace:
    """Matrices M H' by their coefficients M."""

    def __init__(self, gram: GramFactor) -> None:
        self.gram = gram

    def times_input(self, x: Tensor, kind: InputKind) -> Tensor:
        """X A: M ↦ M K, or M K √c √cᵀ because E[h] = H'ᵀ√c."""
        image = x @ self.gram.gram
        return image if kind == "full" else torch.outer(image @ self.gram.root, self.gram.root)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * (y @ self.gram.gram)).sum()

    def square_norm(self, x: Tensor) -> Tensor:
        """‖XH'‖² by the Gram matrix, or by the product itself where rounding could be a part of it."""
        square = self.dot(x, x)
        rounding = torch.finfo(x.dtype).eps * x.square().sum() * self.gram.gram.trace()
        if not device.readable(square) or bool(square > SIGNIFICANT * rounding):
            return square
        return RowProduct(x, self.gram).square_norm()


class _MatrixSpace:
    """Matrices as they are."""

    def __init__(self, inputs: InputFactors) -> None:
        self.inputs = inputs

    def times_input(self, x: Tensor, kind: InputKind) -> Tensor:
        return self.inputs.factor(kind).matmul(x.T).T

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum()

    def square_norm(self, x: Tensor) -> Tensor:
        return x.square().sum()


@dataclass(frozen=True, eq=False)
class WeightMeasures(Measures):
    """Measures of the weight block of a Kronecker layer, in the sample space where all of it is there."""

    system: KroneckerSystem
    layer: LayerCurvature
    direction: Matrix
    gradient: WeightGradient
    damping: Damping
    reads: Versions = NOTHING_READ

    def _represent(self) -> tuple[_RowSpace | _MatrixSpace, Tensor, Tensor]:
        """Direction and gradient in the same representation."""
        inputs, direction, gradient = input_factors(self.layer), as_step(self.direction), self.gradient
        if (
            isinstance(direction, RowProduct)
            and isinstance(gradient, RowGradient)
            and direction.gram.shares_rows_with(gradient.inputs)
            and gradient.inputs.shares_rows_with(inputs.full)
        ):
            return _RowSpace(direction.gram), direction.coefficients, gradient.gradients.scaled_rows().T
        return _MatrixSpace(inputs), direction.form(), form_gradient(gradient)

    def _residual(self, system: KroneckerSystem) -> Tensor:
        """‖system applied to D, plus G‖ / ‖G‖ (zero where G is zero)."""
        space, d, g = self._represent()
        d, g = _scale_to_gradient(d, g)
        rest = system.times_weight(output_factor(self.layer), d, space.times_input(d, system.kind)) + g
        return _relative_norm(space.square_norm(rest), space.square_norm(g))

    def residual(self) -> Tensor:
        return self._residual(self.system)

    def residual_full(self) -> Tensor:
        return self._residual(DampedSystem("full", self.damping.scale, self.damping.shift))

    def slope(self) -> Tensor:
        """⟨G, D⟩."""
        space, d, g = self._represent()
        return space.dot(d, g)

    def quadratic(self) -> Tensor:
        """⟨D, B D E[hhᵀ]⟩."""
        space, d, _ = self._represent()
        return space.dot(d, output_factor(self.layer).matmul(space.times_input(d, "full")))


@dataclass(frozen=True, eq=False)
class BiasMeasures(Measures):
    """Measures of the bias block of a layer with an output factor."""

    system: KroneckerSystem
    layer: LayerCurvature
    direction: Tensor
    gradient: Tensor
    damping: Damping
    reads: Versions = NOTHING_READ

    def _residual(self, system: KroneckerSystem) -> Tensor:
        d, g = _scale_to_gradient(self.direction, self.gradient)
        rest = system.times_bias(output_factor(self.layer), d) + g
        return _relative_norm(rest @ rest, g @ g)

    def residual(self) -> Tensor:
        return self._residual(self.system)

    def residual_full(self) -> Tensor:
        return self._residual(DampedSystem("full", self.damping.scale, self.damping.shift))

    def slope(self) -> Tensor:
        return self.direction @ self.gradient

    def quadratic(self) -> Tensor:
        return self.direction @ output_factor(self.layer).matmul(self.direction[:, None])[:, 0]


@dataclass(frozen=True, eq=False)
class SolvedBlock:
    """g, d and C d of one block."""

    gradient: Tensor
    direction: Tensor
    image: Tensor


@dataclass(frozen=True, eq=False)
class BlockSystem(System):
    """(s C + τI) d = -g, with C known by its products.

    `systems` has, for each parameter of the layer, all blocks of the system that it is a part of: its own, or
    those of the whole network where the curvature has cross-layer blocks.
    """

    systems: Mapping[str, Mapping[str, SolvedBlock]]

    def measures(
        self,
        layer: LayerCurvature,
        gradient: LayerGradient,
        weight: Matrix | None,
        bias: Tensor | None,
        damping: Damping,
    ) -> dict[str, Measures]:
        found: dict[str, Measures] = {}
        for name, system in self.systems.items():
            reads = Versions.of({f"the gradient of `{n}`": block.gradient for n, block in system.items()})
            found[name] = BlockMeasures(name, damping, system, reads)
        return found

    def bias_rank(self, layer: LayerCurvature) -> int:
        return 0 if layer.bias_name is None else layer.blocks[layer.bias_name].numel


@dataclass(frozen=True, eq=False)
class BlockMeasures(Measures):
    """Measures of a block solved through its products, by itself or as part of a system of several.

    `system` holds every block of the system; the residual is that of the whole system, the one that the
    iteration stopped by.
    """

    name: str
    damping: Damping
    system: Mapping[str, SolvedBlock]
    reads: Versions = NOTHING_READ

    def residual(self) -> Tensor:
        squares, references = [], []
        # Relative to the gradient's size: squares then neither under- nor overflow.
        size = torch.stack([binary_scale(block.gradient) for block in self.system.values()]).max()
        for block in self.system.values():
            rest = self.damping.scale * block.image + self.damping.shift * block.direction + block.gradient
            squares.append((rest / size).square().sum())
            references.append((block.gradient / size).square().sum())
        return _relative_norm(torch.stack(squares).sum(), torch.stack(references).sum())

    def residual_full(self) -> Tensor:
        return self.residual()

    def slope(self) -> Tensor:
        block = self.system[self.name]
        return (block.direction * block.gradient).sum()

    def quadratic(self) -> Tensor:
        block = self.system[self.name]
        return (block.direction * block.image).sum()


def _scale_to_gradient(direction: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Both over the gradient's size: squares of what is relative to it do not under- or overflow."""
    size = binary_scale(gradient)
    return direction / size, gradient / size


def _relative_norm(square: Tensor, reference: Tensor) -> Tensor:
    """√(square / reference), or √square where the reference is zero."""
    square, reference = square.clamp(min=0), reference.clamp(min=0)
    return torch.where(
        reference > 0, (square / torch.where(reference > 0, reference, 1)).sqrt(), square.sqrt()
    )


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
        super().__init__(entries)
        self._steps = {name: as_step(entry) for name, entry in entries.items()}
        borrowed = {name: step.borrowed for name, step in self._steps.items()}
        self._borrowed = Versions.of(
            {name: tensor for name, tensor in borrowed.items() if tensor is not None}
        )

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
        if name in self._borrowed.changed():
            what = "the batch" if isinstance(step, RowProduct) else f"the gradient of `{name}`"
            refers = (
                f"and the step of `{name}` refers to it: read or add the step before, or solve for a copy"
            )
            raise SolveError(change_message([what], "the solve", refers, in_place=True))
        return step

    def is_zero(self) -> bool:
        """Whether every step is zero, so that adding it changes nothing (no step is formed)."""
        return all(float(step.magnitude()) == 0 for step in self._steps.values())

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
        changed = self.reads.changed()
        if changed:
            unknown = f"so its residual and predicted reduction in `{self.name}` can no longer be known"
            advice = "read them before, or solve for a copy"
            raise SolveError(change_message(changed, "the solve", f"{unknown}: {advice}", in_place=True))
        return float(measure())

    @cached_property
    def residual(self) -> float:
        """The true relative residual of the solver's own system."""
        return self._measure(self.measures.residual)

    @cached_property
    def residual_full(self) -> float:
        """The true relative residual of the full damped system."""
        return self._measure(self.measures.residual_full)

    @property
    def iterations(self) -> int:
        """CG iterations; 0 for a direct method."""
        return 0 if self.iteration_count is None else int(self.iteration_count)

    @property
    def pi(self) -> float:
        """π of the factored inverse's weight system; NaN where the damping is not split."""
        return float("nan") if self.split is None else float(self.split.pi)

    @property
    def pi_clamped(self) -> bool:
        """Whether π lies at the end of its range because the traces would have it beyond."""
        return self.split is not None and bool(self.split.clamped)

    @cached_property
    def status(self) -> Status:
        """How it ended; the true residual has the last word over the recursive one."""
        outcome = Outcome.CONVERGED if self.outcome is None else Outcome(int(self.outcome))
        if outcome is Outcome.CONVERGED:
            return Status.CONVERGED if self.residual <= self.tolerance else Status.STAGNATED
        return {
            Outcome.LIMIT: Status.ITERATION_LIMIT,
            Outcome.NEGATIVE_CURVATURE: Status.NEGATIVE_CURVATURE,
            Outcome.BREAKDOWN: Status.BREAKDOWN,
        }[outcome]

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
    """The direction and, for each block, how it was found."""

    solver: str
    provider: str
    damping: Damping
    direction: Direction
    blocks: dict[str, BlockSolution]

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
        for name, step in steps.items():
            step.add_into(parameters[name], lr)

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
        return pd.DataFrame(rows)

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
        return f"<p>{escape(repr(self))}</p>{self.frame().to_html(index=False)}"
