"""Failures are never masked: not positive definite, NaN, overflow, each with the layer's name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import curvlab
from curvlab.exceptions import SolveError
from curvlab.linalg import DenseFactor, Factor
from curvlab.linalg.factors import InputFactors
from curvlab.linalg.inverse import cholesky_shifted
from tests.solver_cases import SOLVERS, WIDE, WITH_EXPLICIT, problem

REDUCED = [*SOLVERS, *(f"{solver}[formulation=explicit]" for solver in WITH_EXPLICIT)]


def with_output(curvature: curvlab.Curvature, index: int, output: Factor) -> curvlab.Curvature:
    layers = list(curvature.layers)
    layers[index] = replace(layers[index], output=output)
    return replace(curvature, layers=tuple(layers))


def spoiled(curvature: curvlab.Curvature, index: int, value: float) -> curvlab.Curvature:
    output = curvature.layers[index].output
    assert output is not None
    matrix = output.to_dense().clone()
    matrix[0, 1] = matrix[1, 0] = value
    return with_output(curvature, index, DenseFactor(matrix))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "solver", ["kfi", "sm-kfi", "kfi[formulation=explicit]", "sm-kfi[formulation=explicit]"]
)
def test_an_indefinite_factor_is_raised_with_layer_eigenvalue_and_advice(
    solver: str, dtype: torch.dtype
) -> None:
    p = problem(**WIDE, dtype=dtype)
    turned = torch.linalg.qr(torch.randn(9, 9, dtype=dtype)).Q
    matrix = turned @ torch.diag(torch.linspace(-3.0, 2.0, 9, dtype=dtype)) @ turned.T
    curvature = with_output(curvlab.estimate("pch-1", p), 1, DenseFactor(matrix))
    with pytest.raises(SolveError) as caught:
        curvlab.solve(solver, curvature, p.gradient(), damping=curvlab.Additive(1.0))
    sentence = str(caught.value)
    assert sentence.startswith("layer `2`: the damped factor of `pch-1` is not positive definite")
    assert "smallest eigenvalue -" in sentence
    assert "Increase the damping" in sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("solver", REDUCED)
def test_a_curvature_that_is_not_finite_is_caught_with_the_layers_name(solver: str, value: float) -> None:
    p = problem(**WIDE)
    curvature = spoiled(curvlab.estimate("pch-1", p), 1, value)
    with pytest.raises(SolveError, match=r"layer `2`.*(NaN or infinity|not finite)"):
        curvlab.solve(solver, curvature, p.gradient(), alpha=0.1)


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("solver", ["cg", "ea-cg"])
def test_a_nan_is_caught_after_any_number_of_iterations(solver: str, iterations: int) -> None:
    p = problem(**WIDE)
    curvature = spoiled(curvlab.estimate("pch-1", p), 0, float("nan"))
    with pytest.raises(SolveError, match="curvature of layer `0` by `pch-1` holds NaN"):
        curvlab.solve(f"{solver}[max_iter={iterations}]", curvature, p.gradient(), alpha=0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("solver", [*SOLVERS, "cg[max_iter=0]", "ea-cg[max_iter=0]"])
@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
def test_a_gradient_that_is_not_finite_is_caught_by_name(solver: str, name: str, value: float) -> None:
    p = problem(**WIDE)
    gradient = {key: entry.clone() for key, entry in p.gradient().items()}
    gradient[name].view(-1)[0] = value
    with pytest.raises(SolveError, match=f"the gradient of .*{name}.* holds NaN or infinity"):
        curvlab.solve(solver, curvlab.estimate("pch-1", p), gradient, alpha=0.1)


def test_a_gradient_in_factors_that_is_not_finite_is_caught_without_a_bias_too() -> None:
    p = problem(**WIDE, bias=False)
    gradient = p.gradient()
    entry = gradient.factored("2.weight")
    assert not isinstance(entry, Tensor)
    entry.gradients.rows[0, 0] = float("nan")
    with pytest.raises(SolveError, match=r"2\.weight"):
        curvlab.solve("kfi", curvlab.estimate("pch-1", problem(**WIDE, bias=False)), gradient, alpha=0.1)


def test_a_hessian_product_that_is_not_finite_is_caught() -> None:
    p = problem(**WIDE)
    curvature = curvlab.estimate("hessian", p)
    layers = list(curvature.layers)
    spoilt = replace(layers[0].blocks["0.weight"], product=lambda x: x * float("nan"))
    layers[0] = replace(layers[0], operators=layers[0].blocks | {"0.weight": spoilt})
    with pytest.raises(SolveError, match="layer `0`"):
        curvlab.solve("cg", replace(curvature, layers=tuple(layers)), p.gradient(), alpha=0.1)


def test_exact_refuses_an_indefinite_matrix_that_was_said_to_be_definite() -> None:
    p = problem(**WIDE)
    matrix = torch.diag(torch.linspace(-3, 2, WIDE["widths"][2], dtype=torch.float64))
    curvature = with_output(curvlab.estimate("pch-1", p), 1, DenseFactor(matrix))
    with pytest.raises(SolveError, match="layer `2`: the damped factor of `pch-1` is not positive definite"):
        curvlab.solve("exact", curvature, p.gradient(), damping=curvlab.Additive(1.0))


def test_the_retry_in_float64_has_the_shift_that_float32_lost() -> None:
    lower = cholesky_shifted(torch.ones(2, 2), 2e-8)
    assert bool(torch.isfinite(lower).all())
    assert float(lower[1, 1]) == pytest.approx((4e-8) ** 0.5, rel=1e-3)


def test_infinity_in_a_dense_input_factor_is_caught_in_the_explicit_form() -> None:
    p = problem(**WIDE)
    curvature = curvlab.estimate("pch-1", p)
    layers = list(curvature.layers)
    dense = layers[0].inputs.full.to_dense().clone()
    dense[0, 0] = float("inf")
    layers[0] = replace(layers[0], inputs=InputFactors(DenseFactor(dense), layers[0].inputs.mean))
    spoilt = replace(curvature, layers=tuple(layers))
    with pytest.raises(SolveError, match=r"layer `0`.*NaN or infinity"):
        curvlab.solve("kfi[formulation=explicit,pi=1.0]", spoilt, p.gradient(), alpha=0.1)
