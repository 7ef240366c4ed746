"""Solvers by name; other packages add theirs through the entry-point group `curvlab.solvers`."""

from __future__ import annotations

from curvlab.solvers.base import Solver
from curvlab.solvers.conjugate_gradients import CG, EACG
from curvlab.solvers.exact import Exact
from curvlab.solvers.factored_inverse import KFI, ShermanMorrisonKFI
from curvlab.specs import Registry

__all__ = ["solvers"]

solvers: Registry[Solver] = Registry("solver", "curvlab.solvers")
solvers.register("kfi", KFI)
solvers.register("sm-kfi", ShermanMorrisonKFI)
solvers.register("cg", CG)
solvers.register("ea-cg", EACG)
solvers.register("exact", Exact)
