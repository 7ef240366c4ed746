"""Every estimate lies within its error bars as often as it says, and densities have the mass of the spectrum.

Coverage: of 200 seeds at least 98 % within 4 standard errors, and the errors as large as the bars say: rms
error over rms standard error between 0.75 and 1.35, with 12 probes (Hutch++: 18).
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor, nn

import curvlab
from curvlab import Additive
from curvlab.analysis import density as density_module
from curvlab.analysis import similarity as similarity_module
from curvlab.curvature import Curvature
from tests.cases import Case

SEEDS = 200
PROBES = {"hutchinson": 12, "hutch++": 18}


class Residual(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.head(h + self.inner(h).tanh())


class Attention(nn.Module):
    """Self-attention over four tokens of two numbers each, in a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.reshape(len(x), 4, 2))
        return self.head((h + self.attention(h, h, h, need_weights=False)[0]).tanh().mean(1))


MODELS = {
    "fully connected": lambda: nn.Sequential(
        nn.Linear(8, 14), nn.Tanh(), nn.Linear(14, 10), nn.Tanh(), nn.Linear(10, 4)
    ),
    "convolutional": lambda: nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.Tanh(), nn.Conv2d(5, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 5)
    ),
    "residual": Residual,
    "attention": Attention,
}


@cache
def whole_hessian(name: str) -> tuple[Curvature, Tensor]:
    """The Hessian of a network after some training, when outliers stand apart, as an operator and dense."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().double()
        shape = (1, 6, 6) if name == "convolutional" else (8,)
        targets = torch.randint(0, 4, (60,))
        inputs = torch.randn(60, *shape).double() + targets.double().reshape(-1, *(1,) * len(shape)) / 2
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    dense = curvlab.estimate("hessian[full=true]", problem).to_dense()
    dense = (dense + dense.T) / 2
    assert len(dense) * 10 >= 3000
    return curvlab.curvature_from(dense), dense


@cache
def positive_part(name: str) -> tuple[Curvature, Tensor]:
    """The Hessian without its negative eigenvalues: another matrix of the same network."""
    _, dense = whole_hessian(name)
    values, vectors = torch.linalg.eigh(dense)
    positive = (vectors * values.clamp(min=0)) @ vectors.T
    return curvlab.curvature_from(positive), positive


def assert_covered(errors: np.ndarray, bars: np.ndarray) -> None:
    assert (np.abs(errors) <= 4 * bars).mean() >= 0.98
    ratio = np.sqrt(np.mean(errors**2) / np.mean(bars**2))
    assert 0.75 <= ratio <= 1.35, f"errors are {ratio:.2f} times their bars"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("estimator", PROBES)
@pytest.mark.parametrize("measure", ["trace", "frobenius_norm"])
def test_trace_and_norm_lie_within_their_error_bars(name: str, estimator: str, measure: str) -> None:
    curvature, dense = whole_hessian(name)
    true = float(dense.trace() if measure == "trace" else dense.norm())
    ask = getattr(curvature, measure)
    found = [ask(estimator=estimator, probes=PROBES[estimator], seed=seed) for seed in range(SEEDS)]
    assert {one.probes for one in found} == {PROBES[estimator]}
    errors = np.array([float(one) - true for one in found])
    assert_covered(errors, np.array([one.standard_error for one in found]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("estimator", PROBES)
def test_every_entry_of_the_diagonal_lies_within_its_error_bar(name: str, estimator: str) -> None:
    curvature, dense = whole_hessian(name)
    errors, bars = [], []
    for seed in range(SEEDS):
        found = curvature.diagonal(estimator=estimator, probes=PROBES[estimator], seed=seed)
        errors.append(found.value["operator"] - dense.diagonal())
        bars.append(found.standard_error["operator"])
    assert_covered(torch.stack(errors).numpy(), torch.stack(bars).numpy())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("other", ["the positive part", "a damped multiple"])
def test_similarity_by_probes_lies_within_its_error_bars(
    name: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(similarity_module, "DENSE_UP_TO", 0)
    # The eigenspaces, which need no probe, would take most of the time.
    tops = SimpleNamespace(vectors=torch.eye(1, dtype=torch.float64))
    monkeypatch.setattr(similarity_module, "spectrum", lambda *_, **__: tops)
    b, dense_b = whole_hessian(name)
    eye = torch.eye(len(dense_b), dtype=torch.float64)
    a, dense_a = positive_part(name)
    if other == "a damped multiple":
        dense_a = 0.7 * dense_b + 0.05 * eye
        a = curvlab.curvature_from(dense_a)
    true = {
        "distance": float((dense_a - dense_b).norm() / dense_b.norm()),
        "cosine": float((dense_a * dense_b).sum() / dense_a.norm() / dense_b.norm()),
    }
    found = [curvlab.similarity(a, b, k=1, probes=12, seed=seed) for seed in range(SEEDS)]
    for measure, value in true.items():
        estimates = [getattr(one, measure) for one in found]
        assert {one.probes for one in estimates} == {12}
        assert_covered(
            np.array([float(one) - value for one in estimates]),
            np.array([one.standard_error for one in estimates]),
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_log_determinant_lies_within_its_error_bar(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, dense = whole_hessian(name)
    monkeypatch.setattr(curvlab.curvature, "DENSE_OPERATOR_UP_TO", 0)
    curvature = curvlab.curvature_from(dense)
    values = np.linalg.eigvalsh(dense.numpy())
    tau = 0.2 - values[0]
    true = np.log(values + tau).sum()
    found = [curvature.logdet(damping=Additive(tau), probes=12, steps=20, seed=seed) for seed in range(SEEDS)]
    errors = np.array([float(one) - true for one in found])
    assert_covered(errors, np.array([one.standard_error for one in found]))


def test_hutch_is_nearer_than_hutchinson_where_few_eigenvalues_dominate() -> None:
    curvature, _ = whole_hessian("fully connected")
    bars = {
        estimator: np.mean([
            curvature.trace(estimator=estimator, probes=24, seed=seed).standard_error for seed in range(20)
        ])
        for estimator in PROBES
    }  # fmt: skip
    assert bars["hutch++"] < 0.6 * bars["hutchinson"]


def test_estimates_of_a_kronecker_curvature_are_exact_without_a_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fisher = curvlab.estimate("fisher", Case().build()[0])
    monkeypatch.setattr(Curvature, "rows_product", lambda *_: pytest.fail("a product was taken"))
    for measure in ("trace", "frobenius_norm"):
        found = getattr(fisher, measure)(estimator="hutch++", probes=18)
        assert (found.standard_error, found.probes) == (0, 0)
        assert float(found) == pytest.approx(float(getattr(fisher, measure)()))
    diagonal = fisher.diagonal(probes=12)
    assert all(not bool(error.any()) for error in diagonal.standard_error.values())
    assert float(fisher.logdet(damping=Additive(0.1), probes=5)) == pytest.approx(
        float(fisher.logdet(damping=Additive(0.1)))
    )
    assert curvlab.density(fisher).probes == 0


def test_a_frame_estimates_the_trace_of_a_large_matrix_free_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    inputs, targets = torch.randn(30, 60).double(), torch.randint(0, 3, (30,))
    curvature = curvlab.estimate("hessian", curvlab.Problem(model, "cross-entropy", inputs, targets))
    frame = curvature.frame().set_index("block")
    true = float(curvature.blocks["0.weight"].trace())
    row = frame.loc["0.weight"]
    assert row["trace_error"] > 0
    assert abs(row["trace"] - true) < 5 * row["trace_error"]
    assert frame.loc["2.weight", "trace_error"] == 0
    assert frame.loc["2.weight", "trace"] == pytest.approx(float(curvature.blocks["2.weight"].trace()))


def test_to_display_a_curvature_takes_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    curvature = curvlab.estimate("hessian", Case().build()[0])
    monkeypatch.setattr(curvlab.linalg.OperatorBlock, "matmul", lambda *_: pytest.fail("a product was taken"))
    assert "block diagonal by parameter" in repr(curvature)
    assert curvature._repr_html_().count("<tr") == 7


# Densities.


def bulk_distance(density: curvlab.Density, values: np.ndarray) -> tuple[int, float]:
    """The number of outliers, and the distance of the rest from the true one over its standard deviation."""
    top = np.sort(values)[::-1]
    gaps = (top[1:6] - top[2:7]) / top[1:6]
    count = 2 + int(gaps.argmax())
    bulk = top[count:]
    threshold = (top[count - 1] + top[count]) / 2
    nodes, weights = density.nodes.numpy(), density.weights.numpy()
    below = nodes < threshold
    distance = wasserstein_distance(nodes[below], bulk, weights[below])
    return count, distance / bulk.std()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_density_and_its_negative_mass_lie_within_their_error_bars(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, dense = whole_hessian(name)
    monkeypatch.setattr(curvlab.curvature, "DENSE_OPERATOR_UP_TO", 0)
    curvature = curvlab.curvature_from(dense)
    values = np.linalg.eigvalsh(dense.numpy())
    width = (values[-1] - values[0]) / 250
    found = [
        curvlab.density(curvature, probes=12, width=width, points=250, seed=seed) for seed in range(SEEDS)
    ]
    # The share of all eigenvalues at each point, of which a millionth is nothing.
    errors, bars = [], []
    for one in found:
        grid = one.grid.numpy()[:, None]
        true = np.exp(-0.5 * ((grid - values) / width) ** 2).sum(1) / len(values)
        scale = width * np.sqrt(2 * np.pi)
        errors.append(scale * one.density.numpy() - true)
        bars.append(scale * (one.band[1] - one.density).numpy() / 2 + 1e-6)
    assert_covered(np.stack(errors), np.stack(bars))
    assert found[0].negative_from == pytest.approx(-2 * width, rel=1e-3)
    off = np.array([one.negative_mass - (values < one.negative_from).mean() for one in found])
    assert_covered(off, np.array([one.negative_mass_error for one in found]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_density_has_the_outliers_and_the_bulk_of_the_spectrum(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, dense = whole_hessian(name)
    monkeypatch.setattr(curvlab.curvature, "DENSE_OPERATOR_UP_TO", 0)
    curvature = curvlab.curvature_from(dense)
    values = np.linalg.eigvalsh(dense.numpy())
    for seed in range(2):
        found = curvlab.density(curvature, seed=seed)
        count, distance = bulk_distance(found, values)
        assert len(found.outliers) >= 2
        nearest = [np.abs(found.nodes.numpy() - top).min() / top for top in values[::-1][:count]]
        assert max(nearest) < 1e-3
        np.testing.assert_allclose(found.outliers, values[::-1][: len(found.outliers)], rtol=1e-3)
        assert distance < 0.1
        assert float(found.weights.sum()) == pytest.approx(1)
        assert found.ends == pytest.approx((values[0], values[-1]), abs=1e-3 * values[-1])
        mass = float(torch.trapezoid(found.density, found.grid))
        assert mass == pytest.approx(1, abs=1e-3)
        assert bool((found.band[0] <= found.density).all() and (found.band[1] >= found.density).all())
    at_mean = curvlab.Density(
        "all mass at the mean",
        found.grid,
        found.density,
        found.band,
        torch.tensor([values.mean()]),
        torch.ones(1, dtype=torch.float64),
        found.outliers,
        10,
        len(values),
    )
    assert bulk_distance(at_mean, values)[1] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_a_density_misses_outliers_only_with_few_steps_and_makes_up_none(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs without reorthogonalisation find an eigenvalue again and again; none of the copies may hide it."""
    _, dense = whole_hessian(name)
    monkeypatch.setattr(curvlab.curvature, "DENSE_OPERATOR_UP_TO", 0)
    curvature = curvlab.curvature_from(dense.to(dtype))
    values = np.linalg.eigvalsh(dense.numpy())[::-1]
    gaps = (values[1:6] - values[2:7]) / values[1:6]
    truth = 2 + int(gaps.argmax())
    for steps in (4, 10, 20, 30, 40, 50, 60, 70, 80):
        for seed in range(3):
            found = curvlab.density(curvature, probes=2, steps=steps, seed=seed)
            np.testing.assert_allclose(found.outliers, values[: len(found.outliers)], rtol=1e-3)
            assert len(found.outliers) == truth if steps >= 30 else len(found.outliers) <= truth
            assert float(found.weights.sum()) == pytest.approx(1)


