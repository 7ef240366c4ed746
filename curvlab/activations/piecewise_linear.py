"""Piecewise linear activations: σ'' = 0 almost everywhere; at kinks σ' is what torch's backward gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from curvlab.activations.base import Activation

__all__ = ["Hardsigmoid", "Hardtanh", "Identity", "LeakyReLU", "PiecewiseLinear", "ReLU"]


class PiecewiseLinear(Activation):
    """σ'' = 0 almost everywhere."""

    piecewise_linear: ClassVar[bool] = True

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, None]:
        """Give σ'(z) and None."""
        return self.first(z, h), None


@dataclass(frozen=True)
class Identity(PiecewiseLinear):
    """σ(z) = z."""

    name: ClassVar[str] = "identity"
    lipschitz: ClassVar[float] = 1.0

    def value(self, z: Tensor) -> Tensor:
        """Give z itself."""
        return z

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1."""
        return torch.ones_like(z)


@dataclass(frozen=True)
class ReLU(PiecewiseLinear):
    """σ(z) = max(z, 0), with σ'(0) = 0."""

    name: ClassVar[str] = "relu"
    lipschitz: ClassVar[float] = 1.0

    def value(self, z: Tensor) -> Tensor:
        """Give max(z, 0)."""
        return z.relu()

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1 where z > 0, else 0."""
        return (z > 0).to(z.dtype)


@dataclass(frozen=True)
class LeakyReLU(PiecewiseLinear):
    """σ(z) = z for z > 0, a z otherwise, with σ'(0) = a = `negative_slope`."""

    name: ClassVar[str] = "leaky-relu"

    negative_slope: float = 0.01

    @property
    def lipschitz(self) -> float:
        """The steeper of the two pieces."""
        return max(1.0, abs(self.negative_slope))

    def value(self, z: Tensor) -> Tensor:
        """Give z or a z."""
        return functional.leaky_relu(z, self.negative_slope)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1 where z > 0, else a."""
        return torch.ones_like(z).masked_fill_(z <= 0, self.negative_slope)


@dataclass(frozen=True)
class Hardtanh(PiecewiseLinear):
    """σ(z) = z between `min_val` and `max_val`, constant outside; ReLU6 is Hardtanh(0, 6)."""

    name: ClassVar[str] = "hardtanh"
    lipschitz: ClassVar[float] = 1.0

    min_val: float = -1.0
    max_val: float = 1.0

    def value(self, z: Tensor) -> Tensor:
        """Give z clipped."""
        return functional.hardtanh(z, self.min_val, self.max_val)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1 strictly inside, else 0."""
        return ((z > self.min_val) & (z < self.max_val)).to(z.dtype)


@dataclass(frozen=True)
class Hardsigmoid(PiecewiseLinear):
    """σ(z) = z/6 + ½ between -3 and 3, constant outside."""

    name: ClassVar[str] = "hardsigmoid"
    lipschitz: ClassVar[float] = 1 / 6

    def value(self, z: Tensor) -> Tensor:
        """Give z/6 + ½ clipped to [0, 1]."""
        return functional.hardsigmoid(z)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1/6 strictly inside, else 0."""
        return (z.abs() < 3).to(z.dtype) / 6
