"""How the solve of a block ended: an enum whose values are sentences."""

from __future__ import annotations

from enum import Enum

__all__ = ["Status"]


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
