"""A parameter of any shape as the matrices that the mathematics speaks of, and back.

A weight is seen as G matrices of o outputs and n inputs: one for a Linear layer, one per group of a
convolution, three for the joined projections of an attention layer.

    rows                     (G·o, *rest) as (G, o, n)          Linear, convolution, bilinear: torch's order
    transposed               (n, G·o) as (G, o, n)              embedding, weights of inputs × outputs
    transposed-convolution   (G·c, o, *kernel) as (G, o, c·k)   W[o, (c, κ)] = weight[c, o, κ] in each group
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch import Tensor

__all__ = ["Layout", "MatrixView"]

Layout = Literal["rows", "transposed", "transposed-convolution"]


@dataclass(frozen=True)
class MatrixView:
    """How a parameter of `shape` is seen as `parts` matrices.

    >>> import torch
    >>> view = MatrixView((4, 3, 5, 5), parts=2)
    >>> view.matrix_shape, tuple(view.matrices(torch.zeros(4, 3, 5, 5)).shape)
    ((2, 2, 75), (2, 2, 75))
    """

    shape: tuple[int, ...]
    parts: int = 1
    layout: Layout = "rows"

    def __post_init__(self) -> None:
        split = self.shape[1 if self.layout == "transposed" else 0] if self.shape else 0
        if split % self.parts or self.parts < 1:
            raise ValueError(f"a parameter of shape {self.shape} does not fall into {self.parts} equal parts")

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """(G, o, n): parts, outputs and inputs of each."""
        if self.layout == "transposed":
            return (self.parts, self.shape[1] // self.parts, self.shape[0])
        first, g = self.shape[0] // self.parts, self.parts
        if self.layout == "rows":
            return (g, first, prod(self.shape[1:]))
        return (g, self.shape[1], first * prod(self.shape[2:]))

    def matrices(self, parameter: Tensor) -> Tensor:
        """The parameter (…, *shape) as (…, G, o, n); shares memory with it wherever strides allow that."""
        lead = parameter.shape[: parameter.ndim - len(self.shape)]
        g, o, n = self.matrix_shape
        if self.layout == "rows":
            return parameter.reshape(*lead, g, o, n)
        if self.layout == "transposed":
            return parameter.transpose(-1, -2).unflatten(-2, (g, o))
        split = parameter.reshape(*lead, g, self.shape[0] // g, o, prod(self.shape[2:]))
        return split.transpose(-3, -2).flatten(-2)

    def parameter(self, matrices: Tensor) -> Tensor:
        """The tensor (…, *shape) that `matrices` (…, G, o, n) is the view of.

        >>> import torch
        >>> view = MatrixView((4, 3, 2), parts=2, layout="transposed-convolution")
        >>> x = torch.arange(24.0).reshape(4, 3, 2)
        >>> torch.equal(view.parameter(view.matrices(x)), x)
        True
        """
        lead = matrices.shape[:-3]
        if self.layout == "rows":
            return matrices.reshape(*lead, *self.shape)
        if self.layout == "transposed":
            return matrices.flatten(-3, -2).transpose(-1, -2)
        inner = self.shape[0] // self.parts
        return matrices.unflatten(-1, (inner, -1)).transpose(-3, -2).reshape(*lead, *self.shape)

    def matrices_in_place(self, parameter: Tensor) -> Tensor | None:
        """`matrices` where to write to them is to write to the parameter; None where they would be a copy."""
        found = self.matrices(parameter)
        return found if found.untyped_storage()._cdata == parameter.untyped_storage()._cdata else None

    def pack(self) -> dict[str, Any]:
        """The fields, as JSON can hold them."""
        return {"shape": list(self.shape), "parts": self.parts, "layout": self.layout}

    @staticmethod
    def unpack(row: dict[str, Any]) -> MatrixView:
        """What `pack` took apart."""
        return MatrixView(tuple(row["shape"]), row["parts"], row["layout"])
