"""Conformance checks that a plugin inherits: run them from one test of your own package.

@pytest.mark.parametrize("check", curvlab.testing.provider_checks(MyProvider()), ids=str)
def test_my_provider_keeps_its_promises(check):
    check()
"""

from __future__ import annotations

from curvlab.testing.checking import Check
from curvlab.testing.provider_promises import check_provider, provider_checks
from curvlab.testing.solver_promises import check_solver, solver_checks

__all__ = ["Check", "check_provider", "check_solver", "provider_checks", "solver_checks"]
