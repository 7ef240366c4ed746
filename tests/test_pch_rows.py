"""PCH of rows on any graph: its blocks, where PosEig is taken, its draws, and variants that are wrong."""

from __future__ import annotations

import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import curvlab
from curvlab.criteria import CrossEntropy
from curvlab.exceptions import ProblemError, SpecError
from curvlab.linalg import DenseFactor, GramFactor, poseig_difference
from curvlab.linalg.factors import DiagonalFactor
from curvlab.model.recording import GraphRecording
from curvlab.optim import SecondOrder
from curvlab.providers import propagation
from curvlab.providers.propagation import NODE_CURVATURES, PropagatedCurvature
from curvlab.solvers.registry import solvers
from tests.cases import Case
from tests.node_networks import CASES, NodeCase, layer_hessian
from tests.test_nodes import gradients_at_nodes, jacobians, local_hessian

ALL = "pch[kind=rows,samples=all]"
CONVERGED = "max_iter=400,tol=1e-13"


def problem_of(case: NodeCase, loss: str = "cross-entropy", examples: int = 3) -> curvlab.Problem:
    model, inputs, targets = case.make(examples)
    return curvlab.Problem(model, loss, inputs, targets)


def positive(matrix: Tensor, gamma: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(torch.where(values < 0, gamma * values, values)) @ vectors.T


def over_positions(case: str, layer: str, size: int, channels: int) -> Tensor:
    """A matrix that sums a layer's output over positions: (channels, size)."""
    unit = torch.eye(size).double()
    if case == "residual" and layer in ("first", "inner"):
        return unit.reshape(size, channels, -1).sum(2).T
    return unit.reshape(size, -1, channels).sum(1).T


def mean_blocks(
    case: str, loss: str, examples: int, at_nodes: tuple[float, float] | None
) -> dict[str, Tensor]:
    """Each layer's signed bias block with mean second-order terms (PosEig at the nodes with γ and γ_out)."""
    model, inputs, targets = CASES[case].make(examples)
    singles = [
        curvlab.Problem(model, loss, inputs[i : i + 1], targets[i : i + 1]).recording()
        for i in range(examples)
    ]
    heard = [gradients_at_nodes(one) for one in singles]
    means = []
    for number in range(len(singles[0].forward.nodes)):
        rows = [one.forward.nodes[number].rows for one in singles]
        positions, groups, units = rows[0].counts
        total = torch.zeros(groups, units, units).double()
        for one, found, layout in zip(singles, heard, rows, strict=True):
            node = one.forward.nodes[number]
            local = local_hessian(node, found[node])
            places = layout.of(torch.arange(node.inputs.numel()).reshape(node.inputs.shape))[0]
            if groups > 1:
                places = torch.arange(node.inputs.numel()).reshape(positions, groups, units)
            for group in range(groups):
                for p in range(positions):
                    index = places[p, group]
                    total[group] += local[index][:, index] / (positions * examples)
        means.append(total if at_nodes is None else torch.stack([positive(t, at_nodes[0]) for t in total]))
    blocks: dict[str, Tensor] = {}
    for one in singles:
        curved = one.criterion.hessians(one.logits, one.targets)[0]
        curved = curved if at_nodes is None else positive(curved, at_nodes[1])
        terms = [(None, curved)]
        for node, mean in zip(one.forward.nodes, means, strict=True):
            positions, groups, units = node.rows.counts
            places = node.rows.of(torch.arange(node.inputs.numel()).reshape(node.inputs.shape))[0]
            whole = torch.zeros(node.inputs.numel(), node.inputs.numel()).double()
            for group in range(groups):
                for p in range(positions):
                    index = places[p, group]
                    whole[index[:, None], index] += mean[group]
            terms.append((node, whole))
        for start, matrix in terms:
            for name, jacobian in jacobians(one, start).items():
                channels = len(model.get_submodule(name).bias)
                summed = jacobian @ over_positions(case, name, jacobian.shape[1], channels).T
                block = summed.T @ matrix @ summed / examples
                blocks[name] = blocks.get(name, torch.zeros_like(block)) + block
    return blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "loss", "poseig"),
    [("residual", "cross-entropy", "last"), ("block", "robust", "last"), ("block", "robust", "node"),
     ("gate", "robust", "node"), ("residual", "cross-entropy", "node")],
)  # fmt: skip
def test_bias_blocks_are_those_of_mean_second_order_terms(case: str, loss: str, poseig: str) -> None:
    problem = problem_of(CASES[case], loss, 2)
    spec = f"pch[gamma=-0.5,output_gamma=-0.2,samples=all,poseig={poseig}]"
    curvature = curvlab.estimate(spec, problem)
    assert curvature.psd
    expected = mean_blocks(case, loss, 2, (-0.5, -0.2) if poseig == "node" else None)
    largest = max(float(block.abs().max()) for block in expected.values())  # the key's bias has no curvature
    for name, block in expected.items():
        wanted = block if poseig == "node" else positive(block, -0.2 if name == "head" else -0.5)
        found = curvature.blocks[f"{name}.bias"].to_dense()
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10 * largest, msg=name)


