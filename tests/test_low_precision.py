"""One rule of precision: under autocast, and with bfloat16 or float16 parameters, curvature is float32's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.exceptions import CurvlabError, ProblemError, SpecError, StaleError
from curvlab.linalg.execution import FullPrecision, autocast_switched_off
from curvlab.optim import SecondOrder

LOW = [torch.bfloat16, torch.float16]
KRONECKER = ["fisher", "fisher[kind=mc]", "fisher[kind=exact]", "gauss-newton[kind=rows]"]
RECURSIVE = ["gauss-newton", "pch-1", "pch-2"]
MATRIX_FREE = ["hessian", "gauss-newton[kind=exact]"]
SOLVERS = ["kfi", "sm-kfi", "cg", "ea-cg", "exact"]


class Tokens(nn.Module):
    """Convolution, embedding of the class, a norm, attention and a head: one row per position."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv1d(3, 6, 2), nn.LayerNorm(6)
        self.mix, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x).transpose(1, 2))
        return self.head(torch.tanh(h + self.mix(h, h, h, need_weights=False)[0]).mean(1))


def chain() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 8), nn.Sigmoid(), nn.Linear(8, 4))
    return model, torch.randn(16, 20), torch.randint(4, (16,))


def graph() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Tokens(), torch.randn(6, 3, 5), torch.randint(4, (6,))


MODELS = {"chain": chain, "graph": graph}
# Every provider, and every solver, on both models: the rule is one, so a pair needs no test of its own.
PAIRS = [
    (kind, provider, "cg" if provider in MATRIX_FREE else SOLVERS[place % len(SOLVERS)])
    for kind in MODELS
    for place, provider in enumerate(
        (*KRONECKER, *(RECURSIVE if kind == "chain" else ["fisher"]), *MATRIX_FREE)
    )
]


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def outcome(kind: str, provider: str, solver: str) -> dict[str, Tensor]:
    """All that is computed on the way from a problem to a step, by name."""
    model, x, y = MODELS[kind]()
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    gradient, curvature = problem.gradient(), curvlab.estimate(provider, problem)
    solution = curvlab.solve(solver, curvature, gradient, alpha=0.1)
    found = {"loss": problem.loss(), "trace": curvature.trace()}
    found |= {f"gradient {n}": gradient[n] for n in gradient}
    found |= {f"product {n}": v for n, v in (curvature @ gradient).items()}
    found |= {f"block {n}": b.to_dense() for n, b in curvature.blocks.items() if b.numel <= 12}
    found |= {f"direction {n}": solution.direction[n] for n in solution.direction}
    found["reduction"] = torch.tensor([b.predicted_reduction for b in solution.blocks.values()])
    found["residuals"] = torch.tensor([[b.residual, b.residual_full] for b in solution.blocks.values()])
    solution.add_to(model, 0.1)
    return found | {f"moved {n}": p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "provider", "solver"), PAIRS)
def test_under_autocast_everything_is_what_it_is_outside(kind: str, provider: str, solver: str) -> None:
    expected = outcome(kind, provider, solver)
    with autocast():
        found = outcome(kind, provider, solver)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8, equal_nan=True, msg=name)


