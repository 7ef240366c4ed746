"""Residuals, gᵀd and the predicted reduction of a solved block equal those written out densely."""

from __future__ import annotations

import pytest
import torch

import curvlab
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