@pytest.mark.parametrize("loss", ["cross-entropy", "robust"])
@pytest.mark.parametrize("poseig", ["node", "last"])
def test_on_a_chain_with_one_example_rows_are_the_recursion(loss: str, poseig: str) -> None:
    problem, _ = Case(widths=(3, 5, 4, 3), examples=1, loss=loss).build()
    specs = [f"pch[kind={k},samples=all,gamma=-0.4,poseig={poseig}]" for k in ("rows", "recursive")]
    rows, recursion = curvlab.estimate(specs, problem)
    for name, block in recursion.blocks.items():
        torch.testing.assert_close(rows.blocks[name].to_dense(), block.to_dense(), rtol=1e-9, atol=1e-12)


def test_with_several_examples_and_a_loss_that_is_not_convex_they_differ() -> None:
    problem, _ = Case(widths=(3, 5, 3), examples=6, loss="robust").build()
    rows, recursion = curvlab.estimate([f"{ALL[:-1]},poseig=node]", "pch[kind=recursive]"], problem)
    output = list(rows.blocks)[-1]
    assert not torch.allclose(rows.blocks[output].to_dense(), recursion.blocks[output].to_dense(), rtol=1e-2)


def test_mean_terms_are_the_hessian_s_own_at_the_last_hidden_layer_and_not_at_the_first() -> None:
    problem, reference = Case(widths=(4, 5, 5, 5, 3), activation="tanh", examples=8).build()
    curvature = curvlab.estimate(ALL, problem)
    blocks = reference.hessian_blocks()
    names = [name for name in curvature.blocks if name.endswith("bias")]

    def error(name: str) -> float:
        truth = positive(blocks[name], -1.0)
        return float((curvature.blocks[name].to_dense() - truth).norm() / truth.norm())

    assert error(names[-2]) < 1e-10
    assert error(names[0]) > 0.05


CONVEX = {
    "chain": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    ),
}


@pytest.mark.parametrize("fields", ["samples=2,seed=5", "samples=all", "samples=1,positions=2",
                                    "samples=1,structure=diagonal", "samples=1,sharing=reduce"])  # fmt: skip
@pytest.mark.parametrize("poseig", ["node", "last"])
@pytest.mark.parametrize("network", CONVEX)
def test_without_second_order_terms_it_is_gauss_newton_to_the_bit(
    network: str, poseig: str, fields: str
) -> None:
    torch.manual_seed(0)
    model = CONVEX[network]()
    x = torch.randn(6, 4) if network == "chain" else torch.randn(6, 1, 5, 5)
    problem = curvlab.Problem(model, "cross-entropy", x, torch.randint(3, (6,)))
    specs = [f"pch[kind=rows,poseig={poseig},{fields}]", f"gauss-newton[kind=rows,{fields}]"]
    pch, newton = curvlab.estimate(specs, problem)
    assert any("equals Gauss-Newton" in note for note in pch.notes)
    for name, block in pch.blocks.items():
        assert torch.equal(block.to_dense(), newton.blocks[name].to_dense()), name


