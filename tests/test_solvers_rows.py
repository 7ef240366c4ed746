"""A gradient of the curvature's own batch is known by the id of its rows, which copies keep."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

import curvlab
from curvlab.exceptions import SolveError
from curvlab.linalg import DenseFactor, GramFactor, RowProduct
from curvlab.optim.average import average, kept
from curvlab.solvers.base import DampedSystem, WeightMeasures
from tests.solver_cases import SOLVERS, WIDE, assert_close, converged, problem

Convert = Callable[[curvlab.Curvature, curvlab.Gradient], tuple[curvlab.Curvature, curvlab.Gradient]]

CONVERSIONS: dict[str, Convert] = {
    "curvature.to, same dtype": lambda c, g: (c.to(torch.float64), g),
    "both to float32": lambda c, g: (c.to(torch.float32), g.to(torch.float32)),
    "both to float32 and back": lambda c, g: (
        c.to(torch.float32).to(torch.float64),
        g.to(torch.float32).to(torch.float64),
    ),
    "curvature pickled": lambda c, g: (pickle.loads(pickle.dumps(c)), g),
    "gradient pickled": lambda c, g: (c, pickle.loads(pickle.dumps(g))),
    "both pickled": lambda c, g: (pickle.loads(pickle.dumps(c)), pickle.loads(pickle.dumps(g))),
    "curvature copied": lambda c, g: (copy.deepcopy(c), g),
    "curvature kept for later steps": lambda c, g: (kept(c), g),
}


@pytest.mark.parametrize("provider", ["pch-1", "fisher"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_conversions_and_copies_take_the_same_route_to_the_same_step(
    solver: str, conversion: str, provider: str
) -> None:
    p = problem(**WIDE)
    curvature, gradient = curvlab.estimate(provider, p), p.gradient()
    plain = curvlab.solve(converged(solver), curvature, gradient, alpha=0.05)
    assert "sample" in set(plain.frame()["route"])
    other = curvlab.solve(converged(solver), *CONVERSIONS[conversion](curvature, gradient), alpha=0.05)
    assert other.frame()["route"].tolist() == plain.frame()["route"].tolist()
    for name, step in plain.direction.items():
        assert_close(other.direction[name].double(), step, 1e-4 if "float32" in conversion else 1e-9)
        assert other.blocks[name].residual < (1e-4 if "float32" in conversion else 1e-8)


def test_a_conversion_keeps_the_id_and_another_matrix_has_another() -> None:
    p, other = problem(**WIDE), problem(**WIDE)
    rows = p.gradient().factored("0.weight").inputs
    assert rows.shares_rows_with(p.gradient().factored("0.weight").inputs)
    for same in (rows.map(torch.Tensor.float), pickle.loads(pickle.dumps(rows)), copy.deepcopy(rows)):
        assert rows.shares_rows_with(same)
        assert same.shares_rows_with(rows)
    different = [
        other.gradient().factored("0.weight").inputs,
        p.gradient().factored("2.weight").inputs,
        p.gradient().factored("0.weight").gradients,
        GramFactor(rows.rows, rows.root),
        GramFactor(2 * rows.rows, rows.root),
        DenseFactor(rows.to_dense()),
    ]
    assert not any(rows.shares_rows_with(factor) or factor.shares_rows_with(rows) for factor in different)


@pytest.mark.parametrize("reads", ["full", "mean"])
def test_an_average_does_not_pass_for_the_rows_of_its_last_batch(reads: str) -> None:
    """Its mean E[h] is not that of the rows, so the sample space would give another step."""
    p, later = problem(**WIDE), problem(**WIDE, seed=1)
    solver = "ea-cg[max_iter=60,tol=1e-13]" if reads == "mean" else "kfi"
    mixed = average(curvlab.estimate("pch-1", p), curvlab.estimate("pch-1", later), 0.5, reads)  # type: ignore[arg-type]
    found = curvlab.solve(solver, mixed, later.gradient(), alpha=0.1)
    expected = curvlab.solve(solver, mixed, dict(later.gradient()), alpha=0.1)
    assert "sample" not in set(found.frame()["route"])
    for name, step in expected.direction.items():
        assert_close(found.direction[name], step, 1e-9)


def test_a_gradient_in_factors_is_converted_and_stays_in_factors() -> None:
    p = problem(**WIDE)
    gradient = p.gradient()
    single = gradient.to(torch.float32)
    assert list(single) == list(gradient)
    assert single.factored("0.weight").inputs.rows.dtype == torch.float32
    for name, value in gradient.items():
        assert single[name].dtype == torch.float32
        assert_close(single[name].double(), value, 1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_gradient_in_factors_of_another_dtype_is_refused_in_a_sentence(solver: str) -> None:
    p = problem(**WIDE, bias=False)
    curvature = curvlab.estimate("pch-1", p)
    with pytest.raises(
        SolveError, match=r"`0\.weight` is torch\.float32 on cpu; the curvature is torch\.float64"
    ):
        curvlab.solve(solver, curvature, p.gradient().to(torch.float32), alpha=0.1)


def test_measures_of_a_step_in_the_rows_of_another_batch_are_those_of_the_formed_step() -> None:
    p, other = problem(**WIDE), problem(**WIDE, seed=1)
    layer, entry = curvlab.estimate("pch-1", p).layers[0], other.gradient().factored("0.weight")
    step = RowProduct(torch.ones(entry.shape[0], len(entry.inputs.rows), dtype=torch.float64), entry.inputs)
    system, damping = DampedSystem("mean", 0.9, 0.1), curvlab.Mixed(0.1)
    found, expected = (WeightMeasures(system, layer, given, entry, damping) for given in (step, step.form()))
    for measure in ("residual", "residual_full", "slope", "quadratic"):
        assert_close(getattr(found, measure)(), getattr(expected, measure)(), 1e-12)
