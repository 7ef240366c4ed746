"""Structures without a Kronecker product: block, layer and full of examples' rows, and their solutions."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.exceptions import PairError, SpecError
from curvlab.linalg import ExampleFactor, FormedRows, GramFactor, poseig_difference, signed_difference
from curvlab.providers import example_rows
from tests.any_models import CASES as ANY_CASES
from tests.capturing_network import Dense, make, positive
from tests.cases import Case
from tests.node_networks import CASES

STRUCTURES = ("block", "layer", "full")


def groups(curvature: curvlab.Curvature, structure: str) -> list[tuple[str, ...]]:
    names = list(curvature.blocks)
    if structure == "full":
        return [tuple(names)]
    if structure == "block":
        return [(name,) for name in names]
    return [(n, n.replace("weight", "bias")) for n in names if n.endswith("weight")]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def flat(vectors: object, names: list[str]) -> Tensor:
    return torch.cat([vectors[name].flatten() for name in names])  # type: ignore[index]


def check_solution(curvature: curvlab.Curvature, gradient: object, dense: Tensor) -> None:
    """`exact` and `cg` solve the damped system with the dense matrix."""
    names = list(curvature.blocks)
    expected = -torch.linalg.solve(0.9 * dense + 0.1 * torch.eye(len(dense)).double(), flat(gradient, names))
    for solver in ("exact", "cg[max_iter=600,tol=1e-13]"):
        solution = curvlab.solve(solver, curvature, gradient, alpha=0.1)  # type: ignore[arg-type]
        close(flat(solution.direction, names), expected, 1e-9)
        assert all(block.residual < 1e-10 for block in solution.blocks.values())


def test_a_product_with_the_matrix_is_made_where_a_residual_is_read_and_once_for_a_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x, y = CASES["residual"].make(4)
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    curvature, gradient = curvlab.estimate("fisher[structure=layer]", problem), problem.gradient()
    products, plain = [], ExampleFactor.matmul

    def counting(self: ExampleFactor, x: Tensor) -> Tensor:
        products.append(self)
        return plain(self, x)

    monkeypatch.setattr(ExampleFactor, "matmul", counting)
    solution = curvlab.solve("exact", curvature, gradient, alpha=0.1)
    _ = flat(solution.direction, list(curvature.blocks))
    assert not products
    first = solution.blocks["first.weight"]
    assert first.residual < 1e-10
    made = len(products)
    assert solution.blocks["first.bias"].residual == first.residual
    assert len(products) == made > 0


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    ("provider", "loss", "samples"),
    [("fisher", "cross-entropy", ""), ("gauss-newton", "cross-entropy", ""), ("pch", "robust", "samples=all"),
     ("pch", "cross-entropy", "poseig=node,samples=all"), ("gauss-newton", "robust", "")],
)  # fmt: skip
def test_the_matrix_is_the_second_moment_of_the_rows(
    provider: str, loss: str, samples: str, structure: str
) -> None:
    model, x, y = make(3)
    problem = curvlab.Problem(model, loss, x, y)
    kind = "" if provider == "fisher" else "kind=rows,gamma=-0.5,output_gamma=-0.2,"
    kind = kind if provider == "pch" else kind[:10]
    curvature = curvlab.estimate(
        f"{provider}[{kind}structure={structure},{samples}]".replace(",]", "]"), problem
    )
    dense = Dense(model, x, y, loss)
    mask = dense.mask(groups(curvature, structure))
    if provider == "fisher":
        rows = dense.gradients()
        expected = mask * (rows.T @ rows) / len(rows)
    elif provider == "gauss-newton":
        expected = mask * dense._sum(lambda i: [dense.output_hessian(i), *_zeros(dense)])
    elif "node" in samples:
        expected = mask * dense.positive_hessian(-0.5, -0.2)
    else:
        expected = _positive_groups(mask * dense.mean_terms_hessian(), curvature, structure)
    close(curvature.to_dense(), expected)
    torch.testing.assert_close(flat(curvature.diagonal(), list(curvature.blocks)), expected.diagonal())
    torch.testing.assert_close(curvature.trace(), expected.trace())
    torch.testing.assert_close(curvature.frobenius_norm(), expected.norm())
    if curvature.psd:
        check_solution(curvature, problem.gradient(), expected)
    else:
        with pytest.raises(PairError, match="indefinite"):
            curvlab.solve("exact", curvature, problem.gradient(), alpha=0.1)


def _zeros(dense: Dense) -> list[Tensor]:
    return [torch.zeros_like(local) for local in dense.local_hessians(0)]


def _positive_groups(signed: Tensor, curvature: curvlab.Curvature, structure: str) -> Tensor:
    """PosEig of every group's own block; of the head's with γ_out unless the whole matrix is one block."""
    result, names = torch.zeros_like(signed), list(curvature.blocks)
    for group in groups(curvature, structure):
        index = torch.cat([torch.full((curvature.blocks[n].numel,), n in group) for n in names])
        gamma = -0.2 if structure != "full" and group[0].startswith("head") else -0.5
        both = index[:, None] & index
        result[both] = positive(signed[index][:, index], gamma).flatten()
    return result


@pytest.mark.parametrize("model", ANY_CASES)
def test_every_layer_kind_has_rows(model: str) -> None:
    """Convolutions with groups, attention, embeddings, tied weights: against the examples' own gradients."""
    problem = ANY_CASES[model].problem()
    curvature = curvlab.estimate("fisher[structure=full]", problem)
    gradients, weights = problem.per_example_gradients(), problem.recording().row_weights
    rows = torch.cat([gradients[name].flatten(1) for name in curvature.blocks], 1)
    expected = rows.T @ (weights[:, None] * rows) + problem.l2 * torch.eye(rows.shape[1]).double()
    close(curvature.to_dense(), expected)
    vectors = {name: torch.randn(b.shape).to(b.example) for name, b in curvature.blocks.items()}
    close(flat(curvature @ vectors, list(vectors)), expected @ flat(vectors, list(vectors)), 1e-9)
    gradient = problem.gradient()
    step = curvlab.solve("exact", curvature, gradient, alpha=0.1).direction
    damped = 0.9 * expected + 0.1 * torch.eye(len(expected)).double()
    close(flat(step, list(vectors)), -torch.linalg.solve(damped, flat(gradient, list(vectors))), 1e-9)


