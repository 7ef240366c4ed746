"""Conjugate gradients on several systems at once, against a dense solve and hand-made ends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvlab.linalg.cg import CGResult, Outcome, SymmetricOperator, conjugate_gradients
from tests.test_linalg_factors import close, gram, randn


class Columns(SymmetricOperator):
    """One system per column, each with a matrix of its own."""

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices = matrices

    def matmul(self, x: Tensor) -> Tensor:
        return torch.stack([m @ column for m, column in zip(self.matrices, x.T, strict=True)], dim=1)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(0)

    def max_abs(self, x: Tensor) -> Tensor:
        return x.abs().amax(0)

    def spread(self, scalars: Tensor) -> Tensor:
        return scalars


def solve(matrices: list[Tensor], b: Tensor, **options: object) -> CGResult:
    """One system per column."""
    defaults: dict[str, object] = {"max_iter": 200, "tol": 1e-13}
    return conjugate_gradients(Columns(matrices), b, **(defaults | options))  # type: ignore[arg-type]


def definite(n: int, seed: int) -> Tensor:
    return gram(3 * n, n, seed)[1] + 0.3 * torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize("interval", [0, 1, 8])
def test_each_system_is_solved_as_if_it_were_alone(interval: int) -> None:
    matrices = [definite(6, 1), torch.eye(6, dtype=torch.float64), 1e3 * definite(6, 2)]
    b = randn(6, 3, seed=4) * torch.tensor([1.0, 1e-8, 1e8], dtype=torch.float64)
    together = solve(matrices, b, read_interval=interval)
    for index, matrix in enumerate(matrices):
        expected = torch.linalg.solve(matrix, b[:, index])
        torch.testing.assert_close(together.x[:, index], expected, rtol=1e-10, atol=0)
        alone = solve([matrix], b[:, index : index + 1], read_interval=interval)
        assert int(alone.iterations) == int(together.iterations[index])
    assert together.outcomes.tolist() == [Outcome.CONVERGED] * 3
    assert int(together.iterations[1]) == 1


def test_a_right_hand_side_of_zero_needs_no_iteration() -> None:
    result = solve([definite(4, 1)] * 2, torch.stack([torch.zeros(4).double(), torch.ones(4).double()], 1))
    assert int(result.iterations[0]) == 0
    assert not result.x[:, 0].any()
    assert result.outcomes.tolist() == [Outcome.CONVERGED] * 2


@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e-15, 1e-8, 1e8, 1e15, 1e30, 1e35])
def test_no_size_of_the_right_hand_side_under_or_overflows_in_float32(scale: float) -> None:
    matrix = definite(6, 1).float()
    b = randn(6, 1, seed=4).float()
    plain = solve([matrix], b, tol=1e-6)
    scaled = solve([matrix], b * scale, tol=1e-6)
    torch.testing.assert_close(scaled.x / scale, plain.x, rtol=1e-4, atol=1e-6)
    assert scaled.outcomes.tolist() == plain.outcomes.tolist()


def test_with_no_tolerance_nothing_breaks_after_exact_convergence() -> None:
    for dtype in (torch.float32, torch.float64):
        matrix = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=dtype))
        result = solve([matrix], torch.ones(3, 1, dtype=dtype), max_iter=50, tol=0.0)
        torch.testing.assert_close(result.x[:, 0], 1 / matrix.diagonal())
        assert result.outcomes.tolist() == [Outcome.CONVERGED]


def test_residuals_are_relative_and_counted_from_the_start() -> None:
    matrix, b = definite(6, 1), randn(6, 1, seed=4)
    result = solve([matrix], b, max_iter=3, tol=0.0)
    assert result.residuals.shape == (4, 1)
    assert float(result.residuals[0]) == pytest.approx(1.0)
    true = (b - matrix @ result.x).norm() / b.norm()
    assert float(result.residuals[-1]) == pytest.approx(float(true), rel=1e-8)
    assert result.outcomes.tolist() == [Outcome.LIMIT]


def test_negative_curvature_ends_its_own_system_only() -> None:
    matrices = [torch.diag(torch.tensor([1.0, -5.0]).double()), definite(2, 3)]
    b = torch.ones(2, 2, dtype=torch.float64)
    result = solve(matrices, b)
    assert result.outcomes.tolist() == [Outcome.NEGATIVE_CURVATURE, Outcome.CONVERGED]
    close(result.x[:, 0], b[:, 0])
    close(result.x[:, 1], torch.linalg.solve(matrices[1], b[:, 1]))


@pytest.mark.parametrize(
    ("share", "outcome"),
    [(-4.0, Outcome.BREAKDOWN), (-16.0, Outcome.NEGATIVE_CURVATURE)],
)
def test_negative_curvature_begins_beyond_eight_times_rounding(share: float, outcome: Outcome) -> None:
    """pᵀAp = -x ε ‖p‖ ‖Ap‖, made of entries that are exact: rounding up to x = 8, a direction beyond."""
    eps = torch.finfo(torch.float64).eps
    matrix = torch.diag(torch.tensor([1.0, -1.0 + 2 * share * eps], dtype=torch.float64))
    result = solve([matrix], torch.ones(2, 1, dtype=torch.float64))
    assert result.outcomes.tolist() == [outcome]


def test_a_nan_is_a_breakdown_before_any_iteration() -> None:
    b = torch.tensor([[float("nan")], [1.0]], dtype=torch.float64)
    assert solve([torch.eye(2, dtype=torch.float64)], b, max_iter=0).outcomes.tolist() == [Outcome.BREAKDOWN]


@pytest.mark.parametrize("bad", ["operator", "right-hand side"])
def test_a_nan_is_a_breakdown_and_never_convergence(bad: str) -> None:
    matrix, b = definite(3, 1), torch.ones(3, 1, dtype=torch.float64)
    (matrix if bad == "operator" else b)[0, 0] = float("nan")
    assert solve([matrix], b).outcomes.tolist() == [Outcome.BREAKDOWN]


def test_a_start_and_a_preconditioner_reach_the_same_end() -> None:
    matrix, b = definite(6, 1) * torch.logspace(0, 3, 6, dtype=torch.float64).sqrt(), randn(6, 1, seed=4)
    matrix = (matrix + matrix.T) / 2 + 200 * torch.eye(6, dtype=torch.float64)
    expected = torch.linalg.solve(matrix, b)
    diagonal = matrix.diagonal()[:, None]
    for options in ({"start": randn(6, 1, seed=9)}, {"precondition": lambda r: r / diagonal}):
        result = solve([matrix], b, **options)
        torch.testing.assert_close(result.x, expected, rtol=1e-9, atol=0)
        assert result.outcomes.tolist() == [Outcome.CONVERGED]


def test_negative_curvature_at_once_keeps_a_given_start() -> None:
    start = torch.tensor([[0.5], [0.25]], dtype=torch.float64)
    result = solve([-torch.eye(2, dtype=torch.float64)], torch.ones(2, 1, dtype=torch.float64), start=start)
    assert result.outcomes.tolist() == [Outcome.NEGATIVE_CURVATURE]
    close(result.x, start)
