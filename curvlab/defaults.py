"""Choices that several parts of curvlab make by default, each written once.

Nothing is imported here, so that a help page can show them at once.
"""

from __future__ import annotations

__all__ = [
    "ALPHA",
    "BASELINES",
    "NEWTON_LIMIT",
    "PLAN_FORMS",
    "PROVIDERS",
    "REFERENCE_OPERATIONS",
    "SOLVERS",
    "STEP_ALPHA",
    "STEP_LR",
    "STEP_PROVIDER",
    "STEP_SOLVER",
]

PROVIDERS = ("fisher", "gauss-newton", "pch-1", "pch-2")
"""The providers that are compared, and whose errors are computed."""

SOLVERS = ("kfi", "sm-kfi", "cg", "ea-cg")
"""The solvers that are compared."""

ALPHA = 0.05
"""The damping (1-α)C + αI at which pairs are compared: the paper's."""

BASELINES = ("sgd", "adam")
"""The optimizers that are trained beside the pairs."""

NEWTON_LIMIT = 1_000_000
"""Up to how many parameters the exact Newton direction is solved for."""

REFERENCE_OPERATIONS = 1e12
"""Operations that each exact reference of a comparison may take: Newton's direction, errors on any graph."""

PLAN_FORMS = ("sample-space", "textbook")
"""The forms of each solver that are planned: the one that curvlab runs, and the textbook's."""

STEP_PROVIDER, STEP_SOLVER = "pch-1", "ea-cg"
"""The pair of `SecondOrder` and of `curvlab train`."""

STEP_LR, STEP_ALPHA = 0.1, 0.01
"""Learning rate and damping of `SecondOrder` and `curvlab train`; how they were chosen: reports/plateau."""
