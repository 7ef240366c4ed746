"""Started by torchrun: the process group of all ranks, and the device of this one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from curvlab.measure import device as devices

__all__ = ["Launch", "launched"]

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
