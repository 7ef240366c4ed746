"""curvlab: curvature analysis and benchmarking for PyTorch.

problem   = curvlab.Problem(model, criterion, inputs, targets)
curvature = curvlab.estimate("pch-1", problem)
solution  = curvlab.solve("ea-cg", curvature, problem.gradient(), alpha=0.05)

Each name is imported when it is first asked for, so that `import curvlab` and the help pages of the command
take no time: torch comes with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from curvlab.version import __version__ as __version__

if TYPE_CHECKING:
    from curvlab import exceptions, optim, providers, solvers
    from curvlab.batches import keep_batches
    from curvlab.curvature import Curvature, Definiteness, LayerCurvature, StaleWarning
    from curvlab.gradient import Gradient
    from curvlab.problem import Problem
    from curvlab.providers.estimate import estimate
    from curvlab.solvers import Additive, Mixed, Solution, Status
    from curvlab.solvers.solve import solve
    from curvlab.studies.compare.folder import load_comparison
    from curvlab.studies.compare.frames import Comparison
    from curvlab.studies.compare.run import compare
    from curvlab.studies.small.bounds import bounds
    from curvlab.studies.small.errors import errors
    from curvlab.studies.small.plan import plan

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
    "keep_batches",
    "load_comparison",
    "optim",
    "plan",
    "providers",
    "solve",
    "solvers",
]

# The module that each public name is from; a name that is not here is a package of curvlab itself.
_MODULES = {
    "Additive": "curvlab.solvers",
    "Comparison": "curvlab.studies.compare.frames",
    "Curvature": "curvlab.curvature",
    "Definiteness": "curvlab.curvature",
    "Gradient": "curvlab.gradient",
    "LayerCurvature": "curvlab.curvature",
    "Mixed": "curvlab.solvers",
    "Problem": "curvlab.problem",
    "Solution": "curvlab.solvers",
    "StaleWarning": "curvlab.curvature",
    "Status": "curvlab.solvers",
    "bounds": "curvlab.studies.small.bounds",
    "compare": "curvlab.studies.compare.run",
    "errors": "curvlab.studies.small.errors",
    "estimate": "curvlab.providers",
    "keep_batches": "curvlab.batches",
    "load_comparison": "curvlab.studies.compare.folder",
    "plan": "curvlab.studies.small.plan",
    "solve": "curvlab.solvers",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = getattr(importlib.import_module(_MODULES[name]), name)
    elif name in __all__:
        found = importlib.import_module(f"curvlab.{name}")
    else:
        raise AttributeError(f"module `curvlab` has no attribute `{name}`")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names, those not imported yet too: what tab completion offers."""
    return sorted([*__all__, "__version__"])
