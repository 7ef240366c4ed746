"""Factorisations are made once; gradients of another origin are solved on the row or dense route."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlab
from curvlab.curvature_layers import KroneckerLayer
from curvlab.linalg import GramFactor
from curvlab.linalg.factors import InputKind
from curvlab.linalg.steps import RowGradient
from tests.solver_cases import (
    MEAN,
    NARROW,
    SOLVERS,
    WIDE,
    assert_close,
    converged,
    dense_solve,
    problem,
    written_out,
)

KINDS: tuple[InputKind, ...] = ("full", "mean")


class Calls:
    """How often a function of torch.linalg is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.count = 0
        original = getattr(torch.linalg, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.linalg, name, counted)


@pytest.mark.parametrize("provider", ["fisher", "pch-1"])
@pytest.mark.parametrize("solver", ["kfi", "sm-kfi"])
def test_a_second_solve_factorises_nothing(
    monkeypatch: pytest.MonkeyPatch, solver: str, provider: str
) -> None:
    p = problem(**WIDE)
    curvature, gradient = curvlab.estimate(provider, p), p.gradient()
    calls = Calls(monkeypatch, "cholesky_ex")
    first = curvlab.solve(solver, curvature, gradient, alpha=0.1)
    made = calls.count
    again = curvlab.solve(solver, curvature, gradient, alpha=0.1)
    assert made > 0
    assert calls.count == made
    assert all(torch.equal(first.direction[name], again.direction[name]) for name in first.direction)


def test_kfi_and_sm_kfi_share_the_factorisation_of_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(**WIDE)
    curvature, gradient = curvlab.estimate("pch-1", p), p.gradient()
    calls = Calls(monkeypatch, "cholesky_ex")
    curvlab.solve("kfi", curvature, gradient, alpha=0.1)
    assert calls.count == 3 * 3
    curvlab.solve("sm-kfi", curvature, gradient, alpha=0.1)
    assert calls.count <= 3 * (3 + 2)


def test_another_damping_or_pi_is_another_factorisation() -> None:
    p = problem(**WIDE)
    curvature, gradient = curvlab.estimate("pch-1", p), p.gradient()
    for solver, alpha in (("kfi", 0.1), ("kfi", 0.2), ("kfi[pi=2]", 0.1), ("kfi", 0.1)):
        solution = curvlab.solve(solver, curvature, gradient, alpha=alpha)
        pi = 2.0 if "pi" in solver else None
        for layer, dense in zip(curvature.layers, written_out(p, curvature), strict=True):
            weight, _ = dense_solve("kfi", dense, curvlab.Mixed(alpha), pi)
            assert_close(solution.direction[f"{layer.name}.weight"], weight, 1e-9)


def test_curvatures_of_one_batch_share_the_input_factor_and_not_its_damped_inverse() -> None:
    p = problem(**WIDE)
    gradient = p.gradient()
    for curvature in curvlab.estimate(["fisher", "pch-1", "gauss-newton"], p):
        solution = curvlab.solve("kfi", curvature, gradient, alpha=0.1)
        for layer, dense in zip(curvature.layers, written_out(p, curvature), strict=True):
            weight, _ = dense_solve("kfi", dense, curvlab.Mixed(0.1))
            assert_close(solution.direction[f"{layer.name}.weight"], weight, 1e-9)


def test_cg_and_exact_share_the_eigenvectors_of_the_gram_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(**WIDE)
    curvature, gradient = curvlab.estimate("pch-1", p), p.gradient()
    calls = Calls(monkeypatch, "eigh")
    curvlab.solve("cg[route=sample]", curvature, gradient, alpha=0.1)
    assert calls.count == 3
    curvlab.solve("exact[route=sample]", curvature, gradient, alpha=0.1)
    assert calls.count == 6
    curvlab.solve("exact[route=sample]", curvature, gradient, alpha=0.3)
    assert calls.count == 6


