"""A solution: the direction by parameter name, and how each block of it was found.

Directions stay in factors. Measures and statuses are computed when they are asked for: see `systems`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from curvlab.exceptions import SolveError
from curvlab.linalg import Matrix, RowProduct, Step
from curvlab.linalg.cg import Outcome
from curvlab.linalg.steps import LazyTensors, TensorStep, add_step, as_step
from curvlab.model.network import unwrap
from curvlab.solvers.systems import Damping, DampingSplit, Measures
from curvlab.staleness import Versions, change_message

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BlockSolution", "Direction", "Solution", "Status", "check_parameters"]


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
    """The direction and, for each block, how it was found; `notes` are those of the curvature."""

    solver: str
    provider: str
    damping: Damping
    direction: Direction
    blocks: dict[str, BlockSolution]
    notes: tuple[str, ...] = ()

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
