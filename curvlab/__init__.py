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
    from curvlab.analysis.density import Density, density
    from curvlab.analysis.foreign import curvature_from
    from curvlab.analysis.landscape import Landscape, landscape
    from curvlab.analysis.similarity import Similarity, similarity
    from curvlab.analysis.spectrum import Spectrum, spectrum
    from curvlab.batches import keep_batches
    from curvlab.curvature import Curvature, Definiteness, LayerCurvature, StaleWarning
    from curvlab.linalg.estimators import Estimate
    from curvlab.linalg.steps import Gradient
    from curvlab.problem import Problem
    from curvlab.providers.base import estimate
    from curvlab.report.comparison import compare, load_comparison
    from curvlab.solvers import Additive, Mixed, Solution, Status
    from curvlab.solvers.run import solve
    from curvlab.studies.compare.frames import Comparison
    from curvlab.studies.small.bounds import bounds
    from curvlab.studies.small.errors import errors
    from curvlab.studies.small.plan import plan
    from curvlab.studies.small.tracker import Tracker

__all__ = [
    "Additive",
    "Comparison",
    "Curvature",
    "Definiteness",
    "Density",
    "Estimate",
    "Gradient",
    "Landscape",
    "LayerCurvature",
    "Mixed",
    "Problem",
    "Similarity",
    "Solution",
    "Spectrum",
    "StaleWarning",
    "Status",
    "Tracker",
    "bounds",
    "compare",
    "curvature_from",
    "density",
    "errors",
    "estimate",
    "exceptions",
    "keep_batches",
    "landscape",
    "load_comparison",
    "optim",
    "plan",
    "providers",
    "similarity",
    "solve",
    "solvers",
    "spectrum",
]

# The module that each public name is from; a name that is not here is a package of curvlab itself.
_MODULES = {
    "Additive": "curvlab.solvers",
    "Comparison": "curvlab.studies.compare.frames",
    "Curvature": "curvlab.curvature",
    "Definiteness": "curvlab.curvature",
    "Density": "curvlab.analysis.density",
    "Estimate": "curvlab.linalg.estimators",
    "Gradient": "curvlab.linalg.steps",
    "Landscape": "curvlab.analysis.landscape",
    "LayerCurvature": "curvlab.curvature",
    "Mixed": "curvlab.solvers",
    "Problem": "curvlab.problem",
    "Similarity": "curvlab.analysis.similarity",
    "Solution": "curvlab.solvers",
    "Spectrum": "curvlab.analysis.spectrum",
    "StaleWarning": "curvlab.curvature",
    "Status": "curvlab.solvers",
    "Tracker": "curvlab.studies.small.tracker",
    "bounds": "curvlab.studies.small.bounds",
    "compare": "curvlab.report.comparison",
    "curvature_from": "curvlab.analysis.foreign",
    "density": "curvlab.analysis.density",
    "errors": "curvlab.studies.small.errors",
    "estimate": "curvlab.providers",
    "landscape": "curvlab.analysis.landscape",
    "keep_batches": "curvlab.batches",
    "load_comparison": "curvlab.report.comparison",
    "plan": "curvlab.studies.small.plan",
    "similarity": "curvlab.analysis.similarity",
    "solve": "curvlab.solvers",
    "spectrum": "curvlab.analysis.spectrum",
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
