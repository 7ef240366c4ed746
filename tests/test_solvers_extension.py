"""What a solver may bring along: its own system, its own kind of step, its own way to adapt."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlab
from curvlab import Status
from curvlab.curvature import LayerCurvature
from curvlab.distributed.communicator import LocalCommunicator
from curvlab.linalg import Factor, Step
from curvlab.linalg.steps import as_step
from curvlab.solvers import LayerDirection, LayerGradient, Solver
from curvlab.solvers.base import KroneckerSystem
from curvlab.solvers.input_coordinates import form_gradient
from tests.solver_cases import WIDE, assert_close, problem

# The package has a function of the same name, so the module is asked for by its own.
SOLVE = import_module("curvlab.solvers.run")


@dataclass(frozen=True, eq=False)
class IdentitySystem(KroneckerSystem):
    """τ d = -g."""

    shift: float
    kind = "full"

    def times_weight(self, output: Factor, d: Tensor, d_times_input: Tensor) -> Tensor:
        return self.shift * d

    def times_bias(self, output: Factor, d: Tensor) -> Tensor:
        return self.shift * d


@dataclass(frozen=True, eq=False)
class Scaled(Step):
    """c X, with X never multiplied."""

    factor: float
    matrix: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    @property
    def borrowed(self) -> Tensor:
        return self.matrix

    def form(self) -> Tensor:
        return self.factor * self.matrix

    def add_into(self, target: Tensor, scale: float) -> None:
        with torch.no_grad():
            target.add_(self.matrix, alpha=scale * self.factor)

    def magnitude(self) -> Tensor:
        return abs(self.factor) * self.matrix.abs().max()

    def checksum(self) -> Tensor:
        return self.matrix.sum()


@dataclass(frozen=True)
class SteepestDescent(Solver):
    """d = -g/τ."""

    def prepare(self, layer: LayerCurvature, damping: curvlab.Damping, gradient: LayerGradient) -> float:
        return damping.shift

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, float)
        weight = None if gradient.weight is None else Scaled(-1 / state, form_gradient(gradient.weight))
        bias = None if gradient.bias is None else -gradient.bias / state
        return LayerDirection(weight, bias, IdentitySystem(state), "mine", 1)


def test_a_solver_brings_its_own_system_and_step() -> None:
    p = problem(**WIDE)
    gradient = dict(p.gradient())
    solution = curvlab.solve(SteepestDescent(), curvlab.estimate("pch-1", p), gradient, alpha=0.25)
    for name, block in solution.blocks.items():
        assert_close(solution.direction[name], -4 * gradient[name], 1e-14)
        assert block.status is Status.CONVERGED
        assert block.residual < 1e-14
        assert block.residual_full > 1e-3
    assert isinstance(solution.direction.factored("0.weight"), Scaled)
    before = {name: value.detach().clone() for name, value in p.model.named_parameters()}
    solution.add_to(p.model, lr=0.5)
    for name, value in p.model.named_parameters():
        assert_close(value.detach() - before[name], -2 * gradient[name], 1e-12)
    gradient["0.weight"].zero_()
    with pytest.raises(curvlab.exceptions.SolveError, match="changed in place since the solve"):
        solution.direction["0.weight"]


def test_a_tensor_given_as_a_step_is_handed_out_as_the_tensor() -> None:
    p = problem(**WIDE)
    solution = curvlab.solve("kfi[route=dense]", curvlab.estimate("pch-1", p), p.gradient(), alpha=0.1)
    for name in solution.direction:
        held = solution.direction.factored(name)
        assert isinstance(held, Tensor)
        assert torch.equal(as_step(held).form(), solution.direction[name])


def test_layers_are_shared_out_and_products_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank takes part in a product over all rows, so no rank may be left out of a solve by products."""
    asked: list[object] = []

    def solve_shared(systems: Any, units: Any, process_group: object) -> Any:
        asked.append(process_group)
        return systems.solve_all(units)

    monkeypatch.setattr(SOLVE, "_solve_shared", solve_shared)
    p, group = problem(**WIDE), LocalCommunicator()
    for provider, solver, shared in (
        ("pch-1", "kfi", True),
        ("pch-1", "ea-cg", True),
        ("pch-1", "cg", True),
        ("pch-1", "cg[preconditioner=jacobi]", False),
        ("hessian", "cg", False),
        ("hessian[full=true]", "cg", False),
    ):
        asked.clear()
        curvlab.solve(solver, curvlab.estimate(provider, p), p.gradient(), alpha=0.3, process_group=group)  # type: ignore[arg-type]
        assert asked == ([group] if shared else [])