@pytest.mark.parametrize(("kind", "provider", "solver"), PAIRS)
def test_what_was_made_outside_is_read_the_same_under_autocast(kind: str, provider: str, solver: str) -> None:
    """Lazy values: formed, solved and measured only there."""
    model, x, y = MODELS[kind]()
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    gradient, curvature = problem.gradient(), curvlab.estimate(provider, problem)
    solution = curvlab.solve(solver, curvature, gradient, alpha=0.1)
    fresh = {n: gradient[n] for n in gradient}, {n: solution.direction[n] for n in solution.direction}
    with autocast():
        again = {n: gradient[n] for n in gradient}, {n: solution.direction[n] for n in solution.direction}
        other = curvlab.solve(solver, curvature, gradient, alpha=0.1).direction
        images = {n: curvature.blocks[n] @ fresh[0][n] for n in curvature.blocks}
    for one, two in zip(fresh, again, strict=True):
        for name, value in one.items():
            assert torch.equal(two[name], value), name
    for name, value in fresh[1].items():
        torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-8, msg=name)
        torch.testing.assert_close(
            images[name], curvature.blocks[name] @ fresh[0][name], rtol=1e-6, atol=1e-9, msg=name
        )


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5, "ema": 0.5}, {"adapt": True}], ids=str)
@pytest.mark.parametrize("solver", ["ea-cg", "kfi"])
@pytest.mark.parametrize(("kind", "provider"), [("chain", "pch-1"), ("graph", "fisher")])
def test_optimizer_steps_under_autocast_are_those_outside(
    kind: str, provider: str, solver: str, options: dict[str, Any]
) -> None:
    moved = []
    for context in (torch.enable_grad, autocast):
        model, x, y = MODELS[kind]()
        optimizer = SecondOrder(model, "cross-entropy", provider, solver, **options)
        with context():
            losses = [optimizer.step(x, y) for _ in range(2)]
        moved.append((losses, list(model.parameters())))
    for one, two in zip(moved[0][1], moved[1][1], strict=True):
        torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-8)
    assert [float(a) for a in moved[0][0]] == pytest.approx([float(b) for b in moved[1][0]], rel=1e-6)


def test_results_under_autocast_say_that_it_was_switched_off() -> None:
    model, x, y = chain()
    problem, notes = curvlab.Problem(model, "cross-entropy", x, y), []
    optimizer = SecondOrder(model, "cross-entropy", "fisher", "kfi")
    optimizer.on_solution = lambda solution: notes.append(solution.notes)
    with autocast():
        told = curvlab.estimate("fisher", problem).notes
        optimizer.step(x, y)
    for said in (told, *notes):
        assert any("autocast is switched off" in note and "float32" in note for note in said), said
    assert curvlab.estimate("fisher", problem).notes == ()
    assert not autocast_switched_off()


def test_errors_and_bounds_are_the_same_under_autocast() -> None:
    model, x, y = chain()
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    expected = curvlab.errors(problem, providers=["fisher", "pch-1"]), curvlab.bounds(problem)
    with autocast():
        found = curvlab.errors(problem, providers=["fisher", "pch-1"]), curvlab.bounds(problem)
    assert [f.to_csv() for f in found] == [e.to_csv() for e in expected]


def test_classes_of_other_packages_inherit_the_rule() -> None:
    class Mine(FullPrecision):
        def product(self, x: Tensor) -> Tensor:
            return x @ x

    with autocast():
        assert Mine().product(torch.eye(2)).dtype is torch.float32
        assert torch.is_autocast_enabled("cpu")


# parameters in low precision


