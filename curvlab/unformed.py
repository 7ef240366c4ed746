"""Mappings from parameter names to tensors that are formed only when they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from torch import Tensor

__all__ = ["Unformed"]


class Shaped(Protocol):
    """A tensor, or what forms one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""


E = TypeVar("E", bound=Shaped)


class Unformed(Mapping[str, Tensor], Generic[E]):
    """{parameter name: tensor}; an entry is formed each time it is read, so keep one you need twice."""

    def __init__(self, entries: Mapping[str, E]) -> None:
        self._entries = dict(entries)

    def factored(self, name: str) -> E:
        """The entry as it is held: a tensor, or what forms one."""
        return self._entries[name]

    @staticmethod
    @abstractmethod
    def _form(entry: E) -> Tensor:
        """The entry as a tensor."""

    def __getitem__(self, name: str) -> Tensor:
        return self._form(self.factored(name))

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # a Mapping's own would form the entry to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(entry.shape)}" for name, entry in self._entries.items())
        return f"{type(self).__name__}({shapes})"
