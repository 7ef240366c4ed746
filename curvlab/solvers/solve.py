"""`solve`: a solver, a curvature and a gradient, layer by layer, to a solution."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab import device
from curvlab.curvature import Curvature, LayerCurvature
from curvlab.exceptions import PairError, SolveError, SpecError
from curvlab.gradient import Gradient, RowGradient
from curvlab.linalg import RowProduct
from curvlab.linalg.inverse import NotFiniteError, NotPositiveDefiniteError
from curvlab.solvers.base import LayerDirection, LayerGradient, Solver
from curvlab.solvers.conjugate_gradients import CG
from curvlab.solvers.damping import Damping, damping_from
from curvlab.solvers.operator_cg import BlockResult, Preconditioner, jacobi, solve_blocks
from curvlab.solvers.registry import solvers
from curvlab.solvers.residual import DampedSystem, bias_residual, curvature_form, inner, weight_residual
from curvlab.solvers.solution import BlockSolution, Direction, Measures, Solution

__all__ = ["solve"]


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

    >>> import curvlab
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
    >>> problem = curvlab.Problem(model, "cross-entropy", torch.ones(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    >>> solution = solve("ea-cg", curvlab.estimate("pch-1", problem), problem.gradient(), alpha=0.05)
    >>> solution.direction["0.weight"].shape
    torch.Size([3, 4])
    """
    name = solver if isinstance(solver, str) else _name(solver)
    instance = solvers.make(solver)
    chosen = damping_from(alpha, damping)
    instance.check(curvature, name)
    curvature.check_fresh()
    _check_gradient(curvature, gradient)
    by_operator = curvature.matrix_free or start is not None or preconditioner is not None
    if isinstance(instance, CG) and (by_operator or instance.preconditioner != "none"):
        solution = _solve_by_operator(instance, name, curvature, gradient, chosen, start, preconditioner)
    elif start is not None or preconditioner is not None:
        raise PairError(f"`{name}` takes no start vector and no preconditioner; `cg` does")
    else:
        solution = _solve_by_layers(instance, name, curvature, gradient, chosen)
    if strict:
        solution.check()
    return solution


def _name(solver: Solver) -> str:
    try:
        return solvers.canonical(solver)
    except SpecError:
        return type(solver).__name__


def _check_gradient(curvature: Curvature, gradient: Mapping[str, Tensor]) -> None:
    missing = [name for name in curvature.blocks if name not in gradient]
    if missing:
        raise SolveError(f"the gradient has no entry for {missing}; expected {list(curvature.blocks)}")
    for name, block in curvature.blocks.items():
        entry = _entry(gradient, name)
        if tuple(entry.shape) != block.shape:
            raise SolveError(
                f"the gradient of `{name}` has shape {tuple(entry.shape)}; expected {block.shape}"
            )
        if isinstance(entry, Tensor) and device.readable(entry) and not bool(torch.isfinite(entry.sum())):
            raise SolveError(f"the gradient of `{name}` holds NaN or infinity")


def _entry(gradient: Mapping[str, Tensor], name: str) -> Tensor | RowGradient:
    return gradient.factored(name) if isinstance(gradient, Gradient) else gradient[name]


def _solve_by_layers(
    solver: Solver, name: str, curvature: Curvature, gradient: Mapping[str, Tensor], damping: Damping
) -> Solution:
    entries: dict[str, Tensor | RowProduct] = {}
    blocks: dict[str, BlockSolution] = {}
    for layer in curvature.layers:
        given = LayerGradient(
            None if layer.weight_name is None else _entry(gradient, layer.weight_name),
            None if layer.bias_name is None else gradient[layer.bias_name],
        )
        try:
            started = time.perf_counter()
            state = solver.prepare(layer, damping, given)
            prepared = time.perf_counter()
            found = solver.apply(state, given)
            applied = time.perf_counter()
        except NotPositiveDefiniteError as error:
            raise SolveError(
                f"layer `{layer.name}`: the damped factor of `{curvature.provider}` is not positive definite "
                f"(smallest eigenvalue {error.smallest:.3g}), in float64 either. Increase the damping"
            ) from error
        except NotFiniteError as error:
            raise SolveError(f"layer `{layer.name}` of `{curvature.provider}`: {error}") from error
        on_cpu = layer.output is not None and layer.output.example.device.type == "cpu"
        seconds = (prepared - started, applied - prepared) if on_cpu else (float("nan"), float("nan"))
        _collect(layer, given, found, damping, _tolerance(solver, layer), seconds, entries, blocks)
    return Solution(name, curvature.provider, damping, Direction(entries), blocks)


def _tolerance(solver: Solver, layer: LayerCurvature) -> float:
    """The relative residual below which the true residual counts as converged.

    For CG its own tolerance, doubled because the true residual is not the recursive one; for a direct
    method the root of the rounding unit.
    """
    assert layer.output is not None
    if isinstance(solver, CG):
        return 2 * solver.tol
    return float(torch.finfo(layer.output.example.dtype).eps ** 0.5)