# Draws


def signed_products(problem: curvlab.Problem, samples: int | None) -> PropagatedCurvature:
    recording = problem.recording()
    statistic = PropagatedCurvature(None, samples)
    return statistic.bound({NODE_CURVATURES: NODE_CURVATURES.of(recording)})


def draws_and_truth(samples: int = 500) -> tuple[Tensor, Tensor]:
    """v⁺v⁺ᵀ - v⁻v⁻ᵀ of each draw at the first layer, (draws, n, n), and what it must be in the mean."""
    problem, _ = Case(widths=(3, 4, 4, 3), activation="tanh", examples=2, loss="robust").build()
    recording = problem.recording()
    layers = len(recording.layers)

    def blocks(statistic: PropagatedCurvature) -> Tensor:
        sides = statistic.of(recording)
        parts = []
        for side in (sides[0], sides[layers]):
            assert isinstance(side, GramFactor)
            rows = (side.rows * side.root[:, None]).reshape(-1, 2, side.size)
            parts.append(torch.einsum("rmi,rmj->rij", rows, rows))
        count = 1 if statistic.samples is None else statistic.samples
        if statistic.samples is None:
            return (parts[0].sum(0) - parts[1].sum(0))[None]
        return (parts[0] - parts[1]) * count

    return blocks(signed_products(problem, samples)), blocks(signed_products(problem, None))[0]


def deviation(draws: Tensor, truth: Tensor) -> float:
    """The largest deviation of an entry's mean, in standard errors."""
    error = draws.std(0) / len(draws) ** 0.5
    return float(((draws.mean(0) - truth).abs() / error.clamp(min=1e-12)).max())


@pytest.mark.slow
def test_draws_are_unbiased() -> None:
    assert deviation(*draws_and_truth()) < 5


def one_sign_for_all_units(seed, stream, keys, count, dtype):  # type: ignore[no-untyped-def]
    return REAL(seed, stream, keys, 1, dtype).expand(-1, count)


def two_nodes_share_signs(seed, stream, keys, count, dtype):  # type: ignore[no-untyped-def]
    return REAL(seed, stream % propagation.NODES + propagation.NODES, keys, count, dtype)


def node_and_output_share_signs(seed, stream, keys, count, dtype):  # type: ignore[no-untyped-def]
    return REAL(seed, stream % propagation.NODES, keys, count, dtype)


