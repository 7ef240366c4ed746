"""The coordinates of the input side: each gives back the gradient, and rounding stays where it belongs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import curvlab
from curvlab.linalg import DenseFactor, GramFactor
from curvlab.linalg.factors import InputFactors
from curvlab.linalg.steps import RowGradient, RowProduct, as_step
from curvlab.solvers.base import DampedSystem, WeightMeasures
from curvlab.solvers.input_coordinates import (
    SPLIT_ELEMENTS,
    DenseCoordinates,
    EigenCoordinates,
    InputCoordinates,
    MeanCoordinates,
    RowCoordinates,
    SampleCoordinates,
    WoodburyCoordinates,
    split_gradient,
)
from tests.solver_cases import assert_close, problem
from tests.test_linalg_factors import randn, roots


def gradient_of(h: Tensor, s: Tensor) -> RowGradient:
    root = roots(len(h)).to(h.dtype)
    return RowGradient(GramFactor(s, root), GramFactor(h, root))


def sides(gradient: RowGradient) -> list[InputCoordinates]:
    inputs = InputFactors(gradient.inputs)
    return [
        SampleCoordinates(gradient.inputs),
        EigenCoordinates(gradient.inputs),
        RowCoordinates(gradient.inputs),
        DenseCoordinates(gradient.inputs),
        MeanCoordinates(inputs, "sample"),
        MeanCoordinates(inputs, "dense"),
    ]


@pytest.mark.parametrize("index", range(6))
def test_coordinates_give_back_the_gradient(index: int) -> None:
    gradient = gradient_of(randn(4, 9), randn(4, 3, seed=1))
    side = sides(gradient)[index]
    coordinates = side.of(gradient)
    assert coordinates.x.shape == (3, side.size)
    assert_close(
        as_step(coordinates.assemble(coordinates.x, lambda y: 1.0 * y)).form(), gradient.form(), 1e-12
    )


@pytest.mark.parametrize("index", range(1, 6))
def test_orthonormal_coordinates_keep_the_norm(index: int) -> None:
    gradient = gradient_of(randn(4, 9), randn(4, 3, seed=1))
    side = sides(gradient)[index]
    coordinates = side.of(gradient)
    square = coordinates.x.square().sum() + (coordinates.perp_norm or torch.zeros(())) ** 2
    assert float(square) == pytest.approx(float(gradient.form().square().sum()), rel=1e-12)


@pytest.mark.parametrize("index", range(6))
def test_the_right_action_of_the_input_factor_is_the_small_matrix(index: int) -> None:
    gradient = gradient_of(randn(4, 9), randn(4, 3, seed=1))
    side = sides(gradient)[index]
    kind = "mean" if isinstance(side, MeanCoordinates) else "full"
    a = InputFactors(gradient.inputs).factor(kind).to_dense()
    assert float(side.trace) == pytest.approx(float(a.trace()), rel=1e-12)
    coordinates = side.of(gradient)
    image = coordinates.assemble(coordinates.x @ side.matrix, lambda y: 0.0 * y)
    assert_close(as_step(image).form(), gradient.form() @ a, 1e-11)
    if side.diagonal is not None:
        assert_close(torch.diag(side.diagonal), side.matrix, 1e-15)


@pytest.mark.parametrize("shift", [1e-3, 1.0])
def test_the_inverse_of_few_rows_is_that_of_the_matrix(shift: float) -> None:
    h = randn(4, 9)
    h[3] = 2 * h[1]  # dependent rows
    gram = GramFactor(h, roots(4))
    side = WoodburyCoordinates(gram)
    expected = torch.linalg.inv(gram.to_dense() + shift * torch.eye(9).double())
    assert_close(side.inverse(shift, check=True)(torch.eye(9).double()), expected, 1e-10)


def test_the_norm_off_the_mean_keeps_its_digits_in_float32() -> None:
    """Inputs that are nearly their mean, as in the last layers of a sigmoid network."""
    h = (0.5 + 1e-4 * randn(20, 300)).float()
    s = randn(20, 3, seed=1).float()
    single = gradient_of(h, s)
    double = gradient_of(h.double(), s.double())
    expected = MeanCoordinates(InputFactors(double.inputs), "dense").of(double).perp_norm
    found = MeanCoordinates(InputFactors(single.inputs), "sample").of(single).perp_norm
    assert expected is not None
    assert found is not None
    assert float(found) == pytest.approx(float(expected), rel=1e-3)
    formed = double.form()
    along = formed @ double.inputs.mean / double.inputs.mean.norm()
    assert float(expected / along.norm()) < 1e-3


@pytest.mark.parametrize("rank", [None, 5])
def test_a_gradient_is_orthogonalised_twice(rank: int | None) -> None:
    """All but a millionth of G lies along the basis: the rounding of one product there is a part of G⊥."""
    n = 20_000
    raw = randn(n, seed=1) * 0.03 + 0.55 if rank is None else randn(n, rank, seed=1) + 3
    basis = (raw / raw.norm() if rank is None else torch.linalg.qr(raw).Q).float()
    exact = torch.linalg.qr(basis.double().reshape(n, -1)).Q
    along = randn(16, exact.shape[1], seed=2) @ exact.T
    outside = randn(16, n, seed=3)
    outside -= outside @ exact @ exact.T
    gradient = (along + outside * (1e-6 * along.norm() / outside.norm())).float()
    expected = gradient.double() - gradient.double() @ exact @ exact.T
    x, norm = split_gradient(gradient, basis)
    assert float(norm) == pytest.approx(float(expected.norm()), rel=5e-3)
    assert_close(x.double().reshape(16, -1) @ basis.double().reshape(n, -1).T, along, 2e-6)


@pytest.mark.parametrize("share", [1.0, 0.9, 0.5, 0.1, 1e-4])
@pytest.mark.parametrize("rank", [None, 3])
def test_a_large_gradient_is_split_whatever_its_share_along_the_basis(rank: int | None, share: float) -> None:
    """‖G‖² - ‖GQ‖² loses digits as the share of G⊥ falls: it must not be what is returned then."""
    rows, n = 300, 1000
    assert rows * n > SPLIT_ELEMENTS
    exact = torch.linalg.qr(randn(n, rank or 1, seed=1)).Q
    along = randn(rows, exact.shape[1], seed=2) @ exact.T
    outside = randn(rows, n, seed=3)
    outside -= outside @ exact @ exact.T
    gradient = (along * (1 - share**2) ** 0.5 / along.norm() + outside * share / outside.norm()).float()
    basis = (exact[:, 0] if rank is None else exact).float()
    x, norm = split_gradient(gradient, basis)
    assert float(norm) == pytest.approx(share, rel=2e-6 + 1e-7 / share)
    assert float((x.double().reshape(rows, -1) - gradient.double() @ exact).norm()) < 1e-6


def nearly_repeated() -> tuple[RowGradient, curvlab.Curvature]:
    """Two rows 1e-9 apart with opposite gradients: all of G lies where the Gram matrix has only rounding."""
    first, apart = randn(1, 9), randn(1, 9, seed=1)
    h = torch.cat([first, first + 1e-9 * apart])
    s = torch.cat([torch.ones(1, 3), -torch.ones(1, 3)]).double()
    root = torch.full((2,), 0.5**0.5, dtype=torch.float64)
    gradient = RowGradient(GramFactor(s, root), GramFactor(h, root))
    layer = curvlab.LayerCurvature(
        "0", "0.weight", None, DenseFactor(torch.eye(3, dtype=torch.float64)), InputFactors(gradient.inputs)
    )
    definiteness = curvlab.Definiteness(True, "made so")
    return gradient, curvlab.Curvature("mine", "none", (layer,), definiteness)


@pytest.mark.parametrize("solver", ["cg", "kfi", "exact"])
def test_a_gradient_in_the_rounding_of_the_gram_matrix_is_not_lost(solver: str) -> None:
    gradient, curvature = nearly_repeated()
    given = curvlab.Gradient({"0.weight": gradient})
    step = curvlab.solve(f"{solver}[route=sample]", curvature, given, alpha=0.1).direction["0.weight"]
    dense = curvlab.solve(f"{solver}[route=dense]", curvature, given, alpha=0.1).direction["0.weight"]
    assert float(step.norm()) > 1e-9
    assert_close(step, dense, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eigenvalues_that_are_rounding_act_as_zero(dtype: torch.dtype) -> None:
    """Left as they are, they give the system eigenvalues it does not have, and CG iterations for them."""
    rows = randn(3, 40).repeat(10, 1).to(dtype)
    gradient = gradient_of(rows, randn(30, 4, seed=2).to(dtype))
    values = torch.linalg.eigvalsh(gradient.inputs.gram)
    assert int((values > 0).sum()) > 3
    side = EigenCoordinates(gradient.inputs)
    assert int((side.diagonal != 0).sum()) == 3
    assert not side.of(gradient).x[:, side.diagonal == 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_rows_cost_cg_no_digits(dtype: torch.dtype) -> None:
    """In the metric of the Gram matrix CG would stop at the root of the rounding unit."""
    half = randn(3, 40)
    root = torch.full((6,), 6**-0.5, dtype=torch.float64)
    s = randn(6, 5, seed=2)
    s[3:] = 0.05 * randn(3, 5, seed=3) - s[:3]

    def solution(kind: torch.dtype, route: str) -> curvlab.Solution:
        gradient = RowGradient(
            GramFactor(s.to(kind), root.to(kind)), GramFactor(half.repeat(2, 1).to(kind), root.to(kind))
        )
        b = torch.diag(torch.logspace(-2, 0, 5, dtype=torch.float64)).to(kind)
        layer = curvlab.LayerCurvature("0", "0.weight", None, DenseFactor(b), InputFactors(gradient.inputs))
        curvature = curvlab.Curvature("mine", "none", (layer,), curvlab.Definiteness(True, "made so"))
        given = curvlab.Gradient({"0.weight": gradient})
        return curvlab.solve(f"cg[max_iter=60,tol=1e-13,route={route}]", curvature, given, alpha=0.01)

    expected = solution(torch.float64, "dense").direction["0.weight"]
    found = solution(dtype, "sample")
    eps = torch.finfo(dtype).eps
    assert_close(found.direction["0.weight"].double(), expected, 1e4 * eps)
    assert found.blocks["0.weight"].residual < 1e5 * eps


def test_a_residual_is_no_larger_for_coefficients_that_mean_nothing() -> None:
    """Of repeated rows, coefficients that cancel add nothing to a step, and nothing to its residual."""
    p = problem(widths=(12, 5, 3), inputs=randn(3, 12).repeat(2, 1))
    curvature, gradient = curvlab.estimate("pch-1", p), p.gradient()
    solution = curvlab.solve("exact[route=sample]", curvature, gradient, alpha=0.1)
    step = solution.direction.factored("0.weight")
    assert isinstance(step, RowProduct)
    nothing = 100 * randn(5, 3, seed=1)
    moved = RowProduct(step.coefficients + torch.cat([nothing, -nothing], dim=1), step.gram)
    layer, entry = curvature.layers[0], gradient.factored("0.weight")
    system, damping = DampedSystem("full", 0.9, 0.1), curvlab.Mixed(0.1)
    assert float(WeightMeasures(system, layer, step, entry, damping).residual()) < 1e-12
    assert float(WeightMeasures(system, layer, moved, entry, damping).residual()) < 1e-9


def test_the_norm_off_the_mean_is_computed_only_where_it_is_wanted() -> None:
    gradient = gradient_of(randn(4, 9), randn(4, 3, seed=1))
    for route in ("sample", "dense"):
        side = MeanCoordinates(InputFactors(gradient.inputs), route, norm=False)
        coordinates = side.of(gradient)
        assert coordinates.perp_norm is None
        step = coordinates.assemble(coordinates.x, lambda y: 1.0 * y)
        assert_close(as_step(step).form(), gradient.form(), 1e-12)
    assert "centred_gram" not in vars(gradient.inputs)
