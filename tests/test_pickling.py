"""Curvatures, solutions and problems survive pickle, torch.save and deepcopy, and are whole afterwards."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import curvlab
from curvlab.exceptions import MatrixFreeError, StaleError
from curvlab.linalg import GramFactor
from tests.cases import Case
from tests.test_streaming import split


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = pytest.mark.parametrize("way", [pickled, saved, copy.deepcopy], ids=lambda way: way.__name__)
Way = Callable[[Any], Any]


@WAYS
@pytest.mark.parametrize("name", ["fisher", "gauss-newton", "pch-1"])
@pytest.mark.parametrize("streamed", [False, True], ids=["batch", "stream"])
def test_a_curvature_comes_back_with_equal_blocks(way: Way, name: str, streamed: bool) -> None:
    problem, _ = Case(examples=9).build()
    given = curvlab.estimate(name, split(problem, [4, 5]) if streamed else problem)
    found = way(given)
    assert repr(found) == repr(given)
    assert list(found.blocks) == list(given.blocks)
    for block in given.blocks:
        assert torch.equal(found.blocks[block].to_dense(), given.blocks[block].to_dense())


@WAYS
@pytest.mark.parametrize(
    ("provider", "solver"),
    [
        ("pch-1", "kfi"),
        ("fisher", "sm-kfi"),
        ("pch-1", "cg"),
        ("gauss-newton", "ea-cg"),
        ("pch-2", "exact"),
        ("hessian", "cg"),
    ],
)
@pytest.mark.parametrize("formed", [False, True], ids=["factored", "formed"])
def test_a_solution_comes_back_with_equal_directions_and_frames(
    way: Way, provider: str, solver: str, formed: bool
) -> None:
    problem, _ = Case(examples=9).build()
    gradient = dict(problem.gradient()) if formed else problem.gradient()
    given = curvlab.solve(solver, curvlab.estimate(provider, problem), gradient, alpha=0.1)
    found = way(given)
    for name in given.direction:
        assert torch.equal(found.direction[name], given.direction[name])
    assert found.frame().equals(given.frame())


@WAYS
def test_a_copy_is_never_stale_where_the_original_is(way: Way) -> None:
    problem, _ = Case(examples=9).build()
    curvature, gradient = curvlab.estimate("pch-1", problem), dict(problem.gradient())
    solution = curvlab.solve("ea-cg", curvature, gradient, alpha=0.1)
    expected = {name: step.clone() for name, step in solution.direction.items()}
    matrix = curvature.to_dense()
    copies = way(curvature), way(solution)
    with torch.no_grad():
        for parameter in problem.model.parameters():
            parameter.add_(1)
    for entry in gradient.values():
        entry.zero_()
    with pytest.warns(curvlab.StaleWarning):
        curvature.to_dense()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(copies[0].to_dense(), matrix)
    for name, step in expected.items():
        assert torch.equal(copies[1].direction[name], step)


@WAYS
def test_what_is_stale_already_is_not_copied_as_if_it_were_fresh(way: Way) -> None:
    inputs, targets = torch.randn(9, 4), torch.arange(9) % 2
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    curvature, gradient = curvlab.estimate("pch-1", problem), dict(problem.gradient())
    solution = curvlab.solve("ea-cg", curvature, gradient, alpha=0.1)
    for entry in gradient.values():
        entry.zero_()
    with pytest.raises(StaleError, match="changed in place"):
        way(solution)
    inputs.zero_()
    with pytest.raises(StaleError, match="the inputs changed"):
        way(curvature)


@WAYS
@pytest.mark.parametrize("name", ["hessian", "hessian[full=true]", "gauss-newton[kind=exact]"])
def test_a_matrix_free_curvature_says_what_to_do_instead(way: Way, name: str) -> None:
    problem, _ = Case().build()
    curvature = curvlab.estimate(name, problem)
    with pytest.raises(MatrixFreeError, match="is matrix-free: its products read the model and the batch"):
        way(curvature)
    assert copy.copy(curvature) is curvature


@WAYS
def test_a_problem_comes_back_with_a_model_of_its_own_and_sees_it_change(way: Way) -> None:
    problem, _ = Case(examples=9).build()
    loss = problem.loss()
    found = way(problem)
    assert torch.equal(found.loss(), loss)
    with torch.no_grad():
        next(found.model.parameters()).add_(1)
    assert not torch.equal(found.loss(), loss)
    assert torch.equal(problem.loss(), loss)


def test_what_a_factor_remembers_is_not_pickled() -> None:
    factor = GramFactor(torch.randn(200, 20), torch.ones(200))
    before = len(pickle.dumps(factor))
    assert factor.gram.shape == (200, 200)
    factor.to_dense()
    assert len(pickle.dumps(factor)) == before
