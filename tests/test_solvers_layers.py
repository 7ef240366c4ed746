"""Every solver on every kind of layer equals the dense solve of its documented system."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab import Mixed, Status
from curvlab.curvature import Curvature, Definiteness
from curvlab.curvature_layers import KroneckerPart, OperatorLayer, PlainLayer, SharedLayer
from curvlab.exceptions import PairError, SolveError
from curvlab.linalg import DenseFactor, DiagonalFactor, GramFactor, MatrixView, OperatorBlock, ViewStep
from curvlab.linalg.factors import InputFactors
from curvlab.solvers.conjugate_gradients import StackedSystems
from tests.layer_cases import (
    ALL,
    SHARED,
    WITH_FACTORS,
    Written,
    curvature_of,
    gradient_of,
    kronecker,
    plain,
    random_factor,
    shared,
    tied,
)
from tests.layer_reference import (
    DAMPINGS,
    EXPLICIT,
    ITERATIVE,
    SOLVERS,
    Damping,
    assert_close,
    expected_steps,
)


@pytest.mark.parametrize("damping", DAMPINGS, ids=str)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ALL)
def test_a_step_is_that_of_the_dense_system(name: str, solver: str, damping: Damping) -> None:
    written = ALL[name]()
    curvature = curvature_of(written)
    gradient = gradient_of(curvature)
    solution = curvlab.solve(solver, curvature, gradient, damping=damping)
    for key, step in expected_steps(solver, written, gradient, damping).items():
        assert_close(solution.direction[key], step)
    assert [block.status for block in solution.blocks.values()] == [Status.CONVERGED] * len(written.blocks)


@pytest.mark.parametrize("solver", ["kfi", "sm-kfi", "cg", "ea-cg"])
@pytest.mark.parametrize("name", WITH_FACTORS)
def test_the_textbook_form_gives_the_same_step(name: str, solver: str) -> None:
    curvature = curvature_of(WITH_FACTORS[name]())
    gradient = gradient_of(curvature)
    limits = "max_iter=400,tol=1e-14," if "cg" in solver else ""
    reduced = curvlab.solve(f"{solver}[{limits}route=auto]", curvature, gradient, alpha=0.1)
    explicit = curvlab.solve(f"{solver}[{limits}{EXPLICIT}]", curvature, gradient, alpha=0.1)
    for key, step in reduced.direction.items():
        assert_close(explicit.direction[key], step)


@pytest.mark.parametrize("solver", SOLVERS)
def test_layers_of_all_kinds_are_solved_in_one_call(solver: str) -> None:
    made = [
        SHARED["groups"](),
        tied("wte.weight"),
        plain("token", (1, 2, 4), "gram"),
        kronecker("fc", (3, 5)),
    ]
    curvature = curvature_of(*made)
    gradient = gradient_of(curvature)
    solution = curvlab.solve(solver, curvature, gradient, alpha=0.1)
    assert list(solution.direction) == list(curvature.blocks) == list(solution.blocks)
    for written in made:
        for key, step in expected_steps(solver, written, gradient, Mixed(0.1)).items():
            assert_close(solution.direction[key], step)
            assert solution.blocks[key].layer == written.layer.name
    routes = dict(solution.frame().set_index("block")["route"])
    assert (routes["wte.weight"] == "operator") == solver.startswith("cg")
    assert routes["fc.weight"] != "operator"


@pytest.mark.parametrize("solver", ["kfi", "sm-kfi", f"cg{ITERATIVE}", f"ea-cg{ITERATIVE}"])
@pytest.mark.parametrize("name", ALL)
def test_measures_are_those_of_the_whole_parameter(name: str, solver: str) -> None:
    written, shift = ALL[name](), 0.2
    curvature = curvature_of(written, shift=shift)
    gradient = gradient_of(curvature)
    solution = curvlab.solve(solver, curvature, gradient, alpha=0.1)
    assert list(solution.frame()["block"]) == list(written.blocks)
    for key, block in solution.blocks.items():
        d, g, c = (solution.direction[key].flatten(), gradient[key].flatten(), written.blocks[key])
        c = c + shift * torch.eye(len(c), dtype=c.dtype)
        rest = 0.9 * c @ d + 0.1 * d + g
        assert block.residual_full == pytest.approx(float(rest.norm() / g.norm()), rel=1e-8, abs=1e-13)
        assert block.slope == pytest.approx(float(g @ d), rel=1e-10)
        assert block.predicted_reduction == pytest.approx(-float(g @ d + 0.5 * d @ c @ d), rel=1e-9)
        assert block.residual < 1e-10


@pytest.mark.parametrize("name", ["groups", "attention"])
@pytest.mark.parametrize("solver", ["cg", "ea-cg"])
def test_the_residual_of_several_parts_is_that_of_all_together(name: str, solver: str) -> None:
    written = SHARED[name]()
    curvature = curvature_of(written)
    gradient = gradient_of(curvature)
    key = written.layer.weight_name
    assert key is not None
    gradient[key][: len(gradient[key]) // len(written.b)] *= 1e-3
    solution = curvlab.solve(f"{solver}[max_iter=2,tol=1e-14]", curvature, gradient, alpha=0.01)
    block, mean = solution.blocks[key], solver == "ea-cg"
    square = 0.0
    for index, (d, g) in enumerate(
        zip(written.parts(solution.direction[key]), written.parts(gradient[key]), strict=True)
    ):
        a = torch.outer(written.means[index], written.means[index]) if mean else written.a[index]
        b = written.sub_block(index) if mean else written.b[index]
        square += float((0.99 * b @ d @ a + 0.01 * d + g).norm() ** 2)
    assert block.residual == pytest.approx(square**0.5 / float(gradient[key].norm()), rel=1e-8)
    assert block.status is Status.ITERATION_LIMIT
    assert block.iterations == 2
    history = solution.trace().query("block == @key")["residual"].tolist()
    assert history[0] == pytest.approx(1.0)
    assert history[-1] == pytest.approx(block.residual, rel=1e-6)


def test_rank_and_seconds_are_summed_over_parts_and_the_worst_status_is_told() -> None:
    written = SHARED["attention"]()
    curvature = curvature_of(written)
    gradient = gradient_of(curvature)
    frame = curvlab.solve("cg[max_iter=1,tol=1e-14]", curvature, gradient, alpha=0.01).frame()
    row = frame.set_index("block").loc["in_proj.weight"]
    assert row["rank"] == 9
    assert row["status"] == "iteration-limit"
    assert row["seconds_apply"] > 0
    layer = written.layer
    assert isinstance(layer, SharedLayer)
    negative = replace(layer.parts[1], output=DenseFactor(-torch.eye(3, dtype=torch.float64)))
    parts = (layer.parts[0], negative, layer.parts[2])
    indefinite = Curvature("made", "mse", (replace(layer, parts=parts),), Definiteness(False, "made so"))
    solution = curvlab.solve("cg[max_iter=1,tol=1e-14]", indefinite, gradient, alpha=0.01)
    assert solution.blocks["in_proj.weight"].status is Status.NEGATIVE_CURVATURE


def test_every_part_has_its_own_pi() -> None:
    written = SHARED["groups"]()
    curvature = curvature_of(written)
    block = curvlab.solve("kfi", curvature, gradient_of(curvature), alpha=0.1).blocks["conv.weight"]
    assert block.split is not None
    expected = [
        float(((a.trace() / len(a)) / (b.trace() / len(b))) ** 0.5)
        for a, b in zip(written.a, written.b, strict=True)
    ]
    assert block.split.pi.tolist() == pytest.approx(expected)
    assert block.pi != block.pi  # one number would not do
    assert not block.pi_clamped


class Kernels(nn.Module):
    """The parameters of hand-made layers."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))


