"""structure=ekfac: λ of the examples' rows on the eigenvectors of the Kronecker factors, and its solvers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

import curvlab
from curvlab.exceptions import PairError, SpecError
from curvlab.optim import SecondOrder
from tests.any_models import CASES as ANY_CASES
from tests.cases import Case
from tests.node_networks import CASES


class Small(nn.Module):
    """A convolution with a bias and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(2, 3, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x)).mean(2))


def small(examples: int = 5) -> tuple[Small, Tensor, Tensor]:
    torch.manual_seed(0)
    return Small().double(), torch.randn(examples, 2, 4).double(), torch.randint(3, (examples,))


def rows_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """∇ξ_i by torch.func."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, p, (one[None],)), target[None])

    return vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)


def eigen_block(rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """U, Q of the factors and λ of the rows (examples, o, n), as a matrix."""
    u, q = torch.linalg.eigh(b)[1], torch.linalg.eigh(a)[1]
    moments = (u.T @ rows @ q).square().mean(0)
    basis = torch.kron(u, q)
    return basis @ torch.diag(moments.flatten()) @ basis.T


def test_it_is_lambda_on_the_eigenvectors_of_both_factors() -> None:
    model, x, y = small()
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    found = curvlab.estimate("fisher[structure=ekfac]", problem)
    rows = rows_of(model, x, y)
    # The convolution's factors by hand: patches and the gradients at the outputs, position by position.
    patches = x.unfold(2, 2, 1).permute(0, 2, 1, 3).flatten(2).detach()
    a = torch.einsum("bsn,bsm->nm", patches, patches) / (5 * 3)
    z = model.conv(x).detach().requires_grad_()
    losses = F.cross_entropy(model.head(torch.tanh(z).mean(2)), y, reduction="sum")
    (g,) = torch.autograd.grad(losses, z)
    b = torch.einsum("bos,bps->op", g, g) / 5
    expected = eigen_block(rows["conv.weight"].flatten(2), a, b)
    torch.testing.assert_close(found.blocks["conv.weight"].to_dense(), expected, rtol=1e-9, atol=1e-12)
    bias = rows["conv.bias"]
    torch.testing.assert_close(
        found.blocks["conv.bias"].to_dense(), bias.T @ bias / 5, rtol=1e-10, atol=1e-13
    )
    kronecker = curvlab.estimate("fisher", problem)
    gap = found.blocks["conv.weight"].to_dense() - kronecker.blocks["conv.weight"].to_dense()
    assert float(gap.norm() / expected.norm()) > 0.05
    # The nearest of all diagonals on these vectors: nearer to the true block than A ⊗ B.
    true = rows["conv.weight"].flatten(1).T @ rows["conv.weight"].flatten(1) / 5
    assert (found.blocks["conv.weight"].to_dense() - true).norm() < (
        kronecker.blocks["conv.weight"].to_dense() - true
    ).norm()


@pytest.mark.parametrize(
    "kind", ["groups with every option", "transformer layer", "embedding", "language model, tied"]
)
def test_the_trace_is_that_of_the_rows_for_every_layer_kind(kind: str) -> None:
    """Eigenvectors are orthonormal and span the rows: Σ λ = E‖R_i‖², whatever they are."""
    if kind not in ANY_CASES:
        pytest.skip(f"no case `{kind}`")
    problem = ANY_CASES[kind].problem()
    found = curvlab.estimate("fisher[structure=ekfac]", problem)
    gradients, weights = problem.per_example_gradients(), problem.recording().row_weights
    for layer in problem.layers:
        if layer.weight_name is not None:
            expected = weights @ gradients[layer.weight_name].flatten(1).square().sum(1)
            trace = found.blocks[layer.weight_name].trace() - problem.l2 * layer.weight.numel()
            torch.testing.assert_close(trace, expected, rtol=1e-8, atol=1e-12)


SPECS = [
    "fisher[kind=mc,samples=2",
    "gauss-newton[kind=rows",
    "pch[kind=rows,samples=2",
    "pch[kind=rows,poseig=node",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("case", ["chain", "residual"])
def test_exact_and_cg_solve_its_damped_system(spec: str, case: str) -> None:
    if case == "chain":
        problem, _ = Case(widths=(4, 3, 5, 3), examples=6).build()
    else:
        model, x, y = CASES[case].make(4)
        problem = curvlab.Problem(model, "cross-entropy", x, y)
    curvature, gradient = curvlab.estimate(f"{spec},structure=ekfac]", problem), problem.gradient()
    assert curvature.psd
    for solver in ("exact", "cg[max_iter=400,tol=1e-13]"):
        step = curvlab.solve(solver, curvature, gradient, alpha=0.1).direction
        for name, block in curvature.blocks.items():
            dense = 0.9 * block.to_dense() + 0.1 * torch.eye(block.numel).double()
            expected = -torch.linalg.solve(dense, gradient[name].flatten())
            torch.testing.assert_close(step[name].flatten(), expected, rtol=1e-7, atol=1e-9, msg=name)
    for solver in ("kfi", "sm-kfi", "ea-cg"):
        with pytest.raises(PairError, match="Use `exact` or `cg`"):
            curvlab.solve(solver, curvature, gradient, alpha=0.1)


@pytest.mark.parametrize("spec", SPECS)
def test_batches_do_not_matter(spec: str) -> None:
    """Eigenvectors are those of all batches."""
    model, x, y = CASES["residual"].make(5)
    whole = curvlab.estimate(f"{spec},structure=ekfac]", curvlab.Problem(model, "cross-entropy", x, y))
    batches = [(x[3:], y[3:]), (x[:3], y[:3])]
    streamed = curvlab.estimate(f"{spec},structure=ekfac]", curvlab.Problem(model, "cross-entropy", batches))
    for name, block in whole.blocks.items():
        expected = block.to_dense()
        error = float((streamed.blocks[name].to_dense() - expected).abs().max())
        assert error <= 1e-6 * float(expected.abs().max()), name


def test_with_rows_of_both_signs_lambda_is_their_difference_made_positive() -> None:
    problem, _ = Case(widths=(3, 4, 3), examples=4, loss="robust").build()
    signed = curvlab.estimate("pch[kind=rows,samples=all,gamma=-1,output_gamma=-1,structure=block]", problem)
    found = curvlab.estimate("pch[kind=rows,samples=all,structure=ekfac]", problem)
    block = found.blocks["0.weight"]
    part = block.parts[0]  # type: ignore[attr-defined]
    assert bool((part.values >= 0).all())
    dense = signed.blocks["0.weight"].to_dense()
    assert float(block.trace()) <= float(torch.linalg.eigvalsh(dense).abs().sum()) * (1 + 1e-9)


def test_it_is_saved_scaled_and_selected(tmp_path: Path) -> None:
    model, x, y = small()
    curvature = curvlab.estimate("fisher[structure=ekfac]", curvlab.Problem(model, "cross-entropy", x, y))
    curvature.save(tmp_path / "c.safetensors")
    loaded = curvlab.Curvature.load(tmp_path / "c.safetensors")
    torch.testing.assert_close(loaded.to_dense(), curvature.to_dense(), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close((2 * curvature).to_dense(), 2 * curvature.to_dense())
    assert list(curvature.select(["conv.bias"]).blocks) == ["conv.bias"]
    dense = curvature.blocks["conv.weight"].to_dense()
    torch.testing.assert_close(curvature.blocks["conv.weight"].diagonal().flatten(), dense.diagonal())
    torch.testing.assert_close(curvature.blocks["conv.weight"].frobenius_norm(), dense.norm())
    torch.testing.assert_close(
        curvature.blocks["conv.weight"].eigvalsh(), torch.linalg.eigvalsh(dense), rtol=1e-9, atol=1e-12
    )


def test_an_optimizer_steps_with_it() -> None:
    model, x, y = small(8)
    optimizer = SecondOrder(model, "cross-entropy", "pch[structure=ekfac]", "exact", lr=0.5, alpha=0.1)
    losses = [float(optimizer.step(x, y)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("field", ["sharing=reduce", "positions=2"])
def test_fields_of_kronecker_sides_are_refused(field: str) -> None:
    with pytest.raises(SpecError, match="structure=kronecker"):
        curvlab.estimate(f"fisher[structure=ekfac,{field}]", Case().build()[0])