@pytest.mark.parametrize("values", [[0.0] * 40, [5.0] * 6 + [1.0] * 94, [3.0] + [0.0] * 59])
def test_a_density_of_few_different_eigenvalues_has_their_shares(
    values: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curvlab.curvature, "DENSE_OPERATOR_UP_TO", 0)
    matrix = torch.diag(torch.tensor(values, dtype=torch.float64))
    found = curvlab.density(curvlab.curvature_from(matrix), probes=50)
    assert float(found.weights.sum()) == pytest.approx(1)
    for value in set(values):
        near = float(found.weights[(found.nodes - value).abs() < 1e-6].sum())
        assert near == pytest.approx(values.count(value) / len(values), abs=0.02)
    assert float(found.outliers[0]) == pytest.approx(values[0])


def test_a_kronecker_density_of_millions_of_eigenvalues_takes_no_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1200, 900), nn.Tanh(), nn.Linear(900, 3))
    problem = curvlab.Problem(model, "cross-entropy", torch.randn(20, 1200), torch.randint(0, 3, (20,)))
    fisher = curvlab.estimate("fisher", problem)
    monkeypatch.setattr(Curvature, "rows_product", lambda *_: pytest.fail("a product was taken"))
    found = curvlab.density(fisher)
    assert found.parameters == fisher.numel > 1_000_000
    assert found.mean * fisher.numel == pytest.approx(float(fisher.trace()), rel=1e-4)
    monkeypatch.undo()
    assert found.ends[1] == pytest.approx(float(curvlab.spectrum(fisher, k=1).eigenvalues[0]), rel=1e-5)


