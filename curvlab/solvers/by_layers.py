"""A solver over the layers of a Kronecker curvature: prepare, apply, one solution a block."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.exceptions import PairError, SolveError
from curvlab.gradient import Gradient, RowGradient
from curvlab.linalg import RowProduct
from curvlab.linalg.inverse import NotFiniteError, NotPositiveDefiniteError
from curvlab.solvers.base import LayerDirection, LayerGradient, Solver
from curvlab.solvers.damping import Damping
from curvlab.solvers.measures import BiasMeasures, WeightMeasures
from curvlab.solvers.solution import BlockSolution, Direction, Solution

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["entry_of", "solve_by_layers"]


def entry_of(gradient: Mapping[str, Tensor], name: str) -> Tensor | RowGradient:
    """A gradient's entry as it is held: in factors where it has them."""
    return gradient.factored(name) if isinstance(gradient, Gradient) else gradient[name]


def solve_by_layers(
    solver: Solver,
    name: str,
    curvature: Curvature,
    gradient: Mapping[str, Tensor],
    damping: Damping,
    process_group: ProcessGroup | None = None,
) -> Solution:
    """Solve layer by layer, shared out over the ranks of a `process_group` where that is cheaper."""
    systems = _Systems(solver, curvature, gradient, damping)
    if process_group is None:
        solved = [systems.solve(layer) for layer in curvature.layers]
    else:
        solved = _solve_shared(systems, process_group)
    entries = {entry: step for one in solved for entry, step in one.entries().items()}
    blocks = {entry: block for one in solved for entry, block in one.blocks().items()}
    return Solution(name, curvature.provider, damping, Direction(entries), blocks)


def _solve_shared(systems: _Systems, process_group: ProcessGroup) -> list[_Solved]:
    from curvlab.distributed.group import Group
    from curvlab.distributed.sharing import owners, shared_out

    group, layers = Group(process_group), systems.curvature.layers
    chosen = owners(systems.solver, systems.curvature, group.size)
    if chosen is None:
        return [systems.solve(layer) for layer in layers]
    return shared_out(systems.solve, layers, chosen, systems.known, group)


class _Systems:
    """The systems of all layers: what a solver is asked to solve."""

    def __init__(
        self, solver: Solver, curvature: Curvature, gradient: Mapping[str, Tensor], damping: Damping
    ) -> None:
        self.solver, self.curvature, self.damping = solver, curvature, damping
        self.gradients = {layer.name: _layer_gradient(layer, gradient) for layer in curvature.layers}

    def solve(self, layer: LayerCurvature) -> _Solved:
        """Solve one layer; a failure names the layer, the reason and the advice."""
        provider = self.curvature.provider
        if layer.output is None or (layer.inputs is None and layer.weight_name is not None):
            raise PairError(
                f"layer `{layer.name}` of `{provider}` has no Kronecker factors to solve by: use `cg`, which "
                f"needs products only"
            )
        try:
            return _solve_layer(self.solver, layer, self.damping, self.gradients[layer.name])
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
        held: dict[str, object] = {"layer": layer, "gradient": gradient}
        if layer.inputs is not None:
            held["inputs"] = layer.inputs.full
        if isinstance(gradient.weight, RowGradient):
            held["rows"] = gradient.weight.inputs
        return held


def _layer_gradient(layer: LayerCurvature, gradient: Mapping[str, Tensor]) -> LayerGradient:
    return LayerGradient(
        None if layer.weight_name is None else entry_of(gradient, layer.weight_name),
        None if layer.bias_name is None else gradient[layer.bias_name],
    )


@dataclass(frozen=True, eq=False)
class _Solved:
    """One layer's systems and what a solver made of them."""

    layer: LayerCurvature
    gradient: LayerGradient
    direction: LayerDirection
    damping: Damping
    tolerance: float
    seconds_prepare: float
    seconds_apply: float

    def entries(self) -> dict[str, Tensor | RowProduct]:
        named = ((self.layer.weight_name, self.direction.weight), (self.layer.bias_name, self.direction.bias))
        return {name: step for name, step in named if name is not None and step is not None}

    def blocks(self) -> dict[str, BlockSolution]:
        return {name: self._block(name, column) for column, name in enumerate(self.entries())}

    def _block(self, name: str, column: int) -> BlockSolution:
        found = self.direction
        measures = WeightMeasures if name == self.layer.weight_name else BiasMeasures
        return BlockSolution(
            name=name,
            layer=self.layer.name,
            measures=measures(self.layer, self.gradient, found, self.damping),
            tolerance=self.tolerance,
            route=found.route,
            rank=found.rank,
            outcome=None if found.outcomes is None else found.outcomes[column],
            iteration_count=None if found.iterations is None else found.iterations[column],
            history=None if found.history is None else found.history[:, column],
            split=found.split if name == self.layer.weight_name else None,
            seconds_prepare=self.seconds_prepare,
            seconds_apply=self.seconds_apply,
        )


def _solve_layer(solver: Solver, layer: LayerCurvature, damping: Damping, given: LayerGradient) -> _Solved:
    assert layer.output is not None
    started = time.perf_counter()
    state = solver.prepare(layer, damping, given)
    prepared = time.perf_counter()
    direction = solver.apply(state, given)
    applied = time.perf_counter()
    example = layer.output.example
    # Elsewhere the calls return before the work is done, and waiting for it would cost more than it tells.
    seconds = (prepared - started, applied - prepared) if example.device.type == "cpu" else (nan, nan)
    return _Solved(layer, given, direction, damping, solver.tolerance(example.dtype), *seconds)
