"""Every provider × solver × route × dtype × width × damping, on degenerate problems too: finite and sane."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import curvlab
from curvlab import Status
from curvlab.exceptions import PairError
from tests.solver_cases import DIRECT, MATRIX_FREE, MEAN, PROVIDERS, ROUTES, SOLVERS, problem

ALPHAS = (1e-4, 1e-2, 0.5)
SIZES: dict[str, dict[str, Any]] = {
    "wide": {"widths": (12, 5, 3), "examples": 4},
    "narrow": {"widths": (4, 3, 3), "examples": 10},
}
PER_ITERATION = (Status.CONVERGED, Status.ITERATION_LIMIT, Status.STAGNATED, Status.NEGATIVE_CURVATURE)


def plain(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    return problem(widths, examples, dtype)


def zero_gradient(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    p = problem(widths, examples, dtype, "mse")
    x = next(iter(p.batches())).inputs
    return curvlab.Problem(p.model, "mse", x, p.model(x).detach())


def zero_inputs(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    return problem(widths, dtype=dtype, inputs=torch.zeros(examples, widths[0]))


def zero_mean_inputs(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    half = torch.randn(examples // 2, widths[0])
    return problem(widths, dtype=dtype, inputs=torch.cat([half, -half]))


def no_gradient_off_the_mean(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    return problem(widths, dtype=dtype, inputs=torch.randn(1, widths[0]).repeat(examples, 1))


def repeated_rows(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    return problem(widths, dtype=dtype, inputs=torch.randn(examples // 2, widths[0]).repeat(2, 1))


def one_example(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    return problem(widths, 1, dtype)


def one_neuron(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    return problem((widths[0], 1, 1), examples, dtype, "mse")


def one_input(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    return problem((1, *widths[1:]), examples, dtype)


def no_bias(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    return problem(widths, examples, dtype, bias=False)


def layer_subset(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    return problem(widths, examples, dtype, layers=["2"])


def zero_weight_rows(dtype: torch.dtype, widths: tuple[int, ...], examples: int) -> curvlab.Problem:
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0, 2.0], dtype=dtype))
    p = problem(widths, examples, dtype, weighted)
    targets = torch.arange(examples) % 3
    return p.with_data(next(iter(p.batches())).inputs, targets)


CASES = {
    make.__name__: make
    for make in (
        plain,
        zero_gradient,
        zero_inputs,
        zero_mean_inputs,
        no_gradient_off_the_mean,
        repeated_rows,
        one_example,
        one_neuron,
        one_input,
        no_bias,
        layer_subset,
        zero_weight_rows,
    )
}


def solve_all(curvature: curvlab.Curvature, gradient: Any, dtype: torch.dtype) -> None:
    for solver in SOLVERS:
        if curvature.provider in MATRIX_FREE and solver != "cg":
            check_refused(solver, curvature, gradient)
            continue
        for route in ROUTES:
            if not exists(solver, route, curvature):
                continue
            for alpha in ALPHAS:
                solution = curvlab.solve(f"{solver}[route={route}]", curvature, gradient, alpha=alpha)
                check(solution, curvature, solver, dtype)


def exists(solver: str, route: str, curvature: curvlab.Curvature) -> bool:
    if curvature.provider in MATRIX_FREE:
        return route == "auto"
    full = [layer.inputs.full for layer in curvature.layers if layer.inputs is not None]
    return not (route == "row" and solver not in MEAN and not all(f.rank_bound < f.size for f in full))


def check(solution: curvlab.Solution, curvature: curvlab.Curvature, solver: str, dtype: torch.dtype) -> None:
    for name, block in solution.blocks.items():
        where = f"{solution} {name} {block.route}: residual {block.residual}"
        step = solution.direction[name]
        assert step.dtype == dtype, where
        assert bool(torch.isfinite(step).all()), where
        if curvature_is_by_block(solution):
            assert block.slope <= 1e-6, where
        if solver in DIRECT:
            assert block.residual <= max(block.tolerance, rounding(block, solution, curvature, dtype)), where
            assert block.iterations == 0
        else:
            assert block.status in PER_ITERATION, where
            assert block.iterations <= 20, where
            if dtype == torch.float64 and block.status is not Status.NEGATIVE_CURVATURE:
                assert block.status is not Status.STAGNATED, where
    assert sum(block.slope for block in solution.blocks.values()) <= 1e-6


def rounding(
    block: curvlab.solvers.BlockSolution,
    solution: curvlab.Solution,
    curvature: curvlab.Curvature,
    dtype: torch.dtype,
) -> float:
    """What a direct method in this dtype cannot be expected to go below: rounding times a condition."""
    layer = next(layer for layer in curvature.layers if layer.name == block.layer)
    assert layer.output is not None
    assert layer.inputs is not None
    b, shift = float(layer.output.eigvalsh()[-1]), solution.damping.shift
    a = float(layer.inputs.full.eigvalsh()[-1]) if block.name == layer.weight_name else 1.0
    pi = 1.0 if block.pi != block.pi else block.pi
    return (
        16
        * torch.finfo(dtype).eps
        * max(b * a / shift, (b * pi / shift**0.5 + 1) * (a / pi / shift**0.5 + 1))
    )


def curvature_is_by_block(solution: curvlab.Solution) -> bool:
    """Of a system over all parameters only the sum over blocks must descend."""
    return solution.provider != "hessian[full=true]"


def check_refused(solver: str, curvature: curvlab.Curvature, gradient: Any) -> None:
    with pytest.raises(PairError) as caught:
        curvlab.solve(solver, curvature, gradient, alpha=0.1)
    sentence = str(caught.value)
    assert f"`{solver}`" in sentence
    assert f"`{curvature.provider}` is matrix-free" in sentence
    assert "Use `cg`" in sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        pytest.param("wide", torch.float32, id="wide-float32"),
        pytest.param("narrow", torch.float64, id="narrow-float64"),
        pytest.param("wide", torch.float64, id="wide-float64", marks=pytest.mark.long),
        pytest.param("narrow", torch.float32, id="narrow-float32", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_every_pair_gives_a_finite_direction_and_a_sane_status(
    case: str, size: str, dtype: torch.dtype
) -> None:
    p = CASES[case](dtype, **SIZES[size])
    gradient = p.gradient()
    for curvature in curvlab.estimate(list(PROVIDERS), p):
        solve_all(curvature, gradient, dtype)
