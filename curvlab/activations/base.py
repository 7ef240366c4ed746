"""What an activation is: an element-wise σ with σ', σ'' and its Lipschitz constant sup |σ'|."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

__all__ = ["Activation"]


class Activation(ABC):
    """An element-wise function; subclasses are frozen dataclasses.

    >>> import torch
    >>> from curvlab.activations import Tanh
    >>> sigma, z = Tanh(), torch.tensor([0.0])
    >>> sigma.derivatives(z, sigma.value(z))
    (tensor([1.]), tensor([-0.]))
    """

    name: ClassVar[str]
    piecewise_linear: ClassVar[bool] = False

    @property
    @abstractmethod
    def lipschitz(self) -> float:
        """The supremum of |σ'|."""

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """Give σ(z)."""

    @abstractmethod
    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give σ'(z), where h = σ(z)."""

    @abstractmethod
    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """Give σ'(z) and σ''(z), where h = σ(z); the second is None where σ'' = 0 almost everywhere."""
