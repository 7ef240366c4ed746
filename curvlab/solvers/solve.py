"""`solve`: a solver, a curvature and a gradient to a solution, checked on the way in and on the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.exceptions import ArgumentError, PairError, SpecError, describe_argument
from curvlab.solvers.base import Solver
from curvlab.solvers.by_layers import solve_by_layers
from curvlab.solvers.by_operator import solve_by_operator
from curvlab.solvers.checks import check_gradient, check_solution
from curvlab.solvers.conjugate_gradients import CG
from curvlab.solvers.damping import Damping, damping_from
from curvlab.solvers.operator_cg import Preconditioner
from curvlab.solvers.registry import solvers
from curvlab.solvers.solution import Solution

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["solve"]


@torch.no_grad()
def solve(
    solver: str | Solver,
    curvature: Curvature,
    gradient: Mapping[str, Tensor],
    *,
    alpha: float | None = None,
    damping: Damping | None = None,
    strict: bool = False,
    start: Mapping[str, Tensor] | None = None,
    preconditioner: Preconditioner | None = None,
    process_group: ProcessGroup | None = None,
) -> Solution:
    """The direction d that solves the damped system C d = -g, block by block.

    Args:
        solver: a name such as `"ea-cg[max_iter=20]"`, or a solver.
        curvature: what `estimate` returned.
        gradient: `problem.gradient()`, or any mapping of parameter names to tensors.
        alpha: the paper's damping, (1-α)C + αI.
        damping: a damping value instead of `alpha`.
        strict: raise `SolveError` where a block did not converge, instead of recording it.
        start: for `cg`, a first guess of the direction.
        preconditioner: for `cg`, a function of (parameter name, tensor) that applies M⁻¹.
        process_group: share the layers out over the ranks of this group, where that is cheaper than each
            rank solving them all. Every rank must make this call, with the same joined curvature and
            gradient; without the argument each rank solves for itself.

    >>> import curvlab, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
    >>> problem = curvlab.Problem(model, "cross-entropy", torch.ones(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    >>> solution = solve("ea-cg", curvlab.estimate("pch-1", problem), problem.gradient(), alpha=0.05)
    >>> solution.direction["0.weight"].shape
    torch.Size([3, 4])
    """
    _check_kinds(solver, curvature, gradient)
    instance = solvers.make(solver)
    name = solver if isinstance(solver, str) else _name(solver)
    chosen = damping_from(alpha, damping)
    instance.check(curvature, name)
    check_gradient(curvature, gradient)
    if _needs_operator(instance, name, curvature, guided=start is not None or preconditioner is not None):
        assert isinstance(instance, CG)
        _refuse_ignored(instance, name, curvature)
        solution = solve_by_operator(instance, name, curvature, gradient, chosen, start, preconditioner)
    else:
        solution = solve_by_layers(instance, name, curvature, gradient, chosen, process_group)
    check_solution(solution, curvature, gradient)
    if strict:
        solution.check()
    return solution


def _refuse_ignored(solver: CG, name: str, curvature: Curvature) -> None:
    """Refuse fields that have no meaning where CG runs on the blocks as they are."""
    if solver.route != "auto" or solver.formulation != "reduced":
        raise PairError(
            f"`{name}`: `route` and `formulation` choose how Kronecker factors are used, and on "
            f"`{curvature.provider}` (or with a start or a preconditioner) `cg` uses products only. "
            f"Leave them out"
        )


def _check_kinds(solver: object, curvature: object, gradient: object) -> None:
    """Refuse arguments that are swapped, or of another kind."""
    call = 'write solve("ea-cg", curvature, gradient, alpha=0.05)'
    if isinstance(solver, Curvature):
        raise ArgumentError(f"solve: the solver comes first, by name or as a solver; got a Curvature: {call}")
    if not isinstance(curvature, Curvature):
        raise ArgumentError(
            f"solve: the second argument is a {describe_argument(curvature)}; expected a Curvature, which "
            f"estimate() gives: {call}"
        )
    if not isinstance(gradient, Mapping):
        raise ArgumentError(
            f"solve: the gradient is a {describe_argument(gradient)}; expected a mapping of parameter names "
            f"to tensors, such as problem.gradient(): {call}"
        )


def _name(solver: Solver) -> str:
    try:
        return solvers.canonical(solver)
    except SpecError:
        return type(solver).__name__


def _needs_operator(solver: Solver, name: str, curvature: Curvature, guided: bool) -> bool:
    """Whether CG runs on the blocks as they are; refuses what only the `cg` of that kind can do."""
    plain_cg = isinstance(solver, CG) and solver.input_factor == "full"
    preconditioned = isinstance(solver, CG) and solver.preconditioner != "none"
    if (guided or preconditioned) and not plain_cg:
        raise PairError(f"`{name}` takes no start vector and no preconditioner; `cg` does")
    coupled = curvature.full_product is not None
    factored = all(layer.output is not None for layer in curvature.layers)
    return plain_cg and (guided or preconditioned or curvature.matrix_free or coupled or not factored)
