"""Providers by name; other packages add theirs through the entry-point group `curvlab.providers`."""

from __future__ import annotations

from curvlab.providers.base import providers
from curvlab.providers.fisher import Fisher
from curvlab.providers.gauss_newton import GaussNewton
from curvlab.providers.hessian import Hessian
from curvlab.providers.pch import PCH

__all__ = ["providers"]

providers.register("hessian", Hessian)
providers.register("fisher", Fisher)
providers.register("gauss-newton", GaussNewton)
providers.register("pch", PCH)
providers.register("pch-1", PCH, "PCH with absolute values: the paper's PCH-1.", gamma=-1.0)
providers.register("pch-2", PCH, "PCH with clipping: the paper's PCH-2.", gamma=0.0)
