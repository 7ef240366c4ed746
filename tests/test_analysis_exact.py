"""Functions of a curvature equal those of its dense matrix, for every kind of layer; nothing is estimated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab import Additive, Mixed
from curvlab.exceptions import ArgumentError, IndefiniteError, SpecError
from curvlab.linalg import GramFactor, estimators, krylov
from tests.any_models import CASES, CONVOLUTIONS
from tests.cases import Case

# One network for every form of layer: Kronecker, shared, plain and tied, with and without l2.
NETWORKS = (
    "chain",
    "embedding",
    "layer norm",
    "attention",
    "transformer layer",
    "residual and a layer used twice",
    "language model, tied, with a head bias",
    "class token and positions",
    "l2 of a transformer",
    "class-weighted tokens of unequal lengths",
)
CONVOLUTION = next(iter(CONVOLUTIONS))
PROVIDERS = ("fisher", "gauss-newton[kind=rows]", "fisher[structure=diagonal]", "fisher[sharing=reduce]")
DAMPINGS = {"additive": Additive(0.2), "mixed": Mixed(0.1)}


@pytest.fixture(params=[*NETWORKS, CONVOLUTION])
def network(request: pytest.FixtureRequest) -> curvlab.Problem:
    return CASES[request.param].problem()


def dense_of(curvature: curvlab.Curvature) -> np.ndarray:
    matrix = curvature.to_dense().numpy()
    return (matrix + matrix.T) / 2


def damped(matrix: np.ndarray, damping: Additive | Mixed) -> np.ndarray:
    eye = np.eye(len(matrix))
    if isinstance(damping, Additive):
        return matrix + damping.tau * eye
    return (1 - damping.alpha) * matrix + damping.alpha * eye


def power_of(matrix: np.ndarray, exponent: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * values**exponent) @ vectors.T


def flat(vectors: dict[str, Tensor]) -> np.ndarray:
    return torch.cat([v.flatten() for v in vectors.values()]).numpy()


def random_vectors(curvature: curvlab.Curvature) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn(b.shape, dtype=torch.float64) for name, b in curvature.blocks.items()}


def forbid_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((krylov, "lanczos"), (estimators, "random_signs")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("something was estimated"))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_function_of_a_kronecker_curvature_is_exact(
    network: curvlab.Problem, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    curvature = curvlab.estimate(provider, network)
    dense, vectors = dense_of(curvature), random_vectors(curvature)
    forbid_estimates(monkeypatch)
    values = np.linalg.eigvalsh(dense)
    scale = max(values[-1], 1.0)
    np.testing.assert_allclose(float(curvature.trace()), values.sum(), rtol=1e-9)
    np.testing.assert_allclose(flat(curvature.diagonal()), dense.diagonal(), atol=1e-9 * scale)
    np.testing.assert_allclose(float(curvature.frobenius_norm()), np.linalg.norm(dense), rtol=1e-9)
    for damping in DAMPINGS.values():
        matrix = damped(dense, damping)
        expected = np.linalg.slogdet(matrix)[1]
        np.testing.assert_allclose(float(curvature.logdet(damping=damping)), expected, rtol=1e-9)
        inverse = curvature.inverse(damping=damping) @ vectors
        np.testing.assert_allclose(flat(inverse), np.linalg.solve(matrix, flat(vectors)), atol=1e-9)
        for exponent in (-0.5, 0.5, 2.0):
            found = curvature.power(exponent, damping=damping) @ vectors
            expected_vector = power_of(matrix, exponent) @ flat(vectors)
            np.testing.assert_allclose(flat(found), expected_vector, atol=1e-9 * scale**2)


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_a_kronecker_spectrum_is_that_of_the_whole_matrix(network: curvlab.Problem, which: str) -> None:
    curvature = curvlab.estimate("fisher", network)
    dense = dense_of(curvature)
    found = curvlab.spectrum(curvature, k=7, which=which)
    values = np.linalg.eigvalsh(dense)
    order = {"largest": values[::-1], "smallest": values, "magnitude": values[np.argsort(-abs(values))]}
    np.testing.assert_allclose(found.eigenvalues, order[which][:7], atol=1e-9)
    assert float(found.residuals.max()) < 1e-9
    vectors = np.stack([flat(v) for v in found.eigenvectors])
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(7), atol=1e-9)
    np.testing.assert_allclose(vectors @ dense, found.eigenvalues.numpy()[:, None] * vectors, atol=1e-9)


SAMPLED = ("chain", CONVOLUTION, "residual and a layer used twice", "attention", "language model, tied")


@pytest.mark.parametrize("name", SAMPLED)
def test_samples_have_the_inverse_as_covariance(name: str) -> None:
    curvature = curvlab.estimate("fisher", CASES[name].problem())
    count = 20_000
    draws = curvature.sample(count, damping=Additive(0.5))
    assert {n: tuple(d.shape) for n, d in draws.items()} == {
        n: (count, *b.shape) for n, b in curvature.blocks.items()
    }
    rows = torch.cat([d.reshape(count, -1) for d in draws.values()], 1).numpy()
    expected = np.linalg.inv(damped(dense_of(curvature), Additive(0.5)))
    spread = np.sqrt((np.outer(expected.diagonal(), expected.diagonal()) + expected**2) / count)
    assert np.abs((rows.T @ rows / count - expected) / spread).max() < 5
    again = curvature.sample(3, damping=Additive(0.5), seed=0)
    other = curvature.sample(3, damping=Additive(0.5), seed=1)
    assert all(torch.equal(again[n], curvature.sample(3, damping=Additive(0.5))[n]) for n in again)
    assert not any(torch.equal(again[n], other[n]) for n in again)


@pytest.mark.parametrize("ask", ["logdet", "inverse", "power", "sample"])
def test_a_bare_number_as_damping_is_refused_with_both_spellings(ask: str) -> None:
    problem, _ = Case().build()
    curvature = curvlab.estimate("fisher", problem)
    first = {"power": (-0.5,), "sample": (2,)}.get(ask, ())
    with pytest.raises(SpecError, match=r"Additive\(0\.1\).*Mixed\(0\.1\)"):
        getattr(curvature, ask)(*first, damping=0.1)


INDEFINITE = {
    "hessian by block": lambda: curvlab.estimate("hessian", Case(loss="robust").build()[0]),
    "whole hessian": lambda: curvlab.estimate("hessian[full=true]", Case().build()[0]),
    "negative": lambda: -1 * curvlab.estimate("fisher", Case().build()[0]),
}


@pytest.mark.parametrize("name", INDEFINITE)
@pytest.mark.parametrize("ask", ["logdet", "power", "sample"])
def test_what_needs_a_definite_matrix_is_refused_with_the_smallest_eigenvalue(name: str, ask: str) -> None:
    curvature = INDEFINITE[name]()
    smallest = np.linalg.eigvalsh(dense_of(curvature))[0]
    assert smallest < -1e-4
    first = {"power": (-0.5,), "sample": (2,)}.get(ask, ())
    with pytest.raises(IndefiniteError, match=f"{smallest + 1e-5:.4g}"):
        getattr(curvature, ask)(*first, damping=Additive(1e-5))
    vectors = random_vectors(curvature)
    solved = np.linalg.solve(dense_of(curvature) + 1e-3 * np.eye(len(flat(vectors))), flat(vectors))
    inverse = curvature.inverse(damping=Additive(1e-3)) @ vectors
    np.testing.assert_allclose(flat(inverse), solved, atol=1e-8 * np.abs(solved).max())


def test_a_singular_matrix_has_no_inverse_nor_logdet_without_damping() -> None:
    curvature = curvlab.estimate("fisher", Case(examples=2).build()[0])
    for ask in (curvature.logdet, curvature.inverse):
        with pytest.raises(IndefiniteError, match="larger damping"):
            ask()


def test_a_wide_factor_of_few_rows_is_never_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3000, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    problem = curvlab.Problem(
        model, "cross-entropy", torch.randn(5, 3000).double(), torch.randint(0, 3, (5,))
    )
    curvature = curvlab.estimate("fisher", problem)
    form = GramFactor.to_dense
    monkeypatch.setattr(
        GramFactor, "to_dense", lambda self: pytest.fail("it was formed") if self.narrow else form(self)
    )
    first = curvature.select(["0.weight"])
    inputs, outputs = problem.recording().layers[0].inputs, problem.recording().layers[0].gradients
    a, b = np.linalg.eigvalsh(inputs.gram.numpy()), np.linalg.eigvalsh(outputs.rows.T @ outputs.rows / 5)
    products = np.outer(a, b).flatten()
    zeros = 12_000 - len(products)
    expected = np.log(products + 0.3).sum() + zeros * np.log(0.3)
    np.testing.assert_allclose(float(first.logdet(damping=Additive(0.3))), expected, rtol=1e-9)
    x = torch.randn(4, 3000).double()
    inverse = (first.inverse(damping=Additive(0.3)) @ {"0.weight": x})["0.weight"]
    again = first.blocks["0.weight"] @ inverse + 0.3 * inverse
    np.testing.assert_allclose(again, x, atol=1e-9)
    found = curvlab.density(first)
    assert found.probes == 0
    np.testing.assert_allclose(found.mean, products.sum() / 12_000, rtol=1e-9)


# Algebra.


@pytest.mark.parametrize("name", ["chain", "language model, tied, with a head bias", CONVOLUTION, "l2"])
def test_sums_multiples_and_selections_are_those_of_the_matrices(name: str) -> None:
    network = CASES[name].problem()
    a, b = curvlab.estimate(["fisher", "gauss-newton[kind=rows]"], network)
    whole = curvlab.estimate("hessian[full=true]", network)
    da, db, dw = (one.to_dense() for one in (a, b, whole))
    for made, expected in (
        (a + b, da + db),
        (2 * a, 2 * da),
        (a * 0.5 - b, 0.5 * da - db),
        (a + whole, da + dw),
        (3 * whole, 3 * dw),
    ):
        torch.testing.assert_close(made.to_dense(), expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(made.trace(), expected.trace(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(made.frobenius_norm(), expected.norm(), rtol=1e-9, atol=1e-12)
    expected = np.linalg.slogdet(damped((da + db).numpy(), Additive(0.1)))[1]
    np.testing.assert_allclose(float((a + b).logdet(damping=Additive(0.1))), expected, rtol=1e-9)
    names = list(a.blocks)[::2]
    index = torch.cat(
        [torch.full((block.numel,), name in names) for name, block in a.blocks.items()]
    ).nonzero()[:, 0]
    for one, dense in ((a, da), (whole, dw), (a + b, da + db)):
        selected = one.select(names)
        assert list(selected.blocks) == names
        torch.testing.assert_close(selected.to_dense(), dense[index][:, index], rtol=1e-9, atol=1e-12)


def test_curvatures_of_different_parameters_are_not_added() -> None:
    problem, _ = Case().build()
    fisher = curvlab.estimate("fisher", problem)
    with pytest.raises(ArgumentError, match="different parameters"):
        fisher + fisher.select(["0.weight"])
    with pytest.raises(ArgumentError, match="among"):
        fisher.select(["nothing"])
    with pytest.raises(ArgumentError, match="finite number"):
        fisher * float("nan")


def test_a_scaled_kronecker_curvature_still_goes_with_every_solver() -> None:
    problem, _ = Case().build()
    fisher = curvlab.estimate("fisher", problem)
    for solver in ("kfi", "exact", "ea-cg"):
        found = curvlab.solve(solver, 4.0 * fisher, problem.gradient(), damping=Additive(0.4))
        expected = curvlab.solve(solver, fisher, problem.gradient(), damping=Additive(0.1))
        for name in fisher.blocks:
            torch.testing.assert_close(4 * found.direction[name], expected.direction[name])


def test_several_columns_are_multiplied_at_once() -> None:
    problem, _ = Case().build()
    for provider in ("fisher", "hessian", "hessian[full=true]", "gauss-newton[kind=exact]"):
        curvature = curvlab.estimate(provider, problem)
        columns = torch.randn(curvature.numel, 5, dtype=torch.float64)
        torch.testing.assert_close(curvature.flat_product(columns), curvature.to_dense() @ columns)
