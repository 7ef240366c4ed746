"""Every block of every provider and every solver, on one tiny network of each kind, against dense ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.exceptions import CurvlabError, ProblemError
from tests.any_models import CASES, EITHER_PLAIN, LOSSES, AnyCase, Twice, assert_blocks
from tests.any_reference import AnyReference, call, example, pick_logits

SHARINGS = ("expand", "reduce")
KINDS = {
    "fisher": "empirical",
    "fisher[kind=exact]": "exact",
    "gauss-newton[kind=rows]": "rows",
}
SOLVERS = ("kfi", "sm-kfi", "cg[max_iter=200,tol=1e-12]", "ea-cg[max_iter=200,tol=1e-12]", "exact")
ALPHA = 0.1
NAMES = list(CASES)
LABELLED = [n for n, c in CASES.items() if c.loss not in ("mse", "bce")]
SOLVED = [n for n in NAMES if n not in EITHER_PLAIN]


@cache
def reference_of(name: str) -> AnyReference:
    return CASES[name].reference()


def with_fields(provider: str, **fields: Any) -> str:
    text = ",".join(f"{k}={v}" for k, v in fields.items())
    return f"{provider[:-1]},{text}]" if provider.endswith("]") else f"{provider}[{text}]"


# the references, against torch and each other


@pytest.mark.parametrize("name", NAMES)
def test_references_agree_with_torch_and_with_each_other(name: str) -> None:
    case, reference = CASES[name], reference_of(name)
    model, inputs, targets = case.make()
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = LOSSES[case.loss].torch_loss(pick_logits(call(model, inputs), case.output), targets)
    loss = loss + case.l2 / 2 * torch.stack([(p**2).sum() for p in parameters]).sum()
    torch.testing.assert_close(reference.mean_loss(), loss, rtol=1e-12, atol=1e-13)
    gradient = reference.gradient()
    for found, expected in zip(gradient.values(), torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for parameter, found in reference.gradient_of_rows().items():
        data = gradient[parameter] - case.l2 * reference.parameters[parameter].detach()
        torch.testing.assert_close(found.reshape(data.shape), data, rtol=1e-10, atol=1e-12, msg=parameter)
    newton = reference.gauss_newton_blocks()
    rows, exact = reference.plain_blocks("rows"), reference.plain_blocks("exact")
    for parameter, block in newton.items():
        torch.testing.assert_close(rows[parameter], block, rtol=1e-9, atol=1e-11, msg=parameter)
        if LOSSES[case.loss].likelihood:
            torch.testing.assert_close(exact[parameter], block, rtol=1e-9, atol=1e-11, msg=parameter)


# curvlab


@pytest.mark.parametrize("name", NAMES)
def test_gradient_and_loss_are_torch_s_own(name: str) -> None:
    problem, reference = CASES[name].problem(), reference_of(name)
    torch.testing.assert_close(problem.loss().detach(), reference.mean_loss().detach(), rtol=1e-12, atol=0)
    gradient, expected = problem.gradient(), reference.gradient()
    assert set(gradient) == set(expected)
    for parameter, value in gradient.items():
        scale = float(expected[parameter].abs().max()) + 1e-4
        assert float((value - expected[parameter]).abs().max()) <= 1e-12 * scale, parameter


@pytest.mark.parametrize("name", NAMES)
def test_hessian_and_exact_gauss_newton_are_the_dense_ones(name: str) -> None:
    problem, reference = CASES[name].problem(), reference_of(name)
    assert_blocks(curvlab.estimate("hessian", problem), reference.hessian_blocks())
    assert_blocks(curvlab.estimate("gauss-newton[kind=exact]", problem), reference.gauss_newton_blocks())
    whole, expected = curvlab.estimate("hessian[full=true]", problem), reference.full_hessian()
    order = in_order(list(whole.blocks), reference)
    expected = expected[order][:, order]
    assert float((whole.to_dense() - expected).abs().max()) <= 1e-10 * float(expected.abs().max())


def in_order(names: list[str], reference: AnyReference) -> Tensor:
    """Where the parameters `names` are in the reference's own order."""
    starts, start = {}, 0
    for name, p in reference.parameters.items():
        starts[name] = torch.arange(start, start + p.numel())
        start += p.numel()
    return torch.cat([starts[name] for name in names])


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("provider", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_kronecker_blocks_are_the_written_out_ones(name: str, provider: str, sharing: str) -> None:
    problem, reference = CASES[name].problem(), reference_of(name)
    curvature = curvlab.estimate(with_fields(provider, sharing=sharing), problem)
    either = reference.plain_blocks(KINDS[provider]) if name in EITHER_PLAIN else None
    assert_blocks(curvature, reference.blocks(KINDS[provider], sharing), either)


@pytest.mark.parametrize("name", NAMES)
def test_expand_with_all_positions_is_the_default(name: str) -> None:
    problem = CASES[name].problem()
    plain, named = curvlab.estimate(["fisher", "fisher[sharing=expand,positions=all]"], problem)
    for parameter, block in plain.blocks.items():
        torch.testing.assert_close(named.blocks[parameter].to_dense(), block.to_dense(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name", LABELLED)
def test_exact_fisher_is_gauss_newton_for_cross_entropy(name: str, sharing: str) -> None:
    problem = CASES[name].problem()
    fisher = curvlab.estimate(f"fisher[kind=exact,sharing={sharing}]", problem)
    newton = curvlab.estimate(f"gauss-newton[kind=rows,sharing={sharing}]", problem)
    assert_blocks(fisher, {n: b.to_dense() for n, b in newton.blocks.items()})


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "sequence linear",
        "class-weighted examples",
        "an ignored example",
        "residual and a layer used twice",
        "embedding",
        "attention",
        "conv2d",
        "groups",
        "transposed 2d",
        "a layer used twice on a sequence",
        "class-weighted tokens of unequal lengths",
        "dict input with a mask, tokens of unequal lengths",
        "l2",
    ],
)
def test_mc_fisher_is_that_of_the_labels_drawn_for_each_example(name: str, sharing: str) -> None:
    """Draws are keyed by the example: those of each alone, read off its bias blocks, are the batch's."""
    case, reference = CASES[name], reference_of(name)
    model, inputs, targets = case.make()
    provider = f"fisher[kind=mc,samples=1,seed=5,sharing={sharing}]"
    drawn: list[Any] = [None] * len(targets)
    for i, _ in reference.counted:
        extra: dict[str, Any] = {"l2": case.l2} if case.l2 else {}
        one = curvlab.Problem(
            model, LOSSES[case.loss].criterion(), example(inputs, i), targets[i : i + 1], **extra
        )
        alone = curvlab.estimate(provider, one)
        drawn[i] = reference.drawn(i, lambda n, alone=alone: alone.blocks[n].to_dense())
        assert drawn[i], f"example {i}: no labels give these blocks"
    whole = curvlab.estimate(provider, case.problem())
    assert_blocks(whole, reference.blocks("mc", sharing, drawn))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequence linear", "class-weighted tokens", "mse for each token", "bce"])
def test_mc_fisher_is_the_exact_one_in_the_mean(name: str) -> None:
    problem = CASES[name].problem()
    exact = curvlab.estimate("fisher[kind=exact]", problem)
    mean = curvlab.estimate("fisher[kind=mc,samples=3000]", problem)
    for parameter, block in exact.blocks.items():
        expected = block.to_dense()
        # Two thousand draws a row leave about 2 %; a wrong scale would be off by a factor.
        assert float((mean.blocks[parameter].to_dense() - expected).norm()) <= 0.1 * float(expected.norm())


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", SOLVED)
def test_every_solver_solves_its_documented_system(name: str, solver: str, sharing: str) -> None:
    problem, reference = CASES[name].problem(), reference_of(name)
    curvature = curvlab.estimate(f"fisher[sharing={sharing}]", problem)
    solution = curvlab.solve(solver, curvature, problem.gradient(), alpha=ALPHA)
    expected = reference.direction(solver.split("[")[0], "empirical", sharing, ALPHA)
    assert set(solution.direction) == set(expected)
    for parameter, value in expected.items():
        found = solution.direction[parameter]
        assert found.shape == value.shape, parameter
        error, scale = float((found - value).norm()), float(value.norm()) + 1e-6
        assert error <= 1e-8 * scale, f"{parameter}: off by {error / scale:.3g}"


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("provider", ["fisher[kind=exact]", "gauss-newton[kind=rows]"])
@pytest.mark.parametrize(
    "name", ["conv2d", "groups", "attention", "language model, tied", "unequal lengths", "l2"]
)
def test_solvers_serve_the_other_kronecker_providers(name: str, provider: str, solver: str) -> None:
    problem, reference = CASES[name].problem(), reference_of(name)
    curvature = curvlab.estimate(provider, problem)
    solution = curvlab.solve(solver, curvature, problem.gradient(), alpha=ALPHA)
    expected = reference.direction(solver.split("[")[0], KINDS[provider], "expand", ALPHA)
    for parameter, value in expected.items():
        error = float((solution.direction[parameter] - value).norm())
        assert error <= 1e-8 * (float(value.norm()) + 1e-9), parameter


@pytest.mark.parametrize("name", ["conv2d", "attention", "layer norm", "l2", "four tokens"])
@pytest.mark.parametrize("provider", ["gauss-newton[kind=exact]"])
def test_conjugate_gradients_solve_matrix_free_curvatures(name: str, provider: str) -> None:
    problem, reference = CASES[name].problem(), reference_of(name)
    curvature = curvlab.estimate(provider, problem)
    solution = curvlab.solve("cg[max_iter=400,tol=1e-12]", curvature, problem.gradient(), alpha=ALPHA)
    gradient, blocks = reference.gradient(), reference.gauss_newton_blocks()
    for parameter, block in blocks.items():
        matrix = (1 - ALPHA) * block + ALPHA * torch.eye(len(block)).double()
        value = torch.linalg.solve(matrix, -gradient[parameter].flatten())
        error = float((solution.direction[parameter].flatten() - value).norm())
        assert error <= 1e-7 * (float(value.norm()) + 1e-9), parameter


@pytest.mark.parametrize("name", ["conv2d", "attention", "language model, tied", "l2", "layer norm"])
@pytest.mark.parametrize("provider", ["fisher", "hessian", "gauss-newton[kind=rows,sharing=reduce]"])
def test_products_trace_and_diagonal_are_those_of_the_dense_form(name: str, provider: str) -> None:
    curvature = curvlab.estimate(provider, CASES[name].problem())
    close = {"rtol": 1e-9, "atol": 1e-11}
    for parameter, block in curvature.blocks.items():
        dense = block.to_dense()
        x = torch.randn(reference_of(name).parameters[parameter].shape).double()
        assert (block @ x).shape == x.shape, "operands have the parameter's own shape"
        torch.testing.assert_close((block @ x).flatten(), dense @ x.flatten(), **close)
        torch.testing.assert_close(block.trace(), dense.trace(), **close)
        torch.testing.assert_close(block.diagonal().flatten(), dense.diagonal(), **close)


# streams, and what has to be refused


@pytest.mark.parametrize("provider", ["fisher", "fisher[kind=exact,sharing=reduce]", "fisher[kind=mc]"])
@pytest.mark.parametrize(
    "name", ["dict input with a mask, tokens of unequal lengths", "conv2d", "tuple input", "language model"]
)
def test_a_stream_of_batches_gives_what_one_batch_gives(name: str, provider: str) -> None:
    case = CASES[name]
    model, inputs, targets = case.make()
    batches = [(example(inputs, i), targets[i : i + 1]) for i in reversed(range(len(targets)))]
    stream = curvlab.Problem(model, LOSSES[case.loss].criterion(), batches)
    whole = curvlab.estimate(provider, case.problem())
    assert_blocks(
        curvlab.estimate(provider, stream), {n: b.to_dense() for n, b in whole.blocks.items()}, None, 1e-11
    )
    gradient = case.problem().gradient()
    for parameter, value in stream.gradient().items():
        torch.testing.assert_close(value, gradient[parameter], rtol=1e-11, atol=1e-13)


def test_a_torch_loss_is_refused_where_classes_could_be_first_or_last() -> None:
    model = Twice(2).double()
    inputs, targets = torch.randn(4, 3, 2).double(), torch.randint(3, (4, 3))
    with pytest.raises(ProblemError, match="cross-entropy"):
        curvlab.estimate("fisher", curvlab.Problem(model, nn.CrossEntropyLoss(), inputs, targets))
    curvlab.estimate("fisher", curvlab.Problem(model, "cross-entropy", inputs, targets))


@pytest.mark.parametrize("solver", ["kfi", "exact", "ea-cg"])
def test_matrix_free_curvatures_of_any_model_are_refused_by_other_solvers(solver: str) -> None:
    problem = CASES["conv2d"].problem()
    curvature = curvlab.estimate("hessian", problem)
    with pytest.raises(CurvlabError, match="cg"):
        curvlab.solve(solver, curvature, problem.gradient(), alpha=ALPHA)


@pytest.mark.parametrize("provider", ["pch[kind=recursive]", "gauss-newton[kind=recursive]"])
def test_recursions_are_refused_off_the_chain_naming_what_works(provider: str) -> None:
    case: AnyCase = CASES["conv2d"]
    with pytest.raises(CurvlabError, match=r"fisher|rows"):
        curvlab.estimate(provider, case.problem())


def test_gauss_newton_takes_rows_where_there_is_no_chain() -> None:
    auto, rows = (
        curvlab.estimate(p, CASES["conv2d"].problem()) for p in ("gauss-newton", "gauss-newton[kind=rows]")
    )
    assert_blocks(auto, {n: b.to_dense() for n, b in rows.blocks.items()}, None, 1e-13)
