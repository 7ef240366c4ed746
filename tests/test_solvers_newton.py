"""The exact Hessian with cg: truncated Newton, its statuses, start vectors and preconditioners."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab import Status
from curvlab.exceptions import SolveError
from curvlab.linalg import OperatorBlock
from curvlab.solvers.structure_systems import jacobi
from tests.solver_cases import NARROW, WIDE, assert_close, autograd_gradient, problem

ALPHA = 0.3
LIMIT = "cg[max_iter=400,tol=1e-13]"


def hessian(p: curvlab.Problem) -> dict[str, dict[str, Tensor]]:
    """The whole Hessian by torch.func, parameter by parameter."""
    batch = next(iter(p.batches()))

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        outputs = torch.func.functional_call(p.model, parameters, (batch.inputs,))
        return p.criterion.losses(outputs, batch.targets).mean()

    parameters = {name: value.detach() for name, value in p.model.named_parameters()}
    return torch.func.hessian(loss)(parameters)


def newton(p: curvlab.Problem, full: bool) -> dict[str, Tensor]:
    """-((1-α)H + αI)⁻¹ g, block by block or as a whole."""
    blocks, gradient = hessian(p), autograd_gradient(p)
    names = list(gradient)
    sizes = [gradient[name].numel() for name in names]
    rows = [
        torch.cat(
            [blocks[a][b].reshape(m, n) * (full or a == b) for b, n in zip(names, sizes, strict=True)], 1
        )
        for a, m in zip(names, sizes, strict=True)
    ]
    matrix = (1 - ALPHA) * torch.cat(rows) + ALPHA * torch.eye(sum(sizes), dtype=torch.float64)
    assert float(torch.linalg.eigvalsh(matrix)[0]) > 0
    flat = torch.linalg.solve(matrix, -torch.cat([gradient[name].flatten() for name in names]))
    parts = flat.split(sizes)
    return {name: part.reshape(gradient[name].shape) for name, part in zip(names, parts, strict=True)}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("size", [NARROW, {"widths": (9, 4, 3), "examples": 5}])
def test_where_it_is_definite_truncated_newton_is_newton(size: dict, full: bool) -> None:
    p = problem(**size)
    curvature = curvlab.estimate("hessian[full=true]" if full else "hessian", p)
    solution = curvlab.solve(LIMIT, curvature, p.gradient(), alpha=ALPHA)
    for name, expected in newton(p, full).items():
        assert_close(solution.direction[name], expected, 1e-9)
        assert solution.blocks[name].status is Status.CONVERGED
        assert solution.blocks[name].route == "operator"


def test_a_full_hessian_is_one_system_with_one_residual() -> None:
    p = problem(**NARROW)
    curvature = curvlab.estimate("hessian[full=true]", p)
    solution = curvlab.solve("cg[max_iter=3]", curvature, p.gradient(), alpha=ALPHA)
    frame = solution.frame()
    assert frame["residual"].nunique() == 1
    assert frame["iterations"].nunique() == 1


def test_residuals_are_those_of_the_parameters_solved_for_even_after_the_step() -> None:
    p = problem(**NARROW)
    curvature = curvlab.estimate("hessian", p)
    solution = curvlab.solve(LIMIT, curvature, p.gradient(), alpha=ALPHA)
    solution.add_to(p.model, lr=1.0)
    assert solution.frame()["residual"].max() < 1e-12
    assert set(solution.frame()["status"]) == {"converged"}


class Residual(nn.Module):
    """No chain: the input also goes around the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.inner(x).tanh())


@pytest.mark.parametrize("full", [False, True])
def test_a_module_that_is_no_chain_is_solved_the_same_way(full: bool) -> None:
    torch.manual_seed(0)
    x, y = 0.3 * torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    p = curvlab.Problem(Residual().double(), "cross-entropy", x, y)
    curvature = curvlab.estimate("hessian[full=true]" if full else "hessian", p)
    solution = curvlab.solve(LIMIT, curvature, p.gradient(), alpha=ALPHA)
    for name, expected in newton(p, full).items():
        assert_close(solution.direction[name], expected, 1e-9)


@pytest.mark.parametrize("provider", ["hessian", "hessian[full=true]"])
def test_a_model_of_which_only_biases_are_trained_is_solved(provider: str) -> None:
    p = problem(**NARROW)
    for name, parameter in p.model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    batch = next(iter(p.batches()))
    q = curvlab.Problem(p.model, "cross-entropy", batch.inputs, batch.targets)
    curvature = curvlab.estimate(provider, q)
    solution = curvlab.solve(LIMIT, curvature, q.gradient(), alpha=ALPHA)
    names = list(curvature.blocks)
    dense = (1 - ALPHA) * curvature.to_dense() + ALPHA * torch.eye(curvature.numel, dtype=torch.float64)
    expected = torch.linalg.solve(dense, -torch.cat([q.gradient()[name] for name in names]))
    assert_close(torch.cat([solution.direction[name] for name in names]), expected, 1e-9)


