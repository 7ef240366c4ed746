"""curvlab: curvature analysis and benchmarking for PyTorch.

problem   = curvlab.Problem(model, criterion, inputs, targets)
curvature = curvlab.estimate("pch-1", problem)
solution  = curvlab.solve("ea-cg", curvature, problem.gradient(), alpha=0.05)
"""

from __future__ import annotations

from curvlab import exceptions, providers, solvers
from curvlab.curvature import Curvature, Definiteness, LayerCurvature, StaleWarning
from curvlab.gradient import Gradient
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.solvers import Additive, Mixed, Solution, Status, solve
from curvlab.studies import bounds, errors

__version__ = "0.1.0"

__all__ = [
    "Additive",
    "Curvature",
    "Definiteness",
    "Gradient",
    "LayerCurvature",
    "Mixed",
    "Problem",
    "Solution",
    "StaleWarning",
    "Status",
    "bounds",
    "errors",
    "estimate",
    "exceptions",
    "providers",
    "solve",
    "solvers",
]