@pytest.mark.parametrize("solver", ["ea-cg", "kfi", "cg"])
@pytest.mark.parametrize("memory", ["contiguous", "channels-last"])
@pytest.mark.parametrize("layout", ["rows", "transposed-convolution"])
def test_a_step_is_added_to_a_parameter_of_any_strides(solver: str, memory: str, layout: str) -> None:
    written = shared("conv", (4, 3, 2, 2), 1, layout, bias=False)
    curvature = curvature_of(written)
    layer = replace(written.layer, weight_name="kernel")
    curvature = replace(curvature, layers=(layer,))
    gradient = gradient_of(curvature)
    model = Kernels({"kernel": (4, 3, 2, 2)})
    if memory == "channels-last":
        model = model.to(memory_format=torch.channels_last)
    strides = model.kernel.stride()
    solution = curvlab.solve(solver, curvature, gradient, alpha=0.1)
    solution.add_to(model, lr=0.5)
    assert_close(model.kernel.detach(), 0.5 * solution.direction["kernel"], 1e-13)
    assert model.kernel.stride() == strides


def test_the_step_of_an_iteration_is_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    curvature = curvature_of(SHARED["groups"](), SHARED["embedding"]())
    gradient = gradient_of(curvature)
    solution = curvlab.solve("ea-cg", curvature, gradient, alpha=0.1)
    expected = {name: solution.direction[name].clone() for name in ("conv.weight", "embedding.weight")}
    model = nn.ModuleDict(
        {"conv": nn.Conv1d(4, 4, 3, groups=2), "embedding": nn.Embedding(6, 3)}  # (4, 2, 3) and (6, 3)
    ).double()
    before = {name: model.get_parameter(name).detach().clone() for name in expected}
    monkeypatch.setattr(ViewStep, "form", lambda self: pytest.fail("it was formed"))
    solution.add_to(model)
    for name, step in expected.items():
        assert_close(model.get_parameter(name).detach() - before[name], step, 1e-12)


