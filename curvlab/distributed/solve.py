"""The layers' solves shared out over the ranks, where that is cheaper than each rank solving them all.

Every rank has the same joined factors, so every rank could solve every layer: no traffic, and the same work
on all. Shared out, the longest list of layers takes its time and the directions are broadcast:

    repeated   Σ_t f_t
    shared     max_r Σ_{t of r} f_t + λ N + β Σ_t b_t

in floating-point operations: f_t what layer t takes, b_t the bytes of its direction (coefficients n_t × M in
the sample space, n_t × n_{t-1} otherwise), β = `FLOPS_PER_BYTE` what a rank computes while a byte is sent and
λ = `LATENCY` while a message starts. The layers go, the longest first, each to the rank that has least.

A solution travels as a `Message`: a pickled frame, and its tensors beside it. What every rank holds already
(the layer's factors) is named in the frame and not sent.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from curvlab.curvature_layers import KroneckerLayer
from curvlab.distributed.communicator import Communicator, Failure, TensorLike, failure_of
from curvlab.linalg import DiagonalFactor, GramFactor
from curvlab.linalg.factors import InputKind

__all__ = [
    "FLOPS_PER_BYTE",
    "LATENCY",
    "Cost",
    "Message",
    "choose_owners",
    "layer_cost",
    "pack",
    "share_out",
    "unpack",
]

FLOPS_PER_BYTE = 100.0
LATENCY = 2e6
T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """Operations of a layer's solve, and bytes of its direction."""

    flops: float
    bytes: float


def choose_owners(costs: Sequence[Cost], ranks: int) -> list[int] | None:
    """The rank that solves each layer; None where every rank had better solve them all.

    >>> choose_owners([Cost(4e9, 1e3), Cost(3e9, 1e3), Cost(2e9, 1e3)], 2)
    [0, 1, 1]
    >>> choose_owners([Cost(4e3, 1e3), Cost(3e3, 1e3)], 2) is None
    True
    """
    loads, chosen = [0.0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i].flops):
        chosen[index] = loads.index(min(loads))
        loads[chosen[index]] += costs[index].flops
    sent = FLOPS_PER_BYTE * sum(cost.bytes for cost in costs)
    shared = max(loads) + LATENCY * ranks + sent
    return chosen if shared < sum(cost.flops for cost in costs) else None


def layer_cost(layer: KroneckerLayer, input_factor: InputKind, iterations: float = 0.0) -> Cost:
    """B's factorisation or products, the input side's, and the direction; from shapes alone.

    `input_factor` is the one that the solver reads; `iterations` how many it may make, 0 for a direct one.
    """
    o, size = layer.output.size, layer.output.example.element_size()
    diagonal = isinstance(layer.output, DiagonalFactor)
    product = 2.0 * o if diagonal else 2.0 * o * o
    output = product * iterations if iterations else product if diagonal else product * o
    if layer.inputs is None or layer.weight_name is None:
        return Cost(output, size * o)
    full = layer.inputs.full
    n = full.size
    if isinstance(full, DiagonalFactor) and input_factor == "full":
        products = max(iterations, 1.0) * n * (product + 2.0 * o)
        return Cost(output + products, size * (o * n + o))
    m = len(full.rows) if isinstance(full, GramFactor) else n
    gram = 2.0 * m * m * n if isinstance(full, GramFactor) else 0.0
    if input_factor == "mean":
        return Cost(output + gram + 2.0 * o * m, size * (o * m + o))
    products = 2.0 * o * m * m + product * m
    inner = iterations * products if iterations else m**3 + products
    return Cost(output + gram + inner, size * (o * m + o))


def share_out(
    solve: Callable[[KroneckerLayer], T],
    layers: Sequence[KroneckerLayer],
    owners: Sequence[int],
    known: Callable[[KroneckerLayer], Mapping[str, object]],
    communicator: Communicator,
) -> list[T]:
    """What `solve` returns for every layer, each solved by the rank that owns it.

    `known` names what all ranks hold of a layer. An error of one rank is raised on all.
    """
    messages: dict[int, Message] = {}
    tensors: list[Tensor] = []
    failed: Exception | None = None
    solved: dict[int, T] = {}
    for index, layer in enumerate(layers):
        if owners[index] == communicator.rank and failed is None:
            try:
                solved[index] = solve(layer)
                messages[index], own = pack(solved[index], known(layer))
                tensors += own
            except Exception as error:
                failed = error
    told = communicator.gather_objects(messages if failed is None else failure_of(failed, communicator.rank))
    if failed is not None:
        raise failed
    for rank, sent in enumerate(told):
        if isinstance(sent, Failure):
            raise sent.error()
        _receive(communicator, rank, sent, tensors, layers, known, solved)
    return [solved[index] for index in range(len(layers))]


def _receive(
    communicator: Communicator,
    rank: int,
    sent: Mapping[int, Message],
    tensors: Sequence[Tensor],
    layers: Sequence[KroneckerLayer],
    known: Callable[[KroneckerLayer], Mapping[str, object]],
    solved: dict[int, T],
) -> None:
    """Take part in the broadcast of one rank's directions, and put them together."""
    like = [entry for message in sent.values() for entry in message.like]
    if not like:
        return
    found = communicator.broadcast(tensors, like, rank, layers[0].output.example.device)
    if rank == communicator.rank:
        return
    for index, message in sent.items():
        own, found = found[: len(message.like)], found[len(message.like) :]
        solved[index] = unpack(message, own, known(layers[index]))


@dataclass(frozen=True)
class Message:
    """The frame of a value, and the shapes and dtypes of the tensors that belong in it."""

    frame: bytes
    like: tuple[TensorLike, ...]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, object]) -> None:
        super().__init__(file)
        self.names = {id(value): name for name, value in known.items()}
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> tuple[str, str | int] | None:
        if id(obj) in self.names:
            return "known", self.names[id(obj)]
        if isinstance(obj, Tensor):
            self.tensors.append(obj.detach())
            return "tensor", len(self.tensors) - 1
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], known: Mapping[str, object]) -> None:
        super().__init__(file)
        self.tensors, self.known = tensors, known

    def persistent_load(self, pid: Any) -> Any:
        kind, key = pid
        return self.known[key] if kind == "known" else self.tensors[key]


def pack(value: object, known: Mapping[str, object]) -> tuple[Message, list[Tensor]]:
    """The message of `value`, and the tensors to send with it.

    >>> import torch
    >>> message, tensors = pack({"a": torch.ones(2), "b": 1}, {})
    >>> unpack(message, tensors, {})
    {'a': tensor([1., 1.]), 'b': 1}
    """
    file = io.BytesIO()
    pickler = _Pickler(file, known)
    pickler.dump(value)
    like = tuple((tuple(tensor.shape), tensor.dtype) for tensor in pickler.tensors)
    return Message(file.getvalue(), like), pickler.tensors


def unpack(message: Message, tensors: list[Tensor], known: Mapping[str, object]) -> Any:
    """The value, with this rank's own of what is known."""
    return _Unpickler(io.BytesIO(message.frame), tensors, known).load()
