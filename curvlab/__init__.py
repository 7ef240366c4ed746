"""curvlab: curvature analysis and benchmarking for PyTorch.

problem   = curvlab.Problem(model, criterion, inputs, targets)
curvature = curvlab.estimate("pch-1", problem)
solution  = curvlab.solve("ea-cg", curvature, problem.gradient(), alpha=0.05)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from curvlab import exceptions, providers, solvers
from curvlab.curvature import Curvature, Definiteness, LayerCurvature, StaleWarning
from curvlab.gradient import Gradient
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.solvers import Additive, Mixed, Solution, Status, solve
from curvlab.studies.small.bounds import bounds
from curvlab.studies.small.errors import errors

if TYPE_CHECKING:
    from curvlab import optim
    from curvlab.studies.compare.folder import load_comparison
    from curvlab.studies.compare.frames import Comparison
    from curvlab.studies.compare.run import compare
    from curvlab.studies.small.plan import plan

__version__ = "0.1.0"

__all__ = [
    "Additive",
    "Comparison",
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
    "compare",
    "errors",
    "estimate",
    "exceptions",
    "load_comparison",
    "optim",
    "plan",
    "providers",
    "solve",
    "solvers",
]

# Imported when first asked for: with them `import curvlab` would take twice as long.
_LATER = {
    "Comparison": "curvlab.studies.compare.frames",
    "compare": "curvlab.studies.compare.run",
    "load_comparison": "curvlab.studies.compare.folder",
    "plan": "curvlab.studies.small.plan",
}


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module("curvlab.optim")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module `curvlab` has no attribute `{name}`")


def __dir__() -> list[str]:
    """The public names, those imported later too: what tab completion offers."""
    return sorted([*__all__, "__version__"])
