"""Every solver equals a dense solve of its own documented system, on every route."""

from __future__ import annotations

import pytest
import torch

import curvlab
from curvlab import Additive, Mixed
from tests.solver_cases import (
    KRONECKER,
    MEAN,
    NARROW,
    ROUTES,
    SOLVERS,
    WIDE,
    WITH_EXPLICIT,
    assert_close,
    converged,
    dense_solve,
    problem,
    written_out,
)

ALPHA = 0.05
WEIGHTED = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0, 2.5], dtype=torch.float64))
PROBLEMS = {
    "wide": WIDE,
    "narrow": NARROW,
    "wide, class weights": WIDE | {"criterion": WEIGHTED},
    "wide, no bias": WIDE | {"bias": False},
    "wide, one layer": WIDE | {"layers": ["2"]},
}


def check(
    solver: str, text: str, p: curvlab.Problem, curvature: curvlab.Curvature, damping: Mixed | Additive
) -> None:
    solution = curvlab.solve(text, curvature, p.gradient(), damping=damping)
    for layer, dense in zip(curvature.layers, written_out(p, curvature), strict=True):
        weight, bias = dense_solve(solver, dense, damping)
        assert_close(solution.direction[f"{layer.name}.weight"], weight, 1e-9)
        if bias is not None:
            assert_close(solution.direction[f"{layer.name}.bias"], bias, 1e-9)


def possible(solver: str, route: str, name: str) -> bool:
    return not (route == "row" and name == "narrow" and solver in ("kfi", "cg", "exact"))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_route_solves_the_documented_system(solver: str, route: str, name: str) -> None:
    p = problem(**PROBLEMS[name])
    for curvature in curvlab.estimate(["fisher", "pch-1"], p):
        text = converged(solver, route=route)
        if possible(solver, route, name):
            check(solver, text, p, curvature, Mixed(ALPHA))
            check(solver, text, p, curvature, Additive(0.2))
        else:
            with pytest.raises(curvlab.exceptions.PairError, match="fewer rows than it has columns"):
                curvlab.solve(text, curvature, p.gradient(), alpha=ALPHA)


@pytest.mark.parametrize("provider", KRONECKER)
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_kronecker_provider_is_solved(solver: str, provider: str) -> None:
    p = problem(**WIDE)
    check(solver, converged(solver), p, curvlab.estimate(provider, p), Mixed(ALPHA))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("solver", WITH_EXPLICIT)
def test_the_explicit_formulation_solves_the_documented_system(solver: str, name: str) -> None:
    p = problem(**PROBLEMS[name])
    for curvature in curvlab.estimate(["fisher", "pch-2"], p):
        check(solver, converged(solver, formulation="explicit"), p, curvature, Mixed(ALPHA))


@pytest.mark.parametrize("route", ["sample", "row", "dense"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_route_that_ran_is_recorded(solver: str, route: str) -> None:
    """The row space of the mean input factor is one vector: `row` runs as `dense` there."""
    p = problem(**WIDE)
    frame = curvlab.solve(
        f"{solver}[route={route}]", curvlab.estimate("pch-1", p), p.gradient(), alpha=ALPHA
    ).frame()
    assert set(frame["route"]) == {"dense" if solver in MEAN and route == "row" else route}
