"""`solve`: a solver, a curvature and a gradient to a solution, checked on the way in and on the way out.

The solver first adapts itself to the curvature (layers of Kronecker factors, or blocks by their products).
Then every unit of a layer (see `units`) is prepared and applied, jointly where the solver has a way to, or
shared out over ranks.

Each check takes one read back to the host. A formed gradient of a weight is looked at on the way out only,
where a step is not finite: to look at it costs a pass over it, which is a good part of an EA-CG solve, and
NaN and infinity do not get lost in one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from math import isfinite, nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import KroneckerLayer, LayerCurvature
from curvlab.distributed.agreement import Description, agree
from curvlab.distributed.communicator import communicator_of
from curvlab.distributed.solve import choose_owners, layer_cost, share_out
from curvlab.exceptions import ArgumentError, PairError, SolveError, SpecError, describe_argument
from curvlab.linalg import Matrix
from curvlab.linalg.cg import Outcome
from curvlab.linalg.execution import (
    Limits,
    collected,
    deferring,
    explained,
    full_precision,
    in_pieces,
    require,
    without_gradients,
)
from curvlab.linalg.inverse import NotFiniteError, NotPositiveDefiniteError
from curvlab.linalg.steps import RowGradient
from curvlab.solvers.base import Damping, Guidance, LayerDirection, Preconditioner, Solver, damping_from
from curvlab.solvers.registry import solvers
from curvlab.solvers.solution import (
    BlockSolution,
    Direction,
    Solution,
    SolvedUnit,
    Unit,
    entry_of,
    is_stack,
    join_units,
    units_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SolverByLayer", "check_gradient", "check_solution", "group_by_solver", "solve", "solver_units"]

SolverByLayer = Mapping[str, str | Solver]
"""Solvers by patterns of layer names."""


@full_precision
@without_gradients
def solve(
    solver: str | Solver | SolverByLayer,
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
        solver: a name such as `"ea-cg[max_iter=20]"`, or a solver; or a mapping of layer-name patterns to
            solvers, such as `{"0": "sm-kfi", "*": "kfi"}`, of which the first that matches a layer solves it.
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

    def check() -> tuple[_Chosen, Damping]:
        _check_kinds(solver, curvature, gradient)
        chosen_damping = damping_from(alpha, damping)
        chosen = _choose_solvers(solver, curvature, Guidance(start, preconditioner))
        check_gradient(curvature, gradient)
        return chosen, chosen_damping

    if process_group is None:
        chosen, chosen_damping = check()
        if curvature.agree_on is not None:
            curvature.agree_on(_describe(chosen, chosen_damping, curvature, gradient, strict).settings)
    else:
        chosen, chosen_damping = agree(
            communicator_of(process_group),
            check,
            lambda found: _describe(*found, curvature, gradient, strict),
            on=_device_of(curvature),
        )

    def run() -> Solution:
        found = _solve_layers(chosen, curvature, gradient, chosen_damping, process_group)
        check_solution(found, curvature, gradient)
        return found

    with collected() as checks:
        solution = run()
        if checks is not None and checks.read():  # a factorisation was mended in place
            solution = run()
            checks.read()
    if strict:
        solution.check()
    return solution


def _describe(
    chosen: _Chosen, damping: Damping, curvature: Curvature, gradient: Mapping[str, Tensor], strict: bool
) -> Description:
    """What must be the same on all ranks that solve together."""
    held = [tensor for layer in curvature.layers for tensor in layer.tensors().values()]
    settings = {
        "the solver": [chosen.name, chosen.by_layer],
        "the damping": damping,
        "strict": strict,
        "the provider": [curvature.provider, curvature.criterion, curvature.shift],
    }
    # Blocks that are products are over the rows of all ranks, of which each holds its own.
    factors = {} if curvature.matrix_free else {str(index): tensor for index, tensor in enumerate(held)}
    return Description(settings, {"the curvature": factors, "the gradient": _gradient_tensors(gradient)})


def _gradient_tensors(gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a gradient is held in; nothing is formed."""
    found: dict[str, Tensor] = {}
    for name in gradient:
        entry = entry_of(gradient, name)
        if isinstance(entry, RowGradient):
            found |= {f"{name}, S": entry.gradients.rows, f"{name}, H": entry.inputs.rows}
        else:
            found[name] = entry
    return found


def _device_of(curvature: object) -> torch.device:
    """Where the ranks' messages go; the CPU where what was given is no curvature."""
    if not isinstance(curvature, Curvature):
        return torch.device("cpu")
    return next(iter(curvature.layers[0].blocks.values())).example.device


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


