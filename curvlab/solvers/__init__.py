"""Solvers: from a curvature and a gradient to a direction."""

from __future__ import annotations

from curvlab.solvers.base import Additive, Damping, LayerDirection, LayerGradient, Mixed, Solver
from curvlab.solvers.conjugate_gradients import CG, EACG
from curvlab.solvers.exact import Exact
from curvlab.solvers.factored_inverse import KFI, ShermanMorrisonKFI
from curvlab.solvers.registry import solvers
from curvlab.solvers.run import solve
from curvlab.solvers.solution import BlockSolution, Direction, Solution, Status

__all__ = [
    "CG",
    "EACG",
    "KFI",
    "Additive",
    "BlockSolution",
    "Damping",
    "Direction",
    "Exact",
    "LayerDirection",
    "LayerGradient",
    "Mixed",
    "ShermanMorrisonKFI",
    "Solution",
    "Solver",
    "Status",
    "solve",
    "solvers",
]