@pytest.mark.parametrize("solver", [*SOLVERS, "exact[route=sample]"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_factorisations_are_freed_with_their_curvature(solver: str, size: dict[str, Any]) -> None:
    p = problem(**size)
    gradient = p.gradient()
    curvature = curvlab.estimate("fisher", p)
    curvlab.solve(solver, curvature, gradient, alpha=0.1)
    layers = [layer for layer in curvature.layers if isinstance(layer, KroneckerLayer)]
    inputs = [layer.inputs.factor(kind) for layer in layers if layer.inputs for kind in KINDS]
    factors = [*inputs, *(layer.output for layer in layers)]
    assert any(factor._memo for factor in factors)
    alive = [weakref.ref(factor) for factor in factors]
    del curvature, layers, inputs, factors
    gc.collect()
    assert [reference() for reference in alive if reference() is not None] == []
    assert all(not r.inputs._memo and not r.gradients._memo for r in p.recording().layers)


def test_curvatures_and_gradient_of_one_batch_share_the_gram_matrix_of_its_rows() -> None:
    p = problem(**WIDE)
    gradient = p.gradient()
    for curvature in (curvlab.estimate("fisher", p), curvlab.estimate("pch-1", p)):
        for layer in curvature.layers:
            entry = gradient.factored(f"{layer.name}.weight")
            assert isinstance(entry, RowGradient)
            assert isinstance(layer, KroneckerLayer)
            assert layer.inputs is not None
            assert isinstance(layer.inputs.full, GramFactor)
            assert layer.inputs.full.gram is entry.inputs.gram


def other_batch(size: dict[str, Any]) -> tuple[curvlab.Problem, curvlab.Problem]:
    """The same model on two batches of different sizes."""
    p = problem(**size)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(7, size["widths"][0], dtype=torch.float64, generator=generator) - 0.2
    return p, p.with_data(x, torch.arange(7) % size["widths"][-1])


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("provider", ["fisher", "pch-1"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_gradient_of_another_batch_is_solved_in_the_row_space(
    solver: str, provider: str, size: dict[str, Any]
) -> None:
    p, other = other_batch(size)
    curvature = curvlab.estimate(provider, p)
    solution = curvlab.solve(converged(solver), curvature, other.gradient(), alpha=0.05)
    assert set(solution.frame()["route"]) <= {"row", "dense"}
    assert solution.frame()["residual"].max() < 1e-8
    for layer, dense in zip(curvature.layers, written_out(p, curvature, other), strict=True):
        weight, bias = dense_solve(solver, dense, curvlab.Mixed(0.05))
        assert_close(solution.direction[f"{layer.name}.weight"], weight, 1e-9)
        assert bias is not None
        assert_close(solution.direction[f"{layer.name}.bias"], bias, 1e-9)


@pytest.mark.parametrize("route", ["auto", "row", "dense"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_any_tensors_will_do_as_a_gradient(solver: str, route: str) -> None:
    p = problem(**WIDE)
    curvature = curvlab.estimate("pch-1", p)
    generator = torch.Generator().manual_seed(3)
    momentum: dict[str, Tensor] = {
        name: torch.randn(block.shape, dtype=torch.float64, generator=generator)
        for name, block in curvature.blocks.items()
    }
    before = {name: value.clone() for name, value in momentum.items()}
    solution = curvlab.solve(converged(solver, route=route), curvature, momentum, alpha=0.05)
    for layer, written in zip(curvature.layers, written_out(p, curvature), strict=True):
        names = (f"{layer.name}.weight", f"{layer.name}.bias")
        dense = type(written)(written.a, written.mean, written.b, momentum[names[0]], momentum[names[1]])
        weight, bias = dense_solve(solver, dense, curvlab.Mixed(0.05))
        assert bias is not None
        assert_close(solution.direction[names[0]], weight, 1e-9)
        assert_close(solution.direction[names[1]], bias, 1e-9)
    assert all(torch.equal(before[name], momentum[name]) for name in before)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_loaded_or_streamed_curvature_takes_the_gradient_of_its_batch(solver: str) -> None:
    p = problem(**WIDE)
    batch = next(iter(p.batches()))
    parts = [(batch.inputs[:2], batch.targets[:2]), (batch.inputs[2:], batch.targets[2:])]
    streamed = curvlab.Problem(p.model, "cross-entropy", parts)
    reference = curvlab.solve(converged(solver), curvlab.estimate("pch-1", p), p.gradient(), alpha=0.05)
    for curvature in (curvlab.estimate("pch-1", streamed), curvlab.estimate("pch-1", p).to(torch.float64)):
        for gradient in (p.gradient(), streamed.gradient()):
            solution = curvlab.solve(converged(solver), curvature, gradient, alpha=0.05)
            for name, value in reference.direction.items():
                assert_close(solution.direction[name], value, 1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_adding_a_step_is_adding_its_direction(solver: str) -> None:
    p = problem(**WIDE)
    solution = curvlab.solve(solver, curvlab.estimate("pch-1", p), p.gradient(), alpha=0.1)
    before = {name: value.detach().clone() for name, value in p.model.named_parameters()}
    steps = {name: step.clone() for name, step in solution.direction.items()}
    solution.add_to(p.model, lr=0.3)
    for name, value in p.model.named_parameters():
        assert_close(value.detach() - before[name], 0.3 * steps[name], 1e-12)


def test_the_mean_solvers_are_named_so() -> None:
    assert {s for s in SOLVERS if curvlab.solvers.solvers.make(s).input_factor == "mean"} == set(MEAN)
