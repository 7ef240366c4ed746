"""What a curvature knows and shows of itself."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.sparse.linalg import aslinearoperator, cg, eigsh
from torch import Tensor, nn

import curvlab
from curvlab.curvature import Curvature, Definiteness, StaleWarning
from curvlab.exceptions import MatrixFreeError, SpecError, StaleError
from curvlab.linalg import DenseFactor
from curvlab.problem import Problem
from curvlab.providers import PCH, Context, Fisher, GaussNewton, Provider
from curvlab.providers.base import INPUTS, kronecker_layers
from curvlab.providers.statistics import Statistic
from tests.cases import LOSSES, Case, cases

KRONECKER = ["fisher", "fisher[kind=exact]", "gauss-newton", "pch-1", "pch-2", "pch[gamma=-0.5]"]
MATRIX_FREE = ["hessian", "hessian[full=true]", "gauss-newton[kind=exact]"]


# Definiteness.


def smallest(curvature: Curvature) -> tuple[float, float]:
    """The smallest eigenvalue of any block, and the largest absolute one."""
    spectra = [torch.linalg.eigvalsh(block.to_dense()) for block in curvature.blocks.values()]
    return min(float(s[0]) for s in spectra), max(float(s.abs().max()) for s in spectra)


@given(cases(min_layers=2))
def test_what_says_it_is_positive_semi_definite_is(case: Case) -> None:
    problem, _ = case.build()
    names = ["fisher", "pch-1", "pch-2", "gauss-newton", "gauss-newton[kind=exact]", "hessian"]
    for curvature in curvlab.estimate(names, problem):
        low, scale = smallest(curvature)
        assert not curvature.psd or low >= -1e-12 * scale, curvature
        promised = curvature.provider in names[:3] or (
            LOSSES[case.loss].convex and "gauss" in curvature.provider
        )
        assert curvature.psd or not promised, curvature


@pytest.mark.parametrize("provider", ["gauss-newton", "gauss-newton[kind=exact]"])
@pytest.mark.parametrize("loss", ["robust", "wavy function"])
def test_gauss_newton_with_a_criterion_that_is_not_convex_says_it_is_indefinite(
    provider: str, loss: str
) -> None:
    problem, _ = Case(loss=loss, seed=1).build()
    curvature = curvlab.estimate(provider, problem)
    low, scale = smallest(curvature)
    assert low < -1e-3 * scale
    assert not curvature.psd
    assert "indefinite (measured on this data" in str(curvature.definiteness)


@pytest.mark.parametrize("provider", ["gauss-newton", "gauss-newton[kind=exact]"])
def test_a_convex_user_function_is_found_out_from_its_eigenvalues(provider: str) -> None:
    problem, _ = Case(loss="convex function").build()
    assert problem.criterion.convex is None
    assert curvlab.estimate(provider, problem).psd


def test_a_hessian_is_promised_nothing_but_where_it_is_gauss_newton() -> None:
    for activation, loss, full, psd in (
        ("tanh", "cross-entropy", "false", False),
        ("relu", "cross-entropy", "false", True),
        ("relu", "cross-entropy", "true", False),
        ("relu", "robust", "false", False),
    ):
        problem, _ = Case(activation=activation, loss=loss).build()
        assert curvlab.estimate(f"hessian[full={full}]", problem).psd == psd
    single, _ = Case(widths=(4, 3)).build()
    assert curvlab.estimate("hessian[full=true]", single).psd


def test_pch_says_where_it_equals_gauss_newton() -> None:
    for activation, loss, same in (("relu", "mse", True), ("tanh", "mse", False), ("relu", "robust", False)):
        problem, _ = Case(activation=activation, loss=loss).build()
        pch, newton = curvlab.estimate(["pch-1", "gauss-newton"], problem)
        assert any("equals Gauss-Newton" in note for note in pch.notes) == same
        assert not same or torch.allclose(pch.to_dense(), newton.to_dense())


# Staleness.


@pytest.mark.parametrize("name", KRONECKER)
def test_a_kronecker_curvature_warns_once_its_parameters_have_changed(name: str) -> None:
    problem, reference = Case().build()
    curvature = curvlab.estimate(name, problem)
    with torch.no_grad():
        reference.model[0].weight.add_(1)
    with pytest.warns(StaleWarning, match=r"0\.weight changed since .*old parameters"):
        curvature.to_dense()
    with pytest.warns(StaleWarning):
        assert len(curvature.blocks) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repr(curvature)


@pytest.mark.parametrize("name", MATRIX_FREE)
@pytest.mark.parametrize("change", ["inputs", "weight"])
def test_a_matrix_free_curvature_refuses_changed_parameters_and_data(name: str, change: str) -> None:
    problem, reference = Case().build()
    curvature = curvlab.estimate(name, problem)
    gradient = dict(problem.gradient())
    block = curvature.blocks["2.weight"]
    with torch.no_grad():
        (reference.inputs if change == "inputs" else reference.model[0].weight).add_(1)
    with pytest.raises(StaleError, match="changed since"):
        curvature @ gradient
    # A block that was taken out before knows it too.
    for call in (lambda: block @ gradient["2.weight"], block.trace, block.diagonal, block.frobenius_norm):
        with pytest.raises(StaleError, match="changed since"):
            call()


@pytest.mark.parametrize("name", KRONECKER)
def test_overwritten_inputs_are_refused_because_the_input_factor_reads_them(name: str) -> None:
    problem, reference = Case().build()
    curvature = curvlab.estimate(name, problem)
    reference.inputs.add_(1)
    with pytest.raises(StaleError, match="the inputs changed since"):
        curvature.to_dense()


# Forms.


def test_size_guards_say_how_many_bytes_it_would_take() -> None:
    problem, _ = Case(widths=(20, 20, 2)).build()
    curvature = curvlab.estimate("pch-1", problem)
    with pytest.raises(
        MemoryError, match=r"462 × 462 entries and would take 1,707,552 bytes \(limit 1,000,000\)"
    ):
        curvature.to_dense(max_bytes=1_000_000)
    with pytest.raises(MemoryError, match="400 × 400"):
        curvature.blocks["0.weight"].to_dense(max_bytes=1_000_000)
    with pytest.raises(MemoryError, match="would take"):
        curvlab.estimate("hessian[full=true]", problem).to_dense(max_bytes=1000)


@pytest.mark.parametrize("name", [*KRONECKER, *MATRIX_FREE])
def test_scipy_s_solvers_take_it(name: str) -> None:
    problem, _ = Case(seed=4).build()
    curvature = curvlab.estimate(name, problem)
    operator, dense = curvature.to_scipy(), curvature.to_dense().numpy()
    assert operator.shape == dense.shape
    assert operator.dtype == np.float64
    largest = eigsh(operator, k=2, which="LA", return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(largest), np.linalg.eigvalsh(dense)[-2:], rtol=1e-8)
    ones = np.ones(curvature.numel)
    shifted = operator + aslinearoperator(np.eye(curvature.numel) * 5)
    solution, status = cg(shifted, ones, rtol=1e-10)
    assert status == 0
    np.testing.assert_allclose(dense @ solution + 5 * solution, ones, atol=1e-8)


@pytest.mark.parametrize("name", KRONECKER)
def test_another_dtype_is_a_copy_close_by(name: str) -> None:
    problem, _ = Case().build()
    curvature = curvlab.estimate(name, problem)
    single = curvature.to(torch.float32)
    assert single.blocks["0.weight"].to_dense().dtype == torch.float32
    torch.testing.assert_close(single.to_dense().double(), curvature.to_dense(), rtol=1e-5, atol=1e-6)
    assert curvature.blocks["0.bias"].to_dense().dtype == torch.float64


@pytest.mark.parametrize("name", MATRIX_FREE)
def test_a_matrix_free_curvature_says_why_it_cannot_be_moved(name: str) -> None:
    problem, _ = Case().build()
    with pytest.raises(MatrixFreeError, match=r"layer `0` is matrix-free.*estimate again"):
        curvlab.estimate(name, problem).to(torch.float32)


def test_operands_have_the_parameters_names_and_shapes() -> None:
    problem, _ = Case().build()
    curvature, gradient = curvlab.estimate("pch-1", problem), problem.gradient()
    product = curvature @ gradient
    assert {name: v.shape for name, v in product.items()} == {name: v.shape for name, v in gradient.items()}
    with pytest.raises(ValueError, match=r"no entry for \['0.bias'\]"):
        curvature @ {name: value for name, value in gradient.items() if name != "0.bias"}
    with pytest.raises(ValueError, match=r"shape \(3, 4\), the parameter's own.*; got \(4, 3\)"):
        curvature.blocks["0.weight"] @ gradient["0.weight"].T


# How it shows itself.


@pytest.mark.parametrize("name", [*KRONECKER, *MATRIX_FREE])
def test_frame_has_one_row_a_block_with_true_numbers(name: str) -> None:
    problem, _ = Case(loss="robust").build()
    curvature = curvlab.estimate(name, problem)
    frame = curvature.frame().set_index("block")
    assert list(frame.index) == list(curvature.blocks)
    for block_name, row in frame.iterrows():
        dense = curvature.blocks[str(block_name)].to_dense()
        spectrum = torch.linalg.eigvalsh(dense)
        numbers = [row["trace"], row["frobenius_norm"], row["smallest_eigenvalue"], row["largest_eigenvalue"]]
        expected = [dense.trace(), dense.norm(), spectrum[0], spectrum[-1]]
        np.testing.assert_allclose(numbers, [float(e) for e in expected], rtol=1e-9, atol=1e-13)
    assert frame.loc["0.weight", "shape"] == "3×4"
    assert "dense" in frame.loc["0.bias", "form"] or "gram" in frame.loc["0.bias", "form"]


def test_repr_says_what_it_is_and_how_that_is_known() -> None:
    problem, _ = Case(loss="robust").build()
    text = repr(curvlab.estimate("pch-1", problem))
    for part in (
        "pch-1",
        "criterion=robust",
        "6 blocks",
        "53 parameters",
        "approximate",
        "by PosEig",
        "bytes",
    ):
        assert part in text
    assert "exact, indefinite (a Hessian" in repr(curvlab.estimate("hessian", problem))
    page = curvlab.estimate("fisher[kind=exact]", problem)._repr_html_()
    assert "not a likelihood" in page
    assert page.count("<tr") == 7


def test_bytes_count_a_shared_tensor_once() -> None:
    problem, _ = Case(widths=(4, 3, 2), examples=5).build()
    rows, roots = 5 * (4 + 3) + 5 * (3 + 2), 5
    assert curvlab.estimate("fisher", problem).nbytes == 8 * (rows + roots)


# Providers as objects.


@dataclass(frozen=True)
class Scaled(Provider):
    """A provider that nobody registered."""

    scale: float = 1.0

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        return (INPUTS,)

    def curvature(self, context: Context, name: str) -> Curvature:
        def identity(n: int) -> Tensor:
            return self.scale * torch.eye(n, dtype=torch.float64)

        outputs = [DenseFactor(identity(layer.out_features)) for layer in context.layers]
        definiteness = Definiteness(True, "the identity")
        return Curvature(
            name, context.problem.criterion.name, kronecker_layers(context, outputs), definiteness
        )


def test_an_unregistered_provider_works_under_its_class_name() -> None:
    problem, _ = Case().build()
    scaled, pch = curvlab.estimate([Scaled(2.0), PCH(gamma=0.0)], problem)
    assert scaled.provider == "Scaled"
    assert torch.equal(scaled.blocks["0.bias"].to_dense(), 2 * torch.eye(3).double())
    assert pch.provider.startswith("pch[gamma=0")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PCH(gamma=0.5), r"gamma=0.5 must be finite and at most 0"),
        (lambda: PCH(output_gamma=float("nan")), "output_gamma=nan"),
        (lambda: Fisher(samples=0), "samples=0"),
        (lambda: Fisher(kind="true"), "kind='true'"),
        (lambda: GaussNewton(kind="full"), "kind='full'"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(make: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("wrong", [PCH, 3, nn.Linear(1, 1)])
def test_what_is_no_provider_is_refused(wrong: object) -> None:
    problem, _ = Case().build()
    with pytest.raises(SpecError, match="provider"):
        curvlab.estimate(wrong, problem)  # type: ignore[call-overload]
