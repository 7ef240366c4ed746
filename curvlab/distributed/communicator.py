"""The ranks that take part in a call, and the few collective operations that curvlab uses between them.

    sums            Σ_r x_r of many tensors, in one all-reduce for each dtype
    gather_rows     the rows of all ranks, in one all-gather, padded to the longest shard
    gather_objects  one small value per rank
    broadcast       tensors that one rank has, in one message for each dtype

A `Communicator` is one value that is made where a process group comes in (`process_group=` of `estimate`,
`Problem.gradient`, `solve`, `SecondOrder`, `train`) and handed on; `LOCAL`, the default, is a process alone,
for which all of them are free. Every rank must call each operation, in the same order. This module knows
nothing of problems, providers or solvers, so that all of them may use it.

`launched` makes the group of all ranks that torchrun started. Each takes a shard of the rows: shards are
contiguous, in the order of the ranks, and differ by at most one row. The rows of all ranks, joined, are then
the batch in its own order, so that whatever is keyed by a row's number (the draws of `fisher[kind=mc]`) does
not change with the number of ranks.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from curvlab import exceptions
from curvlab.exceptions import CurvlabError, RankError
from curvlab.measure import device as devices

if TYPE_CHECKING:
    from curvlab.data.base import Batches

__all__ = [
    "LOCAL",
    "Communicator",
    "Failure",
    "Launch",
    "LocalCommunicator",
    "ProcessGroup",
    "ProcessGroupCommunicator",
    "TensorLike",
    "communicator_of",
    "failure_of",
    "launched",
    "rank_batches",
    "shard",
]

T = TypeVar("T")
Shape = tuple[int, ...]
TensorLike = tuple[Shape, torch.dtype]


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, told to the others so that they raise it too instead of waiting."""

    rank: int
    kind: str
    message: str

    def error(self) -> CurvlabError:
        """The error that the other ranks raise: of the same class where it is one of curvlab's."""
        made: CurvlabError = getattr(exceptions, self.kind, RankError)(f"rank {self.rank}: {self.message}")
        return made


def failure_of(error: Exception, rank: int) -> Failure:
    """The failure that stands for `error`."""
    named = [c.__name__ for c in type(error).__mro__ if c.__module__ == exceptions.__name__]
    text = str(error) if named else f"{type(error).__name__}: {error}"
    return Failure(rank, named[0] if named else RankError.__name__, text)


class Communicator(ABC):
    """Some ranks, seen from one of them."""

    @property
    @abstractmethod
    def process_group(self) -> ProcessGroup | None:
        """The process group of the ranks; None for a process alone."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's place among the ranks."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Σ_r of each tensor, all of one dtype in a single message."""

    @abstractmethod
    def gather_rows(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, in their order; rank r has `counts[r]` of them."""

    @abstractmethod
    def gather_objects(self, value: T) -> list[T]:
        """The values of all ranks; small ones, since they are pickled."""

    @abstractmethod
    def broadcast(
        self, tensors: Sequence[Tensor], like: Sequence[TensorLike], source: int, device: torch.device
    ) -> list[Tensor]:
        """The tensors of rank `source`, whose shapes and dtypes all ranks know from `like`."""

    @abstractmethod
    def first_rank(self, function: Callable[[], T]) -> T:
        """What `function` returns on the first rank, pickled to all; its error is raised on all."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Σ_r of one tensor."""
        return self.sums([tensor])[0]

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor([int(flag)], device=device)) > 0)

    def all_equal(self, digest: int, failed: bool, device: torch.device) -> bool:
        """Whether the 64-bit `digest` is the same on all ranks, and none has failed; one small message.

        n Σ d² = (Σ d)² holds for equal d only. All ranks see the same sums, and so come to the same verdict;
        in pieces of 22 bits they are exact.
        """
        pieces = [(digest >> shift) & 0x3FFFFF for shift in (0, 22, 44)]
        sent = [int(failed), *pieces, *(piece * piece for piece in pieces)]
        failures, *sums = self.sum(torch.tensor(sent, dtype=torch.int64, device=device)).tolist()
        pairs = zip(sums[:3], sums[3:], strict=True)
        return failures == 0 and all(self.size * squares == total**2 for total, squares in pairs)

    def raise_on_all(self, error: Exception) -> NoReturn:
        """Raise `error` here, and on the other ranks in the `collect` which they take part in next."""

        def fail() -> None:
            raise error

        self.collect(fail)
        raise AssertionError("unreachable")

    def collect(self, function: Callable[[], T]) -> list[T]:
        """What `function` returns on each rank; where it raises on one, all raise instead of waiting."""
        value: T | Failure
        failed: Exception | None = None
        try:
            value = function()
        except Exception as error:
            failed, value = error, failure_of(error, self.rank)
        values = self.gather_objects(value)
        if failed is not None:
            raise failed
        for found in values:
            if isinstance(found, Failure):
                raise found.error()
        return values  # type: ignore[return-value]


