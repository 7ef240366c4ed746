"""What a solve is given: refused in a sentence where it does not fit, taken as it is where it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import curvlab
from curvlab.exceptions import PairError, SolveError
from curvlab.linalg import GramFactor
from curvlab.linalg.factors import InputFactors
from curvlab.linalg.steps import as_step
from curvlab.solvers import CG, EACG, KFI, Exact, LayerGradient, Solver
from tests.solver_cases import SOLVERS, WIDE, problem


@pytest.mark.parametrize("solver", [KFI(), CG(), Exact()])
def test_a_state_for_the_own_batch_refuses_another_gradient(solver: Solver) -> None:
    p, other = problem(**WIDE), problem(**WIDE, seed=1)
    layer = curvlab.estimate("pch-1", p).layers[0]
    own, foreign = (q.gradient().factored("0.weight") for q in (p, other))
    state = solver.prepare(layer, curvlab.Mixed(0.1), LayerGradient(own, None))
    for given, said in ((foreign, "one of another batch"), (own.form(), "a tensor")):
        with pytest.raises(PairError, match=f"is applied to {said}: prepare it for that gradient"):
            solver.apply(state, LayerGradient(given, None))


def test_ea_cg_prepared_for_the_own_batch_solves_for_another_gradient_all_the_same() -> None:
    p, other = problem(**WIDE), problem(**WIDE, seed=1)
    layer = curvlab.estimate("pch-1", p).layers[0]
    own, foreign = (q.gradient().factored("0.weight") for q in (p, other))
    solver = EACG(route="sample", max_iter=50, tol=1e-14)
    state = solver.prepare(layer, curvlab.Mixed(0.1), LayerGradient(own, None))
    found = as_step(solver.apply(state, LayerGradient(foreign, None)).weight).form()
    dense = EACG(route="dense", max_iter=50, tol=1e-14)
    given = LayerGradient(foreign.form(), None)
    expected = as_step(dense.apply(dense.prepare(layer, curvlab.Mixed(0.1), given), given).weight).form()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("solver", ["kfi", "sm-kfi"])
def test_other_inputs_beside_the_same_output_factor_are_factorised_anew(solver: str) -> None:
    p = problem(**WIDE)
    curvature, gradient = curvlab.estimate("pch-1", p), p.gradient()
    curvlab.solve(solver, curvature, gradient, alpha=0.1)
    layer = curvature.layers[0]
    doubled = GramFactor(2 * layer.inputs.full.rows, layer.inputs.full.root)
    other = replace(curvature, layers=(replace(layer, inputs=InputFactors(doubled)), *curvature.layers[1:]))
    solution = curvlab.solve(solver, other, dict(gradient.items()), alpha=0.1)
    assert solution.blocks["0.weight"].residual < 1e-10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.float(), "is torch.float32 on cpu; the curvature is torch.float64"),
        (lambda g: None, "is NoneType; expected a tensor"),
        (lambda g: g[:, :-1], r"has shape"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_in_a_sentence(change: Callable, message: str) -> None:
    p = problem(**WIDE)
    gradient = dict(p.gradient().items())
    gradient["0.weight"] = change(gradient["0.weight"])
    with pytest.raises(SolveError, match=rf"the gradient of `0\.weight` {message}"):
        curvlab.solve("ea-cg", curvlab.estimate("pch-1", p), gradient, alpha=0.1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_gradient_with_a_graph_of_its_own_is_taken_as_it_is(solver: str) -> None:
    p = problem(**WIDE)
    curvature = curvlab.estimate("pch-1", p)
    plain = dict(p.gradient().items())
    tracked = {name: value.clone().requires_grad_() for name, value in plain.items()}
    found = curvlab.solve(solver, curvature, tracked, alpha=0.1).direction
    expected = curvlab.solve(solver, curvature, plain, alpha=0.1).direction
    for name in plain:
        torch.testing.assert_close(found[name].detach(), expected[name])


def test_a_damping_that_is_a_number_is_refused_with_what_to_write() -> None:
    p = problem(**WIDE)
    with pytest.raises(ValueError, match=r"expected Mixed\(alpha\) or Additive\(tau\), or alpha=0.1"):
        curvlab.solve("kfi", curvlab.estimate("pch-1", p), p.gradient(), damping=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KFI(formulation="explict"), "expected one of reduced, explicit; did you mean `explicit`"),
        (lambda: CG(preconditioner="jacoby"), "expected one of none, jacobi; did you mean `jacobi`"),
        (lambda: EACG(route="rows"), "expected one of auto, sample, row, dense; did you mean `row`"),
        (lambda: Exact(route=3), "route=3: expected one of auto"),
    ],
)
def test_a_field_that_is_none_of_its_choices_is_refused_at_once(make: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("field", ["route=dense", "formulation=explicit"])
def test_fields_of_the_kronecker_form_are_refused_on_a_matrix_free_curvature(field: str) -> None:
    p = problem(**WIDE)
    with pytest.raises(PairError, match="`route` and `formulation` choose how Kronecker factors are used"):
        curvlab.solve(f"cg[{field}]", curvlab.estimate("hessian", p), p.gradient(), alpha=0.3)


def test_strict_says_what_to_do_about_each_status() -> None:
    p = problem(**WIDE, dtype=torch.float32)
    curvature, gradient = curvlab.estimate("pch-1", p), p.gradient()
    with pytest.raises(SolveError, match=r"Rounding stopped.*Use float64, or a tol above the rounding"):
        curvlab.solve("cg[max_iter=200]", curvature, gradient, alpha=0.5, strict=True)
    with pytest.raises(SolveError, match=r"iterations ran out.*Allow more iterations"):
        curvlab.solve("cg[max_iter=1]", curvature, gradient, alpha=0.01, strict=True)
