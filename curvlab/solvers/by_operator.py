"""CG over the blocks as they are: truncated Newton, and CG with a start or preconditioner of one's own."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.exceptions import SolveError
from curvlab.measure import device
from curvlab.solvers.conjugate_gradients import CG
from curvlab.solvers.damping import Damping
from curvlab.solvers.direction import Direction
from curvlab.solvers.measures import OperatorMeasures
from curvlab.solvers.operator_cg import BlockResult, Preconditioner, jacobi, solve_blocks
from curvlab.solvers.solution import BlockSolution, Solution
from curvlab.staleness import Versions

__all__ = ["solve_by_operator"]


def solve_by_operator(
    solver: CG,
    name: str,
    curvature: Curvature,
    gradient: Mapping[str, Tensor],
    damping: Damping,
    start: Mapping[str, Tensor] | None,
    preconditioner: Preconditioner | None,
) -> Solution:
    """Solve block by block (with cross-layer blocks: all at once), and keep C d for the residuals."""
    started = time.perf_counter()
    if preconditioner is None and solver.preconditioner == "jacobi":
        preconditioner = jacobi(curvature, damping)
    prepared = time.perf_counter()
    dense = {block: gradient[block] for block in curvature.blocks}
    results = solve_blocks(
        curvature,
        dense,
        damping,
        max_iter=solver.max_iter,
        tol=solver.tol,
        start=None if start is None else _checked_start(curvature, start),
        preconditioner=preconditioner,
    )
    entries = {block: result.direction for block, result in results.items()}
    images = curvature @ entries
    systems = {block: (dense[block], entries[block], images[block]) for block in results}
    seconds = (prepared - started, time.perf_counter() - prepared)
    joint = curvature.full_product is not None
    blocks = {
        block: _block(
            solver,
            curvature,
            result,
            OperatorMeasures(block, damping, systems if joint else {block: systems[block]}),
            Versions.of({f"the gradient of `{name}`": dense[name] for name in (dense if joint else [block])}),
            *(part / len(results) for part in seconds),
        )
        for block, result in results.items()
    }
    return Solution(name, curvature.provider, damping, Direction(entries), blocks)


def _checked_start(curvature: Curvature, start: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    checked = {}
    for name, block in curvature.blocks.items():
        value = torch.as_tensor(start[name]).to(block.example) if name in start else None
        if value is None or tuple(value.shape) != block.shape:
            given = "has no entry" if value is None else f"has shape {tuple(value.shape)}"
            raise SolveError(f"the start {given} for `{name}`; expected shape {block.shape}")
        if device.readable(value) and not bool(torch.isfinite(value).all()):
            raise SolveError(f"the start for `{name}` holds NaN or infinity; expected finite numbers")
        checked[name] = value
    return checked


def _block(
    solver: CG,
    curvature: Curvature,
    result: BlockResult,
    measures: OperatorMeasures,
    reads: Versions,
    seconds_prepare: float,
    seconds_apply: float,
) -> BlockSolution:
    return BlockSolution(
        name=measures.name,
        layer=measures.name.rpartition(".")[0],
        measures=measures,
        tolerance=solver.tolerance(result.direction.dtype),
        route="operator",
        rank=curvature.blocks[measures.name].numel,
        outcome=result.result.outcomes[0],
        iteration_count=result.result.iterations[0],
        history=result.result.residuals[:, 0],
        seconds_prepare=seconds_prepare,
        seconds_apply=seconds_apply,
        reads=reads,
    )
