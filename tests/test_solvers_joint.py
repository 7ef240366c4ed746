"""EA-CG solves the layers of a network in one iteration: each as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import curvlab
from curvlab.linalg import cg
from curvlab.solvers import EACG, LayerDirection, LayerGradient, conjugate_gradients
from tests.solver_cases import NARROW, WIDE, assert_close, problem

# The layers differ in width, and in how many iterations they take.
SIZES = {"wide": WIDE | {"gain": 4.0}, "narrow": NARROW | {"gain": 2.0}, "no bias": WIDE | {"bias": False}}


@dataclass(frozen=True)
class OneByOne(EACG):
    """The same solver, asked for one layer after the other."""

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        return super().apply(state, gradient)


def iterations_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one entry for each iteration of CG that is run: how many steps it took."""
    runs: list[int] = []
    original = cg.iterate_together

    def counted(iterations: Sequence[cg.Iterating]) -> list[cg.CGResult]:
        results = original(iterations)
        runs.extend(len(result.residuals) - 1 for result in results)
        return results

    monkeypatch.setattr(conjugate_gradients, "iterate_together", counted)
    return runs


@pytest.mark.parametrize("provider", ["fisher", "pch-1"])
@pytest.mark.parametrize("formed", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fields", [{"max_iter": 4, "tol": 0.0}, {"max_iter": 300, "tol": 1e-6}])
def test_layers_together_are_solved_as_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], size: str, formed: bool, provider: str
) -> None:
    p = problem(**SIZES[size])  # type: ignore[arg-type]
    curvature = curvlab.estimate(provider, p)
    gradient = dict(p.gradient().items()) if formed else p.gradient()
    runs = iterations_run(monkeypatch)
    together = curvlab.solve(EACG(**fields), curvature, gradient, alpha=0.01)
    assert len(runs) == 1
    alone = curvlab.solve(OneByOne(**fields), curvature, gradient, alpha=0.01)
    assert len(runs) == 4
    assert runs[0] == max(runs[1:])
    for name, block in together.blocks.items():
        other = alone.blocks[name]
        assert_close(together.direction[name], alone.direction[name], 1e-9)
        assert (block.iterations, block.status, block.route) == (other.iterations, other.status, other.route)
        assert block.history is not None
        assert other.history is not None
        count = block.iterations + 1
        torch.testing.assert_close(block.history[:count], other.history[:count], rtol=1e-5, atol=1e-10)
    frame = together.frame()
    assert (frame["seconds_apply"] > 0).all()


def test_layers_of_different_dtypes_are_solved_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(**WIDE)
    curvature, gradient = curvlab.estimate("pch-1", p), dict(p.gradient().items())
    layers = list(curvature.layers)
    layers[1] = layers[1].map(lambda tensor: tensor.float())
    mixed = {n: g.float() if n.startswith("2.") else g for n, g in gradient.items()}
    runs = iterations_run(monkeypatch)
    found = curvlab.solve("ea-cg", replace(curvature, layers=tuple(layers)), mixed, alpha=0.05)
    assert len(runs) == 3
    expected = curvlab.solve("ea-cg", curvature, gradient, alpha=0.05)
    for name, step in found.direction.items():
        assert_close(step.double(), expected.direction[name], 1e-5)


def test_a_layer_of_another_kind_of_solver_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(**WIDE)
    runs = iterations_run(monkeypatch)
    curvlab.solve("cg", curvlab.estimate("pch-1", p), p.gradient(), alpha=0.05)
    assert len(runs) == 3
