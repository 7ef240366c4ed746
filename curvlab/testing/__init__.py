"""Conformance checks that a plugin inherits: call them from one test of your own package."""

from __future__ import annotations

from curvlab.testing.providers import check_provider
from curvlab.testing.solvers import check_solver

__all__ = ["check_provider", "check_solver"]
