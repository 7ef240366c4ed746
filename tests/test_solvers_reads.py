"""No host reads inside the iteration, none at all without values: what accelerators and plans rely on."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import curvlab
from curvlab.linalg import execution
from curvlab.measure import device
from tests.solver_cases import KRONECKER, MATRIX_FREE, NARROW, SOLVERS, WIDE, WITH_EXPLICIT, problem

READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
)


class Reads(TorchDispatchMode):
    """Counts the operations that bring a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


def reads_of(solver: str, provider: str, size: dict[str, Any]) -> int:
    p = problem(**size, gain=4.0)
    curvature, gradient = curvlab.estimate(provider, p), p.gradient()
    with Reads() as reads:
        curvlab.solve(solver, curvature, gradient, alpha=0.01)
    return reads.count


@pytest.mark.parametrize("provider", ["fisher", "pch-1"])
@pytest.mark.parametrize("size", [WIDE, NARROW])
@pytest.mark.parametrize("iterations", [0, 1, 20, 64])
@pytest.mark.parametrize("solver", ["cg", "ea-cg"])
def test_an_accelerator_is_read_every_eighth_iteration(
    monkeypatch: pytest.MonkeyPatch, solver: str, iterations: int, size: dict[str, Any], provider: str
) -> None:
    monkeypatch.setattr(device, "read_interval", lambda tensor, *_: 8)
    monkeypatch.setattr(device, "in_pieces", lambda tensor: False)
    monkeypatch.setattr(execution, "in_pieces", lambda tensor: False)
    layers, checks = 3, 2
    reads = reads_of(f"{solver}[max_iter={iterations},tol=0]", provider, size)
    assert reads <= layers * ceil(iterations / 8) + checks


@pytest.mark.parametrize("solver", ["cg", "ea-cg", "cg[formulation=explicit]", "cg[preconditioner=jacobi]"])
def test_with_no_interval_the_iteration_reads_nothing(monkeypatch: pytest.MonkeyPatch, solver: str) -> None:
    monkeypatch.setattr(device, "read_interval", lambda tensor, *_: 0)
    for module in (device, execution):
        monkeypatch.setattr(module, "readable", lambda tensor: False)
    assert reads_of(solver, "pch-1", WIDE) == 0


def test_the_reads_are_counted_at_all() -> None:
    assert reads_of("ea-cg[max_iter=20,tol=0]", "pch-1", WIDE) > 3 * 5


@pytest.mark.parametrize("interval", [0, 1, 3, 8])
@pytest.mark.parametrize("solver", ["cg", "ea-cg"])
def test_the_interval_changes_nothing_but_the_reads(
    monkeypatch: pytest.MonkeyPatch, solver: str, interval: int
) -> None:
    p = problem(**WIDE)
    curvature, gradient = curvlab.estimate("pch-1", p), p.gradient()
    text = f"{solver}[max_iter=30,tol=1e-8]"
    expected = curvlab.solve(text, curvature, gradient, alpha=0.05)
    monkeypatch.setattr(device, "read_interval", lambda tensor, *_: interval)
    solution = curvlab.solve(text, curvature, gradient, alpha=0.05)
    for name, block in solution.blocks.items():
        assert torch.equal(solution.direction[name], expected.direction[name])
        assert block.iterations == expected.blocks[name].iterations
        assert block.status is expected.blocks[name].status


SPECS = [
    *SOLVERS,
    *(f"{solver}[formulation=explicit]" for solver in WITH_EXPLICIT),
    *(f"{solver}[route={route}]" for solver in SOLVERS for route in ("sample", "row", "dense")),
]
PAIRS = [
    *((provider, solver) for provider in ("fisher", "pch-1") for solver in SPECS),
    *(
        (provider, solver)
        for provider in KRONECKER
        for solver in SOLVERS
        if provider not in ("fisher", "pch-1")
    ),
    *((provider, "cg") for provider in MATRIX_FREE),
    *((provider, "cg[preconditioner=jacobi]") for provider in ("hessian", "pch-1")),
]


def run(provider: str, solver: str) -> dict[str, tuple[int, ...]]:
    p = problem(widths=(12, 8, 6), examples=4)
    curvature = curvlab.estimate(provider, p)
    solution = curvlab.solve(solver, curvature, p.gradient(), alpha=0.1)
    solution.add_to(p.model, lr=0.1)
    return {name: tuple(step.shape) for name, step in solution.direction.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("provider", "solver"), PAIRS)
def test_every_pair_runs_on_fake_tensors_from_problem_to_step(provider: str, solver: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = run(provider, solver)
    assert fake == run(provider, solver)


class Products(TorchDispatchMode):
    """Counts the products with one matrix."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.address, self.count = matrix.data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.addmm_, torch.ops.aten.mm, torch.ops.aten.mv):
            operands = [a for a in args if isinstance(a, torch.Tensor)]
            self.count += any(a.data_ptr() == self.address for a in operands)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("solver", ["cg", "ea-cg"])
def test_one_pass_over_b_serves_the_weight_and_the_bias_of_a_layer(solver: str) -> None:
    p = problem(**WIDE, gain=4.0)
    curvature, gradient = curvlab.estimate("pch-1", p), p.gradient()
    output = curvature.layers[0].output
    assert output is not None
    with Products(output.to_dense()) as products:
        curvlab.solve(f"{solver}[max_iter=4,tol=0]", curvature, gradient, alpha=0.01)
    assert products.count == 4
