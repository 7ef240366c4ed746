"""Every solver on networks with an EmbeddingBag, beside dense systems that are written out from one-hot rows.

A token of a bag is a position: its input row is one-hot, or zero where it is the padding, and its gradient is
that at the row that was looked up, so that nothing here knows of bags but their sum or mean.
"""

from __future__ import annotations

from functools import cached_property

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

import curvlab
from curvlab import Additive, Mixed

VOCABULARY, WIDTH, CLASSES, TOKENS, EXAMPLES, PADDING = 6, 3, 4, 5, 7, 2
NAMES = ("0.weight", "2.weight", "2.bias")
CG = "[max_iter=400,tol=1e-13]"
DAMPINGS = {"mixed": Mixed(0.1), "additive": Additive(0.2)}
F64 = {"dtype": torch.float64}


class Written:
    """Loss, gradients and factors of a bag, tanh and a Linear layer, from one-hot rows."""

    def __init__(self, mode: str, padding: int | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.EmbeddingBag(VOCABULARY, WIDTH, mode=mode, padding_idx=padding, **F64),
            nn.Tanh(),
            nn.Linear(WIDTH, CLASSES, **F64),
        )
        self.tokens = torch.randint(0, VOCABULARY, (EXAMPLES, TOKENS))
        self.tokens[0, 1] = PADDING
        self.labels = torch.randint(0, CLASSES, (EXAMPLES,))
        counted = torch.ones(EXAMPLES, TOKENS, **F64)
        if padding is not None:
            counted = (self.tokens != padding).double()
        self.rows = nn.functional.one_hot(self.tokens, VOCABULARY) * counted[..., None]
        self.share = 1 / counted.sum(1) if mode == "mean" else torch.ones(EXAMPLES, **F64)
        self.parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.problem = curvlab.Problem(self.model, "cross-entropy", self.tokens, self.labels)

    def logits(self, parameters: dict[str, Tensor], rows: Tensor, share: Tensor) -> Tensor:
        hidden = torch.tanh((rows @ parameters["0.weight"]).sum(0) * share)
        return parameters["2.weight"] @ hidden + parameters["2.bias"]

    def loss(self, parameters: dict[str, Tensor], rows: Tensor, share: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(parameters, rows, share), label)

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """One gradient per example."""
        each = vmap(grad(self.loss), (None, 0, 0, 0))
        return each(self.parameters, self.rows, self.share, self.labels)

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        return {name: self.gradients[name].mean(0) for name in NAMES}

    @cached_property
    def matrix(self) -> Tensor:
        """One gradient per row of the matrix, parameters in order."""
        return torch.cat([self.gradients[name].reshape(EXAMPLES, -1) for name in NAMES], 1)

    def factors(self, kind: str) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """For each weight A, E[h], B from all positions' rows, and B of their sum, of a Fisher matrix."""
        p = self.parameters
        hidden = torch.tanh((self.rows @ p["0.weight"]).sum(1) * self.share[:, None])
        chances = (hidden @ p["2.weight"].T + p["2.bias"]).softmax(1)
        if kind == "empirical":
            chances = nn.functional.one_hot(self.labels, CLASSES).double()
        zero = torch.zeros(CLASSES, **F64)

        def at_rows(found: Tensor, shift: Tensor, share: Tensor, label: Tensor) -> Tensor:
            inside = torch.tanh(found.sum(0) * share)
            return nn.functional.cross_entropy(p["2.weight"] @ inside + p["2.bias"] + shift, label)

        by_label = vmap(grad(at_rows, (0, 1)), (None, None, None, 0))
        looked_up = self.rows @ p["0.weight"]
        first, last = vmap(by_label, (0, None, 0, None))(looked_up, zero, self.share, torch.arange(CLASSES))
        each = chances / EXAMPLES
        of_rows = torch.einsum("nk,nkta,nktb->ab", each, first, first)
        of_sums = torch.einsum("nk,nka,nkb->ab", each, first.sum(2), first.sum(2))
        outputs = torch.einsum("nk,nka,nkb->ab", each, last, last)
        shares = self.rows.mean((0, 1))
        return {
            "0.weight": (shares.diag(), shares, of_rows, of_sums),
            "2.weight": (hidden.T @ hidden / EXAMPLES, hidden.mean(0), outputs, outputs),
        }


CASES = [(mode, padding) for mode in ("mean", "sum") for padding in (None, PADDING)]


@pytest.fixture(scope="module", params=CASES, ids=[f"{mode}, padding {padding}" for mode, padding in CASES])
def written(request: pytest.FixtureRequest) -> Written:
    return Written(*request.param)


def damped(matrix: Tensor, damping: Mixed | Additive) -> Tensor:
    eye = torch.eye(len(matrix), **F64)
    if isinstance(damping, Additive):
        return matrix + damping.tau * eye
    return (1 - damping.alpha) * matrix + damping.alpha * eye


