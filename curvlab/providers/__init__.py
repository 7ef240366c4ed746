"""Curvature providers: exact Hessian, Fisher, Gauss-Newton and PCH behind one interface."""

from __future__ import annotations

from curvlab.providers.base import Context, Provider, estimate
from curvlab.providers.fisher import Fisher
from curvlab.providers.gauss_newton import GaussNewton
from curvlab.providers.hessian import Hessian
from curvlab.providers.pch import PCH
from curvlab.providers.registry import providers

__all__ = ["PCH", "Context", "Fisher", "GaussNewton", "Hessian", "Provider", "estimate", "providers"]
