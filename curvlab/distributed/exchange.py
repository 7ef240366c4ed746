"""The exchange: local means in, means over all ranks out, before anything non-linear.

    E[f] = Σ_r s_r E_r[f]        with s_r the share of rank r in Σ c_i

Sums go through one all-reduce for each dtype. Rows are gathered where that is less (see `traffic`):
the joined factor has the rows of all ranks, with the roots of their weights in the mean over all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from curvlab.distributed.group import Group
from curvlab.distributed.items import GRADIENT, Held, Item, Slot, goes_by_rows, slots_of
from curvlab.gradient import RowGradient
from curvlab.linalg import DenseFactor, Factor, GramFactor
from curvlab.linalg.inputs import InputFactors

__all__ = ["exchange"]


def exchange(
    group: Group,
    described: Sequence[Sequence[Item] | None],
    shares: Sequence[float],
    held: Sequence[Held] | None,
    rows: dict[Slot, GramFactor],
    to: torch.device,
) -> list[Held]:
    """The joined value of every item; newly gathered rows are added to `rows`.

    `described` has each rank's items (None: it has no rows), `shares` its share of the weight, and
    `held` what this rank holds of the items.
    """
    present = [items for items in described if items is not None]
    template, columns = present[0], list(zip(*present, strict=True))
    moved = rows.keys() | {slot for c in columns if goes_by_rows(c) for slot in slots_of(c[0])}
    # Rows that come anyway, for a weight's gradient, serve the Fisher factor too.
    by_rows = [goes_by_rows(c) or (c[0].what == "factor" and slots_of(c[0])[0] in moved) for c in columns]
    mine = _Mine(held, shares[group.rank], to)
    rows |= _gathered(group, described, by_rows, set(rows), mine)
    sums = [[] if chosen else mine.sums(k, template[k]) for k, chosen in enumerate(by_rows)]
    totals = iter(group.sums([tensor for parts in sums for tensor in parts]))
    found = [[next(totals) for _ in parts] for parts in sums]
    return [_joined(item, parts, rows) for item, parts in zip(template, found, strict=True)]


@dataclass(frozen=True, eq=False)
class _Mine:
    """What this rank adds: its values by its share, or zeros where it has no rows."""

    held: Sequence[Held] | None
    share: float
    to: torch.device

    def sums(self, index: int, item: Item) -> list[Tensor]:
        shapes = [item.shape, item.shape[:1]] if item.what == "inputs" else [item.shape]
        if self.held is None:
            return [torch.zeros(shape, dtype=item.dtype, device=self.to) for shape in shapes]
        return [tensor * self.share for tensor in _formed(self.held[index])]

    def rows(self, index: int, item: Item, slot: Slot) -> tuple[Tensor, Tensor]:
        if self.held is None:
            width = item.shape[0] if item.what == "product" and slot[0] == "gradients" else item.shape[-1]
            empty = torch.zeros((0, width), dtype=item.dtype, device=self.to)
            return empty, empty.new_zeros(0)
        factor = _factor(self.held[index], slot)
        return factor.rows, factor.root * sqrt(self.share)


def _formed(held: Held) -> list[Tensor]:
    if isinstance(held, InputFactors):
        return [held.full.to_dense(), held.mean]
    if isinstance(held, RowGradient):
        return [held.form()]
    return [held.to_dense() if isinstance(held, Factor) else held]


def _factor(held: Held, slot: Slot) -> GramFactor:
    if isinstance(held, RowGradient):
        return held.gradients if slot[0] == "gradients" else held.inputs
    factor = held.full if isinstance(held, InputFactors) else held
    assert isinstance(factor, GramFactor)
    return factor


def _gathered(
    group: Group,
    described: Sequence[Sequence[Item] | None],
    by_rows: Sequence[bool],
    known: set[Slot],
    mine: _Mine,
) -> dict[Slot, GramFactor]:
    """The rows of all ranks for every slot that is not known yet; all roots in one message."""
    template = next(items for items in described if items is not None)
    wanted: dict[Slot, int] = {}
    for index, (item, chosen) in enumerate(zip(template, by_rows, strict=True)):
        for slot in slots_of(item) if chosen else ():
            if slot not in known:
                wanted.setdefault(slot, index)
    if not wanted:
        return {}
    counts = {s: [(i[k].rows or 0) if i is not None else 0 for i in described] for s, k in wanted.items()}
    own = {slot: mine.rows(index, template[index], slot) for slot, index in wanted.items()}
    rows = {slot: group.rows(own[slot][0], counts[slot]) for slot in wanted}
    totals = [sum(per_rank) for per_rank in zip(*counts.values(), strict=True)]
    roots = group.rows(torch.cat([root for _, root in own.values()]), totals).split(totals)
    by_rank = [part.split(list(c)) for part, c in zip(roots, zip(*counts.values(), strict=True), strict=True)]
    joined_roots = [torch.cat(pieces) for pieces in zip(*by_rank, strict=True)]
    return {slot: GramFactor(rows[slot], root) for slot, root in zip(wanted, joined_roots, strict=True)}


def _joined(item: Item, totals: list[Tensor], rows: Mapping[Slot, GramFactor]) -> Held:
    if not totals:
        factors = [rows[slot] for slot in slots_of(item)]
        if item.owner == GRADIENT:
            return RowGradient(*factors)
        return InputFactors(factors[0]) if item.what == "inputs" else factors[0]
    if item.what == "inputs":
        return InputFactors(DenseFactor(totals[0]), totals[1])
    return DenseFactor(totals[0]) if item.what == "factor" else totals[0]
