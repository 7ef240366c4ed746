"""`solve`: a solver, a curvature and a gradient to a solution, checked on the way in and on the way out.

The solver first adapts itself to the curvature (layers of Kronecker factors, or blocks by their products).
Then every layer is prepared and applied, jointly where the solver has a way to, or shared out over ranks.

Each check takes one read back to the host. A formed gradient of a weight is looked at on the way out only,
where a step is not finite: to look at it costs a pass over it, which is a good part of an EA-CG solve, and
NaN and infinity do not get lost in one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.distributed.communicator import communicator_of
from curvlab.distributed.solve import choose_owners, layer_cost, share_out
from curvlab.exceptions import ArgumentError, SolveError, SpecError, describe_argument
from curvlab.gradient import Gradient, RowGradient
from curvlab.linalg import Matrix
from curvlab.linalg.cg import Outcome
from curvlab.linalg.inverse import NotFiniteError, NotPositiveDefiniteError
from curvlab.measure import device
from curvlab.solvers.base import Guidance, LayerDirection, LayerGradient, Preconditioner, Solver
from curvlab.solvers.damping import Damping, damping_from
from curvlab.solvers.input_coordinates import WeightGradient
from curvlab.solvers.registry import solvers
from curvlab.solvers.solution import BlockSolution, Direction, Measures, Solution

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["check_gradient", "check_solution", "entry_of", "layer_gradient", "solve"]


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
            gradient; without the argument each rank solves for itself. What is solved by products
            (matrix-free curvatures, `start`, `preconditioner`) is never shared out: every rank takes part in
            each product over the rows of all.

    >>> import curvlab, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
    >>> problem = curvlab.Problem(model, "cross-entropy", torch.ones(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    >>> solution = solve("ea-cg", curvlab.estimate("pch-1", problem), problem.gradient(), alpha=0.05)
    >>> solution.direction["0.weight"].shape
    torch.Size([3, 4])
    """
    _check_kinds(solver, curvature, gradient)
    instance = solvers.make(solver)
    name = solver if isinstance(solver, str) else _name_of(solver)
    chosen = damping_from(alpha, damping)
    instance.check(curvature, name)
    check_gradient(curvature, gradient)
    adapted = instance.adapt(curvature, name, Guidance(start, preconditioner))
    solution = _solve_layers(adapted, name, curvature, gradient, chosen, process_group)
    check_solution(solution, curvature, gradient)
    if strict:
        solution.check()
    return solution


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


def _name_of(solver: Solver) -> str:
    try:
        return solvers.canonical(solver)
    except SpecError:
        return type(solver).__name__


def entry_of(gradient: Mapping[str, Tensor], name: str) -> WeightGradient:
    """A gradient's entry as it is held: in factors where it has them."""
    return gradient.factored(name) if isinstance(gradient, Gradient) else gradient[name]


def layer_gradient(layer: LayerCurvature, gradient: Mapping[str, Tensor]) -> LayerGradient:
    """The gradient of the parameters of one layer, in factors where it has them."""
    return LayerGradient(
        None if layer.weight_name is None else entry_of(gradient, layer.weight_name),
        None if layer.bias_name is None else gradient[layer.bias_name],
    )


def _solve_layers(
    solver: Solver,
    name: str,
    curvature: Curvature,
    gradient: Mapping[str, Tensor],
    damping: Damping,
    process_group: ProcessGroup | None,
) -> Solution:
    """Solve all layers, shared out over the ranks of a `process_group` where that can be and is cheaper."""
    systems = _LayerSolves(solver, curvature, gradient, damping)
    if process_group is None or not solver.layers_apart:
        solved = systems.solve_all()
    else:
        solved = _solve_shared(systems, process_group)
    entries = {entry: step for one in solved for entry, step in one.entries().items()}
    blocks = {entry: block for one in solved for entry, block in one.blocks().items()}
    return Solution(name, curvature.provider, damping, Direction(entries), blocks)


def _solve_shared(systems: _LayerSolves, process_group: ProcessGroup) -> list[_SolvedLayer]:
    communicator, layers, solver = communicator_of(process_group), systems.curvature.layers, systems.solver
    iterations = float(getattr(solver, "max_iter", 0))
    costs = [layer_cost(layer, solver.input_factor, iterations) for layer in layers]
    owners = choose_owners(costs, communicator.size)
    if owners is None:
        return systems.solve_all()
    return share_out(systems.solve, layers, owners, systems.known, communicator)


