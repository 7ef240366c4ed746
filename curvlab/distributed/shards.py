"""Which rows a rank has: contiguous shards, in the order of the ranks, that differ by at most one row.

With contiguous shards the rows of all ranks, joined, are the batch in its own order, so that whatever
is keyed by a row's number (the draws of `fisher[kind=mc]`) does not change with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from curvlab.data.dataset import Batches

__all__ = ["rank_batches", "shard"]


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
