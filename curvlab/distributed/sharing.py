"""The layers' solves shared out over the ranks, where that is cheaper than each rank solving them all.

Every rank has the same joined factors, so every rank could solve every layer: no traffic, and the same work
on all. Shared out, the longest list of layers takes its time and the directions are broadcast:

    repeated   Σ_t f_t
    shared     max_r Σ_{t of r} f_t + λ N + β Σ_t b_t

in floating-point operations: f_t what layer t takes, b_t the bytes of its direction (coefficients n_t × M in
the sample space, n_t × n_{t-1} otherwise), β = `FLOPS_PER_BYTE` what a rank computes while a byte is sent and
λ = `LATENCY` while a message starts. The layers go, the longest first, each to the rank that has least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.distributed.group import Failure, Group, failure_of
from curvlab.distributed.parcel import Parcel, pack, unpack
from curvlab.linalg import GramFactor
from curvlab.solvers.base import Solver

__all__ = ["FLOPS_PER_BYTE", "LATENCY", "owners", "shared_out"]

FLOPS_PER_BYTE = 100.0
LATENCY = 2e6
T = TypeVar("T")


def owners(solver: Solver, curvature: Curvature, ranks: int) -> list[int] | None:
    """The rank that solves each layer; None where every rank had better solve them all."""
    costs = [layer_cost(solver, layer) for layer in curvature.layers]
    loads, chosen = [0.0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i].flops):
        chosen[index] = loads.index(min(loads))
        loads[chosen[index]] += costs[index].flops
    sent = FLOPS_PER_BYTE * sum(cost.bytes for cost in costs)
    shared = max(loads) + LATENCY * ranks + sent
    return chosen if shared < sum(cost.flops for cost in costs) else None


@dataclass(frozen=True)
class Cost:
    """Operations of a layer's solve, and bytes of its direction."""

    flops: float
    bytes: float


def layer_cost(solver: Solver, layer: LayerCurvature) -> Cost:
    """B's factorisation or products, the input side's, and the direction; from shapes alone."""
    assert layer.output is not None
    o, size = layer.output.size, layer.output.example.element_size()
    passes = float(getattr(solver, "max_iter", 0))
    output = 2.0 * o * o * passes if passes else 2.0 * o**3
    if layer.inputs is None or layer.weight_name is None:
        return Cost(output, size * o)
    full = layer.inputs.full
    n = full.size
    m = len(full.rows) if isinstance(full, GramFactor) else n
    gram = 2.0 * m * m * n if isinstance(full, GramFactor) else 0.0
    if solver.input_factor == "mean":
        return Cost(output + gram + 2.0 * o * m, size * (o * m + o))
    inner = passes * 2.0 * (o * m * m + o * o * m) if passes else m**3 + 2.0 * (o * m * m + o * o * m)
    return Cost(output + gram + inner, size * (o * m + o))


def shared_out(
    solve: Callable[[LayerCurvature], T],
    layers: Sequence[LayerCurvature],
    chosen: Sequence[int],
    known: Callable[[LayerCurvature], Mapping[str, object]],
    group: Group,
) -> list[T]:
    """What `solve` returns for every layer, each solved by the rank `chosen` for it.

    `known` names what all ranks hold of a layer. An error of one rank is raised on all.
    """
    parcels: dict[int, Parcel] = {}
    tensors: list[Tensor] = []
    failed: Exception | None = None
    solved: dict[int, T] = {}
    for index, layer in enumerate(layers):
        if chosen[index] == group.rank and failed is None:
            try:
                solved[index] = solve(layer)
                parcels[index], own = pack(solved[index], known(layer))
                tensors += own
            except Exception as error:
                failed = error
    told = group.objects(parcels if failed is None else failure_of(failed, group.rank))
    if failed is not None:
        raise failed
    for rank, sent in enumerate(told):
        if isinstance(sent, Failure):
            raise sent.error()
        _receive(group, rank, sent, tensors, layers, known, solved)
    return [solved[index] for index in range(len(layers))]


def _receive(
    group: Group,
    rank: int,
    sent: Mapping[int, Parcel],
    tensors: Sequence[Tensor],
    layers: Sequence[LayerCurvature],
    known: Callable[[LayerCurvature], Mapping[str, object]],
    solved: dict[int, T],
) -> None:
    """Take part in the broadcast of one rank's directions, and put them together."""
    like = [entry for parcel in sent.values() for entry in parcel.like]
    if not like:
        return
    output = layers[0].output
    assert output is not None
    found = group.spread(tensors, like, rank, output.example.device)
    if rank == group.rank:
        return
    for index, parcel in sent.items():
        own, found = found[: len(parcel.like)], found[len(parcel.like) :]
        solved[index] = unpack(parcel, own, known(layers[index]))
