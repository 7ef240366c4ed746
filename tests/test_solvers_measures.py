"""Residuals, gᵀd and the predicted reduction of a solved block equal those written out densely."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

import curvlab
from curvlab.solvers import EACG, KFI, Solver
from tests.solver_cases import SOLVERS, WIDE, Dense, pi_of, problem, written_out


def test_measures_equal_those_of_the_dense_system() -> None:
    p = problem(**WIDE)
    curvature = curvlab.estimate("pch-1", p)
    alpha = 0.1
    for solver in SOLVERS:
        solution = curvlab.solve(
            f"{solver}[max_iter=3]" if "cg" in solver else solver, curvature, p.gradient(), alpha=alpha
        )
        total = 0.0
        for layer, dense in zip(curvature.layers, written_out(p, curvature), strict=True):
            block = solution.blocks[f"{layer.name}.weight"]
            d = solution.direction[f"{layer.name}.weight"]
            plain = dense.b @ d @ dense.a
            full = (1 - alpha) * plain + alpha * d + dense.weight
            assert block.residual_full == pytest.approx(
                float(full.norm() / dense.weight.norm()), rel=1e-7, abs=1e-12
            )
            assert block.slope == pytest.approx(float((d * dense.weight).sum()), rel=1e-9)
            reduction = -float((d * dense.weight).sum() + 0.5 * (d * plain).sum())
            assert block.predicted_reduction == pytest.approx(reduction, rel=1e-7)
            own = _own_residual(solver, dense, d, alpha)
            assert block.residual == pytest.approx(own, rel=1e-6, abs=1e-12)
            bias = solution.blocks[f"{layer.name}.bias"]
            step = solution.direction[f"{layer.name}.bias"]
            assert dense.bias is not None
            rest = (1 - alpha) * dense.b @ step + alpha * step + dense.bias
            assert bias.residual_full == pytest.approx(
                float(rest.norm() / dense.bias.norm()), rel=1e-7, abs=1e-12
            )
            assert bias.slope == pytest.approx(float(step @ dense.bias), rel=1e-9)
            quadratic = float(step @ dense.b @ step)
            assert bias.predicted_reduction == pytest.approx(-bias.slope - 0.5 * quadratic, rel=1e-7)
            total += block.predicted_reduction + bias.predicted_reduction
        assert solution.predicted_reduction == pytest.approx(total)


def _own_residual(solver: str, dense: Dense, d: torch.Tensor, alpha: float) -> float:
    a, b, g = dense.input_factor(solver), dense.b, dense.weight
    if "kfi" in solver:
        pi = pi_of(a, b)
        left = b + alpha**0.5 / pi * torch.eye(len(b), dtype=b.dtype)
        rest = left @ d @ (a + alpha**0.5 * pi * torch.eye(len(a), dtype=a.dtype)) + g
    else:
        rest = (1 - alpha) * b @ d @ a + alpha * d + g
    return float(rest.norm() / g.norm())


@pytest.mark.parametrize(
    ("solver", "weight"), [("kfi", 5), ("sm-kfi", 1), ("cg", 5), ("ea-cg", 1), ("exact", 5)]
)
def test_the_rank_is_that_of_the_factor_in_use_and_of_a_bias_that_of_its_own(
    solver: str, weight: int
) -> None:
    p = problem(**WIDE)  # five examples
    solution = curvlab.solve(solver, curvlab.estimate("pch-1", p), p.gradient(), alpha=0.1)
    assert solution.blocks["0.weight"].rank == weight
    assert solution.blocks["0.bias"].rank == WIDE["widths"][1]


class Clock:
    """A clock that stands still but for the phases of the solvers below."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()
# The package has a function of the same name, so the module is asked for by its own.
SOLVE = import_module("curvlab.solvers.run")


class SlowKFI(KFI):
    def prepare(self, *given):
        CLOCK.now += 2
        return super().prepare(*given)

    def apply(self, *given):
        CLOCK.now += 5
        return super().apply(*given)


class SlowEACG(EACG):
    def prepare(self, *given):
        CLOCK.now += 2
        return super().prepare(*given)

    def apply_jointly(self, *given):
        CLOCK.now += 15
        return super().apply_jointly(*given)


@pytest.mark.parametrize("solver", [SlowKFI(), SlowEACG()])
def test_the_seconds_of_the_blocks_add_up_to_those_of_each_phase(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SOLVE, "time", CLOCK)
    p = problem(**WIDE)  # three layers
    frame = curvlab.solve(solver, curvlab.estimate("pch-1", p), p.gradient(), alpha=0.1).frame()
    assert frame["seconds_prepare"].tolist() == [1.0] * 6
    assert frame["seconds_apply"].sum() == pytest.approx(15.0)


@pytest.mark.parametrize("solver", ["cg[max_iter=3,tol=0.0]", "ea-cg[max_iter=3,tol=0.0]"])
def test_a_trace_has_the_start_and_every_iteration(solver: str) -> None:
    p = problem(**WIDE)
    solution = curvlab.solve(solver, curvlab.estimate("pch-1", p), p.gradient(), alpha=0.01)
    for name, group in solution.trace().groupby("block"):
        block = solution.blocks[name]
        assert group["iteration"].tolist() == list(range(block.iterations + 1))
        assert group["residual"].iloc[0] == pytest.approx(1.0)
        assert group["residual"].iloc[-1] == pytest.approx(block.residual, rel=1e-6)
