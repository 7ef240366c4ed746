"""What a run asks of a device: launches, views, operations of arithmetic and bytes that go through memory.

A *launch* is an operation that is neither a view nor an allocation; the bytes of one are those of its
operands and of its results, as if no cache held any of them. Fake tensors serve as well as real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from curvlab.linalg.execution import elsewhere
from curvlab.linalg.pending import census
from curvlab.measure.dispatch import ImplicitZeros
from curvlab.measure.flops import of_operation

__all__ = ["Launch", "Operations", "operations"]


@dataclass(frozen=True)
class Launch:
    """One launch: its operation, its arithmetic, and the bytes that it reads and writes."""

    name: str
    flops: int
    bytes: int


@dataclass
class Operations:
    """All launches of a run, in order; how many views it made, and how often the host read."""

    launches: list[Launch] = field(default_factory=list)
    views: int = 0
    reads: int = 0

    @property
    def flops(self) -> int:
        """Their arithmetic together."""
        return sum(launch.flops for launch in self.launches)

    @property
    def bytes(self) -> int:
        """Their traffic together."""
        return sum(launch.bytes for launch in self.launches)

    def seconds(self, flops: float, bandwidth: float) -> float:
        """Σ max(flops / peak, bytes / bandwidth): what the arithmetic and the memory take at the least."""
        return sum(max(one.flops / flops, one.bytes / bandwidth) for one in self.launches)


@contextmanager
def operations(there: bool = False) -> Iterator[Operations]:
    """Count what runs inside; `there` as it would run on an accelerator, wherever its tensors are.

    >>> with operations() as found:
    ...     _ = (torch.ones(3, 4) @ torch.ones(4, 5)).T
    >>> [launch.name for launch in found.launches], found.views, found.flops
    (['aten.ones', 'aten.ones', 'aten.mm'], 1, 120)
    """
    found = Operations()
    with elsewhere() if there else nullcontext(), census() as reads, _Counting(found), ImplicitZeros():
        yield found
    found.reads += reads.reads


class _Counting(TorchDispatchMode):
    def __init__(self, found: Operations) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        name = str(packet)
        if func.namespace != "aten" or name in ALLOCATIONS:
            return result
        if func.is_view or name in VIEWS:
            self.found.views += 1
            return result
        if torch.Tag.data_dependent_output in func.tags:
            self.found.reads += 1
        shapes = [t for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        flops = of_operation(packet, args, kwargs, result)
        size = sum(tensor.numel() * tensor.element_size() for tensor in shapes)
        self.found.launches.append(Launch(name, flops, size))
        return result


ALLOCATIONS = {"aten.empty", "aten.empty_strided", "aten.empty_like"} | {
    "aten.new_empty",
    "aten.new_empty_strided",
}
NO_WORK = "_reshape_alias", "_unsafe_view", "detach", "lift_fresh", "_efficientzerotensor"
VIEWS = {f"aten.{name}" for name in NO_WORK}