def solver_units(
    solver: str | Solver | SolverByLayer, curvature: Curvature, gradient: Mapping[str, Tensor]
) -> list[Unit]:
    """All that `solve` prepares and applies, in the order of the layers: for those who time the phases apart.

    >>> import curvlab, torch
    >>> problem = curvlab.Problem(torch.nn.Linear(3, 2), "mse", torch.ones(4, 3), torch.ones(4, 2))
    >>> units = solver_units("kfi", curvlab.estimate("fisher", problem), problem.gradient())
    >>> [unit.given.kind for unit in units]
    ['kronecker']
    """
    return _make_units(_choose_solvers(solver, curvature, Guidance()).by_layer, curvature, gradient)


@dataclass(frozen=True, eq=False)
class _Chosen:
    """What messages call the solvers, and the solver of each layer."""

    name: str
    by_layer: list[Solver]


def _choose_solvers(
    solver: str | Solver | SolverByLayer, curvature: Curvature, guidance: Guidance
) -> _Chosen:
    """The solver of every layer, checked and adapted to what the curvature is."""
    if not isinstance(solver, Mapping):
        name = solver if isinstance(solver, str) else _name_of(solver)
        adapted = _adapt(solvers.make(solver), name, curvature, guidance)
        return _Chosen(name, [adapted.for_layer(layer, curvature) for layer in curvature.layers])
    if curvature.full_product is not None:
        raise PairError(
            f"`{curvature.provider}` has blocks between layers, which `cg` solves as one system: a solver "
            f'for each layer cannot be had. Use solve("cg", …), or a curvature that is block diagonal'
        )
    names = {pattern: s if isinstance(s, str) else _name_of(s) for pattern, s in solver.items()}
    patterns = [_first_match(layer, solver) for layer in curvature.layers]
    chosen: dict[str, Solver] = {}
    for pattern in dict.fromkeys(patterns):
        own = tuple(layer for layer, p in zip(curvature.layers, patterns, strict=True) if p == pattern)
        made = solvers.make(solver[pattern])
        chosen[pattern] = _adapt(made, names[pattern], replace(curvature, layers=own), guidance)
    pairs = zip(curvature.layers, patterns, strict=True)
    return _Chosen(
        ", ".join(f"{pattern}: {name}" for pattern, name in names.items()),
        [chosen[pattern].for_layer(layer, curvature) for layer, pattern in pairs],
    )


def _first_match(layer: LayerCurvature, solver: SolverByLayer) -> str:
    for pattern in solver:
        if fnmatchcase(layer.name, pattern):
            return pattern
    raise PairError(
        f"no solver for layer `{layer.name}`: none of the patterns {list(solver)} matches it. Add the layer, "
        f'or "*" as the last pattern'
    )


def _adapt(solver: Solver, name: str, curvature: Curvature, guidance: Guidance) -> Solver:
    solver.check(curvature, name)
    return solver.adapt(curvature, name, guidance)


def _make_units(chosen: Sequence[Solver], curvature: Curvature, gradient: Mapping[str, Tensor]) -> list[Unit]:
    pairs = zip(curvature.layers, chosen, strict=True)
    return [unit for layer, solver in pairs for unit in units_of(layer, solver, gradient)]


def _solve_layers(
    chosen: _Chosen,
    curvature: Curvature,
    gradient: Mapping[str, Tensor],
    damping: Damping,
    process_group: ProcessGroup | None,
) -> Solution:
    """Solve all units, shared out over the ranks of a `process_group` where that can be and is cheaper."""
    units = _make_units(chosen.by_layer, curvature, gradient)
    # Layers are of the data part; what the curvature has beside it is damping to a solver.
    damped = replace(damping, l2=curvature.shift) if curvature.shift else damping
    systems = _Systems(curvature.provider, damped)
    if process_group is None or not any(unit.solver.layers_apart for unit in units):
        solved = systems.solve_all(units)
    else:
        solved = _solve_shared(systems, units, process_group)
    entries: dict[str, Matrix] = {}
    blocks: dict[str, BlockSolution] = {}
    for layer, own in _by_layer(units, solved):
        steps, found = join_units(layer, own, gradient, damped)
        entries |= steps
        blocks |= found
    return Solution(chosen.name, curvature.provider, damping, Direction(entries), blocks, curvature.notes)


def _by_layer(
    units: Sequence[Unit], solved: Sequence[SolvedUnit]
) -> Iterator[tuple[LayerCurvature, list[SolvedUnit]]]:
    pairs = zip(units, solved, strict=True)
    for _, group in groupby(pairs, key=lambda pair: id(pair[0].layer)):
        own = list(group)
        yield own[0][0].layer, [one for _, one in own]


