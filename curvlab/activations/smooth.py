"""Curved activations in closed form.

Forms read h = σ(z) where that is cheaper than z: for the sigmoid σ' = h(1-h) and σ'' = h(1-h)(1-2h).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from curvlab.activations.base import Activation

__all__ = ["ELU", "GELU", "Mish", "SiLU", "Sigmoid", "Softplus", "Tanh", "TanhGELU"]


@dataclass(frozen=True)
class Sigmoid(Activation):
    """σ(z) = 1 / (1 + e⁻ᶻ)."""

    name: ClassVar[str] = "sigmoid"
    lipschitz: ClassVar[float] = 0.25

    def value(self, z: Tensor) -> Tensor:
        """Give 1 / (1 + e⁻ᶻ)."""
        return z.sigmoid()

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give h - h²."""
        return torch.addcmul(h, h, h, value=-1)

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = h - h² and σ'' = σ' (1 - 2h)."""
        slope = self.first(z, h)
        return slope, torch.addcmul(slope, slope, h, value=-2)


@dataclass(frozen=True)
class Tanh(Activation):
    """σ(z) = tanh z."""

    name: ClassVar[str] = "tanh"
    lipschitz: ClassVar[float] = 1.0

    def value(self, z: Tensor) -> Tensor:
        """Give tanh z."""
        return z.tanh()

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1 - h²."""
        return 1 - h.square()

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = 1 - h² and σ'' = -2 h σ'."""
        slope = self.first(z, h)
        return slope, (slope * h).mul_(-2)


@dataclass(frozen=True)
class Softplus(Activation):
    """σ(z) = log(1 + e^{βz}) / β, linear where βz > `threshold`, as in torch."""

    name: ClassVar[str] = "softplus"
    lipschitz: ClassVar[float] = 1.0

    beta: float = 1.0
    threshold: float = 20.0

    def value(self, z: Tensor) -> Tensor:
        """Give log(1 + e^{βz}) / β."""
        return functional.softplus(z, self.beta, self.threshold)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give sigmoid(βz)."""
        scaled = self.beta * z
        return scaled.sigmoid().masked_fill_(scaled > self.threshold, 1.0)

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = sigmoid(βz) and σ'' = β σ' (1 - σ')."""
        slope = self.first(z, h)
        # At the threshold itself torch's first derivative is still curved, its second is not.
        second = (slope - slope.square()).mul_(self.beta)
        return slope, second.masked_fill_(self.beta * z >= self.threshold, 0.0)


@dataclass(frozen=True)
class SiLU(Activation):
    """σ(z) = z s with s = sigmoid(z); σ' is largest at z = 2.39935728."""

    name: ClassVar[str] = "silu"
    lipschitz: ClassVar[float] = 1.0998393201288669

    def value(self, z: Tensor) -> Tensor:
        """Give z sigmoid(z)."""
        return functional.silu(z)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give s + h (1 - s)."""
        s = z.sigmoid()
        return s + h * (1 - s)

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = s + h (1 - s) and σ'' = s (1 - s) (2 + z (1 - 2s))."""
        s = z.sigmoid()
        rest = 1 - s
        return s + h * rest, s * rest * (2 + z * (rest - s))


@dataclass(frozen=True)
class ELU(Activation):
    """σ(z) = z for z > 0, α (eᶻ - 1) otherwise, with σ'(0) = α and, as torch has it, σ''(0) = 0."""

    name: ClassVar[str] = "elu"

    alpha: float = 1.0

    @property
    def lipschitz(self) -> float:
        """The steeper side at zero."""
        return max(1.0, abs(self.alpha))

    def value(self, z: Tensor) -> Tensor:
        """Give z or α (eᶻ - 1)."""
        return functional.elu(z, self.alpha)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1 where z > 0, else α eᶻ = h + α."""
        return (h + self.alpha).masked_fill_(z > 0, 1.0)

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ', and σ'' = α eᶻ where z < 0, else 0."""
        slope = self.first(z, h)
        return slope, slope.masked_fill(z >= 0, 0.0)


@dataclass(frozen=True)
class GELU(Activation):
    """σ(z) = z Φ(z), Φ the normal distribution function; σ' is largest at z = √2."""

    name: ClassVar[str] = "gelu"
    lipschitz: ClassVar[float] = 1.1289041451851548

    def value(self, z: Tensor) -> Tensor:
        """Give z Φ(z)."""
        return functional.gelu(z)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give Φ + z φ."""
        return torch.special.ndtr(z) + z * _density(z)

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = Φ + z φ and σ'' = (2 - z²) φ."""
        density = _density(z)
        # Beyond 40 the density is zero in every dtype, and z² may be infinite.
        return torch.special.ndtr(z) + z * density, (2 - z.clamp(-40, 40).square()) * density


@dataclass(frozen=True)
class TanhGELU(Activation):
    """σ(z) = ½ z (1 + t), t = tanh u, u = √(2/π) (z + 0.044715 z³); σ' is largest at z = 1.41850401."""

    name: ClassVar[str] = "gelu-tanh"
    lipschitz: ClassVar[float] = 1.1289930686587718

    def value(self, z: Tensor) -> Tensor:
        """Give ½ z (1 + tanh u)."""
        return functional.gelu(z, approximate="tanh")

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give ½ (1 + t) + ½ z (1 - t²) u'."""
        return self.derivatives(z, h)[0]

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = p + ½ z s u' and σ'' = s u' + ½ z s (u'' - 2 t u'²), where p = ½ (1 + t), s = 1 - t²."""
        z = z.clamp(-10, 10)  # beyond, s vanishes in every dtype while u may be infinite
        square, scale = z.square(), math.sqrt(2 / math.pi)
        p, t, s = _tanh_parts(scale * z * (1 + 0.044715 * square))
        u1, u2 = scale * (1 + 3 * 0.044715 * square), scale * 6 * 0.044715 * z
        return p + z / 2 * s * u1, s * (u1 + z / 2 * (u2 - 2 * t * u1.square()))


@dataclass(frozen=True)
class Mish(Activation):
    """σ(z) = z t, t = tanh u, u = log(1 + eᶻ); σ' is largest at z = 1.49057118."""

    name: ClassVar[str] = "mish"
    lipschitz: ClassVar[float] = 1.088498161251728

    def value(self, z: Tensor) -> Tensor:
        """Give z tanh(log(1 + eᶻ))."""
        return functional.mish(z)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give t + z s u'."""
        return self.derivatives(z, h)[0]

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = t + z s u' and σ'' = s (2 u' + z (u'' - 2 t u'²)), where s = 1 - t², u' = sigmoid(z)."""
        _, t, s = _tanh_parts(-functional.logsigmoid(-z))
        u1 = z.sigmoid()
        return t + z * s * u1, s * (2 * u1 + z * (u1 * (1 - u1) - 2 * t * u1.square()))


def _tanh_parts(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give ½ (1 + t), t = tanh u and 1 - t², the last without the cancellation of its formula."""
    p, q = (2 * u).sigmoid(), (-2 * u).sigmoid()
    return p, u.tanh(), 4 * p * q


def _density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
