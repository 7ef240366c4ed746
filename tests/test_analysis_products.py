"""Spectra, functions and comparisons of matrix-free curvatures, by products alone, against dense matrices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor, nn

import curvlab
from curvlab import Additive, curvature
from curvlab.exceptions import ArgumentError, IndefiniteError, SpecError, StaleError
from curvlab.linalg import eigenbases, estimators, krylov
from curvlab.measure.memory import peak_bytes
from curvlab.model.network import Network
from tests.any_models import CASES, CONVOLUTIONS
from tests.cases import Case

CONVOLUTION = next(iter(CONVOLUTIONS))
NETWORKS = ("chain", CONVOLUTION, "residual and a layer used twice", "attention without bias")
TERMS = ("class-weighted tokens of unequal lengths", "weighted tokens with classes first", "mse", "bce")


@pytest.fixture
def by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix is small enough to be formed."""
    monkeypatch.setattr(curvature, "DENSE_OPERATOR_UP_TO", 0)
    monkeypatch.setattr(eigenbases, "DENSE_OPERATOR_UP_TO", 0)


def in_order(found: curvlab.Curvature, matrix: Tensor, names: list[str]) -> np.ndarray:
    """A reference's matrix with its parameters in the order of the curvature's blocks."""
    sizes = {name: found.blocks[name].numel for name in names}
    starts = dict(zip(names, np.cumsum([0, *sizes.values()]), strict=False))
    index = np.concatenate([np.arange(starts[n], starts[n] + sizes[n]) for n in found.blocks])
    return matrix.numpy()[np.ix_(index, index)]


def flat(vectors: dict[str, Tensor]) -> np.ndarray:
    return torch.cat([v.flatten() for v in vectors.values()]).numpy()


@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize("name", NETWORKS)
def test_the_spectrum_of_a_problem_is_that_of_its_whole_hessian(name: str) -> None:
    case = CASES[name]
    problem, reference = case.problem(), case.reference()
    whole = curvlab.estimate("hessian[full=true]", problem)
    dense = in_order(whole, reference.full_hessian(), list(reference.parameters))
    values, _ = np.linalg.eigh(dense)
    for which, expected in (("largest", values[::-1]), ("smallest", values)):
        found = curvlab.spectrum(problem, k=5, which=which)
        np.testing.assert_allclose(found.eigenvalues, expected[:5], atol=1e-9)
        vectors = np.stack([flat(v) for v in found.eigenvectors])
        np.testing.assert_allclose(vectors @ vectors.T, np.eye(5), atol=1e-9)
        true = np.linalg.norm(vectors @ dense - found.eigenvalues.numpy()[:, None] * vectors, axis=1)
        np.testing.assert_allclose(found.residuals, true, atol=1e-9)
        assert float(true.max()) < 1e-8 * np.abs(values).max()
        assert found.status is curvlab.Status.CONVERGED
        assert list(found.frame()) == ["number", "eigenvalue", "residual", "status"]


@pytest.mark.usefixtures("by_products")
def test_block_eigenvalues_are_not_those_of_the_whole_matrix() -> None:
    problem, _ = Case().build()
    whole = curvlab.estimate("hessian[full=true]", problem)
    by_block = max(float(values[-1]) for values in whole.eigvalsh().values())
    top = float(curvlab.spectrum(whole, k=1).eigenvalues[0])
    assert top == pytest.approx(float(torch.linalg.eigvalsh(whole.to_dense())[-1]), abs=1e-9)
    assert top > by_block + 1e-3
    assert "cross-layer blocks included" in repr(whole)
    assert "block diagonal by parameter" in repr(curvlab.estimate("hessian", problem))
    assert set(whole.frame()["structure"]) == {"full"}


@pytest.mark.usefixtures("by_products")
def test_a_spectrum_by_layer_is_that_of_each_layers_own_block() -> None:
    problem, _ = Case().build()
    whole = curvlab.estimate("hessian[full=true]", problem)
    found = curvlab.spectrum(whole, k=3, by="layer")
    for layer in whole.layers:
        dense = whole.select([layer.name]).to_dense()
        expected = torch.linalg.eigvalsh(dense).flip(0)[:3]
        torch.testing.assert_close(found[layer.name].eigenvalues, expected, atol=1e-9, rtol=0)
    assert list(found.frame()["layer"].unique()) == [layer.name for layer in whole.layers]


