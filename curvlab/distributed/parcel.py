"""Values with tensors in them, taken apart for sending: a pickled frame, and the tensors beside it.

What every rank holds already (the layer's factors) is named in the frame and not sent.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Parcel", "pack", "unpack"]


@dataclass(frozen=True)
class Parcel:
    """The frame of a value, and the shapes and dtypes of the tensors that belong in it."""

    frame: bytes
    like: tuple[tuple[tuple[int, ...], torch.dtype], ...]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, object]) -> None:
        super().__init__(file)
        self.names = {id(value): name for name, value in known.items()}
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> tuple[str, str | int] | None:
        if id(obj) in self.names:
            return "known", self.names[id(obj)]
        if isinstance(obj, Tensor):
            self.tensors.append(obj.detach())
            return "tensor", len(self.tensors) - 1
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], known: Mapping[str, object]) -> None:
        super().__init__(file)
        self.tensors, self.known = tensors, known

    def persistent_load(self, pid: Any) -> Any:
        kind, key = pid
        return self.known[key] if kind == "known" else self.tensors[key]


def pack(value: object, known: Mapping[str, object]) -> tuple[Parcel, list[Tensor]]:
    """The parcel of `value`, and the tensors to send with it.

    >>> parcel, tensors = pack({"a": torch.ones(2), "b": 1}, {})
    >>> unpack(parcel, tensors, {})
    {'a': tensor([1., 1.]), 'b': 1}
    """
    file = io.BytesIO()
    pickler = _Pickler(file, known)
    pickler.dump(value)
    like = tuple((tuple(tensor.shape), tensor.dtype) for tensor in pickler.tensors)
    return Parcel(file.getvalue(), like), pickler.tensors


def unpack(parcel: Parcel, tensors: list[Tensor], known: Mapping[str, object]) -> Any:
    """The value, with this rank's own of what is known."""
    return _Unpickler(io.BytesIO(parcel.frame), tensors, known).load()
