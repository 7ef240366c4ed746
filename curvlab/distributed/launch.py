"""Started by torchrun: the process group of all ranks, the device of this one, and the rows it has.

Shards are contiguous, in the order of the ranks, and differ by at most one row. With contiguous shards the
rows of all ranks, joined, are the batch in its own order, so that whatever is keyed by a row's number (the
draws of `fisher[kind=mc]`) does not change with the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from curvlab.measure import device as devices

if TYPE_CHECKING:
    from curvlab.data.dataset import Batches

__all__ = ["Launch", "launched", "rank_batches", "shard"]

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
    for index in range(batches.start, batches.start + len(batches)):
        first = index * batches.batch_size
        chosen = batches.order[first : first + batches.batch_size]
        yield batches.examples.batch(chosen[shard(len(chosen), rank, ranks)])
