"""A solver for each layer, the shift, structures, what is held, and layers over ranks and over steps."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlab
from curvlab import Additive, Mixed
from curvlab.curvature_layers import OperatorLayer, SharedLayer
from curvlab.distributed import solve as sharing
from curvlab.distributed.solve import Cost, layer_cost
from curvlab.exceptions import CurvlabError, PairError
from curvlab.linalg import DenseFactor, DiagonalFactor, OperatorBlock
from curvlab.linalg.factors import InputFactors
from curvlab.optim.average import average, kept
from curvlab.solvers.run import solver_units
from curvlab.solvers.solution import is_stack
from tests.layer_cases import (
    ALL,
    SHARED,
    Written,
    curvature_of,
    gradient_of,
    kronecker,
    plain,
    random_factor,
    shared,
)
from tests.layer_reference import (
    DAMPINGS,
    ITERATIVE,
    SOLVERS,
    Damping,
    assert_close,
    damped_solve,
    expected_steps,
)
from tests.test_communicator import on_ranks

# A solver for each layer.


def test_layers_with_many_inputs_take_the_mean_input_factor() -> None:
    made = [SHARED["groups"](), SHARED["convolution"](), kronecker("fc", (3, 5)), plain("n", (9,), "dense")]
    made[1] = shared("wide", (4, 3, 2, 2), seed=3)
    curvature = curvature_of(*made)  # 6 inputs per group, 12 of the convolution, 5, none
    gradient = gradient_of(curvature)
    for full, mean, limits in (("kfi", "sm-kfi", ""), ("cg", "ea-cg", "max_iter=400,tol=1e-14,")):
        for above, wide in ((5, (0, 1)), (6, (1,)), (12, ())):
            solution = curvlab.solve(f"{full}[{limits}mean_above={above}]", curvature, gradient, alpha=0.1)
            for index, written in enumerate(made):
                solver = mean if index in wide else full
                for key, step in expected_steps(solver, written, gradient, Mixed(0.1)).items():
                    assert_close(solution.direction[key], step)
            assert f"mean_above={above}" in solution.solver


def test_the_mean_factor_of_some_layers_keeps_the_other_fields() -> None:
    curvature = curvature_of(kronecker("fc", (3, 5)))
    units = solver_units("cg[max_iter=7,tol=0.01,mean_above=2]", curvature, gradient_of(curvature))
    assert [unit.solver for unit in units] == [curvlab.solvers.EACG(7, 0.01)]
    units = solver_units("kfi[pi=2,formulation=explicit,mean_above=2]", curvature, gradient_of(curvature))
    assert [unit.solver for unit in units] == [
        curvlab.solvers.ShermanMorrisonKFI(pi=2.0, formulation="explicit")
    ]


@pytest.mark.parametrize("spec", ["kfi[mean_above=-1]", "sm-kfi[mean_above=3]", "ea-cg[mean_above=3]"])
def test_a_limit_without_meaning_is_refused(spec: str) -> None:
    curvature = curvature_of(kronecker("fc", (3, 5)))
    with pytest.raises(CurvlabError, match="mean_above"):
        curvlab.solve(spec, curvature, gradient_of(curvature), alpha=0.1)


def test_a_limit_beside_a_preconditioner_is_refused() -> None:
    curvature = curvature_of(kronecker("fc", (3, 5)))
    with pytest.raises(PairError, match="uses products only"):
        curvlab.solve("cg[mean_above=3,preconditioner=jacobi]", curvature, gradient_of(curvature), alpha=0.1)


def test_a_mapping_gives_every_layer_the_first_solver_that_matches() -> None:
    made = [kronecker("block.0", (3, 5)), kronecker("block.1", (3, 5)), plain("norm.weight", (4,), "dense")]
    made += [shared("conv", (4, 3, 2))]
    curvature = curvature_of(*made)
    gradient = gradient_of(curvature)
    mapping = {
        "block.0": "sm-kfi",
        "block.*": "kfi[pi=none]",
        "norm*": curvlab.solvers.Exact(),
        "*": SOLVERS[4],
    }
    solution = curvlab.solve(mapping, curvature, gradient, alpha=0.1)
    for written, solver in zip(made, ("sm-kfi", "kfi", "exact", "ea-cg"), strict=True):
        for key, step in expected_steps(solver, written, gradient, Mixed(0.1)).items():
            assert_close(solution.direction[key], step)
    expected = f"block.0: sm-kfi, block.*: kfi[pi=none], norm*: exact[route=auto], *: {SOLVERS[4]}"
    assert solution.solver == expected
    assert set(solution.frame()["solver"]) == {expected}


def test_a_layer_that_nothing_matches_is_named() -> None:
    curvature = curvature_of(kronecker("block.0", (3, 5)), plain("norm.weight", (4,), "dense"))
    with pytest.raises(PairError, match=r"no solver for layer `norm.weight`.*\['block.\*'\]"):
        curvlab.solve({"block.*": "kfi"}, curvature, gradient_of(curvature), alpha=0.1)


def test_a_solver_of_a_mapping_is_checked_on_its_own_layers() -> None:
    block = random_factor("dense", 6, 4)[1]
    operator = OperatorBlock((6,), lambda x: block @ x, block)
    free = Written(OperatorLayer("free", {"free.scale": operator}), {"free.scale": block})
    curvature = curvature_of(kronecker("fc", (3, 5)), free)
    gradient = gradient_of(curvature)
    curvlab.solve({"fc": "kfi", "*": "cg"}, curvature, gradient, alpha=0.1)
    with pytest.raises(PairError, match="`kfi` works on Kronecker factors"):
        curvlab.solve({"fc": "cg", "*": "kfi"}, curvature, gradient, alpha=0.1)
    coupled = replace(curvature, full_product=lambda vectors: dict(vectors))
    with pytest.raises(PairError, match="blocks between layers"):
        curvlab.solve({"*": "cg"}, coupled, gradient, alpha=0.1)


# λI of an l2 term.


@pytest.mark.parametrize("damping", DAMPINGS, ids=str)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["groups", "embedding", "linear", "plain-gram", "tied"])
def test_the_shift_is_in_the_damped_system(name: str, solver: str, damping: Damping) -> None:
    written, l2 = ALL[name](), 0.4
    curvature = curvature_of(written, shift=l2)
    gradient = gradient_of(curvature)
    solution = curvlab.solve(solver, curvature, gradient, damping=damping)
    for key, step in expected_steps(solver, written, gradient, damping, l2).items():
        assert_close(solution.direction[key], step)
    assert solution.damping == damping
    assert "l2" not in repr(solution)
    for block in solution.blocks.values():
        assert block.residual < 1e-10
        if solver.startswith(("cg", "exact")) and (name != "tied" or solver != "exact"):
            assert block.residual_full < 1e-10


def test_the_shift_is_in_a_system_over_all_layers() -> None:
    matrix, l2 = random_factor("dense", 9, 0)[1], 0.4
    made = [plain("a", (4,), "dense"), plain("b", (5,), "dense")]

    def product(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        image = matrix @ torch.cat([vectors["a"], vectors["b"]])
        return {"a": image[:4], "b": image[4:]}

    curvature = curvature_of(*made, shift=l2, full_product=product)
    gradient = gradient_of(curvature)
    solution = curvlab.solve(f"cg{ITERATIVE}", curvature, gradient, alpha=0.1)
    g = torch.cat([gradient["a"], gradient["b"]])
    expected = damped_solve(matrix, g, 0.9, 0.1 + 0.9 * l2)
    assert_close(torch.cat([solution.direction["a"], solution.direction["b"]]), expected)
    reduction = -float(g @ expected + 0.5 * expected @ (matrix @ expected + l2 * expected))
    assert solution.predicted_reduction == pytest.approx(reduction, rel=1e-9)


# Structures.


@pytest.mark.parametrize("solver", ["kfi", "sm-kfi", "ea-cg"])
def test_a_diagonal_curvature_goes_with_exact_and_cg(solver: str) -> None:
    written = plain("positions", (3, 4), "diagonal")
    curvature = curvature_of(written, structure="diagonal")
    gradient = gradient_of(curvature)
    with pytest.raises(PairError, match=r"`hand-made` is `diagonal`. Use `exact` or `cg`"):
        curvlab.solve(solver, curvature, gradient, alpha=0.1)
    for able in ("exact", f"cg{ITERATIVE}"):
        solution = curvlab.solve(able, curvature, gradient, alpha=0.1)
        expected = -gradient["positions"] / (0.9 * written.blocks["positions"].diagonal().reshape(3, 4) + 0.1)
        assert_close(solution.direction["positions"], expected)


# What is held, and how long things take.


def test_factorisations_of_many_dampings_are_not_all_held() -> None:
    written = shared("conv", (20, 10, 1), outputs="dense", inputs="dense")
    curvature = curvature_of(written)
    gradient = gradient_of(curvature)
    layer = written.layer
    assert isinstance(layer, SharedLayer)

    def held() -> int:
        factors = [layer.mean_output, layer.parts[0].output, layer.parts[0].inputs.full]
        return sum(len(factor._memo.get("recent", ())) for factor in factors)

    for index in range(50):
        for solver in ("kfi", "sm-kfi"):
            curvlab.solve(solver, curvature, gradient, alpha=0.01 + index / 100)
        assert held() <= 12
    assert held() > 0


def test_the_last_dampings_are_still_there() -> None:
    factor = DenseFactor(torch.eye(2))
    made: list[int] = []
    for key in (1, 2, 1, 3, 1):
        factor.remember_recent(("key", key), lambda key=key: made.append(key))
    assert made == [1, 2, 3]
    for key in range(4, 12):
        factor.remember_recent(("key", key), lambda: None)
    factor.remember_recent(("key", 1), lambda: made.append(1))
    assert made == [1, 2, 3, 1]


def test_a_step_looks_at_its_own_gradient_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from curvlab.staleness import Stamp

    layers, looks = 60, 0
    curvature = curvature_of(*[kronecker(f"fc{index}", (2, 3)) for index in range(layers)])
    gradient = gradient_of(curvature)
    solution = curvlab.solve("ea-cg", curvature, gradient, alpha=0.1)
    original = Stamp.of

    def counted(tensor: Tensor) -> Stamp:
        nonlocal looks
        looks += 1
        return original(tensor)

    monkeypatch.setattr(Stamp, "of", counted)
    for name in solution.direction:
        solution.direction.step(name)
    assert looks <= 2 * layers


@pytest.mark.parametrize(
    "call",
    [
        lambda: Mixed(0.0),
        lambda: Mixed(float("nan")),
        lambda: Additive(-1.0),
        lambda: curvlab.solvers.KFI(pi=0.0),
        lambda: curvlab.solvers.CG(max_iter=-1),
        lambda: curvlab.solvers.CG(tol=-1.0),
    ],
)
def test_a_value_out_of_range_is_an_error_of_curvlab_and_a_value_error(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CurvlabError) as raised:
        call()
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    "options", [{}, {"alpha": 0.1, "damping": Mixed(0.1)}, {"damping": 0.1}, {"alpha": []}]
)
def test_a_damping_that_is_none_is_an_error_of_curvlab(options: dict[str, object]) -> None:
    curvature = curvature_of(kronecker("fc", (3, 5)))
    with pytest.raises(CurvlabError, match=r"alpha|damping"):
        curvlab.solve("kfi", curvature, gradient_of(curvature), **options)  # type: ignore[arg-type]


# Over ranks, and over steps.


@pytest.mark.parametrize("solver", SOLVERS)
def test_units_are_shared_out_over_ranks_and_products_are_not(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("curvlab.solvers.run")
    monkeypatch.setattr(module, "communicator_of", lambda group: group)
    monkeypatch.setattr(sharing, "LATENCY", 0.0)
    monkeypatch.setattr(sharing, "FLOPS_PER_BYTE", 0.0)
    names = ("groups", "embedding", "plain-diagonal", "tied", "linear")
    made = [ALL[name]() for name in names]
    gradient = gradient_of(curvature_of(*made))
    alone = curvlab.solve(solver, curvature_of(*made), gradient, alpha=0.1)
    asked: list[str] = []
    solve_one = module._Systems.solve

    def counted(self: Any, unit: Any) -> Any:
        asked.append(unit.given.name)
        return solve_one(self, unit)

    monkeypatch.setattr(module._Systems, "solve", counted)

    def work(communicator: Any) -> dict[str, tuple[Tensor, float, str]]:
        curvature = curvature_of(*[ALL[name]() for name in names])
        found = curvlab.solve(solver, curvature, gradient, alpha=0.1, process_group=communicator)
        blocks = found.blocks
        return {n: (found.direction[n], blocks[n].residual, blocks[n].layer) for n in found.direction}

    ranks = on_ranks(2, work)
    for name, step in alone.direction.items():
        for found in ranks:
            assert_close(found[name][0], step, 1e-12)
            assert found[name][1] == pytest.approx(alone.blocks[name].residual, rel=1e-3, abs=1e-11)
            assert found[name][2] == alone.blocks[name].layer
    units = solver_units(solver, curvature_of(*made), gradient)
    # Every rank solves the stack of the groups for itself.
    expected = [unit.given.name for unit in units if not is_stack(unit.given)]
    assert len(expected) == len(units) - 1
    if solver.startswith("cg"):
        expected.remove("wte.weight")  # by products, in which every rank takes part
    assert sorted(asked) == sorted(expected)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("reads", ["full", "mean"])
def test_layers_of_every_kind_are_averaged_over_steps(name: str, reads: str) -> None:
    old, new = ALL[name](), ALL[name]()
    scaled = replace(curvature_of(old), layers=(old.layer.map(lambda t: 2 * t),))
    averaged = average(scaled, curvature_of(new), 0.25, reads)  # type: ignore[arg-type]
    (layer,) = averaged.layers
    assert type(layer) is type(new.layer)
    (before,), (after,) = scaled.layers, (new.layer,)
    for one, a, b in zip(layer.units(reads), before.units(reads), after.units(reads), strict=True):  # type: ignore[arg-type]
        expected = 0.25 * a.output.to_dense() + 0.75 * b.output.to_dense()
        if layer.kind != "tied":  # of which the factors are averaged, not their product
            assert_close(one.output.to_dense(), expected, 1e-12)
        assert (a.inputs is None) == (one.inputs is None)
        if one.inputs is not None and a.inputs is not None and b.inputs is not None:
            assert_close(one.inputs.mean, 0.25 * a.inputs.mean + 0.75 * b.inputs.mean, 1e-12)
            if reads == "full":
                full = 0.25 * a.inputs.full.to_dense() + 0.75 * b.inputs.full.to_dense()
                assert_close(one.inputs.full.to_dense(), full, 1e-12)
    gradient = gradient_of(averaged)
    for solver in ("sm-kfi", "ea-cg") if reads == "mean" else ("kfi", "cg", "exact"):
        assert curvlab.solve(solver, averaged, gradient, alpha=0.3).predicted_reduction != 0


def test_the_average_of_a_diagonal_factor_is_diagonal_and_of_two_kinds_there_is_none() -> None:
    written = plain("positions", (3, 4), "diagonal")
    averaged = average(curvature_of(written), curvature_of(written), 0.5)
    assert isinstance(averaged.layers[0].units("full")[0].output, DiagonalFactor)
    other = replace(curvature_of(written), layers=(kronecker("positions", (3, 4)).layer,))
    with pytest.raises(PairError, match="`positions` was plain and is kronecker"):
        average(curvature_of(written), other, 0.5)


@pytest.mark.parametrize("name", ALL)
def test_a_kept_curvature_of_any_kind_is_its_own(name: str) -> None:
    written = ALL[name]()
    given = list(written.layer.tensors().values())
    own = kept(curvature_of(written), given)
    before = own.to_dense().clone()
    for tensor in given:
        tensor.mul_(3)
    assert torch.equal(own.to_dense(), before)


def test_the_cost_of_diagonal_sides_grows_with_their_width() -> None:
    wide = DiagonalFactor(torch.ones(1000, dtype=torch.float64))
    narrow = DenseFactor(torch.eye(3, dtype=torch.float64))
    mean = torch.ones(1000, dtype=torch.float64)
    head = curvlab.LayerCurvature("0", "w", None, wide, InputFactors(narrow, mean[:3]))
    lookup = curvlab.LayerCurvature("0", "w", None, narrow, InputFactors(wide, mean))
    bias = curvlab.LayerCurvature("0", None, "b", wide)
    assert layer_cost(bias, "full") == Cost(2000, 8000)
    assert layer_cost(bias, "full", 5) == Cost(10_000, 8000)
    assert layer_cost(lookup, "full") == Cost(54 + 1000 * (18 + 6), 8 * 3003)
    assert layer_cost(head, "full") == Cost(2000 + 27 + 2 * 9000 + 2000 * 3, 8 * 4000)
