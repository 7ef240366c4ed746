"""What can be asked of a solved block: residuals, gᵀd and dᵀCd, as tensors.

A Kronecker block answers when it is asked, from its factors and the direction alone. A block solved
through its operator keeps the image C d from the time of the solve: a matrix-free curvature reads
the model, whose parameters the step is about to change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.curvature import LayerCurvature
from curvlab.linalg.norms import binary_scale
from curvlab.solvers.base import LayerDirection, LayerGradient
from curvlab.solvers.damping import Damping
from curvlab.solvers.residual import (
    DampedSystem,
    System,
    bias_residual,
    curvature_form,
    inner,
    relative,
    weight_residual,
)

__all__ = ["BiasMeasures", "Measures", "OperatorMeasures", "WeightMeasures"]


class Measures(ABC):
    """What can be asked of a solved block."""

    @abstractmethod
    def residual(self) -> Tensor:
        """Relative residual of the solver's own system."""

    @abstractmethod
    def residual_full(self) -> Tensor:
        """Relative residual of (s E[hhᵀ] ⊗ B + τI) d = -g, which compares across solvers."""

    @abstractmethod
    def slope(self) -> Tensor:
        """gᵀd."""

    @abstractmethod
    def quadratic(self) -> Tensor:
        """dᵀCd with the undamped curvature."""


@dataclass(frozen=True, eq=False)
class _LayerMeasures(Measures):
    layer: LayerCurvature
    gradient: LayerGradient
    direction: LayerDirection
    damping: Damping

    @abstractmethod
    def _residual(self, system: System) -> Tensor: ...

    def residual(self) -> Tensor:
        return self._residual(self.direction.system)

    def residual_full(self) -> Tensor:
        return self._residual(DampedSystem("full", self.damping.scale, self.damping.shift))


class WeightMeasures(_LayerMeasures):
    """Measures of the weight block of a Kronecker layer."""

    def _residual(self, system: System) -> Tensor:
        assert self.direction.weight is not None
        assert self.gradient.weight is not None
        return weight_residual(system, self.layer, self.direction.weight, self.gradient.weight)

    def slope(self) -> Tensor:
        assert self.direction.weight is not None
        assert self.gradient.weight is not None
        return inner(self.layer, self.direction.weight, self.gradient.weight)

    def quadratic(self) -> Tensor:
        assert self.direction.weight is not None
        assert self.gradient.weight is not None
        return curvature_form(self.layer, self.direction.weight, self.gradient.weight)


class BiasMeasures(_LayerMeasures):
    """Measures of the bias block of a layer."""

    def _residual(self, system: System) -> Tensor:
        assert self.direction.bias is not None
        assert self.gradient.bias is not None
        return bias_residual(system, self.layer, self.direction.bias, self.gradient.bias)

    def slope(self) -> Tensor:
        assert self.direction.bias is not None
        assert self.gradient.bias is not None
        return self.direction.bias @ self.gradient.bias

    def quadratic(self) -> Tensor:
        direction, output = self.direction.bias, self.layer.output
        assert direction is not None
        assert output is not None
        return direction @ output.matmul(direction[:, None])[:, 0]


@dataclass(frozen=True, eq=False)
class OperatorMeasures(Measures):
    """Measures of a block solved through its operator, by itself or as part of a system of several.

    `system` holds g, d and C d of every block of the system; the residual is that of the whole system,
    the one that the iteration stopped by.
    """

    name: str
    damping: Damping
    system: Mapping[str, tuple[Tensor, Tensor, Tensor]]

    def residual(self) -> Tensor:
        squares, references = [], []
        # Relative to the gradient's size: squares then neither under- nor overflow.
        size = torch.stack([binary_scale(gradient) for gradient, _, _ in self.system.values()]).max()
        for gradient, direction, image in self.system.values():
            rest = self.damping.scale * image + self.damping.shift * direction + gradient
            squares.append((rest / size).square().sum())
            references.append((gradient / size).square().sum())
        return relative(torch.stack(squares).sum(), torch.stack(references).sum())

    def residual_full(self) -> Tensor:
        return self.residual()

    def slope(self) -> Tensor:
        gradient, direction, _ = self.system[self.name]
        return (direction * gradient).sum()

    def quadratic(self) -> Tensor:
        _, direction, image = self.system[self.name]
        return (direction * image).sum()
