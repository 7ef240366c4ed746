"""`hessian[kind=rows]`: every example's own terms of every function, unbiased, by signed rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian
from torch.nn import functional as F

import curvlab
from curvlab.exceptions import PairError, ProblemError, SpecError
from curvlab.providers.hessian_rows import HessianRows
from tests.any_models import CASES as ANY_CASES
from tests.any_models import assert_blocks
from tests.capturing_network import Dense, make
from tests.cases import Case
from tests.node_networks import CASES

ALL = "hessian[kind=rows,samples=all]"


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross-entropy", "robust"])
def test_with_every_column_its_blocks_are_the_hessian_s(loss: str) -> None:
    """On a network with a residual branch and a LayerNorm, against torch.func."""
    model, x, y = make(2)
    curvature = curvlab.estimate(ALL, curvlab.Problem(model, loss, x, y))
    dense = Dense(model, x, y, loss)
    expected = dense.own_terms_hessian()
    start = 0
    for name, block in curvature.blocks.items():
        part = slice(start, start + block.numel)
        found = block.to_dense()
        assert float((found - expected[part, part]).abs().max()) <= 1e-11 * float(expected.abs().max()), name
        start += block.numel
    assert not curvature.psd
    assert curvature.exact


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross-entropy", "robust"])
@pytest.mark.parametrize("case", CASES)
def test_softmax_products_and_matrix_products_are_among_its_nodes(case: str, loss: str) -> None:
    """Against the Hessian that torch's own double differentiation gives, parameter by parameter."""
    model, x, y = CASES[case].make(2)
    problem = curvlab.Problem(model, loss, x, y)
    found, expected = curvlab.estimate([ALL, "hessian"], problem)
    blocks = {name: block.to_dense() for name, block in expected.blocks.items()}
    largest = max(float(block.abs().max()) for block in blocks.values())  # the key's bias has no curvature
    for name, block in blocks.items():
        assert float((found.blocks[name].to_dense() - block).abs().max()) <= 1e-12 * largest, name


KINDS = ("conv2d", "stride", "dilation", "groups with every option", "transposed conv2d")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name in KINDS if name in ANY_CASES])
def test_convolutions_of_every_kind(kind: str) -> None:
    problem = ANY_CASES[kind].problem()
    found, expected = curvlab.estimate([ALL, "hessian"], problem)
    assert_blocks(found, {name: block.to_dense() for name, block in expected.blocks.items()}, tolerance=1e-10)