def concave() -> tuple[curvlab.Problem, curvlab.Curvature]:
    """A gradient that points straight into negative curvature: one linear layer, Tukey far from zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    p = curvlab.Problem(model, "tukey[c=2]", x, model(x).detach() + 1.6)
    return p, curvlab.estimate("hessian", p)


def test_negative_curvature_at_once_is_reported_and_gives_steepest_descent() -> None:
    p, curvature = concave()
    gradient = p.gradient()
    solution = curvlab.solve("cg", curvature, gradient, alpha=1e-3)
    for name, block in solution.blocks.items():
        assert block.status is Status.NEGATIVE_CURVATURE
        assert block.slope < 0
        assert_close(solution.direction[name], -gradient[name], 1e-12)


def test_negative_curvature_later_gives_the_best_direction_before_it() -> None:
    """diag(4, 1, -1) from g = (1, 1, 0.1): the first step has positive curvature, a later one has not."""
    eigenvalues = torch.tensor([4.0, 1.0, -1.0], dtype=torch.float64)
    curvature = diagonal(eigenvalues)
    gradient = {"0.bias": torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64)}
    solution = curvlab.solve("cg", curvature, gradient, damping=curvlab.Additive(1e-9))
    block = solution.blocks["0.bias"]
    assert block.status is Status.NEGATIVE_CURVATURE
    assert block.iterations >= 1
    step, g = solution.direction["0.bias"], gradient["0.bias"]
    before = curvlab.solve(
        f"cg[max_iter={block.iterations}]", curvature, gradient, damping=curvlab.Additive(1e-9)
    )
    assert torch.equal(step, before.direction["0.bias"])
    model = float(g @ step + 0.5 * step @ (eigenvalues * step))
    assert model < 0


def diagonal(eigenvalues: Tensor) -> curvlab.Curvature:
    """A curvature of one bias with these eigenvalues."""
    block = OperatorBlock((len(eigenvalues),), lambda x: eigenvalues.to(x) * x, eigenvalues)
    layer = curvlab.LayerCurvature("0", None, "0.bias", None, bias_operator=block)
    definiteness = curvlab.Definiteness(False, "made so")
    return curvlab.Curvature("mine", "none", (layer,), definiteness)


def test_an_iteration_that_runs_out_says_so() -> None:
    p = problem(**WIDE)
    solution = curvlab.solve("cg[max_iter=1]", curvlab.estimate("hessian", p), p.gradient(), alpha=0.05)
    assert Status.ITERATION_LIMIT in {block.status for block in solution.blocks.values()}


def test_a_true_residual_above_the_tolerance_is_stagnation() -> None:
    torch.manual_seed(0)
    eigenvalues = torch.logspace(0, 4, 6).float()
    curvature = diagonal(eigenvalues)
    gradient = {"0.bias": torch.ones(6)}
    solution = curvlab.solve(
        "cg[max_iter=200,tol=1e-10]", curvature, gradient, damping=curvlab.Additive(1e-3)
    )
    block = solution.blocks["0.bias"]
    assert block.status is Status.STAGNATED
    assert block.residual > 2e-10
    assert float(block.history[-1]) <= 1e-10  # type: ignore[index]


@pytest.mark.parametrize(
    ("times", "status"), [(1.5, Status.CONVERGED), (1.9, Status.CONVERGED), (2.1, Status.STAGNATED)]
)
def test_a_true_residual_of_up_to_twice_the_tolerance_counts_as_converged(
    times: float, status: Status
) -> None:
    """The recursive residual ends at zero; the last product, which gives the true one, is made to be off."""
    tol, tau = 1e-6, 1.0
    products = 0

    def product(x: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return x if products == 1 else x + times * tol

    block = OperatorBlock((4,), product, torch.ones(4, dtype=torch.float64))
    layer = curvlab.LayerCurvature("0", None, "0.bias", None, bias_operator=block)
    curvature = curvlab.Curvature("mine", "none", (layer,), curvlab.Definiteness(True, "made so"))
    gradient = {"0.bias": torch.ones(4, dtype=torch.float64)}
    solution = curvlab.solve(f"cg[tol={tol}]", curvature, gradient, damping=curvlab.Additive(tau))
    found = solution.blocks["0.bias"]
    assert found.iterations == 1
    assert found.residual == pytest.approx(times * tol, rel=1e-6)
    assert found.status is status


def test_zero_curvature_is_a_breakdown() -> None:
    tau = 0.5
    eigenvalues = torch.full((3,), -tau, dtype=torch.float64)
    curvature = diagonal(eigenvalues)
    gradient = {"0.bias": torch.ones(3, dtype=torch.float64)}
    solution = curvlab.solve("cg", curvature, gradient, damping=curvlab.Additive(tau))
    assert solution.blocks["0.bias"].status is Status.BREAKDOWN
    assert not solution.direction["0.bias"].any()


def test_every_status_is_a_sentence() -> None:
    assert all(status.value.endswith(".") and " " in status.value for status in Status)
    assert [status.slug for status in Status] == [
        "converged",
        "iteration-limit",
        "stagnated",
        "negative-curvature",
        "breakdown",
    ]


def test_strict_raises_where_the_default_records() -> None:
    p = problem(**WIDE)
    curvature = curvlab.estimate("fisher", p)
    with pytest.raises(SolveError, match=r"`cg\[max_iter=1\]` on `fisher`.*did not converge.*strict=False"):
        curvlab.solve("cg[max_iter=1]", curvature, p.gradient(), alpha=0.01, strict=True)
    curvlab.solve("kfi", curvature, p.gradient(), alpha=0.01, strict=True)


@pytest.mark.parametrize("provider", ["hessian", "hessian[full=true]", "pch-1"])
def test_a_start_at_the_solution_needs_no_iteration(provider: str) -> None:
    p = problem(**NARROW)
    curvature = curvlab.estimate(provider, p)
    first = curvlab.solve(LIMIT, curvature, p.gradient(), alpha=ALPHA)
    again = curvlab.solve("cg[tol=1e-9]", curvature, p.gradient(), alpha=ALPHA, start=dict(first.direction))
    for name, block in again.blocks.items():
        assert block.iterations == 0
        assert block.status is Status.CONVERGED
        assert_close(again.direction[name], first.direction[name], 1e-12)


def test_any_start_ends_at_the_same_solution() -> None:
    p = problem(**NARROW)
    curvature = curvlab.estimate("pch-1", p)
    start = {name: torch.randn_like(value) for name, value in p.gradient().items()}
    expected = curvlab.solve("exact", curvature, p.gradient(), alpha=ALPHA)
    solution = curvlab.solve(LIMIT, curvature, p.gradient(), alpha=ALPHA, start=start)
    for name, value in expected.direction.items():
        assert_close(solution.direction[name], value, 1e-9)


def test_a_start_that_does_not_fit_is_refused_by_name() -> None:
    p = problem(**NARROW)
    curvature = curvlab.estimate("hessian", p)
    with pytest.raises(SolveError, match=r"the start has no entry for `0.weight`"):
        curvlab.solve("cg", curvature, p.gradient(), alpha=ALPHA, start={})
    wrong = dict(p.gradient()) | {"2.bias": torch.ones(1)}
    with pytest.raises(SolveError, match=r"has shape \(1,\) for `2.bias`"):
        curvlab.solve("cg", curvature, p.gradient(), alpha=ALPHA, start=wrong)


@pytest.mark.parametrize("provider", ["hessian", "hessian[full=true]", "gauss-newton[kind=exact]", "pch-1"])
def test_preconditioners_change_the_way_and_not_the_end(provider: str) -> None:
    p = problem(**NARROW)
    curvature = curvlab.estimate(provider, p)
    plain = curvlab.solve(LIMIT, curvature, p.gradient(), alpha=ALPHA)
    jacobi = curvlab.solve(f"{LIMIT[:-1]},preconditioner=jacobi]", curvature, p.gradient(), alpha=ALPHA)
    seen: set[str] = set()

    def thirds(name: str, x: Tensor) -> Tensor:
        seen.add(name)
        return x / 3

    own = curvlab.solve(LIMIT, curvature, p.gradient(), alpha=ALPHA, preconditioner=thirds)
    assert seen == set(plain.direction)
    for name, value in plain.direction.items():
        assert_close(jacobi.direction[name], value, 1e-9)
        assert_close(own.direction[name], value, 1e-9)


def test_jacobi_solves_a_diagonal_system_in_one_iteration() -> None:
    eigenvalues = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    curvature = diagonal(eigenvalues)
    gradient = {"0.bias": torch.ones(4, dtype=torch.float64)}
    damping = curvlab.Additive(0.1)
    jacobi = curvlab.solve("cg[preconditioner=jacobi]", curvature, gradient, damping=damping)
    plain = curvlab.solve("cg", curvature, gradient, damping=damping)
    assert (jacobi.blocks["0.bias"].iterations, plain.blocks["0.bias"].iterations) == (1, 4)
    assert_close(jacobi.direction["0.bias"], -1 / (eigenvalues + 0.1), 1e-13)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda g: torch.full_like(g, float("nan")), "the start for `0.weight` holds NaN or infinity"),
        (lambda g: g[:-1], r"the start has shape .* for `0.weight`; expected shape"),
    ],
)
def test_a_start_that_does_not_fit_is_refused_and_not_blamed_on_the_curvature(start, message: str) -> None:
    p = problem(**WIDE)
    given = {name: torch.zeros_like(value) for name, value in p.model.named_parameters()}
    given["0.weight"] = start(given["0.weight"])
    with pytest.raises(SolveError, match=message):
        curvlab.solve("cg", curvlab.estimate("hessian", p), p.gradient(), alpha=ALPHA, start=given)


def test_a_start_of_another_dtype_or_from_numpy_is_converted() -> None:
    p = problem(**WIDE)
    curvature, gradient = curvlab.estimate("pch-1", p), p.gradient()
    start = {name: torch.randn_like(value) for name, value in p.model.named_parameters()}
    expected = curvlab.solve(LIMIT, curvature, gradient, alpha=ALPHA, start=start).direction
    for other in (lambda t: t.float(), lambda t: t.detach().numpy()):
        given = {name: other(value) for name, value in start.items()}
        found = curvlab.solve(LIMIT, curvature, gradient, alpha=ALPHA, start=given).direction
        for name in expected:
            assert_close(found[name], expected[name], 1e-8)


@pytest.mark.parametrize(
    ("image", "given"), [(lambda x: None, "NoneType"), (lambda x: x.T, "shape"), (lambda x: 2.0, "float")]
)
def test_a_preconditioner_that_gives_something_else_is_refused(image, given: str) -> None:
    p = problem(**WIDE)
    with pytest.raises(
        SolveError, match=f"the preconditioner gives {given}.* for `0.weight`; expected a tensor"
    ):
        curvlab.solve(
            "cg",
            curvlab.estimate("hessian", p),
            p.gradient(),
            alpha=ALPHA,
            preconditioner=lambda name, x: image(x),
        )


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_the_residual_of_an_operator_is_that_of_any_size_of_gradient(size: float) -> None:
    p = problem(**WIDE, dtype=torch.float32)
    curvature = curvlab.estimate("gauss-newton[kind=exact]", p)
    plain = {name: value * size for name, value in p.gradient().items()}
    blocks = curvlab.solve("cg[max_iter=2]", curvature, plain, alpha=0.01).blocks
    reference = curvlab.solve("cg[max_iter=2]", curvature, dict(p.gradient().items()), alpha=0.01).blocks
    for name, block in blocks.items():
        assert block.residual == pytest.approx(reference[name].residual, rel=1e-3, abs=1e-6)


def test_measures_of_an_operator_equal_those_written_out() -> None:
    p = problem(**WIDE)
    gradient, matrices = autograd_gradient(p), hessian(p)
    solution = curvlab.solve("cg[max_iter=2]", curvlab.estimate("hessian", p), p.gradient(), alpha=ALPHA)
    for name, block in solution.blocks.items():
        d, g = solution.direction[name].flatten(), gradient[name].flatten()
        image = matrices[name][name].reshape(len(d), len(d)) @ d
        rest = (1 - ALPHA) * image + ALPHA * d + g
        assert block.residual_full == pytest.approx(float(rest.norm() / g.norm()), rel=1e-8)
        assert block.residual == block.residual_full
        assert block.slope == pytest.approx(float(d @ g), rel=1e-9)
        assert block.predicted_reduction == pytest.approx(-float(d @ g + 0.5 * d @ image), rel=1e-8)


@pytest.mark.parametrize("provider", ["hessian", "hessian[full=true]"])
def test_the_jacobi_preconditioner_is_the_damped_diagonal_without_its_negative_part(provider: str) -> None:
    p = problem(**WIDE, gain=3.0)
    curvature, matrices = curvlab.estimate(provider, p), hessian(p)
    apply = jacobi(curvature.blocks, curvlab.Mixed(0.2))
    negative = 0
    for name, parameter in p.model.named_parameters():
        diagonal = matrices[name][name].reshape(parameter.numel(), -1).diagonal().reshape(parameter.shape)
        expected = 1 / (0.8 * diagonal.clamp(min=0) + 0.2)
        negative += int((diagonal < -1e-6).sum())
        assert_close(apply(name, torch.ones_like(parameter)), expected, 1e-9)
    assert negative


@pytest.mark.parametrize("provider", ["hessian[full=true]", "gauss-newton[kind=exact]"])
def test_the_jacobi_preconditioner_is_used_where_it_is_asked_for(provider: str) -> None:
    p = problem(**WIDE, gain=4.0)
    curvature, gradient = curvlab.estimate(provider, p), p.gradient()
    plain, scaled = (
        curvlab.solve(f"cg[max_iter=1,preconditioner={kind}]", curvature, gradient, alpha=0.5).direction
        for kind in ("none", "jacobi")
    )
    assert not torch.allclose(plain["0.weight"], scaled["0.weight"], rtol=1e-3)
