"""What a layer's statistics and gradient cost to send, and which form is sent.

For M rows over all ranks and a layer of n_t outputs and n_{t-1} inputs, in elements:

    rows      all-gather of H and S          M (n_{t-1} + n_t)
    dense     all-reduce of E[hhᵀ] and G     n_{t-1}² + n_t n_{t-1}
    DDP       all-reduce of G and g          n_t n_{t-1} + n_t

The first is the smaller one just where M < n_{t-1}, whatever n_t: then the rows are gathered, and the
solvers stay in the sample space; otherwise they work on the dense factor, as for a streamed data set.
The sums that belong to no rows (E[σ'σ'ᵀ], E[σ'' ⊙ Wᵀg], E[∇²ξ], biases) are all-reduced in any case.

A ring moves (N-1)/N of a gathered payload into each rank, and twice that of a reduced one.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LayerTraffic", "gathers", "layer_traffic"]


def gathers(rows: int, columns: int) -> bool:
    """Whether `rows` rows of `columns` entries are sent as they are, rather than as a dense factor.

    >>> gathers(100, 3072), gathers(100, 16)
    (True, False)
    """
    return rows < columns


@dataclass(frozen=True)
class LayerTraffic:
    """Elements that one layer's step communicates over all ranks, by what they are for."""

    gathered: int
    reduced: int
    data_parallel: int

    def received(self, ranks: int) -> float:
        """Elements that a ring brings into each rank."""
        return (self.gathered + 2 * self.reduced) * (ranks - 1) / ranks

    def received_data_parallel(self, ranks: int) -> float:
        """The same for DDP's gradient."""
        return 2 * self.data_parallel * (ranks - 1) / ranks


def layer_traffic(rows: int, inputs: int, outputs: int, *, hidden: bool, bend: bool = True) -> LayerTraffic:
    """Elements that a step with PCH (`bend`) or Gauss-Newton sends for one layer and M = `rows`.

    `hidden` is whether an activation follows, whose E[σ'σ'ᵀ] is then sent; after the last layer it is
    E[∇²ξ], of the same size.

    >>> layer_traffic(100, 3072, 1024, hidden=True)
    LayerTraffic(gathered=409800, reduced=1050624, data_parallel=3146752)
    """
    slopes = outputs * outputs + (outputs if hidden and bend else 0)
    ddp = outputs * inputs + outputs
    if gathers(rows, inputs):
        return LayerTraffic(rows * (inputs + outputs + 2), slopes + outputs, ddp)
    return LayerTraffic(0, slopes + outputs + inputs * inputs + inputs + outputs * inputs, ddp)
