"""A stack of equal systems is solved as its systems are one by one, by fewer calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import curvlab
from curvlab.curvature import Curvature
from curvlab.curvature_layers import LayerCurvature, SharedLayer
from curvlab.exceptions import SolveError
from curvlab.linalg import DenseFactor, stacks
from curvlab.linalg.factors import InputFactors
from curvlab.linalg.stacks import DenseStack, diagonal_blocks, stack_factors
from curvlab.providers import sides
from curvlab.solvers import KFI, LayerDirection
from curvlab.solvers.base import LayerGradient
from curvlab.solvers.run import solver_units
from curvlab.solvers.solution import is_stack
from tests.layer_cases import SHARED, curvature_of, gradient_of, random_factor, shared
from tests.layer_reference import assert_close

CASES = {
    "groups": SHARED["groups"],
    "depthwise": SHARED["depthwise"],
    "transposed, inputs as rows": SHARED["transposed-groups"],
    "attention, outputs as rows": SHARED["attention"],
    "twelve groups": lambda: shared("conv", (12, 1, 3, 3), 12),
}
SOLVERS = [
    "kfi",
    "kfi[pi=2]",
    "sm-kfi",
    "cg[max_iter=4]",
    "ea-cg[max_iter=3]",
    "exact",
    "kfi[formulation=explicit]",
    "sm-kfi[formulation=explicit]",
    "cg[max_iter=4,formulation=explicit]",
    "ea-cg[max_iter=3,formulation=explicit]",
]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", CASES)
def test_a_stack_is_solved_as_one_system_after_the_other(
    name: str, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = curvature_of(CASES[name]())
    gradient = gradient_of(together)
    stacked = curvlab.solve(solver, together, gradient, alpha=0.1)
    assert sum(is_stack(unit.given) for unit in solver_units(solver, together, gradient)) == 1
    monkeypatch.setattr(stacks, "STACKED_UP_TO", 0)
    apart = curvature_of(CASES[name]())
    assert not any(is_stack(unit.given) for unit in solver_units(solver, apart, gradient))
    single = curvlab.solve(solver, apart, gradient, alpha=0.1)
    for key, block in single.blocks.items():
        found = stacked.blocks[key]
        assert_close(stacked.direction[key], single.direction[key], 1e-11)
        for measure in ("residual", "residual_full", "slope", "predicted_reduction"):
            assert getattr(found, measure) == pytest.approx(getattr(block, measure), rel=1e-7, abs=1e-12)
        assert (found.status, found.iterations, found.rank) == (block.status, block.iterations, block.rank)
        assert (found.split is None) == (block.split is None)
        if block.split is not None and found.split is not None:
            assert_close(found.split.pi.reshape(-1), block.split.pi.reshape(-1), 1e-12)
        if block.history is not None and found.history is not None:
            count = block.iterations + 1  # beyond it a history may go on, with systems of other layers
            assert_close(found.history[:count], block.history[:count], 1e-7)


def test_systems_of_a_stack_end_each_at_its_own_iteration() -> None:
    written = shared("conv", (2, 1, 3), 2, bias=False)
    layer = written.layer
    assert isinstance(layer, SharedLayer)
    easy = replace(
        layer.parts[0],
        inputs=InputFactors(DenseFactor(torch.eye(3, dtype=torch.float64)), layer.parts[0].inputs.mean),
    )
    curvature = curvature_of(replace(written, layer=replace(layer, parts=(easy, layer.parts[1]))))
    solution = curvlab.solve("cg[max_iter=9,tol=1e-9]", curvature, gradient_of(curvature), alpha=0.1)
    assert solution.blocks["conv.weight"].iterations == 3  # of the second; the first ends after one
    assert solution.blocks["conv.weight"].status is curvlab.Status.CONVERGED


@pytest.mark.parametrize(
    ("value", "message"),
    [(-5.0, "smallest eigenvalue -"), (float("nan"), "NaN or infinity")],
    ids=["indefinite", "nan"],
)
@pytest.mark.parametrize("solver", ["kfi", "exact"])
def test_one_bad_system_of_a_stack_is_refused(solver: str, value: float, message: str) -> None:
    written = CASES["twelve groups"]()
    layer = written.layer
    assert isinstance(layer, SharedLayer)
    bad = replace(layer.parts[7], output=DenseFactor(torch.full((1, 1), value, dtype=torch.float64)))
    parts = tuple(bad if index == 7 else part for index, part in enumerate(layer.parts))
    curvature = curvature_of(replace(written, layer=replace(layer, parts=parts)))
    with pytest.raises(SolveError, match=message):
        curvlab.solve(solver, curvature, gradient_of(curvature), alpha=0.1)


def test_a_second_solve_factorises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    curvature = curvature_of(CASES["twelve groups"]())
    gradient, calls = gradient_of(curvature), 0
    original = torch.linalg.cholesky_ex

    def counted(matrix: torch.Tensor) -> object:
        nonlocal calls
        calls += 1
        return original(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    first = curvlab.solve("kfi", curvature, gradient, alpha=0.1)
    assert calls == 3  # all twelve B, all twelve A, and the bias
    again = curvlab.solve("kfi", curvature, gradient, alpha=0.1)
    assert calls == 3
    assert torch.equal(first.direction["conv.weight"], again.direction["conv.weight"])


@dataclass(frozen=True)
class OwnApply(KFI):
    """A solver that knows of single systems only."""

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert gradient.weight is None or gradient.weight.ndim == 2
        return super().apply(state, gradient)


def test_a_solver_with_phases_of_its_own_is_given_one_system_after_the_other() -> None:
    curvature = curvature_of(CASES["groups"]())
    gradient = gradient_of(curvature)
    expected = curvlab.solve("kfi", curvature, gradient, alpha=0.1)
    found = curvlab.solve(OwnApply(), curvature, gradient, alpha=0.1)
    assert_close(found.direction["conv.weight"], expected.direction["conv.weight"], 1e-12)


def test_the_mean_input_factor_forms_no_second_moment_of_a_stack() -> None:
    written = CASES["groups"]()
    layer = written.layer
    assert isinstance(layer, SharedLayer)

    def refuse() -> DenseFactor:
        raise AssertionError("it was formed")

    parts = tuple(replace(part, inputs=InputFactors(refuse, part.inputs.mean)) for part in layer.parts)
    lazy: Curvature = replace(curvature_of(written), layers=(replace(layer, parts=parts),))
    for solver in ("sm-kfi", "ea-cg"):
        assert curvlab.solve(solver, lazy, gradient_of(curvature_of(written)), alpha=0.1).direction


@pytest.mark.parametrize("kind", ["dense", "gram", "diagonal"])
def test_blocks_on_the_diagonal_are_those_of_the_matrix(kind: str) -> None:
    factor, dense = random_factor(kind, 6, 3)
    found = diagonal_blocks(factor, 3)
    assert (found.count, found.size) == (3, 2)
    for index, block in enumerate(found.matrix):
        assert_close(block, dense[2 * index : 2 * index + 2, 2 * index : 2 * index + 2], 1e-14)


@pytest.mark.parametrize("kinds", [("dense", "dense"), ("gram", "gram"), ("dense", "gram")])
def test_a_stack_is_that_of_the_factors_matrices(kinds: tuple[str, str]) -> None:
    made = [random_factor(kind, 4, seed) for seed, kind in enumerate(kinds)]
    stack = stack_factors([factor for factor, _ in made])
    assert stack.rank_bound == sum(factor.rank_bound for factor, _ in made)
    for matrix, norm, (_, dense) in zip(stack.matrix, stack.frobenius_norm(), made, strict=True):
        assert_close(matrix, dense, 1e-14)
        assert_close(norm, torch.linalg.matrix_norm(dense), 1e-13)
    assert_close(stack.trace(), torch.stack([dense.trace() for _, dense in made]), 1e-14)
    assert isinstance(stack.diagonal_block(1, 3), DenseStack)


def depthwise_problem() -> curvlab.Problem:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.GELU()]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(16 * 25, 3)).double()
    return curvlab.Problem(
        model, "cross-entropy", torch.randn(4, 3, 5, 5).double(), torch.tensor([0, 1, 2, 1])
    )


def outputs_of(layer: LayerCurvature) -> list[torch.Tensor]:
    assert isinstance(layer, SharedLayer)
    return [part.output.to_dense() for part in layer.parts]


@pytest.mark.parametrize("provider", ["fisher", "fisher[sharing=reduce]", "fisher[positions=2]"])
def test_the_groups_of_a_convolution_are_counted_in_one_product(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outputs_of(curvlab.estimate(provider, depthwise_problem()).layers[1])
    added = 0
    original = sides.FactorSum._sum

    def one_by_one(self: sides.FactorSum, columns: torch.Tensor) -> None:
        nonlocal added
        added += 1
        original(self, torch.stack([part @ part.T for part in columns]))

    monkeypatch.setattr(sides.FactorSum, "_sum_products", one_by_one)
    expected = outputs_of(curvlab.estimate(provider, depthwise_problem()).layers[1])
    assert len(found) == 8
    assert added <= 6  # one for the outputs of each layer, and one for each bias
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 1e-13)
