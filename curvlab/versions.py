"""Tensor versions: noticing that a tensor was changed in place since a result was computed from it.

Torch counts the in-place changes of every tensor, and a tensor given other storage has another
address. A write through `tensor.data` or a numpy view is not counted, so it is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from curvlab import device
from curvlab.exceptions import StaleError

__all__ = ["Stamp", "Versions"]


@dataclass(frozen=True)
class Stamp:
    """The version and the address a tensor had.

    >>> import torch
    >>> w = torch.zeros(2)
    >>> before = Stamp.of(w)
    >>> Stamp.of(w.add_(1)) == before
    False
    """

    version: int
    address: int

    @classmethod
    def of(cls, tensor: Tensor) -> Stamp:
        """The present version; inference tensors have none, fake ones no address."""
        version = -1 if tensor.is_inference() else tensor._version
        return cls(version, tensor.data_ptr() if device.readable(tensor) else 0)


@dataclass(frozen=True, eq=False)
class Versions:
    """Which version each of some named tensors had; the tensors themselves are not kept alive.

    >>> import torch
    >>> w = torch.zeros(2)
    >>> seen = Versions.of({"w": w})
    >>> seen.changed()
    []
    >>> _ = w.add_(1)
    >>> seen.changed()
    ['w']
    """

    entries: tuple[tuple[str, weakref.ref[Tensor], Stamp], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Versions:
        """Note the present versions."""
        return cls(tuple((name, weakref.ref(t), Stamp.of(t)) for name, t in tensors.items()))

    def __reduce__(self) -> tuple[type[Versions], tuple[tuple[()]]]:
        """A pickled or deep copy has tensors of its own and nothing to compare with: it is never stale.

        So what is stale already cannot be copied: the copy would not know.
        """
        if changed := self.changed():
            raise StaleError(
                f"{', '.join(changed)}: what these refer to was changed in place, so a copy or pickle would "
                f"be of something else. Copy before the change, or compute again"
            )
        return Versions, ((),)

    def changed(self) -> list[str]:
        """Names of the tensors that were changed in place, or given other storage, since."""
        return [
            name
            for name, ref, stamp in self.entries
            if (tensor := ref()) is not None and Stamp.of(tensor) != stamp
        ]

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names under which `tensors` holds another tensor, or the same one changed since."""
        return [
            name
            for name, ref, stamp in self.entries
            if ref() is not tensors.get(name) or Stamp.of(tensors[name]) != stamp
        ]
