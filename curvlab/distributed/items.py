"""What is joined: one item for each tensor or factor, as every rank describes its own.

Descriptions are small and go to all ranks first. From them each rank makes the same choice, rows or
sums, and a rank without rows learns the shapes of what it has to add nothing to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvlab.distributed.part import Part
from curvlab.distributed.traffic import gathers
from curvlab.gradient import RowGradient
from curvlab.linalg import Factor, GramFactor
from curvlab.linalg.inputs import InputFactors
from curvlab.providers.statistics import GradientProducts, Inputs, Statistic

__all__ = ["GRADIENT", "LOSS", "Held", "Item", "Slot", "goes_by_rows", "held_by", "owner_names", "slots_of"]

GRADIENT, LOSS = "the gradient", "the loss"
What = Literal["tensor", "factor", "inputs", "product"]
Held = Tensor | Factor | InputFactors | RowGradient
Slot = tuple[str, int]


@dataclass(frozen=True)
class Item:
    """One thing to join, named by its owner (a statistic, the gradient, the loss) and its place there.

    `rows` is how many rows the rank holds of it; None where it holds a sum.
    """

    owner: str
    place: int
    what: What
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: int | None = None

    @property
    def alike(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        return self.owner, self.place, self.what, self.shape, self.dtype


def held_by(part: Part, owners: dict[Statistic, str], weights: Sequence[str]) -> Iterator[tuple[Item, Held]]:
    """The items of a rank with what it holds; `weights` are the names of the weights, layer by layer.

    The place of a gradient's entry is that of its layer for a weight, and after all layers for a bias.
    """
    for statistic, values in part.values.items():
        for place, value in enumerate(values):
            yield _described(owners[statistic], place, value), value
    if part.gradient is not None:
        biases = len(weights)
        for name in part.gradient:
            entry = part.gradient.factored(name)
            if name in weights:
                yield _described_weight(weights.index(name), entry), entry
            else:
                yield _described(GRADIENT, biases, entry), entry
                biases += 1
    if part.loss is not None:
        yield _described(LOSS, 0, part.loss), part.loss


def _described(owner: str, place: int, value: Held) -> Item:
    if isinstance(value, Tensor):
        return Item(owner, place, "tensor", tuple(value.shape), value.dtype)
    assert isinstance(value, InputFactors | Factor)
    what: What = "inputs" if isinstance(value, InputFactors) else "factor"
    factor = value.full if isinstance(value, InputFactors) else value
    rows = len(factor.rows) if isinstance(factor, GramFactor) else None
    return Item(owner, place, what, (factor.size, factor.size), factor.example.dtype, rows)


def _described_weight(place: int, entry: Tensor | RowGradient) -> Item:
    if isinstance(entry, Tensor):
        return Item(GRADIENT, place, "product", tuple(entry.shape), entry.dtype)
    rows = entry.inputs.rows
    return Item(GRADIENT, place, "product", entry.shape, rows.dtype, len(rows))


def owner_names(statistics: Sequence[Statistic]) -> dict[Statistic, str]:
    """A name for each statistic that is the same on all ranks, since all ask for the same ones."""
    shared = {Inputs(): "inputs", GradientProducts(): "gradients"}
    return {s: shared.get(s, f"{index} {type(s).__name__}") for index, s in enumerate(statistics)}


def slots_of(item: Item) -> tuple[Slot, ...]:
    """The rows an item is made of: a weight's gradient shares them with the input and Fisher factors."""
    if item.what == "product":
        return ("gradients", item.place), ("inputs", item.place)
    return ((item.owner, item.place),)


def goes_by_rows(items: Sequence[Item]) -> bool:
    """Whether the rows themselves are sent, given the same item of all ranks that have rows."""
    held = [item.rows for item in items]
    return None not in held and gathers(sum(rows or 0 for rows in held), items[0].shape[-1])