@pytest.mark.parametrize("grams", [True, False])
def test_the_kernel_of_grams_is_that_of_products(grams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = CASES["residual"].make(4)
    monkeypatch.setattr(
        example_rows.WeightRows, "_grams_are_cheaper", lambda self: grams and len(self.uses) == 1
    )
    monkeypatch.setattr(example_rows, "PIECE_ENTRIES", 50)
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    curvature = curvlab.estimate("pch[kind=rows,samples=3,poseig=node,structure=layer]", problem)
    for layer in curvature.layers:
        rows = layer.factor.form()  # type: ignore[attr-defined]
        torch.testing.assert_close(layer.factor.gram, rows @ rows.T, rtol=1e-11, atol=1e-13)  # type: ignore[attr-defined]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "spec", ["fisher[kind=mc,samples=2", "pch[kind=rows,samples=2", "gauss-newton[kind=rows,samples=2"]
)
def test_batches_and_their_order_do_not_matter(spec: str, structure: str) -> None:
    model, x, y = CASES["gate"].make(5)
    whole = curvlab.estimate(f"{spec},structure={structure}]", curvlab.Problem(model, "cross-entropy", x, y))
    order = torch.tensor([3, 0, 4, 1, 2])
    batches = [(x[order[:2]], y[order[:2]]), (x[order[2:]], y[order[2:]])]
    streamed = curvlab.estimate(
        f"{spec},structure={structure}]", curvlab.Problem(model, "cross-entropy", batches)
    )
    close(streamed.to_dense(), whole.to_dense(), 1e-11)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_chain_has_them_too(structure: str) -> None:
    problem, _ = Case(widths=(4, 3, 5, 3), examples=6, loss="weighted").build()
    curvature = curvlab.estimate("gauss-newton[kind=exact,structure=full]", problem).to_dense()
    found = curvlab.estimate(f"gauss-newton[kind=rows,structure={structure}]", problem)
    start = 0
    for layer in found.layers:
        size = sum(block.numel for block in layer.blocks.values())
        part = slice(start, start + size)
        close(found.to_dense()[part, part], curvature[part, part])
        start += size


