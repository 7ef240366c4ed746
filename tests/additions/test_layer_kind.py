"""A layer kind is added from this file alone: an operator of another package, and how it uses its weight.

    z_ik = Σ_j w_{(k-j) mod n} x_ij          a circulant matrix, given by its first column w

Output k is a position: its row h_ik is x_i rolled and turned, and W is the single row w.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.model import bindings as bindings_module
from curvlab.model.bindings import Bound, bindings
from curvlab.model.uses import WeightUse
from curvlab.optim import SecondOrder


@torch.library.custom_op("additions::circulant", mutates_args=())
def circulant(inputs: Tensor, weight: Tensor) -> Tensor:
    """z of the formula above, for inputs (…, n) and a weight (1, n)."""
    return inputs @ _matrix(weight).T


def _matrix(weight: Tensor) -> Tensor:
    return torch.stack([weight[0].flip(0).roll(k + 1) for k in range(weight.shape[1])])


@circulant.register_fake
def _(inputs: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    inputs, weight = ctx.saved_tensors
    slopes = gradient.flatten(0, -2).T @ inputs.flatten(0, -2)  # of the circulant matrix
    columns = torch.stack([slopes.roll(j, 1).diagonal() for j in range(weight.shape[1])])
    return gradient @ _matrix(weight), columns.sum(1)[None]


circulant.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@dataclass(frozen=True, eq=False)
class CirculantUse(WeightUse):
    """Positions are the outputs (of every token, if there are several); o = 1."""

    kind: ClassVar[str] = "circulant"
    unfolds: ClassVar[bool] = True
    parts: ClassVar[int] = 1  # type: ignore[misc]

    @property
    def input_size(self) -> int:
        return self.inputs.shape[-1]

    @property
    def positions(self) -> int:
        return self.inputs.numel() // self.examples

    @property
    def positions_shape(self) -> None:
        return None

    def input_rows(self, first: int = 0, last: int | None = None) -> Tensor:
        n = self.input_size
        x = self.inputs.reshape(self.examples, -1, n)[first:last]
        turned = torch.stack([x.flip(-1).roll(k + 1, -1) for k in range(n)], 2)
        return turned.reshape(len(x), -1, 1, n)

    def sampled_rows(self, index: Tensor) -> Tensor:
        return self.input_rows().take_along_dim(index[..., None, None], 1)

    def output_rows(self, gradient: Tensor) -> Tensor:
        draws = gradient.shape[: gradient.ndim - self.inputs.ndim]
        return gradient.reshape(*draws, self.examples, self.positions, 1, 1)

    def matrix(self, parameter: Tensor) -> Tensor:
        return parameter.unsqueeze(-3)

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        return matrix.squeeze(-3)


def bind(inputs: Tensor, weight: Tensor) -> tuple[Bound, ...]:
    """The second argument may be a parameter, and is then used as above."""
    return (Bound(weight, lambda examples, output, transposed: CirculantUse(inputs.detach(), examples)),)


KINDS = {torch.ops.additions.circulant.default: bind}


class Circulant(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, n))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.additions.circulant.default(x, self.weight)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if another package had this file's dictionary as an entry point."""
    point = EntryPoint("circulant", f"{__name__}:KINDS", "curvlab.bindings")
    monkeypatch.setattr(
        bindings_module, "entry_points", lambda group: [point] if group == "curvlab.bindings" else []
    )
    bindings.cache_clear()
    yield
    bindings.cache_clear()


N, M = 4, 5


def network() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Circulant(N), nn.Tanh(), nn.Linear(N, 3)).double()
    return model, torch.randn(M, N).double(), torch.randint(3, (M,))


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """h_ik, (m, n, n), and g_ik = ∂ξ_i/∂z_ik, (m, n), from the circulant matrix written out."""
    w = model[0].weight.detach()[0]
    rows = torch.empty(M, N, N).double()
    matrix = torch.empty(N, N).double()
    for k in range(N):
        for j in range(N):
            matrix[k, j] = w[(k - j) % N]
            rows[:, k, (k - j) % N] = x[:, j]
    z = (x @ matrix.T).requires_grad_()
    loss = nn.functional.cross_entropy(model[2](torch.tanh(z)), y, reduction="sum")
    return rows, torch.autograd.grad(loss, z)[0]


