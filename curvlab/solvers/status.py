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
    STAGNATED = "The recursive residual says converged, the true one does not: rounding stopped the progress."
    NEGATIVE_CURVATURE = "A direction of negative curvature was met; the direction is the best before it."
    BREAKDOWN = "The iteration met a direction of zero curvature and could not go on."

    @property
    def slug(self) -> str:
        """The name as tables show it."""
        return self.name.lower().replace("_", "-")
