"""Tensor versions: noticing that a tensor was changed in place since a result was computed from it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Versions"]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class Versions:
    """Which version each of some named tensors had.

    >>> import torch
    >>> w = torch.zeros(2)
    >>> seen = Versions.of({"w": w})
    >>> seen.changed()
    []
    >>> _ = w.add_(1)
    >>> seen.changed()
    ['w']
    """

    entries: tuple[tuple[str, weakref.ref[Tensor], int, int], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Versions:
        """Note the present versions."""
        return cls(tuple((name, weakref.ref(t), _version(t), t.data_ptr() if _has_data(t) else 0) for name, t in tensors.items()))

    def changed(self) -> list[str]:
        """Names of the tensors that were changed in place, or given other storage, since."""
        return [
            name
            for name, ref, version, pointer in self.entries
            if (tensor := ref()) is not None
            and (_version(tensor) != version or (tensor.data_ptr() if _has_data(tensor) else 0) != pointer)
        ]


def _has_data(tensor: Tensor) -> bool:
    return type(tensor).__name__ != "FakeTensor" and not tensor.is_meta
