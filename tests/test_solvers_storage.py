"""A step on a wide layer makes no new tensor of the weight's size."""

from __future__ import annotations

import pytest
import torch

import curvlab
from curvlab.measure.memory import Allocation, track
from curvlab.solvers import input_coordinates
from tests.solver_cases import network

WIDTHS, EXAMPLES = (4000, 64, 32, 10), 16
WIDE = WIDTHS[0] * WIDTHS[1]


def step(provider: str, solver: str) -> list[Allocation]:
    torch.manual_seed(0)
    model = network(WIDTHS, torch.float32)
    x, y = torch.randn(EXAMPLES, WIDTHS[0]), torch.randint(WIDTHS[-1], (EXAMPLES,))
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    before = model[0].weight.detach().clone()
    with track(record=True) as tracker:
        now = problem.with_data(x, y)
        gradient = now.gradient()
        curvature = curvlab.estimate(provider, now)
        solution = curvlab.solve(solver, curvature, gradient, alpha=0.05)
        solution.add_to(model, lr=0.1)
    assert not torch.equal(before, model[0].weight)
    return [made for made in tracker.allocations if made.elements >= WIDE]


@pytest.mark.parametrize("provider", ["pch-1", "fisher"])
@pytest.mark.parametrize("solver", ["ea-cg", "kfi", "sm-kfi", "cg", "exact"])
def test_no_storage_of_the_weights_size_is_made(provider: str, solver: str) -> None:
    assert step(provider, solver) == []


@pytest.mark.parametrize("solver", ["ea-cg[route=dense]", "ea-cg[formulation=explicit]", "kfi[route=row]"])
def test_the_watch_sees_routes_that_form_the_gradient(solver: str) -> None:
    assert step("pch-1", solver)


@pytest.mark.parametrize("solver", ["ea-cg", "cg", "exact"])
def test_a_step_for_a_formed_gradient_refers_to_it_and_makes_no_other(
    monkeypatch: pytest.MonkeyPatch, solver: str
) -> None:
    monkeypatch.setattr(input_coordinates, "SPLIT_ELEMENTS", WIDE // 4)
    torch.manual_seed(0)
    model = network(WIDTHS, torch.float32)
    x, y = torch.randn(EXAMPLES, WIDTHS[0]), torch.randint(WIDTHS[-1], (EXAMPLES,))
    p = curvlab.Problem(model, "cross-entropy", x, y)
    curvature, gradient = curvlab.estimate("pch-1", p), dict(p.gradient().items())
    with track(record=True) as tracker:
        curvlab.solve(solver, curvature, gradient, alpha=0.05).add_to(model, lr=0.1)
    assert [made for made in tracker.allocations if made.elements >= WIDE] == []


def test_residuals_of_a_wide_step_need_none_either() -> None:
    torch.manual_seed(0)
    model = network((40_000, 24, 10), torch.float32)
    x, y = torch.randn(8, 40_000), torch.randint(10, (8,))
    p = curvlab.Problem(model, "cross-entropy", x, y)
    solution = curvlab.solve("kfi", curvlab.estimate("pch-1", p), p.gradient(), alpha=0.05)
    with track(record=True) as tracker:
        solution.frame()
    assert not [made for made in tracker.allocations if made.elements >= 40_000 * 24]
