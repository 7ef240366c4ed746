"""A solver over the layers of a Kronecker curvature: prepare, apply, one solution a block."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.distributed.communicator import communicator_of
from curvlab.distributed.solve import choose_owners, layer_cost, share_out
from curvlab.exceptions import PairError, SolveError
from curvlab.gradient import Gradient, RowGradient
from curvlab.linalg import Matrix
from curvlab.linalg.inverse import NotFiniteError, NotPositiveDefiniteError
from curvlab.solvers.base import LayerDirection, LayerGradient, Solver
from curvlab.solvers.damping import Damping
from curvlab.solvers.direction import Direction
from curvlab.solvers.measures import BiasMeasures, WeightMeasures
from curvlab.solvers.solution import BlockSolution, Solution
from curvlab.staleness import Versions

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
    solved = systems.solve_all() if process_group is None else _solve_shared(systems, process_group)
    entries = {entry: step for one in solved for entry, step in one.entries().items()}
    blocks = {entry: block for one in solved for entry, block in one.blocks().items()}
    return Solution(name, curvature.provider, damping, Direction(entries), blocks)


def _solve_shared(systems: _Systems, process_group: ProcessGroup) -> list[_Solved]:
    communicator, layers, solver = communicator_of(process_group), systems.curvature.layers, systems.solver
    iterations = float(getattr(solver, "max_iter", 0))
    costs = [layer_cost(layer, solver.input_factor, iterations) for layer in layers]
    owners = choose_owners(costs, communicator.size)
    if owners is None:
        return systems.solve_all()
    return share_out(systems.solve, layers, owners, systems.known, communicator)


class _Systems:
    """The systems of all layers: what a solver is asked to solve."""

    def __init__(
        self, solver: Solver, curvature: Curvature, gradient: Mapping[str, Tensor], damping: Damping
    ) -> None:
        self.solver, self.curvature, self.damping = solver, curvature, damping
        self.gradients = {layer.name: _layer_gradient(layer, gradient) for layer in curvature.layers}

    def solve(self, layer: LayerCurvature) -> _Solved:
        """Solve one layer; a failure names the layer, the reason and the advice."""
        return self._apply(self._prepare(layer))

    def solve_all(self) -> list[_Solved]:
        """Solve all layers, together where the solver has a way to."""
        prepared = [self._prepare(layer) for layer in self.curvature.layers]
        started = time.perf_counter()
        found = self.solver.apply_jointly([p.state for p in prepared], [p.gradient for p in prepared])
        if found is None:
            return [self._apply(one) for one in prepared]
        seconds = time.perf_counter() - started
        sizes = [one.size for one in prepared]
        return [
            self._solved(one, direction, seconds * one.size / sum(sizes))
            for one, direction in zip(prepared, found, strict=True)
        ]

    def _prepare(self, layer: LayerCurvature) -> _Prepared:
        if layer.output is None or (layer.inputs is None and layer.weight_name is not None):
            raise PairError(
                f"layer `{layer.name}` of `{self.curvature.provider}` has no Kronecker factors to solve by: "
                f"use `cg`, which needs products only"
            )
        gradient = self.gradients[layer.name]
        started = time.perf_counter()
        with self._failures(layer):
            state = self.solver.prepare(layer, self.damping, gradient)
        return _Prepared(layer, gradient, state, time.perf_counter() - started)

    def _apply(self, prepared: _Prepared) -> _Solved:
        started = time.perf_counter()
        with self._failures(prepared.layer):
            direction = self.solver.apply(prepared.state, prepared.gradient)
        return self._solved(prepared, direction, time.perf_counter() - started)

    def _solved(self, prepared: _Prepared, direction: LayerDirection, seconds: float) -> _Solved:
        layer = prepared.layer
        assert layer.output is not None
        example = layer.output.example
        # Elsewhere calls return before the work is done, and waiting for it would cost more than it tells.
        known = example.device.type == "cpu"
        return _Solved(
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


def _layer_gradient(layer: LayerCurvature, gradient: Mapping[str, Tensor]) -> LayerGradient:
    return LayerGradient(
        None if layer.weight_name is None else entry_of(gradient, layer.weight_name),
        None if layer.bias_name is None else gradient[layer.bias_name],
    )


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
        outputs = 0 if self.layer.output is None else self.layer.output.size
        inputs = 0 if self.layer.inputs is None else self.layer.inputs.full.size
        return outputs * (outputs + inputs)


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

    def entries(self) -> dict[str, Matrix]:
        named = ((self.layer.weight_name, self.direction.weight), (self.layer.bias_name, self.direction.bias))
        return {name: step for name, step in named if name is not None and step is not None}

    def blocks(self) -> dict[str, BlockSolution]:
        reads, names = self._reads(), list(self.entries())
        return {name: self._block(name, column, len(names), reads) for column, name in enumerate(names)}

    def _reads(self) -> Versions:
        """What residuals are computed from that others can change: the gradient, in factors or formed."""
        weight, bias = self.gradient.weight, self.gradient.bias
        named: dict[str, Tensor | None] = {f"the gradient of `{self.layer.bias_name}`": bias}
        if isinstance(weight, RowGradient):
            named["the batch"] = weight.inputs.rows
        else:
            named[f"the gradient of `{self.layer.weight_name}`"] = weight
        return Versions.of({name: tensor for name, tensor in named.items() if tensor is not None})

    def _block(self, name: str, column: int, count: int, reads: Versions) -> BlockSolution:
        """Block `column` of `count`; the layer's time is theirs in equal parts."""
        found, of_weight = self.direction, name == self.layer.weight_name
        measures = WeightMeasures if of_weight else BiasMeasures
        assert self.layer.output is not None
        return BlockSolution(
            name=name,
            layer=self.layer.name,
            measures=measures(self.layer, self.gradient, found, self.damping),
            tolerance=self.tolerance,
            route=found.route,
            rank=found.rank if of_weight else self.layer.output.rank_bound,
            outcome=None if found.outcomes is None else found.outcomes[column],
            iteration_count=None if found.iterations is None else found.iterations[column],
            history=None if found.history is None else found.history[:, column],
            split=found.split if of_weight else None,
            seconds_prepare=self.seconds_prepare / count,
            seconds_apply=self.seconds_apply / count,
            reads=reads,
        )
