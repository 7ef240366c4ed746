"""Shifted inverses, Cholesky with its retry, PosEig and symmetric products, against dense torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from curvlab.linalg import congruence, poseig, poseig_diagonal
from curvlab.linalg import gram as gram_of
from curvlab.linalg import inverse as module
from curvlab.linalg.inverse import NotFiniteError, NotPositiveDefiniteError, cholesky_shifted, shifted_inverse
from tests.test_linalg_factors import close, dense, gram, randn, rank_one

FACTORS = {
    "dense": lambda: dense(5),
    "wide Gram": lambda: gram(3, 7),
    "tall Gram": lambda: gram(9, 4),
    "one row": lambda: gram(1, 6),
    "rank one": lambda: rank_one(6),
}


@pytest.mark.parametrize("columns", [1, 3, 12])
@pytest.mark.parametrize("name", FACTORS)
def test_the_shifted_inverse_solves_the_shifted_system(name: str, columns: int) -> None:
    factor, matrix = FACTORS[name]()
    shift = 20.0 if name == "dense" else 0.3
    x = randn(len(matrix), columns, seed=3)
    for tau in (shift, torch.tensor(shift, dtype=torch.float64)):
        inverse = shifted_inverse(factor, tau, "key")
        expected = torch.linalg.solve(matrix + shift * torch.eye(len(matrix), dtype=torch.float64), x)
        close(inverse(x), expected)


def test_the_factorisation_is_kept_under_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    original = module.cholesky_shifted
    monkeypatch.setattr(module, "cholesky_shifted", lambda m, s, c=True: calls.append(s) or original(m, s, c))
    factor, _ = gram(3, 7)
    for shift in (0.1, 0.1, 0.2):
        module.shifted_inverse(factor, shift, shift)
    assert calls == [0.1, 0.2]


def test_cholesky_leaves_its_argument_alone() -> None:
    _, matrix = gram(9, 4)
    before = matrix.clone()
    lower = cholesky_shifted(matrix, 0.5)
    assert torch.equal(matrix, before)
    close(lower @ lower.T, matrix + 0.5 * torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize(("n", "dtype"), [(1024, torch.float32), (512, torch.float64)])
def test_columns_of_a_whole_page_are_kept_apart_and_change_nothing(n: int, dtype: torch.dtype) -> None:
    matrix = gram_of(randn(n, 2 * n)).to(dtype) / n
    lower = cholesky_shifted(matrix, 0.5)
    assert lower.stride(1) % n != 0
    expected = torch.linalg.cholesky(matrix.double() + 0.5 * torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(lower.double(), expected, rtol=0, atol=100 * torch.finfo(dtype).eps)


def test_an_indefinite_matrix_of_whole_pages_says_its_own_smallest_eigenvalue() -> None:
    matrix = torch.diag(torch.linspace(-3, -2, 512, dtype=torch.float64))
    with pytest.raises(NotPositiveDefiniteError, match=r"smallest eigenvalue -2\.5"):
        cholesky_shifted(matrix, 0.5)


def test_a_failure_of_float32_is_retried_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    original = torch.linalg.cholesky_ex

    def failing(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(matrix.dtype)
        factor, info = original(matrix)
        return factor, info + (matrix.dtype == torch.float32)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing)
    matrix = torch.eye(3)
    lower = cholesky_shifted(matrix, 3.0)
    assert seen == [torch.float32, torch.float64]
    assert lower.dtype == torch.float32
    torch.testing.assert_close(lower, 2 * torch.eye(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_indefinite_matrix_is_raised_with_its_smallest_eigenvalue(dtype: torch.dtype) -> None:
    matrix = torch.diag(torch.tensor([-2.0, 1.0, 5.0], dtype=dtype))
    with pytest.raises(NotPositiveDefiniteError, match=r"smallest eigenvalue -1\.5") as caught:
        cholesky_shifted(matrix, 0.5)
    assert caught.value.smallest == pytest.approx(-1.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite_is_raised_as_such(value: float) -> None:
    matrix = torch.eye(3)
    matrix[1, 1] = value
    with pytest.raises(NotFiniteError, match="NaN or infinity"):
        cholesky_shifted(matrix, 0.5)


@given(n=st.integers(1, 7), gamma=st.sampled_from([-1.0, -0.5, 0.0]), seed=st.integers(0, 99))
def test_poseig_multiplies_the_negative_eigenvalues(n: int, gamma: float, seed: int) -> None:
    _, matrix = dense(n, seed)
    values, vectors = torch.linalg.eigh(matrix)
    expected = sum(
        (gamma * float(v) if v < 0 else float(v)) * torch.outer(u, u)
        for v, u in zip(values, vectors.T, strict=True)
    )
    result = poseig(matrix, gamma)
    close(result, torch.as_tensor(expected))
    assert torch.equal(result, result.T)
    close(poseig_diagonal(values, gamma), torch.where(values < 0, gamma * values, values))


@pytest.mark.parametrize("n", [1, 5, 384, 385, 500])
def test_symmetric_products_equal_plain_ones(n: int) -> None:
    x, c = randn(n, 7), randn(7, seed=2)
    close(gram_of(x), x @ x.T)
    close(gram_of(x, c), (x - c) @ (x - c).T)
    b = randn(7, 7, seed=3)
    close(congruence(x.T, b + b.T), x @ (b + b.T) @ x.T)


def test_a_centred_gram_matrix_over_many_columns_keeps_its_digits_in_float32() -> None:
    x = randn(4, 20_000)
    shifted = (x + 1e4).float()
    expected = shifted.double() - shifted.double().mean(0)
    result = gram_of(shifted, shifted.double().mean(0).float())
    torch.testing.assert_close(result.double(), expected @ expected.T, rtol=2e-3, atol=20.0)
