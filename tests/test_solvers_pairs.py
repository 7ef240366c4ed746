"""Which provider goes with which solver; the refused pairs answer with a sentence."""

from __future__ import annotations

import pytest
import torch

import curvlab
from curvlab import Status
from curvlab.exceptions import PairError, SolveError, SpecError
from tests.solver_cases import MATRIX_FREE, SOLVERS, problem


def indefinite(provider: str = "gauss-newton") -> tuple[curvlab.Problem, curvlab.Curvature]:
    p = problem(criterion="robust", gain=3.0, seed=1)
    return p, curvlab.estimate(provider, p)


@pytest.mark.parametrize("solver", [s for s in SOLVERS if s != "cg"])
def test_an_indefinite_curvature_is_refused_with_what_to_use_instead(solver: str) -> None:
    p, curvature = indefinite()
    assert not curvature.psd
    with pytest.raises(PairError) as caught:
        curvlab.solve(solver, curvature, p.gradient(), alpha=0.1)
    sentence = str(caught.value)
    assert sentence.startswith(f"`{solver}` needs a positive semi-definite curvature")
    assert "`gauss-newton` with criterion `robust` is indefinite here" in sentence
    assert "Use `pch-1`, `pch-2` or `fisher`" in sentence


def test_cg_takes_an_indefinite_curvature() -> None:
    p, curvature = indefinite()
    solution = curvlab.solve("cg", curvature, p.gradient(), alpha=0.1)
    assert all(bool(torch.isfinite(step).all()) for step in solution.direction.values())


@pytest.mark.parametrize("provider", MATRIX_FREE)
@pytest.mark.parametrize("solver", [s for s in SOLVERS if s != "cg"])
def test_a_matrix_free_curvature_goes_with_cg_only(solver: str, provider: str) -> None:
    p = problem()
    curvature = curvlab.estimate(provider, p)
    with pytest.raises(PairError, match=r"works on Kronecker factors.*is matrix-free.*Use `cg`"):
        curvlab.solve(solver, curvature, p.gradient(), alpha=0.1)


@pytest.mark.parametrize("solver", [s for s in SOLVERS if s != "cg"])
@pytest.mark.parametrize("given", ["start", "preconditioner"])
def test_only_cg_takes_a_start_and_a_preconditioner(solver: str, given: str) -> None:
    p = problem()
    curvature = curvlab.estimate("fisher", p)
    value = dict(p.gradient()) if given == "start" else lambda name, x: x
    with pytest.raises(PairError, match="takes no start vector and no preconditioner; `cg` does"):
        curvlab.solve(solver, curvature, p.gradient(), alpha=0.1, **{given: value})


def test_ea_cg_with_a_preconditioner_of_its_own_is_refused() -> None:
    p = problem()
    with pytest.raises(PairError, match="`cg` does"):
        curvlab.solve("ea-cg[preconditioner=jacobi]", curvlab.estimate("fisher", p), p.gradient(), alpha=0.1)


def test_the_sample_route_of_a_foreign_gradient_is_refused() -> None:
    p = problem()
    for solver in SOLVERS:
        with pytest.raises(PairError, match="needs the gradient of the very batch"):
            curvlab.solve(
                f"{solver}[route=sample]", curvlab.estimate("fisher", p), dict(p.gradient()), alpha=0.1
            )


def test_an_unknown_solver_route_or_field_lists_what_there_is() -> None:
    p = problem()
    curvature = curvlab.estimate("fisher", p)
    for text, answer in {"ea-gc": "ea-cg", "kfi[route=rwo]": "row", "cg[maxiter=3]": "max_iter"}.items():
        with pytest.raises(SpecError, match=answer):
            curvlab.solve(text, curvature, p.gradient(), alpha=0.1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda g: g.pop("0.bias"), r"no entry for \['0.bias'\]"),
        (
            lambda g: g.update({"0.weight": torch.ones(2, 2)}),
            r"`0.weight` has shape \(2, 2\); expected \(5, 12\)",
        ),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_by_name(change: object, sentence: str) -> None:
    p = problem()
    gradient = dict(p.gradient())
    change(gradient)  # type: ignore[operator]
    with pytest.raises(SolveError, match=sentence):
        curvlab.solve("kfi", curvlab.estimate("fisher", p), gradient, alpha=0.1)


def test_a_solver_that_is_not_registered_is_named_by_its_class() -> None:
    class Mine(curvlab.solvers.KFI):
        pass

    p = problem()
    solution = curvlab.solve(Mine(), curvlab.estimate("fisher", p), p.gradient(), alpha=0.1)
    assert solution.solver == "Mine"
    assert {block.status for block in solution.blocks.values()} == {Status.CONVERGED}
