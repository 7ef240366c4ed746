"""Named tensors as one vector, and back; products of a whole matrix with such vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["NamedProduct", "WholeProduct", "flatten", "flatten_rows", "unflatten", "unflatten_rows"]

NamedProduct: TypeAlias = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
RowsProduct: TypeAlias = Callable[[Tensor, Mapping[str, Sequence[int]]], Tensor]


def flatten(vectors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """The entries called `names`, flattened and joined.

    >>> flatten({"a": torch.ones(1, 2), "b": torch.zeros(1)}, ["b", "a"]).tolist()
    [0.0, 1.0, 1.0]
    """
    return torch.cat([vectors[name].flatten() for name in names])


def unflatten(vector: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The inverse of `flatten`, for entries of the given shapes.

    >>> {name: tuple(t.shape) for name, t in unflatten(torch.ones(3), {"b": (1,), "a": (1, 2)}).items()}
    {'b': (1,), 'a': (1, 2)}
    """
    parts = vector.split([int(torch.Size(shape).numel()) for shape in shapes.values()])
    return {
        name: part.reshape(tuple(shape)) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def flatten_rows(vectors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Several vectors, {name: (r, *shape)}, as rows (r, n); an entry of no dimension is one column.

    >>> flatten_rows({"a": torch.ones(2), "b": torch.ones(2, 3)}, ["a", "b"]).shape
    torch.Size([2, 4])
    """
    return torch.cat([vectors[name].reshape(len(vectors[name]), -1) for name in names], dim=1)


def unflatten_rows(rows: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The inverse of `flatten_rows`.

    >>> unflatten_rows(torch.ones(2, 3), {"b": (1,), "a": (1, 2)})["a"].shape
    torch.Size([2, 1, 2])
    """
    parts = rows.split([int(torch.Size(shape).numel()) for shape in shapes.values()], dim=1)
    return {
        name: part.reshape(len(rows), *shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


@dataclass(frozen=True)
class WholeProduct:
    """x ↦ C x on named tensors, and with several vectors, {name: (r, *shape)}, in one pass over the data.

    `side_by_side` takes rows (r, n) with the shapes of their parts, and writes the images of all parts into
    rows at once: joining them afterwards copies each.

    >>> double = WholeProduct(several=lambda vectors: {name: 2 * x for name, x in vectors.items()})
    >>> double({"a": torch.ones(3)})["a"].tolist()
    [2.0, 2.0, 2.0]
    >>> double.rows(torch.ones(1, 3), {"b": (1,), "a": (2,)}).tolist()
    [[2.0, 2.0, 2.0]]
    """

    several: NamedProduct
    one: NamedProduct | None = None
    side_by_side: RowsProduct | None = None

    def __call__(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.one is not None:
            return self.one(vectors)
        images = self.several({name: vector[None] for name, vector in vectors.items()})
        return {name: image[0] for name, image in images.items()}

    def rows(self, rows: Tensor, shapes: Mapping[str, Sequence[int]]) -> Tensor:
        """The images of rows (r, n), parameters flattened and joined; no entry of `rows` is among them."""
        if self.side_by_side is not None:
            return self.side_by_side(rows, shapes)
        return flatten_rows(self.several(unflatten_rows(rows, shapes)), list(shapes))

    @classmethod
    def made_of(
        cls, products: Sequence[NamedProduct], make: Callable[[Sequence[NamedProduct]], NamedProduct]
    ) -> NamedProduct:
        """What `make` makes of products; with several vectors at once where all of them take several."""
        wholes = [product for product in products if isinstance(product, WholeProduct)]
        if len(wholes) < len(products):
            return make(products)
        return cls(make([whole.several for whole in wholes]), make(products))
