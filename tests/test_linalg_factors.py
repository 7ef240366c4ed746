"""Factors and blocks: every form equals the dense matrix it stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from curvlab.linalg import (
    DenseFactor,
    Factor,
    FactorBlock,
    GramFactor,
    KroneckerBlock,
    OperatorBlock,
    RankOneFactor,
)
from curvlab.linalg.factors import InputFactors, frobenius_norm
from curvlab.linalg.steps import Combination, RowProduct, as_step


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def roots(m: int, seed: int = 1) -> Tensor:
    weights = randn(m, seed=seed).abs()
    weights[0] = 0.0 if m > 1 else 1.0
    return (weights / weights.sum()).sqrt()


def dense(n: int, seed: int = 0) -> tuple[Factor, Tensor]:
    a = randn(n, n, seed=seed)
    return DenseFactor(a + a.T), a + a.T


def gram(m: int, n: int, seed: int = 0) -> tuple[Factor, Tensor]:
    h, root = randn(m, n, seed=seed), roots(m)
    return GramFactor(h, root), sum(r**2 * torch.outer(x, x) for x, r in zip(h, root, strict=True))  # type: ignore[return-value]


def rank_one(n: int, seed: int = 0) -> tuple[Factor, Tensor]:
    v = randn(n, seed=seed)
    return RankOneFactor(v), torch.outer(v, v)


FACTORS = {
    "dense": lambda: dense(5),
    "wide Gram": lambda: gram(3, 7),
    "tall Gram": lambda: gram(9, 4),
    "Gram of one row": lambda: gram(1, 6),
    "Gram of one column": lambda: gram(4, 1),
    "rank one": lambda: rank_one(6),
}


def close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", FACTORS)
def test_a_product_is_added_in_full_precision_under_autocast(name: str) -> None:
    factor = FACTORS[name]()[0].map(Tensor.float)
    rows = randn(3, factor.size, seed=5).float()
    outside, inside = torch.ones(2, 3, factor.size)
    factor.add_product_(outside, rows, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        factor.add_product_(inside, rows, 0.5)
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_is_the_matrix_it_stands_for(name: str) -> None:
    factor, matrix = FACTORS[name]()
    n = len(matrix)
    x = randn(n, 3, seed=5)
    close(factor.to_dense(), matrix)
    close(factor.matmul(x), matrix @ x)
    target = torch.ones(3, n + 2, dtype=torch.float64)
    factor.add_product_(target[:, :n], x.T, 0.5)
    close(target[:, :n], 1 + 0.5 * x.T @ matrix)
    assert bool((target[:, n:] == 1).all())
    close(factor.trace(), matrix.trace())
    close(factor.diagonal(), matrix.diagonal())
    close(factor.frobenius_norm(), torch.linalg.matrix_norm(matrix))
    close(factor.eigvalsh(), torch.linalg.eigvalsh(matrix))
    close(factor.quadratic(x.T), (x.T @ matrix @ x).diagonal())
    assert factor.size == n
    assert factor.rank_bound >= int(torch.linalg.matrix_rank(matrix))
    assert factor.nbytes == sum(t.nbytes for t in factor.tensors().values())


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_maps_to_another_dtype(name: str) -> None:
    factor, matrix = FACTORS[name]()
    single = factor.map(lambda t: t.float())
    assert single.to_dense().dtype == torch.float32
    torch.testing.assert_close(single.to_dense().double(), matrix, rtol=1e-5, atol=1e-5)


def test_a_factor_remembers_what_it_was_asked_before() -> None:
    factor, _ = gram(3, 7)
    made: list[int] = []
    for _ in range(2):
        assert factor.remember("key", lambda: made.append(1) or "value") == "value"
    assert made == [1]
    assert factor.remember("other", lambda: "another") == "another"


@given(m=st.integers(1, 9), n=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_gram_matrices_of_weighted_rows(m: int, n: int, seed: int) -> None:
    h, root = randn(m, n, seed=seed), roots(m, seed + 1)
    factor = GramFactor(h, root)
    scaled = root[:, None] * h
    mean = (root.square()[:, None] * h).sum(0)
    centred = root[:, None] * (h - mean)
    close(factor.gram, scaled @ scaled.T)
    close(factor.mean, mean)
    close(factor.centred_gram, centred @ centred.T)
    close(factor.scaled_rows(), scaled)


def test_the_trace_of_a_gram_factor_is_the_same_before_and_after_its_gram_matrix() -> None:
    factor, _ = gram(5, 40)
    assert isinstance(factor, GramFactor)
    before = factor.trace()
    _ = factor.gram
    assert torch.equal(factor.trace(), before)


def test_input_factors_are_the_full_and_the_mean_one() -> None:
    factor, matrix = gram(5, 4)
    inputs = InputFactors(factor)
    assert isinstance(factor, GramFactor)
    close(inputs.factor("full").to_dense(), matrix)
    close(inputs.factor("mean").to_dense(), torch.outer(factor.mean, factor.mean))
    given_mean = InputFactors(DenseFactor(matrix), factor.mean)
    close(given_mean.factor("mean").to_dense(), torch.outer(factor.mean, factor.mean))


@pytest.mark.parametrize("inner", FACTORS)
@pytest.mark.parametrize("outer", FACTORS)
def test_a_kronecker_block_is_torchs_kron_on_flattened_rows(outer: str, inner: str) -> None:
    (b, b_matrix), (a, a_matrix) = FACTORS[outer](), FACTORS[inner]()
    block, matrix = KroneckerBlock(b, a), torch.kron(b_matrix, a_matrix)
    x = randn(len(b_matrix), len(a_matrix), seed=8)
    close((block @ x).flatten(), matrix @ x.flatten())
    close(block.to_dense(), matrix)
    close(block.trace(), matrix.trace())
    close(block.diagonal().flatten(), matrix.diagonal())
    close(block.frobenius_norm(), torch.linalg.matrix_norm(matrix))
    close(block.eigvalsh(), torch.linalg.eigvalsh(matrix))


def test_operator_and_factor_blocks_are_their_matrices() -> None:
    factor, matrix = dense(6)
    operator = OperatorBlock((2, 3), lambda x: (matrix @ x.flatten()).reshape(2, 3), matrix)
    x = randn(6, seed=3)
    for block in (FactorBlock(factor), operator):
        close((block @ x.reshape(block.shape)).flatten(), matrix @ x)
        close(block.to_dense(), matrix)
        close(block.trace(), matrix.trace())
        close(block.diagonal().flatten(), matrix.diagonal())
        close(block.frobenius_norm(), torch.linalg.matrix_norm(matrix))
        close(block.eigvalsh(), torch.linalg.eigvalsh(matrix))


def test_a_block_refuses_an_operand_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"acts on tensors of shape \(5,\).*got \(5, 1\)"):
        FactorBlock(dense(5)[0]) @ torch.ones(5, 1)


def test_a_dense_form_beyond_the_limit_is_refused_with_the_bytes() -> None:
    with pytest.raises(MemoryError, match=r"25 × 25.*5,000 bytes.*limit 4,999"):
        KroneckerBlock(dense(5)[0], dense(5)[0]).to_dense(max_bytes=4999)


@pytest.mark.parametrize("columns", [5, 8192, 20_000])
def test_a_row_product_is_the_matrix_it_stands_for(columns: int) -> None:
    factor = GramFactor(randn(4, columns), roots(4))
    coefficients = randn(3, 4, seed=2)
    product = RowProduct(coefficients, factor)
    matrix = coefficients @ (factor.root[:, None] * factor.rows)
    other = RowProduct(randn(3, 4, seed=6), factor)
    assert product.shape == tuple(matrix.shape)
    close(product.form(), matrix)
    close(product.square_norm(), matrix.square().sum())
    close(product.dot(other), (matrix * other.form()).sum())
    for value in (product, matrix):
        target = torch.ones(3, columns, dtype=torch.float64)
        as_step(value).add_into(target, 0.5)
        close(target, 1 + 0.5 * matrix)


def test_a_combination_is_the_matrix_it_stands_for_and_leaves_its_parts_alone() -> None:
    given, left, right = randn(3, 7), randn(3, 2, seed=1), randn(2, 7, seed=2)
    before = given.clone()
    combination = Combination(torch.tensor(-0.3, dtype=torch.float64), given, left, right)
    matrix = -0.3 * given + left @ right
    assert combination.shape == (3, 7)
    close(combination.form(), matrix)
    target = torch.ones(3, 7, dtype=torch.float64)
    combination.add_into(target, 0.5)
    close(target, 1 + 0.5 * matrix)
    assert torch.equal(given, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_formed_says_how_large_it_is_and_whether_it_is_finite(bad: float) -> None:
    combination = Combination(
        torch.tensor(-0.3), randn(3, 7).float(), randn(3, 2).float(), randn(2, 7).float()
    )
    product = RowProduct(randn(3, 4).float(), GramFactor(randn(4, 7).float(), torch.full((4,), 0.5)))
    for value in (combination, product, randn(3, 7)):
        assert float(as_step(value).magnitude()) >= float(as_step(value).form().abs().max())
        assert bool(torch.isfinite(as_step(value).checksum()))
    for spoiled in (combination.left, product.coefficients):
        spoiled[1, 1] = bad
    for value in (combination, product, replace(combination, scale=torch.tensor(bad))):
        assert not bool(torch.isfinite(as_step(value).checksum()))


def test_the_norm_of_many_float32_entries_is_good_to_rounding() -> None:
    """torch's own is off by 1e-5 here: all squares are added in a few sums of float32."""
    matrix = randn(1024, 1024).float()
    exact = float(matrix.double().square().sum().sqrt())
    for norm in (frobenius_norm(matrix), DenseFactor(matrix).frobenius_norm()):
        assert float(norm) == pytest.approx(exact, rel=3e-7)


def test_the_norm_of_a_row_product_survives_a_null_space() -> None:
    """Coefficients that cancel: the Gram form of the norm would see rounding of 1e-8 here."""
    h = randn(3, 50).repeat(2, 1)
    factor = GramFactor(h, torch.full((6,), 6**-0.5, dtype=torch.float64))
    half = randn(2, 3, seed=4)
    product = RowProduct(torch.cat([half, 1e-12 - half], dim=1), factor)
    expected = 6**-0.5 * 1e-12 * h[:3].sum(0).norm() * 2**0.5
    assert float(product.square_norm().sqrt()) == pytest.approx(float(expected), rel=1e-2)
