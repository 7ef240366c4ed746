"""`pch[kind=exact]`: the dense JᵀMJ, streams, the paper's recursion where it is exact, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.exceptions import PairError, SpecError
from curvlab.optim import SecondOrder
from tests.capturing_network import Dense, make
from tests.cases import Case
from tests.node_networks import CASES

EXACT = "pch[kind=exact,gamma=-0.5,output_gamma=-0.2]"


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross-entropy", "robust"])
def test_it_is_the_gauss_newton_matrix_of_the_augmented_network(loss: str) -> None:
    model, x, y = make(3)
    curvature = curvlab.estimate(EXACT, curvlab.Problem(model, loss, x, y))
    dense = Dense(model, x, y, loss)
    found = curvature.to_dense()
    assert relative(found, dense.positive_hessian(-0.5, -0.2)) < 1e-10
    # What it must not be: PosEig with other factors, or terms that were not averaged over the rows.
    assert relative(found, dense.positive_hessian(-1.0, -0.2)) > 0.01
    assert relative(found, dense.own_terms_hessian()) > 0.1
    assert curvature.psd
    assert curvature.structure == "full"
    assert float(torch.linalg.eigvalsh(found)[0]) > -1e-12


@pytest.mark.parametrize("loss", ["cross-entropy", "robust", "weighted"])
@pytest.mark.parametrize("gamma", [-1.0, 0.0, -0.4])
def test_on_a_chain_with_one_example_its_bias_blocks_are_the_recursion_s(loss: str, gamma: float) -> None:
    problem, _ = Case(widths=(3, 5, 4, 3), examples=1, loss=loss).build()
    exact, recursion = curvlab.estimate(
        [f"pch[kind={k},gamma={gamma}]" for k in ("exact", "recursive")], problem
    )
    for name, block in recursion.blocks.items():
        if name.endswith("bias"):
            torch.testing.assert_close(
                exact.blocks[name].to_dense(), block.to_dense(), rtol=1e-10, atol=1e-13
            )


def test_with_several_examples_only_the_last_hidden_bias_block_is_the_recursion_s() -> None:
    problem, _ = Case(widths=(3, 5, 4, 3), examples=6, loss="robust").build()
    exact, recursion = curvlab.estimate(["pch[kind=exact]", "pch[kind=recursive]"], problem)
    first = exact.blocks["0.bias"].to_dense()
    assert relative(first, recursion.blocks["0.bias"].to_dense()) > 0.01


def test_a_chain_and_the_same_network_as_a_graph_agree() -> None:
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).double()

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain, self.nothing = chain, nn.Parameter(torch.zeros(1).double())

        def forward(self, z: Tensor) -> Tensor:
            return self.chain(z) + self.nothing

    x, y = torch.randn(5, 3).double(), torch.randint(2, (5,))
    one = curvlab.estimate("pch[kind=exact]", curvlab.Problem(chain, "robust", x, y))
    other = curvlab.estimate("pch[kind=exact]", curvlab.Problem(Graph(), "robust", x, y))
    names = [f"chain.{name}" for name in one.blocks]
    assert relative(other.select(names).to_dense(), one.to_dense()) < 1e-12


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", ["cross-entropy", "robust"])
def test_batches_and_their_order_do_not_matter(case: str, loss: str) -> None:
    """The mean terms are those of all batches before PosEig."""
    model, x, y = CASES[case].make(5)
    whole = curvlab.estimate("pch[kind=exact]", curvlab.Problem(model, loss, x, y))
    order = torch.tensor([3, 0, 4, 1, 2])
    batches = [(x[order[:2]], y[order[:2]]), (x[order[2:]], y[order[2:]])]
    streamed = curvlab.estimate("pch[kind=exact]", curvlab.Problem(model, loss, batches))
    vectors = {name: torch.randn(b.shape).double() for name, b in whole.blocks.items()}
    expected, found = whole @ vectors, streamed @ vectors
    largest = max(float(value.abs().max()) for value in expected.values())  # the key's bias has no curvature
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= 1e-10 * largest, name


def test_without_second_order_terms_it_is_gauss_newton() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(12, 3)).double()
    problem = curvlab.Problem(
        model, "cross-entropy", torch.randn(4, 1, 3, 3).double(), torch.randint(3, (4,))
    )
    pch, newton = curvlab.estimate(["pch[kind=exact]", "gauss-newton[kind=exact,structure=full]"], problem)
    assert relative(pch.to_dense(), newton.to_dense()) < 1e-13
    assert any("equals Gauss-Newton" in note for note in pch.notes)


def test_cg_solves_with_it_and_nothing_else_does() -> None:
    model, x, y = CASES["block"].make(4)
    problem = curvlab.Problem(model, "robust", x, y)
    curvature, gradient = curvlab.estimate("pch[kind=exact]", problem), problem.gradient()
    step = curvlab.solve("cg[max_iter=400,tol=1e-13]", curvature, gradient, alpha=0.1).direction
    dense = 0.9 * curvature.to_dense() + 0.1 * torch.eye(curvature.numel).double()
    expected = -torch.linalg.solve(dense, torch.cat([gradient[name].flatten() for name in curvature.blocks]))
    found = torch.cat([step[name].flatten() for name in curvature.blocks])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    for solver in ("kfi", "sm-kfi", "ea-cg", "exact"):
        with pytest.raises(PairError, match="`cg`"):
            curvlab.solve(solver, curvature, gradient, alpha=0.1)


def test_an_optimizer_steps_with_it() -> None:
    model, x, y = CASES["gate"].make(6)
    optimizer = SecondOrder(model, "cross-entropy", "pch[kind=exact]", "cg", lr=0.5, alpha=0.1)
    losses = [float(optimizer.step(x, y)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("fields", "word"),
    [("poseig=last", "poseig=node"), ("structure=diagonal", "cross-layer"),
     ("structure=block", "cross-layer"), ("gamma=1", "at most 0")],
)  # fmt: skip
def test_fields_that_do_not_go_with_it_are_refused(fields: str, word: str) -> None:
    model, x, y = CASES["gate"].make(2)
    with pytest.raises(SpecError, match=word):
        curvlab.estimate(f"pch[kind=exact,{fields}]", curvlab.Problem(model, "robust", x, y))