@pytest.mark.parametrize("structure", STRUCTURES)
def test_they_are_saved_copied_scaled_and_selected(structure: str, tmp_path: Path) -> None:
    model, x, y = CASES["residual"].make(3)
    problem = curvlab.Problem(model, "robust", x, y)
    for spec in (f"pch[kind=rows,structure={structure}]", f"gauss-newton[kind=rows,structure={structure}]"):
        curvature = curvlab.estimate(spec, problem)
        dense = curvature.to_dense()
        curvature.save(tmp_path / "c.safetensors")
        loaded = curvlab.Curvature.load(tmp_path / "c.safetensors")
        close(loaded.to_dense(), dense, 1e-12)
        assert loaded.structure == structure
        close(pickle.loads(pickle.dumps(curvature)).to_dense(), dense, 1e-12)
        close(copy.deepcopy(curvature).to_dense(), dense, 1e-12)
        close((curvature * -2.0).to_dense(), -2 * dense, 1e-12)
        close(curvature.to(torch.float32).to_dense().double(), dense, 1e-5)
        chosen = curvature.select(["head.weight", "head.bias"])
        close(chosen.to_dense(), dense[-18:, -18:], 1e-12)
        assert curvature.nbytes > 0


@pytest.mark.parametrize("structure", STRUCTURES)
def test_other_solvers_refuse_them_naming_exact(structure: str) -> None:
    model, x, y = CASES["gate"].make(3)
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    curvature = curvlab.estimate(f"fisher[structure={structure}]", problem)
    for solver in ("kfi", "sm-kfi", "ea-cg"):
        with pytest.raises(PairError, match=f"`{structure}`. Use `exact` or `cg`"):
            curvlab.solve(solver, curvature, problem.gradient(), alpha=0.1)
    with pytest.raises(PairError, match="route"):
        curvlab.solve("exact[route=dense]", curvature, problem.gradient(), alpha=0.1)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("field", ["sharing=reduce", "positions=2"])
def test_fields_of_kronecker_sides_are_refused(structure: str, field: str) -> None:
    model, x, y = CASES["gate"].make(3)
    with pytest.raises(SpecError, match="structure=kronecker"):
        curvlab.estimate(f"fisher[structure={structure},{field}]", curvlab.Problem(model, "robust", x, y))


def test_a_recursion_refuses_them_naming_rows() -> None:
    for provider in ("pch", "gauss-newton"):
        with pytest.raises(SpecError, match="kind=rows"):
            curvlab.estimate(f"{provider}[kind=recursive,structure=layer]", Case().build()[0])


def test_an_overwritten_batch_is_told() -> None:
    model = nn.Sequential(nn.Linear(3, 2)).double()
    x = torch.randn(4, 3).double()
    problem = curvlab.Problem(model, "cross-entropy", x, torch.tensor([0, 1, 0, 1]))
    curvature = curvlab.estimate("fisher[structure=layer]", problem)
    gradient = {name: value.clone() for name, value in problem.gradient().items()}
    x.add_(1)
    with pytest.raises(curvlab.exceptions.StaleError):
        curvlab.solve("exact", curvature, gradient, alpha=0.1)


# The factor


@pytest.mark.parametrize(("plus", "minus"), [(3, 2), (4, 1), (5, 9)])
def test_differences_of_rows_that_are_not_formed(plus: int, minus: int) -> None:
    torch.manual_seed(plus)
    a, b = torch.randn(plus, 8).double(), torch.randn(minus, 8).double()
    one = ExampleFactor((FormedRows((2,), a[:, :2]), FormedRows((2, 3), a[:, 2:])), torch.rand(plus).double())
    two = ExampleFactor(
        (FormedRows((2,), b[:, :2]), FormedRows((2, 3), b[:, 2:])), torch.rand(minus).double()
    )
    dense = GramFactor(a, one.root).to_dense() - GramFactor(b, two.root).to_dense()
    close(signed_difference(one, two).to_dense(), dense, 1e-12)
    close(signed_difference(one, two).eigvalsh(), torch.linalg.eigvalsh(dense), 1e-12)
    found = poseig_difference(one, two, -0.5)
    close(found.to_dense(), positive(dense, -0.5), 1e-11)
    close(found.diagonal_block(2, 8).to_dense(), positive(dense, -0.5)[2:, 2:], 1e-11)
    close(found.diagonal_block(1, 4).to_dense(), positive(dense, -0.5)[1:4, 1:4], 1e-11)