REAL = propagation.draw_signs


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [one_sign_for_all_units, two_nodes_share_signs, node_and_output_share_signs]
)
def test_signs_that_are_shared_are_seen(wrong, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(propagation, "draw_signs", wrong)
    assert deviation(*draws_and_truth()) > 5


def relative_error(draws: Tensor, truth: Tensor) -> float:
    return float((draws.mean(0) - truth).norm() / truth.norm())


@pytest.mark.long
def test_four_thousand_draws_are_within_five_standard_errors_of_the_mean() -> None:
    draws, truth = draws_and_truth(4096)
    assert deviation(draws, truth) < 5
    assert relative_error(draws, truth) < 0.1


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong", [one_sign_for_all_units, two_nodes_share_signs, node_and_output_share_signs]
)
def test_signs_that_are_shared_are_more_than_a_tenth_off(wrong, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(propagation, "draw_signs", wrong)
    assert relative_error(*draws_and_truth(4096)) > 0.1


def test_both_signs_in_one_pass_give_another_matrix_than_signs_kept_apart() -> None:
    problem, _ = Case(widths=(3, 4, 4, 3), activation="tanh", examples=2, loss="robust").build()
    node, last = curvlab.estimate([f"{ALL[:-1]},poseig={p}]" for p in ("node", "last")], problem)
    assert not torch.allclose(node.blocks["0.bias"].to_dense(), last.blocks["0.bias"].to_dense(), rtol=1e-2)


def test_poseig_comes_after_the_mean_over_examples_and_positions() -> None:
    """PosEig of every example's or position's own terms is another matrix."""
    model, inputs, targets = CASES["residual"].make(4)
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    recording = problem.recording()
    node, gradient = next(iter(gradients_at_nodes(recording).items()))
    own = node.rows.of(node.own_terms(gradient))
    right = problem.recording().node_curvatures()[recording.forward.nodes.index(node)]
    for early in (own.abs().mean((0, 1)), own.mean(1).abs().mean(0)):
        assert not torch.allclose(early, right.abs(), rtol=0.05)
    torch.testing.assert_close(own.mean((0, 1)), right, rtol=1e-11, atol=1e-14)


# Streams


# The robust loss has a direction without curvature, whose eigenvalue is rounding: its root would be 1e-9.
@pytest.mark.parametrize("structure", ["kronecker", "layer"])
@pytest.mark.parametrize("loss", ["cross-entropy", "robust"])
@pytest.mark.parametrize("poseig", ["node", "last"])
@pytest.mark.parametrize("case", CASES)
def test_batches_and_their_order_do_not_matter(case: str, poseig: str, loss: str, structure: str) -> None:
    model, x, y = CASES[case].make(5)
    spec = f"pch[kind=rows,samples=2,poseig={poseig},structure={structure}]"
    whole = curvlab.estimate(spec, curvlab.Problem(model, loss, x, y))
    order = torch.tensor([3, 0, 4, 1, 2])
    batches = [(x[order[:2]], y[order[:2]]), (x[order[2:]], y[order[2:]])]
    streamed = curvlab.estimate(spec, curvlab.Problem(model, loss, batches))
    largest = max(float(block.to_dense().abs().max()) for block in whole.blocks.values())
    for name, block in whole.blocks.items():
        error = float((streamed.blocks[name].to_dense() - block.to_dense()).abs().max())
        assert error <= 1e-12 * largest, name


# PosEig in the small space


@pytest.mark.parametrize(("plus", "minus"), [(3, 2), (4, 1), (2, 2), (5, 9)])
@pytest.mark.parametrize("gamma", [-1.0, 0.0, -0.3])
def test_poseig_in_the_space_of_the_rows_is_that_of_the_matrix(plus: int, minus: int, gamma: float) -> None:
    torch.manual_seed(plus)
    a, b = torch.randn(plus, 8).double(), torch.randn(minus, 8).double()
    if minus > 1:
        b[1] = 2 * a[0]  # dependent rows
    one, two = GramFactor(a, torch.rand(plus).double()), GramFactor(b, torch.rand(minus).double())
    found = poseig_difference(one, two, gamma)
    assert isinstance(found, GramFactor if plus + minus < 8 else DenseFactor)
    expected = positive(one.to_dense() - two.to_dense(), gamma)
    torch.testing.assert_close(found.to_dense(), expected, rtol=1e-10, atol=1e-12)


def test_poseig_of_diagonals_is_taken_entry_by_entry() -> None:
    one, two = DiagonalFactor(torch.tensor([1.0, 2.0])), DiagonalFactor(torch.tensor([3.0, 1.0]))
    assert poseig_difference(one, two, -0.5).diagonal().tolist() == [1.0, 1.0]


def test_the_eigenvectors_of_a_node_s_mean_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    real = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: found.append(matrix.shape) or real(matrix))
    problem = problem_of(CASES["block"])
    curvlab.estimate("pch[kind=rows,poseig=node]", problem)
    assert [shape for shape in found if len(shape) == 3] == [(1, 4, 4), (1, 4, 4)]  # the two LayerNorms


# Solvers and optimisers


@pytest.mark.slow
@pytest.mark.parametrize("case", ["residual", "block"])
def test_every_solver_steps_with_it(case: str) -> None:
    problem = problem_of(CASES[case], examples=4)
    gradient = problem.gradient()
    for poseig in ("node", "last"):
        curvature = curvlab.estimate(f"pch-1[poseig={poseig},positions=2]", problem)
        for solver in ("kfi", "sm-kfi", f"cg[{CONVERGED}]", "ea-cg", "exact"):
            solution = curvlab.solve(solver, curvature, gradient, alpha=0.1)
            slope = sum(float((solution.direction[n] * gradient[n]).sum()) for n in gradient)
            assert slope < 0, (poseig, solver)


