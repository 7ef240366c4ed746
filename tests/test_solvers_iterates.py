"""The reduced conjugate gradients are the textbook iteration, iterate for iterate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import curvlab
from tests.solver_cases import NARROW, WIDE, Dense, assert_close, problem, written_out

ALPHA = 0.05
# Large weights, so that the curvature is not lost beside the damping and ten iterations are needed.
PROBLEMS = {"wide": WIDE | {"gain": 4.0}, "narrow": NARROW | {"gain": 4.0}}
ROUTES = {"wide": ("auto", "sample", "row", "dense"), "narrow": ("auto", "sample", "dense")}


def textbook(matrix: Tensor, b: Tensor, iterations: int) -> Tensor:
    """Hestenes and Stiefel, 1952, as printed."""
    x, r = torch.zeros_like(b), b.clone()
    p = r.clone()
    for _ in range(iterations):
        ap = matrix @ p
        a = (r @ r) / (p @ ap)
        x = x + a * p
        new = r - a * ap
        p = new + (new @ new) / (r @ r) * p
        r = new
    return x


def systems(solver: str, dense: Dense) -> tuple[Tensor, Tensor]:
    a = dense.input_factor(solver)
    weight = (1 - ALPHA) * torch.kron(dense.b, a) + ALPHA * torch.eye(dense.weight.numel(), dtype=a.dtype)
    return weight, (1 - ALPHA) * dense.b + ALPHA * torch.eye(len(dense.b), dtype=a.dtype)


@pytest.mark.parametrize("iterations", [1, 2, 5, 10])
@pytest.mark.parametrize(("name", "route"), [(name, route) for name in PROBLEMS for route in ROUTES[name]])
@pytest.mark.parametrize("solver", ["cg", "ea-cg"])
def test_every_iterate_is_that_of_the_textbook(solver: str, name: str, route: str, iterations: int) -> None:
    p = problem(**PROBLEMS[name])
    # A Fisher of five rows has few eigenvalues, far apart: there CG itself soon amplifies rounding.
    for provider in ("fisher", "pch-1") if iterations <= 5 else ("pch-1",):
        curvature = curvlab.estimate(provider, p)
        fields = f"max_iter={iterations},tol=0"
        reduced = curvlab.solve(f"{solver}[{fields},route={route}]", curvature, p.gradient(), alpha=ALPHA)
        explicit = curvlab.solve(
            f"{solver}[{fields},formulation=explicit]", curvature, p.gradient(), alpha=ALPHA
        )
        for layer, dense in zip(curvature.layers, written_out(p, curvature), strict=True):
            weight, bias = systems(solver, dense)
            assert dense.bias is not None
            expected = {
                f"{layer.name}.weight": textbook(weight, -dense.weight.flatten(), iterations).reshape(
                    dense.weight.shape
                ),
                f"{layer.name}.bias": textbook(bias, -dense.bias, iterations),
            }
            for block, value in expected.items():
                if torch.isfinite(value).all():
                    assert_close(explicit.direction[block], value, 1e-10)
                    assert_close(reduced.direction[block], value, 1e-10)


@pytest.mark.parametrize("solver", ["cg", "ea-cg"])
def test_the_trace_holds_the_residuals_of_the_textbook(solver: str) -> None:
    p = problem(**WIDE)
    curvature = curvlab.estimate("pch-1", p)
    solution = curvlab.solve(f"{solver}[max_iter=4,tol=0]", curvature, p.gradient(), alpha=ALPHA)
    dense = written_out(p, curvature)[0]
    weight, _ = systems(solver, dense)
    b = -dense.weight.flatten()
    expected = [float((b - weight @ textbook(weight, b, k)).norm() / b.norm()) for k in range(5)]
    trace = solution.trace()
    got = trace[trace["block"] == "0.weight"]
    assert got["iteration"].tolist() == list(range(len(got)))
    assert got["residual"].tolist() == pytest.approx(expected[: len(got)], rel=1e-8, abs=1e-13)


def test_ea_cg_needs_as_many_iterations_as_the_outputs_have_unknowns() -> None:
    p = problem(**WIDE)
    curvature = curvlab.estimate("fisher", p)
    solution = curvlab.solve("ea-cg[max_iter=100,tol=1e-12]", curvature, p.gradient(), alpha=0.5)
    for block in solution.blocks.values():
        assert block.status is curvlab.Status.CONVERGED
        assert block.iterations <= 14


def test_no_iteration_gives_no_step() -> None:
    p = problem(**WIDE)
    solution = curvlab.solve("cg[max_iter=0]", curvlab.estimate("fisher", p), p.gradient(), alpha=ALPHA)
    assert all(not step.any() for step in solution.direction.values())
    assert {block.status for block in solution.blocks.values()} == {curvlab.Status.ITERATION_LIMIT}


@pytest.mark.parametrize("formulation", ["reduced", "explicit"])
@pytest.mark.parametrize("solver", ["cg", "ea-cg"])
def test_a_tolerance_ends_the_iteration_in_either_form(solver: str, formulation: str) -> None:
    p = problem(**PROBLEMS["wide"])
    curvature = curvlab.estimate("pch-1", p)

    def solved(tol: float) -> curvlab.Solution:
        spec = f"{solver}[max_iter=50,tol={tol},formulation={formulation}]"
        return curvlab.solve(spec, curvature, p.gradient(), alpha=ALPHA)

    coarse, fine = solved(1e-1), solved(1e-12)
    assert all(block.residual <= 0.2 for block in coarse.blocks.values())
    assert coarse.frame()["iterations"].sum() < 0.7 * fine.frame()["iterations"].sum()