def _solve_shared(systems: _Systems, units: list[Unit], process_group: ProcessGroup) -> list[SolvedUnit]:
    communicator = communicator_of(process_group)
    # A stack of small systems takes less time than to send its directions.
    pairs = [
        (unit, unit.given)
        for unit in units
        if unit.solver.layers_apart and isinstance(unit.given, KroneckerLayer) and not is_stack(unit.given)
    ]
    apart, given = {id(layer): unit for unit, layer in pairs}, [layer for _, layer in pairs]
    costs = [
        layer_cost(layer, unit.solver.input_factor, float(getattr(unit.solver, "max_iter", 0)))
        for unit, layer in pairs
    ]
    owners = choose_owners(costs, communicator.size)
    if owners is None:
        return systems.solve_all(units)
    shared = share_out(
        lambda one: systems.solve(apart[id(one)]),
        given,
        owners,
        lambda one: systems.known(apart[id(one)]),
        communicator,
    )
    found = dict(zip(apart, shared, strict=True))
    # Every rank takes part in the products of the others, in the same order.
    rest = [unit for unit in units if id(unit.given) not in apart]
    found |= dict(zip([id(unit.given) for unit in rest], systems.solve_all(rest), strict=True))
    return [found[id(unit.given)] for unit in units]


class _Systems:
    """The damped systems of units of one provider's curvature."""

    def __init__(self, provider: str, damping: Damping) -> None:
        self.provider, self.damping = provider, damping

    def solve(self, unit: Unit) -> SolvedUnit:
        """Solve one unit; a failure names the layer, the reason and the advice."""
        return self._apply(self._prepare(unit))

    def solve_all(self, units: Sequence[Unit]) -> list[SolvedUnit]:
        """Solve all units, those of one solver together where it has a way to."""
        prepared = [self._prepare(unit) for unit in units]
        found: dict[int, SolvedUnit] = {}
        for solver, indices in group_by_solver(units):
            solved = self._apply_all(solver, [prepared[index] for index in indices])
            found |= dict(zip(indices, solved, strict=True))
        return [found[index] for index in range(len(units))]

    def _apply_all(self, solver: Solver, prepared: list[_Prepared]) -> list[SolvedUnit]:
        started = time.perf_counter()
        found = solver.apply_jointly([p.state for p in prepared], [p.unit.gradient for p in prepared])
        if found is None:
            return [self._apply(one) for one in prepared]
        seconds = time.perf_counter() - started
        sizes = [one.size for one in prepared]
        return [
            self._finish(one, direction, seconds * size / sum(sizes))
            for one, direction, size in zip(prepared, found, sizes, strict=True)
        ]

    def _prepare(self, unit: Unit) -> _Prepared:
        started = time.perf_counter()
        failures = _Failures(self.provider, unit.layer)
        with failures, explained(lambda: failures):
            state = unit.solver.prepare(unit.given, self.damping, unit.gradient)
        return _Prepared(unit, state, time.perf_counter() - started)

    def _apply(self, prepared: _Prepared) -> SolvedUnit:
        started, unit = time.perf_counter(), prepared.unit
        with _Failures(self.provider, unit.layer):
            direction = unit.solver.apply(prepared.state, unit.gradient)
        return self._finish(prepared, direction, time.perf_counter() - started)

    def _finish(self, prepared: _Prepared, direction: LayerDirection, seconds: float) -> SolvedUnit:
        unit = prepared.unit
        example = next(iter(unit.given.blocks.values())).example
        # Elsewhere calls return before the work is done, and waiting for it would cost more than it tells.
        known = example.device.type == "cpu"
        return SolvedUnit(
            unit.given,
            unit.gradient,
            direction,
            self.damping,
            unit.solver.tolerance(example.dtype),
            prepared.seconds if known else nan,
            seconds if known else nan,
        )

    def known(self, unit: Unit) -> dict[str, object]:
        """What every rank holds of a unit, by name: it is not sent with a solution."""
        gradient = unit.gradient
        held: dict[str, object] = {"layer": unit.given, "gradient": gradient, "weight": gradient.weight}
        if unit.given.inputs is not None:
            held["inputs"] = unit.given.inputs.full
        if isinstance(gradient.weight, RowGradient):
            held["rows"] = gradient.weight.inputs
        return held