def test_an_exact_density_counts_every_negative_eigenvalue_and_has_no_error() -> None:
    fisher = curvlab.estimate("fisher", Case().build()[0])
    below = curvlab.density(-1e-3 * fisher)
    values = np.linalg.eigvalsh((1e-3 * fisher).to_dense().numpy())
    assert below.probes == 0
    assert below.negative_mass == pytest.approx((values > 1e-10 * values[-1]).mean())
    assert below.negative_mass_error == 0


def test_nodes_on_a_grid_have_the_density_of_the_nodes_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    fisher = curvlab.estimate("fisher", Case().build()[0])
    exact = curvlab.density(fisher)
    values, width = np.linalg.eigvalsh(fisher.to_dense().numpy()), exact.nodes.max().item() / 250
    bumps = np.exp(-0.5 * ((exact.grid.numpy()[:, None] - values) / width) ** 2).mean(1)
    expected = bumps / width / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(exact.density, expected, atol=1e-4 * expected.max())
    monkeypatch.setattr(density_module, "EXACT_UP_TO", 0)
    shared = curvlab.density(fisher)
    np.testing.assert_allclose(shared.density, expected, atol=0.02 * expected.max())


def test_negative_mass_is_the_share_of_negative_eigenvalues() -> None:
    values = torch.tensor([-1.0, -0.5, 0.0, 2.0]).double()
    curvature = curvlab.curvature_from(torch.diag(values))
    assert curvlab.density(curvature).negative_mass == pytest.approx(0.5)