def _collect(
    layer: LayerCurvature,
    given: LayerGradient,
    found: LayerDirection,
    damping: Damping,
    tolerance: float,
    seconds: tuple[float, float],
    entries: dict[str, Tensor | RowProduct],
    blocks: dict[str, BlockSolution],
) -> None:
    column = 0
    for name, direction in ((layer.weight_name, found.weight), (layer.bias_name, found.bias)):
        if name is None or direction is None:
            continue
        entries[name] = direction
        blocks[name] = BlockSolution(
            name,
            layer.name,
            _LayerMeasures(layer, given, found, damping, weight=name == layer.weight_name),
            tolerance,
            found.route,
            found.rank,
            None if found.outcomes is None else found.outcomes[column],
            None if found.iterations is None else found.iterations[column],
            None if found.history is None else found.history[:, column],
            *seconds,
        )
        column += 1


@dataclass(frozen=True, eq=False)
class _LayerMeasures(Measures):
    """Measures of a block of a Kronecker layer."""

    layer: LayerCurvature
    given: LayerGradient
    found: LayerDirection
    damping: Damping
    weight: bool

    def _residual(self, system) -> Tensor:  # type: ignore[no-untyped-def]
        if self.weight:
            assert self.found.weight is not None
            assert self.given.weight is not None
            return weight_residual(system, self.layer, self.found.weight, self.given.weight)
        assert self.found.bias is not None
        assert self.given.bias is not None
        return bias_residual(system, self.layer, self.found.bias, self.given.bias)

    def residual(self) -> Tensor:
        return self._residual(self.found.system)

    def residual_full(self) -> Tensor:
        return self._residual(DampedSystem("full", self.damping.scale, self.damping.shift))

    def slope(self) -> Tensor:
        if self.weight:
            return inner(self.layer, self.found.weight, self.given.weight)  # type: ignore[arg-type]
        return self.found.bias @ self.given.bias  # type: ignore[operator]

    def quadratic(self) -> Tensor:
        if self.weight:
            return curvature_form(self.layer, self.found.weight, self.given.weight)  # type: ignore[arg-type]
        direction = self.found.bias
        assert direction is not None
        assert self.layer.output is not None
        return direction @ self.layer.output.matmul(direction[:, None])[:, 0]


def _solve_by_operator(
    solver: CG,
    name: str,
    curvature: Curvature,
    gradient: Mapping[str, Tensor],
    damping: Damping,
    start: Mapping[str, Tensor] | None,
    preconditioner: Preconditioner | None,
) -> Solution:
    if solver.input_factor == "mean":
        raise PairError(f"`{name}` takes no start vector and no preconditioner; `cg` does")
    if preconditioner is None and solver.preconditioner == "jacobi":
        preconditioner = jacobi(curvature, damping)
    started = time.perf_counter()
    dense = {block: gradient[block] for block in curvature.blocks}
    results = solve_blocks(
        curvature,
        dense,
        damping,
        max_iter=solver.max_iter,
        tol=solver.tol,
        start=start,
        preconditioner=preconditioner,
    )
    seconds = time.perf_counter() - started
    blocks = {
        block: BlockSolution(
            block,
            block.rpartition(".")[0],
            _OperatorMeasures(curvature, damping, block, dense, results),
            2 * solver.tol,
            "operator",
            curvature.blocks[block].numel,
            r.result.outcomes[0],
            r.result.iterations[0],
            r.result.residuals[:, 0],
            0.0,
            seconds / len(results),
        )
        for block, r in results.items()
    }
    entries = {block: r.direction for block, r in results.items()}
    return Solution(name, curvature.provider, damping, Direction(entries), blocks)


@dataclass(frozen=True, eq=False)
class _OperatorMeasures(Measures):
    """Measures of a block solved through its operator (of a full Hessian: of its row of blocks)."""

    curvature: Curvature
    damping: Damping
    name: str
    gradient: dict[str, Tensor]
    results: dict[str, BlockResult]

    def _image(self) -> Tensor:
        if self.curvature.full_product is not None:
            return self.curvature.full_product({n: r.direction for n, r in self.results.items()})[self.name]
        return self.curvature.blocks[self.name].matmul(self.results[self.name].direction)

    def residual(self) -> Tensor:
        d, g = self.results[self.name].direction, self.gradient[self.name]
        r = self.damping.scale * self._image() + self.damping.shift * d + g
        norm = g.norm()
        return r.norm() / torch.where(norm > 0, norm, torch.ones_like(norm))

    def residual_full(self) -> Tensor:
        return self.residual()

    def slope(self) -> Tensor:
        return (self.results[self.name].direction * self.gradient[self.name]).sum()

    def quadratic(self) -> Tensor:
        return (self.results[self.name].direction * self._image()).sum()