class _LayerSolves:
    """What a solver is asked to solve: the systems of all layers."""

    def __init__(
        self, solver: Solver, curvature: Curvature, gradient: Mapping[str, Tensor], damping: Damping
    ) -> None:
        self.solver, self.curvature, self.damping = solver, curvature, damping
        self.gradients = {layer.name: layer_gradient(layer, gradient) for layer in curvature.layers}

    def solve(self, layer: LayerCurvature) -> _SolvedLayer:
        """Solve one layer; a failure names the layer, the reason and the advice."""
        return self._apply(self._prepare(layer))

    def solve_all(self) -> list[_SolvedLayer]:
        """Solve all layers, together where the solver has a way to."""
        prepared = [self._prepare(layer) for layer in self.curvature.layers]
        started = time.perf_counter()
        found = self.solver.apply_jointly([p.state for p in prepared], [p.gradient for p in prepared])
        if found is None:
            return [self._apply(one) for one in prepared]
        seconds = time.perf_counter() - started
        sizes = [one.size for one in prepared]
        return [
            self._finish(one, direction, seconds * one.size / sum(sizes))
            for one, direction in zip(prepared, found, strict=True)
        ]

    def _prepare(self, layer: LayerCurvature) -> _Prepared:
        gradient = self.gradients[layer.name]
        started = time.perf_counter()
        with self._failures(layer):
            state = self.solver.prepare(layer, self.damping, gradient)
        return _Prepared(layer, gradient, state, time.perf_counter() - started)

    def _apply(self, prepared: _Prepared) -> _SolvedLayer:
        started = time.perf_counter()
        with self._failures(prepared.layer):
            direction = self.solver.apply(prepared.state, prepared.gradient)
        return self._finish(prepared, direction, time.perf_counter() - started)

    def _finish(self, prepared: _Prepared, direction: LayerDirection, seconds: float) -> _SolvedLayer:
        layer = prepared.layer
        example = next(iter(layer.blocks.values())).example
        # Elsewhere calls return before the work is done, and waiting for it would cost more than it tells.
        known = example.device.type == "cpu"
        return _SolvedLayer(
            layer,
            prepared.gradient,
            direction,
            self.damping,
            self.solver.tolerance(example.dtype),
            prepared.seconds if known else nan,
            seconds if known else nan,
        )

    @contextmanager
    def _failures(self, layer: LayerCurvature) -> Iterator[None]:
        provider = self.curvature.provider
        try:
            yield
        except NotPositiveDefiniteError as error:
            raise SolveError(
                f"layer `{layer.name}`: the damped factor of `{provider}` is not positive definite "
                f"(smallest eigenvalue {error.smallest:.3g}), in float64 either. Increase the damping, or "
                f"use solver `cg`, which stops at negative curvature"
            ) from error
        except (NotFiniteError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            raise SolveError(f"layer `{layer.name}` of `{provider}`: {error}") from error

    def known(self, layer: LayerCurvature) -> dict[str, object]:
        """What every rank holds of a layer, by name: it is not sent with a solution."""
        gradient = self.gradients[layer.name]
        held: dict[str, object] = {"layer": layer, "gradient": gradient, "weight": gradient.weight}
        if layer.inputs is not None:
            held["inputs"] = layer.inputs.full
        if isinstance(gradient.weight, RowGradient):
            held["rows"] = gradient.weight.inputs
        return held


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A layer that is ready to be solved."""

    layer: LayerCurvature
    gradient: LayerGradient
    state: object
    seconds: float

    @property
    def size(self) -> int:
        """Entries of the weight and of B: what a joint solve's time is shared out by."""
        outputs, *inputs = next(iter(self.layer.blocks.values())).shape
        return outputs * (outputs + sum(inputs))


@dataclass(frozen=True, eq=False)
class _SolvedLayer:
    """One layer's systems and what a solver made of them."""

    layer: LayerCurvature
    gradient: LayerGradient
    direction: LayerDirection
    damping: Damping
    tolerance: float
    seconds_prepare: float
    seconds_apply: float

    def entries(self) -> dict[str, Matrix]:
        named = ((self.layer.weight_name, self.direction.weight), (self.layer.bias_name, self.direction.bias))
        return {name: step for name, step in named if name is not None and step is not None}

    def blocks(self) -> dict[str, BlockSolution]:
        found = self.direction
        measures = found.system.measures(self.layer, self.gradient, found.weight, found.bias, self.damping)
        return {
            name: self._block(name, measures[name], column, len(measures))
            for column, name in enumerate(self.entries())
        }

    def _block(self, name: str, measures: Measures, column: int, count: int) -> BlockSolution:
        """Block `column` of `count`; the layer's time is theirs in equal parts."""
        found, of_weight = self.direction, name == self.layer.weight_name
        return BlockSolution(
            name=name,
            layer=self.layer.name,
            measures=measures,
            tolerance=self.tolerance,
            route=found.route,
            rank=found.rank if of_weight else found.system.bias_rank(self.layer),
            outcome=None if found.outcomes is None else found.outcomes[column],
            iteration_count=None if found.iterations is None else found.iterations[column],
            history=None if found.history is None else found.history[:, column],
            split=found.split if of_weight else None,
            seconds_prepare=self.seconds_prepare / count,
            seconds_apply=self.seconds_apply / count,
            reads=measures.reads,
        )


def check_gradient(curvature: Curvature, gradient: Mapping[str, Tensor]) -> None:
    """Refuse a gradient with a missing, misshapen or (bias, factors) non-finite entry, by its name."""
    blocks = curvature.blocks
    missing = [name for name in blocks if name not in gradient]
    if missing:
        raise SolveError(f"the gradient has no entry for {missing}; expected {list(blocks)}")
    held = {}
    for name, block in blocks.items():
        entry = entry_of(gradient, name)
        if not isinstance(entry, Tensor | RowGradient):
            raise SolveError(f"the gradient of `{name}` is {type(entry).__name__}; expected a tensor")
        if tuple(entry.shape) != block.shape:
            raise SolveError(
                f"the gradient of `{name}` has shape {tuple(entry.shape)}; expected {block.shape}"
            )
        _check_kind(name, entry.gradients.rows if isinstance(entry, RowGradient) else entry, block.example)
        # In factors: the inputs were checked when they were recorded, and the mean is the bias's gradient.
        if isinstance(entry, RowGradient):
            held[name] = entry.gradients.mean
        elif entry.ndim == 1:
            held[name] = entry
    sums = {name: tensor.sum() for name, tensor in held.items()}
    _refuse_not_finite([name for name in _find_not_finite(sums) if not _all_finite([held[name]])])


def _check_kind(name: str, entry: Tensor, example: Tensor) -> None:
    """Refuse a tensor of another dtype or device than the curvature's."""
    if (entry.dtype, entry.device) != (example.dtype, example.device):
        raise SolveError(
            f"the gradient of `{name}` is {entry.dtype} on {entry.device}; the curvature is {example.dtype} "
            f"on {example.device}. Use gradient.to(…) or curvature.to(…)"
        )


def _refuse_not_finite(bad: list[str]) -> None:
    if bad:
        raise SolveError(f"the gradient of {bad} holds NaN or infinity: has training diverged?")


def check_solution(solution: Solution, curvature: Curvature, gradient: Mapping[str, Tensor]) -> None:
    """Raise where a step is not finite, or a breakdown comes from a gradient or a curvature that is not."""
    signs = solution.direction.sums()
    for name, block in solution.blocks.items():
        if block.outcome is not None:
            broken = block.outcome == Outcome.BREAKDOWN
            signs[name] = torch.where(broken, torch.full_like(signs[name], torch.nan), signs[name])
    spoiled = _find_not_finite(signs)
    held = {name: entry_of(gradient, name) for name in spoiled}
    _refuse_not_finite(
        [name for name, entry in held.items() if isinstance(entry, Tensor) and not _all_finite([entry])]
    )
    for name in spoiled:
        layer = next(layer for layer in curvature.layers if name in layer.blocks)
        tensors = _tensors(layer)
        if layer.weight_operator is not None or layer.bias_operator is not None:
            tensors.append(solution.blocks[name].measures.quadratic())
        if not _all_finite(tensors):
            raise SolveError(
                f"the curvature of layer `{layer.name}` by `{curvature.provider}` holds NaN or infinity"
            )
        if not _all_finite([solution.direction[name]]):
            raise SolveError(
                f"layer `{layer.name}`: the direction of `{name}` by `{solution.solver}` on "
                f"`{curvature.provider}` is not finite: the curvature or the solve overflows. "
                f"Increase the damping, or use float64"
            )


def _find_not_finite(sums: Mapping[str, Tensor]) -> list[str]:
    """The names whose sum is not finite: a single read where all are."""
    if not sums:
        return []
    flags = torch.isfinite(torch.stack(list(sums.values())))
    if not device.readable(flags) or bool(flags.all()):
        return []
    return [name for name, finite in zip(sums, flags.tolist(), strict=True) if not finite]


def _tensors(layer: LayerCurvature) -> list[Tensor]:
    outputs = {} if layer.output is None else layer.output.tensors()
    inputs = {} if layer.inputs is None else layer.inputs.tensors()
    return [*outputs.values(), *inputs.values()]


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