def factored_step(a: Tensor, b: Tensor, gradient: Tensor, damping: Mixed | Additive) -> Tensor:
    """-(B + √τ/π I)⁻¹ G (A + π√τ I)⁻¹ with π² the ratio of their mean eigenvalues."""
    tau = damping.tau if isinstance(damping, Additive) else damping.alpha
    pi = ((a.trace() / len(a)) / (b.trace() / len(b))).sqrt()
    left = b + tau**0.5 / pi * torch.eye(len(b), **F64)
    right = a + tau**0.5 * pi * torch.eye(len(a), **F64)
    return -torch.linalg.solve(left, gradient) @ torch.linalg.inv(right)


def kron(left: Tensor, right: Tensor) -> Tensor:
    return torch.kron(left.contiguous(), right.contiguous())


@pytest.mark.parametrize("damping", DAMPINGS.values(), ids=DAMPINGS)
@pytest.mark.parametrize("kind", ["empirical", "exact"])
def test_kronecker_solvers_solve_the_written_out_systems(
    written: Written, kind: str, damping: Mixed | Additive
) -> None:
    curvature = curvlab.estimate(f"fisher[kind={kind}]", written.problem)
    gradient, factors = written.problem.gradient(), written.factors(kind)
    found = {
        solver: curvlab.solve(solver, curvature, gradient, damping=damping).direction
        for solver in ("kfi", "sm-kfi", f"cg{CG}", f"ea-cg{CG}", "exact")
    }
    for name, (a, mean, b, b_of_sums) in factors.items():
        torch.testing.assert_close(gradient[name], written.gradient[name], rtol=1e-12, atol=1e-14)
        lookup = name == "0.weight"  # torch has the rows of an embedding first: its matrix is transposed
        g = written.gradient[name].T if lookup else written.gradient[name]
        mean_a = torch.outer(mean, mean)
        expected = {
            "kfi": factored_step(a, b, g, damping),
            "sm-kfi": factored_step(mean_a, b_of_sums, g, damping),
        }
        for solver, (left, right) in {"cg": (b, a), "exact": (b, a), "ea-cg": (b_of_sums, mean_a)}.items():
            expected[solver] = -torch.linalg.solve(damped(kron(left, right), damping), g.flatten()).reshape(
                g.shape
            )
        block = kron(a, b) if lookup else kron(b, a)
        torch.testing.assert_close(curvature.blocks[name].to_dense(), block, rtol=1e-10, atol=1e-12)
        for solver, step in found.items():
            right = expected[solver.partition("[")[0]]
            torch.testing.assert_close(step[name], right.T if lookup else right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("solver", ["exact", f"cg{CG}"])
@pytest.mark.parametrize("structure", ["diagonal", "block", "layer", "full"])
def test_structures_of_the_examples_gradients_are_solved_as_dense_matrices(
    written: Written, structure: str, solver: str
) -> None:
    whole = written.matrix.T @ written.matrix / EXAMPLES
    sizes = [written.parameters[name].numel() for name in NAMES]
    spans = {"block": sizes, "layer": [sizes[0], sizes[1] + sizes[2]], "full": [sum(sizes)]}
    parts = [torch.ones(size, size) for size in spans.get(structure, [1] * sum(sizes))]
    matrix = whole * torch.block_diag(*parts)
    curvature = curvlab.estimate(f"fisher[structure={structure}]", written.problem)
    found = curvlab.solve(solver, curvature, written.problem.gradient(), damping=Additive(0.1)).direction
    expected = -torch.linalg.solve(damped(matrix, Additive(0.1)), written.matrix.mean(0))
    step = torch.cat([found[name].flatten() for name in NAMES])
    torch.testing.assert_close(step, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("provider", ["hessian", "gauss-newton[kind=exact]", "fisher[kind=exact]"])
def test_conjugate_gradients_solve_the_whole_matrix(written: Written, provider: str) -> None:
    shapes = {name: written.parameters[name].shape for name in NAMES}
    sizes = [shape.numel() for shape in shapes.values()]

    def split(vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split(sizes)
        return {name: part.reshape(shapes[name]) for name, part in zip(NAMES, parts, strict=True)}

    def logits(vector: Tensor) -> Tensor:
        return vmap(written.logits, (None, 0, 0))(split(vector), written.rows, written.share)

    start = torch.cat([written.parameters[name].flatten() for name in NAMES])
    if provider == "hessian":
        matrix = torch.func.hessian(lambda v: nn.functional.cross_entropy(logits(v), written.labels))(start)
    else:
        jacobian, chances = jacrev(logits)(start), logits(start).softmax(1)
        output = torch.diag_embed(chances) - chances[:, :, None] * chances[:, None]
        matrix = torch.einsum("nkp,nkl,nlq->pq", jacobian, output, jacobian) / EXAMPLES
    opened = provider.rstrip("]") + ("," if "[" in provider else "[") + "structure=full]"
    curvature = curvlab.estimate(opened, written.problem)
    torch.testing.assert_close(curvature.to_dense(), matrix, rtol=1e-10, atol=1e-12)
    damping = Additive(0.2 + max(0.0, -float(torch.linalg.eigvalsh(matrix)[0])))
    found = curvlab.solve(f"cg{CG}", curvature, written.problem.gradient(), damping=damping).direction
    expected = -torch.linalg.solve(damped(matrix, damping), written.matrix.mean(0))
    step = torch.cat([found[name].flatten() for name in NAMES])
    torch.testing.assert_close(step, expected, rtol=1e-9, atol=1e-11)