def lowered(kind: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A model of low precision, the float32 model at the same values, and a batch that both can read."""
    model, x, y = MODELS[kind]()
    model = model.to(dtype)
    return model, copy.deepcopy(model).float(), x.to(dtype), y


@pytest.mark.parametrize(
    ("kind", "provider", "solver", "dtype"),
    [(*pair, torch.bfloat16) for pair in PAIRS] + [(*pair, torch.float16) for pair in PAIRS[::3]],
)
def test_low_precision_parameters_are_read_as_float32(
    kind: str, provider: str, solver: str, dtype: torch.dtype
) -> None:
    model, full, x, y = lowered(kind, dtype)
    problem, expected = (
        curvlab.Problem(m, "cross-entropy", inputs, y) for m, inputs in ((model, x), (full, x.float()))
    )
    before = {n: v.clone() for n, v in model.state_dict().items()}
    found, other = (
        curvlab.solve(solver, curvlab.estimate(provider, p), p.gradient(), alpha=0.1)
        for p in (problem, expected)
    )
    for name, value in other.direction.items():
        assert found.direction[name].dtype is torch.float32
        torch.testing.assert_close(found.direction[name], value, rtol=1e-6, atol=1e-8, msg=name)
    assert all(v.dtype is dtype and torch.equal(v, before[n]) for n, v in model.state_dict().items())
    found.add_to(model, 0.1)
    for name, value in model.named_parameters():
        assert value.dtype is dtype, name
        once = (before[name].float() + 0.1 * other.direction[name]).to(dtype)
        torch.testing.assert_close(value.detach(), once, rtol=2 * torch.finfo(dtype).eps, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_low_precision_models_are_trained_in_their_own_dtype(kind: str, dtype: torch.dtype) -> None:
    model, _, x, y = lowered(kind, dtype)
    optimizer = SecondOrder(model, "cross-entropy", "fisher", "kfi", momentum=0.5, weight_decay=1e-3)
    losses = [float(optimizer.step(x, y)) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {dtype}


def test_results_say_what_the_parameters_are() -> None:
    model, _, x, y = lowered("chain", torch.bfloat16)
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    curvature = curvlab.estimate("fisher", problem)
    assert any("bfloat16" in note and "float32 function" in note for note in curvature.notes)
    assert problem.model is model


def test_a_low_precision_problem_sees_its_model_change() -> None:
    model, _, x, y = lowered("chain", torch.bfloat16)
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    before, hessian = float(problem.loss()), curvlab.estimate("hessian", problem)
    with torch.no_grad():
        model[0].weight.mul_(-1)
    fresh = float(curvlab.Problem(copy.deepcopy(model).float(), "cross-entropy", x.float(), y).loss())
    assert float(problem.loss()) == pytest.approx(fresh, rel=1e-6) != before
    with pytest.raises(StaleError):
        _ = hessian @ problem.gradient()


def test_modes_follow_and_changed_hooks_ask_for_a_new_problem() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).bfloat16().eval()
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    model.train()
    with pytest.raises(ProblemError, match="Dropout"):
        problem.gradient()
    model.eval()
    problem.gradient()
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(StaleError, match="bfloat16"):
        problem.gradient()


def test_mixed_precisions_and_frozen_parts_are_read_as_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    found = curvlab.estimate("fisher", curvlab.Problem(model, "cross-entropy", x, y)).blocks
    full = curvlab.Problem(copy.deepcopy(model).float(), "cross-entropy", x, y)
    for name, block in curvlab.estimate("fisher", full).blocks.items():
        torch.testing.assert_close(found[name].to_dense(), block.to_dense(), rtol=1e-6, atol=1e-9)


def test_squared_errors_take_targets_of_low_precision() -> None:
    model, x = nn.Linear(4, 2).bfloat16(), torch.randn(5, 4).bfloat16()
    y = torch.randn(5, 2).bfloat16()
    found = curvlab.Problem(model, "mse", x, y).loss()
    expected = nn.functional.mse_loss(copy.deepcopy(model).float()(x.float()), y.float())
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)


class Closure(nn.Module):
    """Multiplies with a parameter that a closure holds: no copy of the module has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 3), nn.Parameter(torch.full((3,), 2.0))

    def hold(self) -> Closure:
        scale = self.scale
        self.multiply: Callable[[Tensor], Tensor] = lambda x: x * scale
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(self.inner(x))


def test_a_parameter_that_a_closure_holds_is_refused_by_name() -> None:
    model = Closure().bfloat16().hold()
    with pytest.raises(ProblemError, match=r"`scale`.*model\.float"):
        curvlab.Problem(model, "cross-entropy", torch.randn(5, 4), torch.randint(3, (5,)))


def test_a_low_precision_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(4, 3).bfloat16()
    model.handle = (i for i in range(3))  # a generator cannot be copied
    with pytest.raises(ProblemError, match=r"no copy of it in float32.*model\.float"):
        curvlab.Problem(model, "cross-entropy", torch.randn(5, 4), torch.randint(3, (5,)))


def test_batch_statistics_of_a_low_precision_model_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).bfloat16()
    with pytest.raises(SpecError, match="bfloat16"):
        SecondOrder(model, "cross-entropy", batchnorm="running")


def test_low_precision_problems_are_pickled_and_copied() -> None:
    model, _, x, y = lowered("chain", torch.bfloat16)
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    expected = problem.gradient()
    for twin in (pickle.loads(pickle.dumps(problem)), copy.deepcopy(problem)):
        assert twin.model is not model
        for name, value in twin.gradient().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-8)


def test_a_step_beyond_the_range_of_float16_is_refused() -> None:
    model, _, x, y = lowered("chain", torch.float16)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    optimizer = SecondOrder(model, "cross-entropy", "fisher", "kfi", lr=1e8)
    with pytest.raises(CurvlabError, match="NaN or infinity"):
        optimizer.step(x, y)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
