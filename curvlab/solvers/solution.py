"""A solution: the direction by parameter name, and how each block's system was solved.

Directions stay in factors; residuals, inner products and statuses are computed when they are asked
for, from the direction alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

from torch import Tensor, nn

from curvlab.exceptions import SolveError
from curvlab.linalg.cg import Outcome
from curvlab.linalg.product import add_into
from curvlab.model.graph import unwrap
from curvlab.solvers.damping import Damping
from curvlab.solvers.direction import Direction
from curvlab.solvers.measures import Measures
from curvlab.solvers.pi import Split
from curvlab.solvers.status import Status
from curvlab.staleness import Versions

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BlockSolution", "Solution"]


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
    split: Split | None = None
    seconds_prepare: float = float("nan")
    seconds_apply: float = float("nan")
    reads: Versions = field(default_factory=lambda: Versions(()))

    def _measured(self, measure: Callable[[], Tensor]) -> float:
        """A measure of the solve as it was; refused where that can no longer be known."""
        changed = self.reads.changed()
        if changed:
            raise SolveError(
                f"{' and '.join(changed)} changed in place since the solve, so its residual and predicted "
                f"reduction in `{self.name}` can no longer be known: read them before, or solve for a copy"
            )
        return float(measure())

    @cached_property
    def residual(self) -> float:
        """The true relative residual of the solver's own system."""
        return self._measured(self.measures.residual)

    @cached_property
    def residual_full(self) -> float:
        """The true relative residual of the full damped system."""
        return self._measured(self.measures.residual_full)

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
        return self._measured(self.measures.slope)

    @cached_property
    def predicted_reduction(self) -> float:
        """-(gᵀd + ½ dᵀCd), with the undamped curvature."""
        return -(self.slope + 0.5 * self._measured(self.measures.quadratic))


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
        steps = {name: self.direction.factored(name) for name in self.direction}
        for name, step in steps.items():
            given, expected = tuple(parameters[name].shape), tuple(step.shape)
            if given != expected:
                raise SolveError(
                    f"the model's `{name}` has shape {given}; this solution is for one of shape {expected}"
                )
        for name, step in steps.items():
            add_into(parameters[name], step, lr)

    @property
    def predicted_reduction(self) -> float:
        """The sum over blocks of -(gᵀd + ½ dᵀCd)."""
        return sum(block.predicted_reduction for block in self.blocks.values())

    def frame(self) -> pd.DataFrame:
        """One row a block: status, iterations, residuals, gᵀd, predicted reduction, rank, route, π, times."""
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