def test_a_step_that_refers_to_a_changed_gradient_is_refused() -> None:
    curvature = curvature_of(SHARED["convolution"]())
    gradient = gradient_of(curvature)
    solution = curvlab.solve("ea-cg", curvature, gradient, alpha=0.1)
    gradient["conv.weight"].mul_(2)
    with pytest.raises(SolveError, match=r"the gradient of `conv.weight` changed in place"):
        solution.direction["conv.weight"]
    with pytest.raises(SolveError, match=r"the gradient of `conv.weight` changed in place"):
        _ = solution.blocks["conv.weight"].residual


@pytest.mark.parametrize(
    "solver", [*SOLVERS, f"kfi[{EXPLICIT}]", f"cg[{EXPLICIT}]", "cg[preconditioner=jacobi]"]
)
@pytest.mark.parametrize("side", ["output", "input", "plain"])
def test_a_diagonal_factor_of_a_vocabularys_size_is_never_formed(
    solver: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, few = 200_000, 3
    monkeypatch.setattr(DiagonalFactor, "to_dense", lambda self: pytest.fail("it was formed"))
    wide = DiagonalFactor(torch.linspace(0.1, 1, n, dtype=torch.float64))
    narrow = random_factor("dense", few, 0)[0]
    if side == "plain":
        curvature = curvature_of(Written(PlainLayer("x.weight", (few, n // few), wide), {}))
        curvature = replace(curvature, layers=(PlainLayer("x.weight", (n,), wide),))
    else:
        output, full = (wide, narrow) if side == "output" else (narrow, wide)
        mean = torch.linspace(-1, 1, full.size, dtype=torch.float64)
        view = MatrixView((output.size, full.size))
        part = KroneckerPart(output, InputFactors(full, mean))
        layer = SharedLayer("x", "x.weight", "x.bias", view, (part,), output)
        curvature = curvature_of(Written(layer, {}))
    gradient = gradient_of(curvature)
    solution = curvlab.solve(solver, curvature, gradient, alpha=0.3)
    key = "x.weight"
    block, d, g = curvature.blocks[key], solution.direction[key], gradient[key]
    assert block.shape == d.shape
    if solver.startswith(("exact", "cg")) and EXPLICIT not in solver:
        rest = 0.7 * (block @ d) + 0.3 * d + g
        assert float(rest.norm() / g.norm()) < (1e-6 if "jacobi" in solver else 1e-10)
    assert solution.blocks[key].residual < 1e-3


def test_a_wide_gram_factor_is_solved_by_its_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    n, m = 30_000, 4
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(m, n, generator=generator, dtype=torch.float64) / n**0.5
    gram = GramFactor(rows, torch.full((m,), 0.5**0.5, dtype=torch.float64))
    monkeypatch.setattr(GramFactor, "to_dense", lambda self: pytest.fail("it was formed"))
    a, dense = random_factor("dense", 3, 1)
    part = KroneckerPart(gram, InputFactors(a, torch.ones(3, dtype=torch.float64)))
    head = SharedLayer("head", "head.weight", "head.bias", MatrixView((n, 3)), (part,), gram)
    curvature = curvature_of(Written(head, {}), Written(PlainLayer("token", (n,), gram), {}))
    gradient = gradient_of(curvature)
    for solver in SOLVERS:
        solution = curvlab.solve(solver, curvature, gradient, alpha=0.1)
        assert all(block.residual < 1e-9 for block in solution.blocks.values())
    exact = curvlab.solve("exact", curvature, gradient, alpha=0.1)
    d, g = exact.direction["head.weight"], gradient["head.weight"]
    rest = 0.9 * 0.5 * rows.T @ (rows @ d) @ dense + 0.1 * d + g
    assert float(rest.norm() / g.norm()) < 1e-12


def test_ea_cg_iterates_narrow_units_together_and_wide_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from curvlab.solvers import conjugate_gradients

    monkeypatch.setattr(conjugate_gradients, "STACKED_UP_TO", 6)
    made = [SHARED["groups"](), plain("positions", (3, 4), "dense"), kronecker("fc", (3, 5))]
    sizes: list[int] = []
    original = conjugate_gradients.stack_systems

    def counted(layers, damping):  # type: ignore[no-untyped-def]
        sizes.append(len(layers))
        return original(layers, damping)

    monkeypatch.setattr(conjugate_gradients, "stack_systems", counted)
    curvature = curvature_of(*made)
    gradient = gradient_of(curvature)
    solution = curvlab.solve(f"ea-cg{ITERATIVE}", curvature, gradient, alpha=0.1)
    assert sizes == [2, 1]  # the bias of the groups (a stack) and the Linear layer; the twelve positions
    for written in made:
        for key, step in expected_steps("ea-cg", written, gradient, Mixed(0.1)).items():
            assert_close(solution.direction[key], step)


def test_ea_cg_leaves_out_the_products_of_layers_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"fast": 7, "slow": 8}
    made = [kronecker(name, (size, 5)) for name, size in sizes.items()]
    # The identity's systems end with the first iteration.
    identity = DenseFactor(torch.eye(7, dtype=torch.float64))
    made[0] = Written(replace(made[0].layer, output=identity), {})
    curvature = curvature_of(*made)
    gradient = gradient_of(curvature)
    products = {7: 0, 8: 0}
    original = DenseFactor.add_product_

    def counted(self: DenseFactor, target: Tensor, rows: Tensor, scale: float) -> None:
        products[target.shape[1]] += 1
        original(self, target, rows, scale)

    monkeypatch.setattr(DenseFactor, "add_product_", counted)
    found = curvlab.solve("ea-cg[max_iter=8,tol=1e-8]", curvature, gradient, alpha=0.1)
    iterations = {name: block.iterations for name, block in found.blocks.items()}
    assert products[7] == max(iterations["fast.weight"], iterations["fast.bias"]) < products[8] == 8
    monkeypatch.setattr(StackedSystems, "rest", lambda self, done: None)
    again = curvlab.solve("ea-cg[max_iter=8,tol=1e-8]", curvature, gradient, alpha=0.1)
    assert products[7] == iterations["fast.weight"] + 8
    assert all(torch.equal(found.direction[name], again.direction[name]) for name in gradient)


def test_cg_takes_products_of_operators_and_factors_of_the_rest() -> None:
    block = random_factor("dense", 6, 4)[1]
    operator = OperatorBlock((2, 3), lambda x: (block @ x.flatten()).reshape(2, 3), block)
    free = Written(OperatorLayer("free", {"free.scale": operator}), {"free.scale": block})
    made = [SHARED["transposed-groups"](), free, plain("norm.weight", (5,), "dense")]
    curvature = curvature_of(*made)
    gradient = gradient_of(curvature)
    solution = curvlab.solve(f"cg{ITERATIVE}", curvature, gradient, alpha=0.1)
    for written in made:
        for key, step in expected_steps("cg", written, gradient, Mixed(0.1)).items():
            assert_close(solution.direction[key], step)
    routes = [block.route for block in solution.blocks.values()]
    assert routes == ["dense", "bias", "operator", "bias"]
    for solver in ("kfi", "exact", "ea-cg"):
        with pytest.raises(PairError, match="matrix-free"):
            curvlab.solve(solver, curvature, gradient, alpha=0.1)


@pytest.mark.parametrize("guide", ["start", "preconditioner", "jacobi"])
def test_a_guided_iteration_takes_the_products_of_every_kind(guide: str) -> None:
    made = [make() for name, make in ALL.items() if name in ("groups", "tied", "plain-gram", "linear")]
    curvature = curvature_of(*made)
    gradient = gradient_of(curvature)
    limits, options = "max_iter=400,tol=1e-14", {}
    if guide == "start":
        options = {"start": gradient_of(curvature, seed=1)}
    if guide == "preconditioner":
        options = {"preconditioner": lambda name, x: 2 * x}
    solver = f"cg[{limits},preconditioner=jacobi]" if guide == "jacobi" else f"cg[{limits}]"
    solution = curvlab.solve(solver, curvature, gradient, alpha=0.1, **options)
    for written in made:
        for key, step in expected_steps("cg", written, gradient, Mixed(0.1)).items():
            assert_close(solution.direction[key], step)
    assert {block.route for block in solution.blocks.values()} == {"operator"}
