"""Named tensors as one vector, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["flatten", "unflatten"]


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
