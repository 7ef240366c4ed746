"""curvlab: curvature analysis and benchmarking for PyTorch.

    problem   = curvlab.Problem(model, criterion, inputs, targets)
    curvature = curvlab.estimate("pch-1", problem)
    solution  = curvlab.solve("ea-cg", curvature, problem.gradient(), alpha=0.05)
"""

from __future__ import annotations

from curvlab import exceptions, providers
from curvlab.curvature import Curvature, Definiteness, LayerCurvature, StaleWarning
from curvlab.gradient import Gradient
from curvlab.problem import Problem
from curvlab.providers import estimate

__version__ = "0.1.0"

__all__ = [
    "Curvature",
    "Definiteness",
    "Gradient",
    "LayerCurvature",
    "Problem",
    "StaleWarning",
    "estimate",
    "exceptions",
    "providers",
]
