"""The gradient E[∇ξ], kept as factors: G^t = Sᵀ diag(c) H is formed only when it is read.

With H the layer's inputs and S the gradients at its output (one row of each per row of the batch, with
weights c that sum to one): ∇_W = Sᵀ diag(c) H and ∇_b = Sᵀ c. `LazyTensors` is the mapping that gradients and
the solvers' directions share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from curvlab.linalg import GramFactor
from curvlab.linalg.execution import FullPrecision
from curvlab.linalg.factors import COLUMN_CHUNK
from curvlab.measure import device
from curvlab.model.recording import GraphRecording, LayerRecord, Recording

__all__ = [
    "Gradient",
    "GradientMean",
    "LazyTensors",
    "RowFactor",
    "RowGradient",
    "add_decay",
    "gradient_of",
    "view_entry",
]


class Shaped(Protocol):
    """A tensor, or what forms one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""


E = TypeVar("E", bound=Shaped)


class LazyTensors(FullPrecision, Mapping[str, Tensor], Generic[E]):
    """{parameter name: tensor}; an entry is formed or copied each time it is read: keep one you need twice.

    What is read is the caller's own: to change it changes nothing here.
    """

    def __init__(self, entries: Mapping[str, E]) -> None:
        self._entries = dict(entries)

    def factored(self, name: str) -> E:
        """The entry as it is held: a tensor, or what forms one."""
        return self._entries[name]

    @staticmethod
    @abstractmethod
    def _form(entry: E) -> Tensor:
        """The entry as a tensor."""

    def __getitem__(self, name: str) -> Tensor:
        held = self.factored(name)
        return held.clone() if isinstance(held, Tensor) else self._form(held)

    def view(self, name: str) -> Tensor:
        """The entry as a tensor, for who changes nothing: it may be the one that is held."""
        return self._form(self.factored(name))

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # a Mapping's own would form the entry to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(entry.shape)}" for name, entry in self._entries.items())
        return f"{type(self).__name__}({shapes})"


def view_entry(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """An entry of any mapping, not copied, for who changes nothing."""
    return tensors.view(name) if isinstance(tensors, LazyTensors) else tensors[name]


# Sums that are this many roundings small are computed again: three digits are right above it.
CANCELLED = 1e4
RowFactor = Literal["gradients", "inputs"]


@dataclass(frozen=True, eq=False)
class RowGradient(FullPrecision):
    """G = Sᵀ diag(c) H for one weight, with S the output gradients' rows and H the inputs'."""

    gradients: GramFactor
    inputs: GramFactor

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's shape."""
        return (self.gradients.size, self.inputs.size)

    def form(self) -> Tensor:
        """G itself."""
        return (self.gradients.rows * self.gradients.root.square()[:, None]).T @ self.inputs.rows

    def map(self, function: Callable[[Tensor], Tensor]) -> RowGradient:
        """The same gradient with `function`, a conversion or a copy, applied to each of its tensors."""
        return RowGradient(self.gradients.map(function), self.inputs.map(function))

    def square_norm(self) -> Tensor:
        """‖G‖² = Σ (S Sᵀ ⊙ H Hᵀ), weighted, with no G.

        Near a stationary point the terms of the sum cancel, but their rounding does not: where too little is
        left of (Σ ‖s_i‖ ‖h_i‖)² to be trusted, G is formed in float64, a chunk of columns at a time.
        """
        left, right = self.gradients.gram, self.inputs.gram
        total = (left * right).sum()
        if device.readable(total):
            bound = (left.diagonal() * right.diagonal()).clamp(min=0).sqrt().sum().square()
            if float(total) < CANCELLED * torch.finfo(total.dtype).eps * float(bound):
                total = self._formed_square_norm().to(total.dtype)
        return total.clamp(min=0)

    def _formed_square_norm(self) -> Tensor:
        weighted = (self.gradients.rows * self.gradients.root.square()[:, None]).T.double()
        chunks = self.inputs.rows.split(COLUMN_CHUNK, dim=1)
        return torch.stack([(weighted @ chunk.double()).square().sum() for chunk in chunks]).sum()


class Gradient(LazyTensors[Tensor | RowGradient]):
    """{parameter name: E[gradient]}; a weight's entry is formed each time it is read.

    Keep a tensor you need twice; `factored(name)` gives the entry as it is held, not to be changed.
    """

    @staticmethod
    def _form(entry: Tensor | RowGradient) -> Tensor:
        return entry.form() if isinstance(entry, RowGradient) else entry

    def to(self, *args: torch.device | torch.dtype | str, **kwargs: object) -> Gradient:
        """The same gradient on another device or in another dtype, entries in factors kept so."""

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(*args, **kwargs)  # type: ignore[call-overload]

        held = self._entries.items()
        return Gradient({n: e.map(convert) if isinstance(e, RowGradient) else convert(e) for n, e in held})

    def norm(self) -> Tensor:
        """‖E[∇ξ]‖ over all parameters, with no weight gradient formed."""
        squares = [
            e.square_norm() if isinstance(e, RowGradient) else e.square().sum()
            for e in self._entries.values()
        ]
        return torch.stack(squares).sum().sqrt()


def gradient_of(recording: Recording) -> Gradient:
    """The gradient of one batch, in factors where a layer sees one row per example."""
    entries = {name: entry for record in recording.layers for name, entry in _entries(record).items()}
    if isinstance(recording, GraphRecording):
        entries |= recording.mean_gradients
    return Gradient({name: entries[name] for layer in recording.layout for name in layer.names})


def add_decay(gradient: Gradient, parameters: Mapping[str, Tensor], decay: float) -> Gradient:
    """g + λθ, formed.

    >>> add_decay(Gradient({"w": torch.ones(2)}), {"w": torch.full((2,), 4.0)}, 0.5)["w"]
    tensor([3., 3.])
    """
    return Gradient({name: gradient.view(name) + decay * parameters[name].detach() for name in gradient})


@dataclass
class GradientMean:
    """The gradient over several batches, as running sums: no batch is held."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    weight: Tensor | None = None

    def add(self, recording: Recording) -> None:
        """Count a batch with its weight."""
        weight = recording.total_weight
        gradient = gradient_of(recording)
        for name in gradient:
            counted = gradient.view(name) * weight
            self.sums[name] = counted if name not in self.sums else self.sums[name].add_(counted)
        self.weight = weight if self.weight is None else self.weight + weight

    def value(self) -> Gradient:
        """The mean so far."""
        assert self.weight is not None
        return Gradient({name: total / self.weight for name, total in self.sums.items()})


def _entries(record: LayerRecord) -> dict[str, Tensor | RowGradient]:
    entries: dict[str, Tensor | RowGradient] = {}
    if record.layer.weight_name is not None:
        entries[record.layer.weight_name] = RowGradient(record.gradients, record.inputs)
    if record.layer.bias_name is not None:
        entries[record.layer.bias_name] = record.gradients.mean
    return entries
