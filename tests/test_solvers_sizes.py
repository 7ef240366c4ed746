"""A gradient of any size: what is squared on the way to a step stays in the range of its dtype."""

from __future__ import annotations

import pytest
import torch

import curvlab
from curvlab.linalg import GramFactor
from curvlab.linalg.factors import InputFactors
from curvlab.linalg.steps import RowGradient
from curvlab.measure import device
from curvlab.solvers.input_coordinates import EigenCoordinates, MeanCoordinates, RowCoordinates
from curvlab.solvers.run import check_gradient
from tests.solver_cases import NARROW, SOLVERS, WIDE, assert_close, problem
from tests.test_linalg_factors import randn

SIZES = (1e-30, 1e-25, 1e25, 1e30)


def resized(gradient: curvlab.Gradient, size: float) -> curvlab.Gradient:
    """`size` times the gradient, entries in factors kept so."""

    def entry(held: torch.Tensor | RowGradient) -> torch.Tensor | RowGradient:
        if isinstance(held, torch.Tensor):
            return held * size
        return RowGradient(GramFactor(held.gradients.rows * size, held.gradients.root), held.inputs)

    return curvlab.Gradient({name: entry(gradient.factored(name)) for name in gradient})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("solver", "shape"),
    [
        *((f"{solver}[route={route}]", WIDE) for solver in SOLVERS for route in ("sample", "row", "dense")),
        *((solver, NARROW) for solver in SOLVERS),
        *((f"{solver}[formulation=explicit]", WIDE) for solver in ("cg", "ea-cg")),
    ],
)
def test_the_step_of_a_gradient_of_any_size_is_as_many_times_the_plain_one(
    solver: str, shape: dict[str, object], size: float
) -> None:
    p = problem(**shape, dtype=torch.float32, gain=4.0)
    curvature, gradient = curvlab.estimate("pch-1", p), p.gradient()
    # A gradient with norms of order one, so that what is tested is the size alone.
    gradient = resized(gradient, 1 / float(gradient.norm()))
    plain = curvlab.solve(solver, curvature, gradient, alpha=0.05)
    solution = curvlab.solve(solver, curvature, resized(gradient, size), alpha=0.05)
    for name, step in plain.direction.items():
        assert_close(solution.direction[name] / size, step, 2e-5)
        assert solution.blocks[name].status is plain.blocks[name].status
        assert solution.blocks[name].residual == pytest.approx(plain.blocks[name].residual, rel=0.5, abs=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reads", [1, 8])
def test_the_part_outside_the_input_factor_keeps_its_norm_however_seldom_is_read(
    monkeypatch: pytest.MonkeyPatch, reads: int, size: float
) -> None:
    root = torch.full((4,), 0.5)
    inputs = GramFactor(randn(4, 9).float(), root)
    gradients = [GramFactor(randn(4, 3, seed=1).float() * scale, root) for scale in (1.0, size)]
    plain, large = (RowGradient(rows, inputs) for rows in gradients)
    sides = [MeanCoordinates(InputFactors(inputs), "sample"), MeanCoordinates(InputFactors(inputs), "dense")]
    for side in [*sides, RowCoordinates(inputs)]:
        monkeypatch.setattr(device, "read_interval", lambda tensor, *_: reads)
        expected, found = side.of(plain), side.of(large)
        assert expected.perp_norm is not None
        assert found.perp_norm is not None
        assert_close(found.x / size, expected.x, 1e-6)
        rounding = 1e-6 * float(plain.form().norm())
        assert float(found.perp_norm / size) == pytest.approx(
            float(expected.perp_norm), rel=1e-5, abs=rounding
        )


def test_what_lies_in_the_rounding_of_the_gram_matrix_has_a_size_too() -> None:
    root = torch.full((4,), 0.5)
    inputs = GramFactor(randn(2, 9).float().repeat(2, 1), root)
    for size in SIZES:
        gradient = RowGradient(GramFactor(randn(4, 3, seed=1).float() * size, root), inputs)
        perp = EigenCoordinates(inputs).of(gradient).perp_norm
        assert perp is not None
        assert 0 < float(perp / size) < 1e-2


def test_entries_that_only_sum_to_infinity_are_not_refused() -> None:
    p = problem(**WIDE, dtype=torch.float32)
    curvature = curvlab.estimate("pch-1", p)
    gradient = {name: torch.full_like(value, 3e36) for name, value in p.gradient().items()}
    assert not torch.isfinite(gradient["0.weight"].sum())
    check_gradient(curvature, gradient)