FUNCTIONS = {
    "quotient": lambda a, b: a / (2 + b.square()),
    "constant over": lambda a, b: 3.0 / (2 + a.square()) + b,
    "log-softmax": lambda a, b: a.log_softmax(-1) + F.log_softmax(b, 1),
    "logsumexp": lambda a, b: a + b.logsumexp(1, keepdim=True),
    "square by itself": lambda a, b: a * a + b,
    "broadcast": lambda a, b: a * b.sum(1, keepdim=True),
    "softmax of functional": lambda a, b: F.softmax(a, dim=-1) + b,
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions_of_two_tensors_and_softmaxes(kind: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(FUNCTIONS[kind](self.a(x), self.b(x)))

    torch.manual_seed(0)
    model, x, y = Net().double(), torch.randn(3, 3).double(), torch.tensor([0, 2, 1])
    found = curvlab.estimate(ALL, curvlab.Problem(model, "cross-entropy", x, y))
    parameters = dict(model.named_parameters())
    for name, block in found.blocks.items():

        def loss(value: Tensor, name: str = name) -> Tensor:
            given = {**{n: p.detach() for n, p in parameters.items()}, name: value}
            return F.cross_entropy(torch.func.functional_call(model, given, (x,)), y)

        expected = hessian(loss)(parameters[name].detach()).reshape(block.numel, block.numel)
        torch.testing.assert_close(block.to_dense(), expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("loss", ["cross-entropy", "robust", "weighted"])
def test_on_a_chain_it_is_the_exact_hessian_too(loss: str) -> None:
    problem, reference = Case(widths=(4, 3, 5, 3), examples=5, loss=loss).build()
    found = curvlab.estimate(ALL, problem)
    assert_blocks(found, reference.hessian_blocks(), tolerance=1e-10)


def test_mean_terms_would_be_wrong() -> None:
    """With M̄ in the place of each example's own terms an early bias block is more than a tenth off."""
    problem, reference = Case(widths=(4, 5, 5, 5, 3), activation="tanh", examples=8).build()
    truth = reference.hessian_blocks()["0.bias"]
    own = curvlab.estimate(ALL, problem).blocks["0.bias"].to_dense()
    mean = curvlab.estimate("pch[kind=rows,samples=all,structure=block]", problem).blocks["0.bias"].to_dense()
    values, vectors = torch.linalg.eigh(truth)
    positive = vectors @ torch.diag(values.abs()) @ vectors.T
    assert float((own - truth).norm() / truth.norm()) < 1e-12
    assert float((mean - positive).norm() / positive.norm()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("draws", [256, pytest.param(4096, marks=pytest.mark.long)])
def test_draws_are_unbiased(draws: int) -> None:
    """Every entry's mean within five standard errors; without the second-order terms it would be far off."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    problem = curvlab.Problem(model, "cross-entropy", torch.randn(2, 2).double(), torch.tensor([0, 1]))
    recording = problem.recording()
    (plus, minus) = (HessianRows(samples=draws).of(recording)[index] for index in (0, 4))
    parts = [one.form().reshape(draws, 2, -1) for one in (plus, minus)]  # type: ignore[union-attr]
    each = [draws * torch.einsum("rmi,rmj->rij", rows, rows) for rows in parts]
    found = each[0] - each[1]
    truth = curvlab.estimate("hessian", problem).blocks["0.weight"].to_dense()
    newton = curvlab.estimate("gauss-newton[kind=exact]", problem).blocks["0.weight"].to_dense()
    error = found.std(0) / draws**0.5
    assert bool(((found.mean(0) - truth).abs() <= 5 * error + 1e-12).all())
    assert bool(((newton - truth).abs() > 5 * error).any())


def test_streams_give_the_same_draws() -> None:
    model, x, y = CASES["gate"].make(5)
    spec = "hessian[kind=rows,samples=2]"
    whole = curvlab.estimate(spec, curvlab.Problem(model, "robust", x, y))
    order = torch.tensor([3, 0, 4, 1, 2])
    batches = [(x[order[:2]], y[order[:2]]), (x[order[2:]], y[order[2:]])]
    streamed = curvlab.estimate(spec, curvlab.Problem(model, "robust", batches))
    for name, block in whole.blocks.items():
        torch.testing.assert_close(streamed.blocks[name].to_dense(), block.to_dense(), rtol=1e-11, atol=1e-13)


def test_cg_solves_with_it_until_negative_curvature() -> None:
    model, x, y = CASES["gate"].make(4)
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    curvature = curvlab.estimate("hessian[kind=rows,samples=8]", problem)
    solution = curvlab.solve("cg", curvature, problem.gradient(), damping=curvlab.Additive(2.0))
    dense = curvature.blocks["first.weight"].to_dense() + 2 * torch.eye(12).double()
    expected = -torch.linalg.solve(dense, problem.gradient()["first.weight"].flatten())
    torch.testing.assert_close(solution.direction["first.weight"].flatten(), expected, rtol=1e-7, atol=1e-9)
    for solver in ("kfi", "exact", "ea-cg"):
        with pytest.raises(PairError):
            curvlab.solve(solver, curvature, problem.gradient(), alpha=0.1)


def test_a_function_that_is_not_known_is_named() -> None:
    class Cumulative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cumprod(self.first(x), 1))

    problem = curvlab.Problem(Cumulative(), "cross-entropy", torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ProblemError, match="`cumprod` is not known"):
        curvlab.estimate("hessian[kind=rows]", problem)
    assert any("cumprod" in note for note in curvlab.estimate("pch[kind=rows]", problem).notes)


@pytest.mark.parametrize(("fields", "word"), [("structure=full", "bilinear"), ("samples=0", "at least 1")])
def test_fields_that_do_not_go_with_it_are_refused(fields: str, word: str) -> None:
    with pytest.raises(SpecError, match=word):
        curvlab.estimate(f"hessian[kind=rows,{fields}]", Case().build()[0])