class _Failures:
    """Where a factorisation of a layer fails inside, the error says of which layer, and what to do."""

    __slots__ = ("layer", "provider")

    def __init__(self, provider: str, layer: LayerCurvature) -> None:
        self.provider, self.layer = provider, layer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, NotPositiveDefiniteError):
            raise SolveError(
                f"layer `{self.layer.name}`: the damped factor of `{self.provider}` is not positive definite "
                f"(smallest eigenvalue {error.smallest:.3g}), in float64 either. Increase the damping, or "
                f"use solver `cg`, which stops at negative curvature"
            ) from error
        if isinstance(error, NotFiniteError | torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            raise SolveError(f"layer `{self.layer.name}` of `{self.provider}`: {error}") from error


def group_by_solver(units: Sequence[Unit]) -> list[tuple[Solver, list[int]]]:
    """The places of the units of each solver; equal ones are one."""
    groups: list[tuple[Solver, list[int]]] = []
    for index, unit in enumerate(units):
        for solver, indices in groups:
            if solver is unit.solver or solver == unit.solver:
                indices.append(index)
                break
        else:
            groups.append((unit.solver, [index]))
    return groups


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A unit that is ready to be solved."""

    unit: Unit
    state: object
    seconds: float

    @property
    def size(self) -> int:
        """Entries of the weight and of B: what a joint solve's time is shared out by."""
        given = self.unit.given
        outputs, *inputs = next(iter(given.blocks.values())).shape
        return (1 if given.output is None else given.output.count) * outputs * (outputs + sum(inputs))


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

    def judge(spoiled: list[str]) -> None:
        _refuse_not_finite([name for name in spoiled if not _all_finite([held[name]])])

    _find_not_finite(held, {}, judge)


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
    outcomes = {n: block.outcome for n, block in solution.blocks.items() if block.outcome is not None}

    def judge(spoiled: list[str]) -> None:
        _explain_not_finite(spoiled, solution, curvature, gradient)

    _find_not_finite(solution.direction.computed(), outcomes, judge)


def _explain_not_finite(
    spoiled: Sequence[str], solution: Solution, curvature: Curvature, gradient: Mapping[str, Tensor]
) -> None:
    """Raise what made the steps of these names not finite, if they are not."""
    held = {name: entry_of(gradient, name) for name in spoiled}
    _refuse_not_finite(
        [name for name, entry in held.items() if isinstance(entry, Tensor) and not _all_finite([entry])]
    )
    for name in spoiled:
        layer = next(layer for layer in curvature.layers if name in layer.blocks)
        tensors = list(layer.tensors().values())
        if layer.matrix_free:
            tensors.append(solution.blocks[name].measures.quadratic())
        if not _all_finite(tensors):
            raise SolveError(
                f"the curvature of layer `{layer.name}` by `{curvature.provider}` holds NaN or infinity"
            )
        if not _all_finite([solution.direction.view(name)]):
            raise SolveError(
                f"layer `{layer.name}`: the direction of `{name}` by `{solution.solver}` on "
                f"`{curvature.provider}` is not finite: the curvature or the solve overflows. "
                f"Increase the damping, or use float64"
            )


def _find_not_finite(
    tensors: Mapping[str, Tensor | tuple[Tensor, ...]],
    outcomes: Mapping[str, Tensor],
    judge: Callable[[list[str]], None],
) -> None:
    """Give `judge` the names whose tensors may not be finite, or whose outcome is a breakdown."""
    if not tensors:
        return
    named = [(n, t) for n, own in tensors.items() for t in ((own,) if isinstance(own, Tensor) else own)]
    given = [tensor for _, tensor in named]
    # One launch for all of them; on the CPU sums are the faster.
    sums = [t.sum() for t in given] if in_pieces(given[0]) else list(torch._foreach_norm(given))
    names = [name for name, _ in named]

    def found(numbers: list[float]) -> None:
        fine = [isfinite(number) for number in numbers[: len(names)]]
        fine += [number != int(Outcome.BREAKDOWN) for number in numbers[len(names) :]]
        spoiled = [n for n, f in zip([*names, *outcomes], fine, strict=True) if not f]
        if spoiled:
            judge(list(dict.fromkeys(spoiled)))

    if deferring():
        for name, total in zip(names, sums, strict=True):
            require(
                [total], lambda _: None, Limits(f"the gradient or the direction of `{name}` is not finite")
            )
        for name, outcome in outcomes.items():
            limits = Limits(f"the solve of `{name}` broke down", high=int(Outcome.BREAKDOWN) - 1)
            require([outcome], lambda _: None, limits)
        return
    require([*sums, *outcomes.values()], found)


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