@pytest.mark.usefixtures("installed")
def test_its_rows_are_found_and_give_the_gradient_of_autograd() -> None:
    model, x, y = network()
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    assert [(layer.name, layer.kind) for layer in problem.layers] == [("0", "shared"), ("2", "linear")]
    expected = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model[0].weight)[0]
    torch.testing.assert_close(problem.gradient()["0.weight"], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_its_block_is_the_kronecker_product_of_its_rows(sharing: str) -> None:
    model, x, y = network()
    h, g = by_hand(model, x, y)
    if sharing == "expand":
        inputs, output = torch.einsum("ika,ikb->ab", h, h) / (M * N), (g**2).sum() / M
    else:
        inputs, output = h.mean(1).T @ h.mean(1) / M, (g.sum(1) ** 2).mean()
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    curvature = curvlab.estimate(f"fisher[sharing={sharing}]", problem)
    torch.testing.assert_close(
        curvature.blocks["0.weight"].to_dense(), output * inputs, rtol=1e-11, atol=1e-14
    )
    for alpha in (0.05, 0.5):
        solution = curvlab.solve("exact", curvature, problem.gradient(), alpha=alpha)
        damped = (1 - alpha) * output * inputs + alpha * torch.eye(N).double()
        expected = torch.linalg.solve(damped, -problem.gradient()["0.weight"][0])
        torch.testing.assert_close(solution.direction["0.weight"][0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("solver", ["kfi", "sm-kfi", "cg", "ea-cg", "exact"])
@pytest.mark.parametrize(
    "provider", ["fisher", "fisher[kind=mc]", "fisher[kind=exact,positions=2]", "gauss-newton[kind=rows]"]
)
def test_every_provider_and_solver_takes_it(provider: str, solver: str) -> None:
    model, x, y = network()
    optimizer = SecondOrder(model, "cross-entropy", provider, solver, lr=0.3, alpha=0.1)
    losses = [float(optimizer.step(x, y)) for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("installed")
def test_matrix_free_curvatures_differentiate_the_operator_itself() -> None:
    model, x, y = network()
    found = curvlab.estimate("hessian", curvlab.Problem(model, "cross-entropy", x, y)).blocks["0.weight"]

    def loss(weight: Tensor) -> Tensor:
        z = x @ torch.stack([torch.stack([weight[0, (k - j) % N] for j in range(N)]) for k in range(N)]).T
        return nn.functional.cross_entropy(model[2](torch.tanh(z)), y)

    expected = torch.autograd.functional.hessian(loss, model[0].weight.detach()).reshape(N, N)
    torch.testing.assert_close(found.to_dense(), expected, rtol=1e-10, atol=1e-12)


def test_without_the_package_the_weight_has_a_plain_block() -> None:
    model, x, y = network()
    bindings.cache_clear()
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    assert [(layer.name, layer.kind) for layer in problem.layers] == [("0.weight", "plain"), ("2", "linear")]
    h, g = by_hand(model, x, y)
    rows = torch.einsum("ik,ika->ia", g, h)
    block = curvlab.estimate("fisher", problem).blocks["0.weight"].to_dense()
    torch.testing.assert_close(block, rows.T @ rows / M, rtol=1e-11, atol=1e-14)


def test_a_package_that_does_not_load_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("broken", "no_such_module:KINDS", "curvlab.bindings")
    monkeypatch.setattr(bindings_module, "entry_points", lambda group: [point])
    bindings.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"`broken` .* left out: `no_such_module:KINDS` does not load"):
        bindings()
    bindings.cache_clear()