@dataclass(frozen=True)
class LocalCommunicator(Communicator):
    """A process alone: nothing is sent, and every operation returns what it is given.

    >>> LOCAL.sum(torch.tensor(2.0)), LOCAL.gather_objects("mine")
    (tensor(2.), ['mine'])
    """

    @property
    def process_group(self) -> ProcessGroup | None:
        return None

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def gather_rows(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        return tensor

    def gather_objects(self, value: T) -> list[T]:
        return [value]

    def broadcast(
        self, tensors: Sequence[Tensor], like: Sequence[TensorLike], source: int, device: torch.device
    ) -> list[Tensor]:
        return list(tensors)

    def first_rank(self, function: Callable[[], T]) -> T:
        return function()

    def any(self, flag: bool, device: torch.device) -> bool:
        return flag


LOCAL = LocalCommunicator()


@dataclass(frozen=True)
class ProcessGroupCommunicator(Communicator):
    """The ranks of a torch.distributed process group."""

    group: ProcessGroup

    @property
    def process_group(self) -> ProcessGroup | None:
        return self.group

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        result: list[Tensor] = list(tensors)
        for indices in _by_dtype(tensors):
            flat = torch.cat([tensors[i].reshape(-1) for i in indices])
            dist.all_reduce(flat, group=self.group)
            _put_tensors(result, indices, flat, [tuple(tensors[i].shape) for i in indices])
        return result

    def gather_rows(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        longest = max(counts)
        padded = tensor.contiguous()
        if len(tensor) < longest:
            padded = tensor.new_zeros(longest, *tensor.shape[1:])
            padded[: len(tensor)] = tensor
        joined = tensor.new_empty(self.size, longest, *tensor.shape[1:])
        dist.all_gather(list(joined), padded, group=self.group)
        if min(counts) == longest:
            return joined.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(joined, counts, strict=True)])

    def gather_objects(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(
        self, tensors: Sequence[Tensor], like: Sequence[TensorLike], source: int, device: torch.device
    ) -> list[Tensor]:
        mine = self.rank == source
        result: list[Tensor] = [torch.empty(0)] * len(like)
        for dtype in dict.fromkeys(dtype for _, dtype in like):
            indices = [i for i, (_, d) in enumerate(like) if d == dtype]
            shapes = [like[i][0] for i in indices]
            # Not every backend sends booleans.
            sent = torch.uint8 if dtype == torch.bool else dtype
            if mine:
                flat = torch.cat([tensors[i].reshape(-1) for i in indices]).to(sent)
            else:
                flat = torch.empty(sum(torch.Size(s).numel() for s in shapes), dtype=sent, device=device)
            dist.broadcast(flat, group=self.group, group_src=source)
            _put_tensors(result, indices, flat.to(dtype), shapes)
        return result

    def first_rank(self, function: Callable[[], T]) -> T:
        value: T | None = None
        failed: Exception | None = None
        if self.rank == 0:
            try:
                value = function()
            except Exception as error:
                failed = error
        told = [(value, None if failed is None else failure_of(failed, 0))]
        dist.broadcast_object_list(told, group=self.group, group_src=0)
        if failed is not None:
            raise failed
        if told[0][1] is not None:
            raise told[0][1].error()
        return told[0][0]  # type: ignore[return-value]


def communicator_of(process_group: ProcessGroup | Communicator | None) -> Communicator:
    """The ranks of a process group; without one, this process alone. A communicator is taken as it is."""
    if isinstance(process_group, Communicator):
        return process_group
    return LOCAL if process_group is None else ProcessGroupCommunicator(process_group)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())


def _put_tensors(result: list[Tensor], indices: Sequence[int], flat: Tensor, shapes: Sequence[Shape]) -> None:
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    for index, part, shape in zip(indices, parts, shapes, strict=True):
        result[index] = part.reshape(shape)


TIMEOUT = timedelta(minutes=30)  # a rank may wait this long for another one's longest step


@dataclass(frozen=True)
class Launch:
    """This process among those that torchrun started; alone, it has no group."""

    process_group: ProcessGroup | None
    rank: int
    ranks: int

    @property
    def leads(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0


@contextmanager
def launched(device: str | torch.device = "auto") -> Iterator[Launch]:
    """The group of a torchrun, with nccl for GPUs and gloo otherwise; no group outside of one.

    Each rank takes the accelerator of its local number.

    >>> with launched("cpu") as launch:
    ...     launch.ranks, launch.leads
    (1, True)
    """
    if not dist.is_torchelastic_launched():
        yield Launch(None, 0, 1)
        return
    kind = devices.resolve(device).type
    if kind != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    backend = dist.get_default_backend_for_device(kind)
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Launch(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def shard(count: int, rank: int, ranks: int) -> slice:
    """The rows of `rank` among `count`; empty where there are fewer rows than ranks before it.

    >>> [shard(5, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    each, more = divmod(count, ranks)
    first = rank * each + min(rank, more)
    return slice(first, first + each + (rank < more))


def rank_batches(batches: Batches, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's shard of every batch; the other rows are not read."""
    return batches.parts(lambda count: shard(count, rank, ranks))
