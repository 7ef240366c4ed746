"""Providers: from a problem to its curvature.

A provider is a frozen dataclass: configuration and no work. It names the statistics it needs and
turns their means into blocks; `estimate` computes the statistics of all providers in one pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.linalg import Factor
from curvlab.network import Network
from curvlab.problem import Problem
from curvlab.providers.statistics import Inputs, Statistic, Values

__all__ = ["Context", "Provider", "kronecker_layers"]

INPUTS = Inputs()


@dataclass(frozen=True, eq=False)
class Context:
    """What a provider builds its curvature from: the problem and the means over all its rows."""

    problem: Problem
    means: Mapping[Statistic, Values]

    @property
    def network(self) -> Network:
        """The analysed model."""
        return self.problem.network


@dataclass(frozen=True)
class Provider(ABC):
    """A rule that turns a problem into a curvature."""

    needs_chain: ClassVar[bool] = True

    @abstractmethod
    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        """The means over rows that `curvature` reads."""

    @abstractmethod
    def curvature(self, context: Context, name: str) -> Curvature:
        """The curvature, from the means of all batches."""

    def check(self, problem: Problem, name: str) -> None:
        """Refuse a problem the provider cannot analyse, before any work is done."""
        if self.needs_chain:
            problem.network.require_chain(name)


def kronecker_layers(context: Context, outputs: Mapping[str, Factor]) -> tuple[LayerCurvature, ...]:
    """Layers with weight blocks E[hhᵀ] ⊗ B^t from the output factors B^t, by layer name."""
    inputs = context.means[INPUTS]
    layers = []
    for layer, factors in zip(context.network.selected, inputs, strict=True):
        layers.append(
            LayerCurvature(layer.name, layer.weight_name, layer.bias_name, outputs[layer.name], factors)  # type: ignore[arg-type]
        )
    return tuple(layers)
