"""A matrix kept as the product of two thin ones, X = L R, and formed only on demand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Product", "add_into", "form"]


@dataclass(frozen=True, eq=False)
class Product:
    """X = left @ right with left (n × r) and right (r × p).

    >>> x = Product(torch.ones(2, 1), torch.ones(1, 3))
    >>> x.shape, x.form().sum().item()
    ((2, 3), 6.0)
    """

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the product."""
        return (self.left.shape[0], self.right.shape[1])

    def form(self) -> Tensor:
        """The matrix itself."""
        return self.left @ self.right


def form(value: Tensor | Product) -> Tensor:
    """The matrix, whether it is kept as a product or not."""
    return value.form() if isinstance(value, Product) else value


def add_into(target: Tensor, value: Tensor | Product, scale: float) -> None:
    """target ← target + scale · value, in place and without forming a product."""
    with torch.no_grad():
        if isinstance(value, Product):
            target.addmm_(value.left, value.right, alpha=scale)
        else:
            target.add_(value, alpha=scale)