@pytest.mark.slow
@pytest.mark.parametrize("poseig", ["node", "last"])
@pytest.mark.parametrize("case", ["residual", "block"])
def test_a_gradient_that_is_not_the_factor_s_own_is_solved_for_as_written(case: str, poseig: str) -> None:
    """A momentum, or the gradient of other examples: against the textbook's equations and a dense solve."""
    problem = problem_of(CASES[case], examples=4)
    curvature = curvlab.estimate(f"pch-1[kind=rows,poseig={poseig},positions=2]", problem)
    model, x, y = CASES[case].make(6, seed=0)
    other = curvlab.Problem(model, "cross-entropy", x.flip(0) + 0.3, y)
    gradient = {name: 0.5 * g + 0.1 for name, g in other.gradient().items()}
    for solver in ("kfi", "sm-kfi", f"cg[{CONVERGED}]", f"ea-cg[{CONVERGED}]"):
        plain = solver if "[" in solver else f"{solver}[]"
        explicit = plain.replace("[", "[formulation=explicit,").replace(",]", "]")
        found, expected = (curvlab.solve(s, curvature, gradient, alpha=0.1) for s in (solver, explicit))
        assert "sample" not in set(found.frame()["route"])
        for name in gradient:
            assert_close(found.direction[name], expected.direction[name], rtol=1e-8, atol=1e-9, msg=solver)
    for solver in ("exact", f"cg[{CONVERGED}]"):
        step = curvlab.solve(solver, curvature, gradient, alpha=0.1).direction
        for name, block in curvature.blocks.items():
            dense = 0.9 * block.to_dense() + 0.1 * torch.eye(gradient[name].numel()).double()
            expected = -torch.linalg.solve(dense, gradient[name].flatten())
            assert_close(step[name].flatten(), expected, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("solver", ["kfi", "sm-kfi", "cg", "ea-cg", "exact"])
@pytest.mark.parametrize("case", ["residual", "block"])
def test_the_optimizer_trains_with_it(case: str, solver: str, momentum: float) -> None:
    assert solver in solvers.names()
    model, x, y = CASES[case].make(8)
    provider = "pch-1[positions=2]"
    optimizer = SecondOrder(model, "cross-entropy", provider, solver, lr=0.1, alpha=0.1, momentum=momentum)
    first = float(optimizer.step(x, y))
    for _ in range(14):
        last = float(optimizer.step(x, y))
    assert last < 0.8 * first


@pytest.mark.parametrize(("poseig", "passes"), [("node", 2), ("last", 3)])
def test_a_step_takes_the_gradient_and_the_terms_in_one_pass_and_a_pass_for_each_sign(
    poseig: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, y = CASES["residual"].make(6)
    wanted = curvlab.Problem(deepcopy(model), "cross-entropy", x, y)
    provider = f"pch[kind=rows,poseig={poseig}]"
    step = curvlab.solve("kfi", curvlab.estimate(provider, wanted), wanted.gradient(), alpha=0.1).direction
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = SecondOrder(model, "cross-entropy", provider, "kfi", lr=0.5, alpha=0.1)
    sent: list[Tensor] = []
    plain = GraphRecording._send_back

    def counting(self: GraphRecording, cotangent: Tensor) -> None:
        sent.append(cotangent)
        plain(self, cotangent)

    optimizer.step(x, y)  # the first looks the network over besides
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    monkeypatch.setattr(GraphRecording, "_send_back", counting)
    optimizer.step(x, y)
    assert len(sent) == passes
    for name, p in model.named_parameters():
        assert_close(p.detach() - before[name], 0.5 * step[name], rtol=1e-9, atol=1e-12)


def test_what_starts_at_the_nodes_is_made_as_the_pass_arrives_and_not_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x, y = CASES["residual"].make(6)
    made: list[weakref.ref[Tensor]] = []
    most = 0
    plain = PropagatedCurvature._draw_node

    def noting(self: PropagatedCurvature, *args: Any) -> Tensor:
        nonlocal most
        most = max(most, sum(one() is not None for one in made))
        rows = plain(self, *args)
        made.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(PropagatedCurvature, "_draw_node", noting)
    curvlab.estimate("pch[kind=rows,samples=3]", curvlab.Problem(model, "cross-entropy", x, y))
    assert len(made) > 12
    assert most <= 1


# What is said and refused


def test_the_result_names_what_was_left_out_and_how_it_was_drawn() -> None:
    notes = curvlab.estimate("pch[samples=3]", problem_of(CASES["block"])).notes
    assert any("3 draws" in note for note in notes)
    assert any("`matmul`, `softmax`" in note for note in notes)
    assert not any("own curvature" in n for n in curvlab.estimate("pch", problem_of(CASES["residual"])).notes)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(SpecError, match="structure=diagonal does not go with kind=recursive"):
        curvlab.providers.PCH(kind="recursive", structure="diagonal")
    with pytest.raises(SpecError, match="samples=0"):
        curvlab.providers.PCH(samples=0)
    with pytest.raises(ProblemError, match=r"pch\[kind=rows\]"):
        curvlab.estimate("pch[kind=recursive]", problem_of(CASES["gate"]))
    model, x, y = CASES["residual"].make(2)
    wide = nn.Sequential(nn.Conv2d(2, 70, 3), nn.Tanh(), nn.Flatten(), nn.Linear(1120, 3)).double()
    with pytest.raises(ProblemError, match="samples=all takes 1,123 backward passes"):
        curvlab.estimate(ALL, curvlab.Problem(wide, "cross-entropy", x, y))
    batches = [(x, y), (torch.cat([x, x], -1), y)]
    with pytest.raises(ProblemError, match="of one size"):
        curvlab.estimate("pch", curvlab.Problem(model, CrossEntropy(), batches))


def test_the_exact_absolute_hessian_of_one_example_is_reached_without_positions() -> None:
    model, x, y = CASES["gate"].make(1)
    curvature = curvlab.estimate(ALL, curvlab.Problem(model, "cross-entropy", x, y))
    expected = positive(layer_hessian(model, "first", x, y, "cross-entropy"), -1.0)
    torch.testing.assert_close(curvature.blocks["first.bias"].to_dense(), expected, rtol=1e-9, atol=1e-12)


def test_results_are_labelled_with_what_auto_means_off_the_chain() -> None:
    """The recursion keeps the paper's short names; elsewhere labels and frames tell the kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    problem = curvlab.Problem(
        model, "cross-entropy", torch.randn(4, 1, 3, 3).double(), torch.randint(0, 3, (4,))
    )
    asked = ["pch-1", "pch-2[samples=2]", "gauss-newton", "pch[kind=exact]", "fisher"]
    expected = [
        "pch[kind=rows,poseig=last]",
        "pch-2[kind=rows,poseig=last,samples=2]",
        "gauss-newton[kind=rows]",
        "pch[kind=exact,poseig=node]",
        "fisher",
    ]
    found = curvlab.estimate(asked, problem)
    assert [one.provider for one in found] == expected
    solution = curvlab.solve("ea-cg", found[0], problem.gradient(), alpha=0.1)
    assert set(solution.frame()["provider"]) == {expected[0]}
    again = curvlab.estimate(expected, problem)
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one.trace(), other.trace(), rtol=0, atol=0)
    assert "kind=rows" in curvlab.estimate(curvlab.providers.PCH(), problem).provider
    chain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    on_chain = curvlab.Problem(chain, "cross-entropy", torch.randn(4, 4).double(), torch.tensor([0, 1, 0, 1]))
    assert [one.provider for one in curvlab.estimate(["pch-1", "gauss-newton"], on_chain)] == [
        "pch-1",
        "gauss-newton",
    ]
