"""Providers: from a problem to its curvature.

A provider is a frozen dataclass: configuration and no work. It names the statistics it needs and
turns their means into blocks; `estimate` computes the statistics of all providers in one pass. Matrix-free
blocks read the data anew for every product, through a `ProblemSnapshot`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.exceptions import StaleError
from curvlab.linalg import Factor
from curvlab.linalg.factors import InputFactors
from curvlab.model.graph import Network
from curvlab.model.recording import Recording
from curvlab.problem import Problem
from curvlab.providers.statistics import Inputs, Statistic, Values
from curvlab.registry import INTERFACE
from curvlab.staleness import Versions, change_message

__all__ = ["INPUTS", "Context", "ProblemSnapshot", "Provider", "kronecker_layers"]

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

    def tensors(self, statistic: Statistic) -> tuple[Tensor, ...]:
        """The means of a statistic that gives tensors."""
        return cast(tuple[Tensor, ...], self.means[statistic])

    def factors(self, statistic: Statistic) -> tuple[Factor, ...]:
        """The means of a statistic that gives Gram factors."""
        return cast(tuple[Factor, ...], self.means[statistic])

    @property
    def inputs(self) -> tuple[InputFactors, ...]:
        """E[hhᵀ] and E[h] for each layer with blocks; `INPUTS` must be among the provider's statistics."""
        return cast(tuple[InputFactors, ...], self.means[INPUTS])


@dataclass(frozen=True)
class Provider(ABC):
    """A rule that turns a problem into a curvature.

    `interface` numbers what is described here; a plugin repeats the number that it was written for, so that
    another curvlab can tell.
    """

    interface: ClassVar[int] = INTERFACE
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


def kronecker_layers(context: Context, outputs: Sequence[Factor]) -> tuple[LayerCurvature, ...]:
    """Layers with weight blocks E[hhᵀ] ⊗ B^t from the output factors B^t, one for each layer with blocks."""
    return tuple(
        LayerCurvature(layer.name, layer.weight_name, layer.bias_name, output, inputs)
        for layer, output, inputs in zip(context.network.selected, outputs, context.inputs, strict=True)
    )


@dataclass(frozen=True, eq=False)
class ProblemSnapshot:
    """A problem as it was: a single batch's recording is kept, a stream is recorded for every product."""

    problem: Problem
    versions: Versions

    @classmethod
    def of(cls, problem: Problem) -> ProblemSnapshot:
        """The problem as it is now."""
        return cls(problem, problem.versions)

    def check_unchanged(self) -> None:
        """Refuse to go on with parameters or a batch that have changed."""
        changed = self.versions.differing(self.problem.tensors)
        if changed:
            again = "and its blocks read them: call estimate() again"
            raise StaleError(change_message(changed, "the curvature was estimated", again))

    def batches(self) -> Iterator[tuple[Recording, Tensor]]:
        """Each batch's recording, with its rows' weights in the mean over all."""
        self.check_unchanged()
        if not self.problem.streamed:
            recording = self.problem.recording()
            yield recording, recording.row_weights
            return
        total = sum(recording.total_weight for recording in self.problem.recordings())
        for recording in self.problem.recordings():
            yield recording, recording.weights / total