def test_a_search_that_ends_early_says_so() -> None:
    torch.manual_seed(0)
    operator = aslinearoperator(np.diag(np.linspace(1, 2, 2000)))
    found = curvlab.spectrum(curvlab.curvature_from(operator), k=4, max_products=30)
    assert found.status is curvlab.Status.ITERATION_LIMIT
    assert float(found.residuals.max()) > 1e-8


@pytest.mark.parametrize("room", [0, krylov.SPACE_BYTES])
def test_many_pairs_and_repeated_eigenvalues_are_found_with_and_without_restarts(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(krylov, "SPACE_BYTES", room)
    rng = np.random.default_rng(0)
    values = np.concatenate([np.repeat([5.0, 4.0], 2), np.linspace(0, 3, 896)])
    basis, _ = np.linalg.qr(rng.standard_normal((900, 900)))
    operator = aslinearoperator((basis * values) @ basis.T)
    found = curvlab.spectrum(curvlab.curvature_from(operator), k=30)
    np.testing.assert_allclose(found.eigenvalues, np.sort(values)[::-1][:30], atol=1e-9)
    assert float(found.residuals.max()) < 1e-8


@pytest.mark.parametrize("name", [*NETWORKS, "l2", "l2 of a transformer", *TERMS])
@pytest.mark.parametrize("form", ["one batch", "a stream"])
def test_several_products_at_once_are_those_of_the_dense_matrix(name: str, form: str) -> None:
    case = CASES[name]
    problem, reference = case.problem(), case.reference()
    if form == "a stream":
        batch = next(problem.batches())
        problem = problem.with_data([(batch.inputs, batch.targets)])
    whole = curvlab.estimate("hessian[full=true]", problem)
    dense = in_order(whole, reference.full_hessian(), list(reference.parameters))
    columns = torch.randn(whole.numel, 19, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    np.testing.assert_allclose(whole.flat_product(columns), dense @ columns.numpy(), atol=1e-9)
    gauss_newton = curvlab.estimate("gauss-newton[kind=exact,structure=full]", problem)
    both = 2 * whole + gauss_newton
    one_by_one = torch.stack([both.flat_product(column) for column in columns.T[:3]], dim=1)
    torch.testing.assert_close(both.flat_product(columns[:, :3]), one_by_one, atol=1e-10, rtol=1e-9)
    chosen = [*whole.blocks][:2]
    part = both.select(chosen)
    sizes = [block.numel for block in whole.blocks.values()]
    inside = torch.zeros_like(columns[:, :3])
    inside[: sum(sizes[:2])] = columns[: part.numel, :3]
    expected = both.flat_product(inside)[: part.numel]
    torch.testing.assert_close(part.flat_product(columns[: part.numel, :3]), expected, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("name", ["chain", "residual and a layer used twice"])
def test_a_stream_runs_its_model_once_for_several_products(name: str) -> None:
    problem = CASES[name].problem()
    batch = next(problem.batches())
    problem = problem.with_data([(batch.inputs, batch.targets)])
    calls: list[int] = []
    problem.model.register_forward_hook(lambda *_: calls.append(1))
    whole = curvlab.estimate("hessian[full=true]", problem)
    columns = torch.ones(whole.numel, 7, dtype=torch.float64)
    whole.flat_product(columns)  # the first counts the stream's weight, too
    calls.clear()
    whole.flat_product(columns)
    assert len(calls) == 1


def test_bias_blocks_of_the_whole_hessian_are_those_of_the_dense_matrix() -> None:
    case = CASES["chain"]
    problem, reference = case.problem(), case.reference()
    batch = next(problem.batches())
    for given in (problem, problem.with_data([(batch.inputs, batch.targets)])):
        whole = curvlab.estimate("hessian[structure=full]", given)
        dense = in_order(whole, reference.full_hessian(), list(reference.parameters))
        start = 0
        for name, block in whole.blocks.items():
            own = dense[start : start + block.numel, start : start + block.numel]
            start += block.numel
            if not name.endswith("bias"):
                continue
            np.testing.assert_allclose(block.to_dense(), own, atol=1e-10)
            np.testing.assert_allclose(block.diagonal(), np.diag(own), atol=1e-10)
            np.testing.assert_allclose(block.trace(), np.trace(own), atol=1e-10)
            np.testing.assert_allclose(block.frobenius_norm(), np.linalg.norm(own), atol=1e-10)
            np.testing.assert_allclose(block.eigvalsh(), np.linalg.eigvalsh(own), atol=1e-10)


@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize("name", ["chain", "residual and a layer used twice"])
def test_an_analysis_asks_once_whether_the_model_has_changed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = CASES[name].problem()
    whole = curvlab.estimate("hessian[structure=full]", problem)
    asked: list[int] = []
    original = Network.check_unchanged
    monkeypatch.setattr(Network, "check_unchanged", lambda self: (asked.append(1), original(self)))
    for analysis in (lambda: curvlab.spectrum(whole, k=2), lambda: curvlab.density(whole, 2, 10)):
        whole.rows_product(torch.ones(1, whole.numel, dtype=torch.float64))  # the batch is recorded
        asked.clear()
        analysis()
        assert len(asked) == 1
    asked.clear()
    whole.rows_product(torch.ones(1, whole.numel, dtype=torch.float64))
    whole.rows_product(torch.ones(1, whole.numel, dtype=torch.float64))
    assert len(asked) == 2
    with torch.no_grad():
        next(problem.model.parameters()).add_(1)
    with pytest.raises(StaleError):
        curvlab.spectrum(whole, k=2)


def test_a_search_leaves_an_operator_that_hands_out_its_operand_alone() -> None:
    """Vectors are worked on in place, but never those that a product has given."""
    found = krylov.eigenpairs(
        lambda x: x, 40, 3, "largest", like=torch.empty(0).double(), tol=1e-10, max_products=60
    )
    torch.testing.assert_close(found.values, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(found.vectors @ found.vectors.T, torch.eye(3, dtype=torch.float64))
    starts = torch.randn(2, 40, dtype=torch.float64)
    before = starts.clone()
    nodes, weights = krylov.quadrature(krylov.lanczos(lambda x: x, starts, 3, keep=False))
    torch.testing.assert_close((nodes * weights).sum(1), torch.ones(2, dtype=torch.float64))
    assert torch.equal(starts, before)


def test_what_is_drawn_piece_by_piece_is_what_one_call_of_torch_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(estimators, "PIECE", 64)
    for count, size in ((1, 3), (2, 9), (1, 64), (1, 65), (1, 79), (1, 80), (3, 67), (4, 100)):
        for dtype in (torch.float32, torch.float64):
            like = torch.empty(0, dtype=dtype)
            generator = torch.Generator().manual_seed(5)
            normal = torch.randn(count, size, generator=generator, dtype=torch.float64).to(dtype)
            assert torch.equal(estimators.gaussian_rows(count, size, like, 5), normal)
            generator = torch.Generator().manual_seed(5)
            bits = torch.randint(0, 2, (count, size), generator=generator, dtype=torch.int8)
            assert torch.equal(estimators.random_signs(count, size, like, 5), (2 * bits - 1).to(dtype))


def test_analyses_hold_few_vectors_of_all_parameters_beside_those_they_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is new at every product is asked of the system each time, which took half of a large one."""
    monkeypatch.setattr(estimators, "PIECE", 2**10)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 3))
    problem = curvlab.Problem(model, "cross-entropy", torch.randn(4, 300), torch.tensor([0, 1, 2, 0]))
    whole = curvlab.estimate("hessian[structure=full]", problem)
    start = torch.ones(1, whole.numel)
    whole.rows_product(start)  # what is kept from product to product

    def vectors(function: Callable[[], object]) -> float:
        return peak_bytes(function, device="cpu") / (4 * whole.numel)

    assert vectors(lambda: whole.rows_product(start)) < 1.1  # the image
    without_basis = vectors(lambda: krylov.lanczos(whole.rows_product, start, 6, keep=False))
    assert without_basis < 3 + 0.1  # two vectors and the image
    basis = krylov.SPACE + 2 + 1
    assert vectors(lambda: curvlab.spectrum(whole, 2, max_products=15, tol=0.0)) < basis + 4 + 0.5
    assert vectors(lambda: whole.trace(probes=8)) < 2 * 8 + 0.5  # signs and images


@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize("name", NETWORKS)
def test_inverse_power_and_samples_of_an_operator_are_those_of_its_matrix(name: str) -> None:
    problem = CASES[name].problem()
    matrix = curvlab.estimate("gauss-newton[kind=exact,structure=full]", problem)
    dense = matrix.to_dense().numpy() + 0.3 * np.eye(matrix.numel)
    values, vectors = np.linalg.eigh(dense)
    torch.manual_seed(1)
    x = {n: torch.randn(b.shape, dtype=torch.float64) for n, b in matrix.blocks.items()}
    damping = Additive(0.3)
    np.testing.assert_allclose(
        flat(matrix.inverse(damping=damping) @ x), np.linalg.solve(dense, flat(x)), atol=1e-9
    )
    for exponent in (-0.5, 0.5):
        expected = (vectors * values**exponent) @ vectors.T @ flat(x)
        np.testing.assert_allclose(flat(matrix.power(exponent, damping=damping) @ x), expected, atol=1e-9)
    draws = matrix.sample(3, damping=damping)
    rows = torch.cat([d.reshape(3, -1) for d in draws.values()], 1).numpy()
    normal = rows @ ((vectors * values**0.5) @ vectors.T)
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(3, matrix.numel, generator=generator, dtype=torch.float64)
    np.testing.assert_allclose(normal, expected, atol=1e-9)


@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize("ask", ["logdet", "power", "sample"])
def test_an_indefinite_operator_is_refused_with_its_smallest_eigenvalue(ask: str) -> None:
    problem, _ = Case().build()
    whole = curvlab.estimate("hessian[full=true]", problem)
    smallest = float(torch.linalg.eigvalsh(whole.to_dense())[0])
    damping = Additive(-0.5 * smallest)
    x = {n: torch.ones(b.shape, dtype=torch.float64) for n, b in whole.blocks.items()}
    asked: dict[str, Callable[[], object]] = {
        "logdet": lambda: whole.logdet(damping=damping),
        "power": lambda: whole.power(-0.5, damping=damping) @ x,
        "sample": lambda: whole.sample(2, damping=damping),
    }
    with pytest.raises(IndefiniteError, match=f"{0.5 * smallest:.2g}"[:5]):
        asked[ask]()


# The Fisher matrix itself, and the gradients that it is of.


@pytest.mark.parametrize("name", [*NETWORKS, *TERMS])
@pytest.mark.parametrize("kind", ["empirical", "exact"])
def test_the_whole_fisher_is_the_second_moment_of_its_columns(name: str, kind: str) -> None:
    case = CASES[name]
    problem, reference = case.problem(), case.reference()
    found = curvlab.estimate(f"fisher[structure=full,kind={kind}]", problem)
    total = reference.l2 * torch.eye(found.numel, dtype=torch.float64)
    for i, share in reference.counted:
        logits = reference.forward(i)
        for column in reference.columns(kind, i):
            row = reference._flat_gradient((logits.flatten() * column.flatten()).sum())
            total += share * torch.outer(row, row)
    expected = in_order(found, total, list(reference.parameters))
    np.testing.assert_allclose(found.to_dense(), expected, atol=1e-9 * np.abs(expected).max())
    np.testing.assert_allclose(flat(found.diagonal()), expected.diagonal(), atol=1e-9 * expected.max())
    np.testing.assert_allclose(float(found.trace()), expected.trace(), rtol=1e-9)


@pytest.mark.parametrize("name", ["chain", "class-weighted tokens of unequal lengths"])
def test_the_drawn_fisher_has_the_draws_of_the_kronecker_one(name: str) -> None:
    problem = CASES[name].problem()
    spec = "kind=mc,samples=3,seed=5"
    whole, kronecker, diagonal = curvlab.estimate(
        [f"fisher[structure=full,{spec}]", f"fisher[{spec}]", f"fisher[structure=diagonal,{spec}]"], problem
    )
    biases = [block for block in whole.blocks if block.endswith("bias")]
    assert biases
    for name_of_block in biases:
        expected = kronecker.blocks[name_of_block].to_dense()
        torch.testing.assert_close(whole.blocks[name_of_block].to_dense(), expected)
    torch.testing.assert_close(whole.diagonal(), diagonal.diagonal())
    torch.testing.assert_close(
        torch.cat([d.flatten() for d in whole.diagonal().values()]), whole.to_dense().diagonal()
    )


def test_the_whole_fisher_of_a_stream_is_that_of_its_batch() -> None:
    problem, _ = Case(examples=7).build()
    batch = next(problem.batches())
    stream = problem.with_data([(batch.inputs[:3], batch.targets[:3]), (batch.inputs[3:], batch.targets[3:])])
    for spec in ("fisher[structure=full]", "hessian[full=true]"):
        one, other = curvlab.estimate(spec, problem), curvlab.estimate(spec, stream)
        torch.testing.assert_close(other.to_dense(), one.to_dense())
        torch.testing.assert_close(
            curvlab.spectrum(other, k=3).eigenvalues, curvlab.spectrum(one, k=3).eigenvalues
        )


def test_the_whole_fisher_goes_with_conjugate_gradients() -> None:
    problem, _ = Case().build()
    found = curvlab.estimate("fisher[structure=full]", problem)
    solution = curvlab.solve("cg[max_iter=200,tol=1e-12]", found, problem.gradient(), damping=Additive(0.1))
    g = flat({n: problem.gradient()[n] for n in found.blocks})
    expected = -np.linalg.solve(found.to_dense().numpy() + 0.1 * np.eye(found.numel), g)
    np.testing.assert_allclose(flat({n: solution.direction[n] for n in found.blocks}), expected, atol=1e-8)


@pytest.mark.parametrize("name", [*NETWORKS, *TERMS, "an ignored example"])
def test_per_example_gradients_are_those_of_autograd(name: str) -> None:
    case = CASES[name]
    problem, reference = case.problem(), case.reference()
    found = problem.per_example_gradients()
    expected = {
        n: torch.zeros(reference.examples, *p.shape).double() for n, p in reference.parameters.items()
    }
    for i, _ in reference.counted:
        loss = reference.example_loss(i, reference.forward(i))
        grads = torch.autograd.grad(loss, list(reference.parameters.values()), allow_unused=True)
        for key, g in zip(reference.parameters, grads, strict=True):
            expected[key][i] = 0 if g is None else g
    assert set(found) == set(expected)
    for key, rows in found.items():
        torch.testing.assert_close(rows, expected[key], atol=1e-10, rtol=1e-9)


# Comparisons.


def test_similarity_is_that_of_the_dense_matrices() -> None:
    problem = CASES["l2 of a transformer"].problem()
    a, b = curvlab.estimate(["fisher", "gauss-newton[kind=rows]"], problem)
    da, db = a.to_dense().numpy(), b.to_dense().numpy()
    found = curvlab.similarity(a, b, k=4)
    assert float(found.distance) == pytest.approx(np.linalg.norm(da - db) / np.linalg.norm(db), abs=1e-9)
    cosine = (da * db).sum() / np.linalg.norm(da) / np.linalg.norm(db)
    assert float(found.cosine) == pytest.approx(cosine, abs=1e-9)
    assert found.distance.standard_error == 0
    tops = []
    for matrix in (da, db):
        values, vectors = np.linalg.eigh(matrix)
        tops.append(vectors[:, np.argsort(-np.abs(values))[:4]])
    assert found.overlap == pytest.approx((np.abs(tops[0].T @ tops[1]) ** 2).sum() / 4, abs=1e-8)
    frame = found.frame().set_index("parameter")
    assert list(frame.index) == [*a.blocks, "whole"]
    for name, block in a.blocks.items():
        x, y = block.to_dense().numpy(), b.blocks[name].to_dense().numpy()
        assert frame.loc[name, "distance"] == pytest.approx(
            np.linalg.norm(x - y) / np.linalg.norm(y), abs=1e-9
        )


@pytest.mark.slow
def test_similarity_of_operators_lies_within_its_error_bars() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4)).double()
    problem = curvlab.Problem(
        model, "cross-entropy", torch.randn(40, 20).double(), torch.randint(0, 4, (40,))
    )
    a, b = curvlab.estimate(["hessian[full=true]", "fisher"], problem)
    da, db = a.to_dense(), b.to_dense()
    true = float((da - db).norm() / db.norm())
    cosine = float((da * db).sum() / da.norm() / db.norm())
    distances, cosines = [], []
    for seed in range(12):
        found = curvlab.similarity(a, b, k=1, seed=seed)
        assert found.distance.probes == 30
        distances.append((float(found.distance) - true) / found.distance.standard_error)
        cosines.append((float(found.cosine) - cosine) / found.cosine.standard_error)
    assert np.abs([distances, cosines]).max() < 4.5
    assert 0.4 < np.sqrt(np.mean(np.square(distances))) < 2


# Operators from elsewhere.


def test_an_operator_of_scipy_gets_the_names_of_a_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    matrix = torch.randn(23, 23).double()
    matrix = matrix + matrix.T
    made = curvlab.curvature_from(aslinearoperator(matrix.numpy()), like=model)
    assert list(made.blocks) == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(made.to_dense(), matrix)
    torch.testing.assert_close(made.blocks["2.bias"].to_dense(), matrix[-2:, -2:])
    torch.testing.assert_close(made.trace(), matrix.trace())
    for given in (matrix, matrix.numpy()):
        torch.testing.assert_close(curvlab.curvature_from(given).to_dense(), matrix)
    with pytest.raises(ArgumentError, match="23 × 23"):
        curvlab.curvature_from(matrix, like=nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="LinearOperator"):
        curvlab.curvature_from(3.0)


class TorchOperator:
    """What curvlinops' operators look like from outside: torch dtype and device, `@` on flat tensors."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.shape = matrix, tuple(matrix.shape)
        self.dtype, self.device = matrix.dtype, matrix.device

    def __matmul__(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return self.matrix @ x


def test_an_operator_on_torch_vectors_is_given_torch_vectors() -> None:
    matrix = torch.diag(torch.arange(1.0, 601.0).double())
    found = curvlab.spectrum(curvlab.curvature_from(TorchOperator(matrix)), k=2)
    np.testing.assert_allclose(found.eigenvalues, [600, 599], atol=1e-8)


# The loss around a point.


def test_a_landscape_is_the_loss_and_its_taylor_model() -> None:
    problem = CASES["l2"].problem()
    hessian = curvlab.estimate("hessian[full=true]", problem)
    directions = [curvlab.spectrum(hessian, k=2).eigenvectors[i] for i in range(2)]
    before = {n: p.detach().clone() for n, p in problem.model.named_parameters()}
    found = curvlab.landscape(problem, directions, radius=1e-3, points=3)
    frame = found.frame()
    assert list(frame) == ["x", "y", "loss", "quadratic"]
    np.testing.assert_allclose(frame["loss"], frame["quadratic"], atol=1e-8)
    assert np.ptp(frame["loss"]) > 1e-6
    middle = frame[(frame.x == 0) & (frame.y == 0)]
    assert float(middle["loss"].iloc[0]) == pytest.approx(float(problem.loss()), abs=1e-14)
    moved = CASES["l2"].problem()
    with torch.no_grad():
        for name, p in moved.model.named_parameters():
            p += 1e-3 * directions[0][name] - 1e-3 * directions[1][name]
    corner = frame[(frame.x > 0) & (frame.y < 0)]
    assert float(corner["loss"].iloc[0]) == pytest.approx(float(moved.loss()), abs=1e-14)
    assert all(torch.equal(p, before[n]) for n, p in problem.model.named_parameters())
    _ = hessian @ directions[0]  # as fresh as before
    line = curvlab.landscape(problem, directions[0], radius=0.5, points=5)
    assert list(line.frame()) == ["x", "loss", "quadratic"]


def test_wrong_arguments_are_refused_with_what_was_expected() -> None:
    problem, _ = Case().build()
    whole = curvlab.estimate("hessian[full=true]", problem)
    with pytest.raises(SpecError, match="largest, smallest, magnitude"):
        curvlab.spectrum(whole, which="biggest")  # type: ignore[call-overload]
    with pytest.raises(SpecError, match="at least 1"):
        curvlab.spectrum(whole, k=0)
    with pytest.raises(ArgumentError, match="curvature_from"):
        curvlab.spectrum(torch.eye(2))  # type: ignore[call-overload]
    with pytest.raises(SpecError, match="'hutchinson' or 'hutch"):
        whole.trace(estimator="other")  # type: ignore[call-overload]
    with pytest.raises(SpecError, match="at least 4"):
        whole.trace(probes=2)
    with pytest.raises(ArgumentError, match="one or two directions"):
        curvlab.landscape(problem, [])
    with pytest.raises(ArgumentError, match="select"):
        curvlab.similarity(whole, whole.select(["0"]))
