"""A solution reports when the gradient or the batch it refers to has changed, and adds all or nothing."""

from __future__ import annotations

import pytest
import torch

import curvlab
from curvlab.exceptions import SolveError
from tests.solver_cases import SOLVERS, WIDE, problem


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_step_is_refused_once_the_batch_it_refers_to_has_changed(solver: str) -> None:
    x = torch.randn(4, 12, dtype=torch.float64)
    p = problem(widths=(12, 5, 3), inputs=x)
    batch = next(p.batches()).inputs
    solution = curvlab.solve(f"{solver}[route=sample]", curvlab.estimate("pch-1", p), p.gradient(), alpha=0.1)
    before = {name: value.clone() for name, value in p.model.state_dict().items()}
    batch.zero_()
    for use in (
        lambda: solution.direction["0.weight"],
        lambda: solution.add_to(p.model),
        solution.frame,
    ):
        with pytest.raises(SolveError, match=r"the batch .*changed in place since the solve"):
            use()
    assert all(torch.equal(value, before[name]) for name, value in p.model.state_dict().items())


@pytest.mark.parametrize("solver", ["kfi[route=row]", "cg[route=row]", "ea-cg", "cg[preconditioner=jacobi]"])
def test_measures_are_refused_once_the_gradient_has_changed_unless_they_were_read(solver: str) -> None:
    p = problem(**WIDE)
    gradient = dict(p.gradient().items())
    curvature = curvlab.estimate("pch-1", p)
    read, unread = (curvlab.solve(solver, curvature, gradient, alpha=0.1) for _ in range(2))
    frame = read.frame()
    for value in gradient.values():
        value.mul_(0.5)
    assert read.frame().equals(frame)
    with pytest.raises(SolveError, match=r"gradient of .*changed in place since the solve.*read them before"):
        unread.frame()


def test_a_step_that_cannot_be_added_whole_is_not_added_in_part() -> None:
    p = problem(**WIDE)
    gradient = dict(p.gradient().items())
    solution = curvlab.solve("ea-cg", curvlab.estimate("pch-1", p), gradient, alpha=0.1)
    before = {name: value.clone() for name, value in p.model.state_dict().items()}
    other = problem(widths=(WIDE["widths"][0], *(n + 1 for n in WIDE["widths"][1:]))).model
    with pytest.raises(SolveError, match=r"`0\.weight` has shape .*; this solution is for one of shape"):
        solution.add_to(other)
    for lr in (float("nan"), float("inf")):
        with pytest.raises(SolveError, match="expected a finite number"):
            solution.add_to(p.model, lr=lr)
    gradient["2.weight"].zero_()
    with pytest.raises(SolveError, match=r"2\.weight"):
        solution.add_to(p.model)
    assert all(torch.equal(value, before[name]) for name, value in p.model.state_dict().items())


@pytest.mark.parametrize("solver", ["ea-cg", "cg[route=row]", "exact[route=row]"])
def test_a_step_is_refused_once_the_gradient_it_refers_to_has_changed(solver: str) -> None:
    p = problem(**WIDE)
    gradient = dict(p.gradient().items())
    solution = curvlab.solve(solver, curvlab.estimate("pch-1", p), gradient, alpha=0.1)
    before = solution.direction["2.weight"]
    gradient["0.weight"].zero_()
    for use in (lambda: solution.direction["0.weight"], lambda: solution.add_to(p.model)):
        with pytest.raises(SolveError, match=r"gradient of `0\.weight` changed in place since the solve"):
            use()
    assert torch.equal(solution.direction["2.weight"], before)


def test_a_step_for_another_model_is_refused() -> None:
    p = problem(**WIDE)
    solution = curvlab.solve("kfi", curvlab.estimate("pch-1", p), p.gradient(), alpha=0.1)
    with pytest.raises(SolveError, match=r"the model has no parameter .*4\.weight"):
        solution.add_to(torch.nn.Sequential(torch.nn.Linear(30, 12), torch.nn.Tanh(), torch.nn.Linear(12, 9)))
