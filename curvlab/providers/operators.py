"""Matrix-free blocks of any model: every parameter's block of the Hessian or of the Gauss-Newton matrix.

    block of θ_a       v ↦ ∂²/∂θ_a² E[ξ] v            for one parameter at a time
    all blocks         v ↦ ∇² E[ξ] v                  cross blocks included, with structure=full

Products run the model (`curvlab.model.products`). A single batch's graphs are kept with the curvature, so
that each further product is one or two backward passes; a stream is run again for every product. The problem
must be as it was: see `ProblemSnapshot`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from curvlab.curvature_layers import OperatorLayer
from curvlab.exceptions import StaleError
from curvlab.linalg import OperatorBlock
from curvlab.linalg.flat import WholeProduct
from curvlab.model.double_backward import graph_entries
from curvlab.model.products import BatchProducts, ModelProducts
from curvlab.model.recording import ChainRecording, GraphRecording, Recording
from curvlab.problem import Problem
from curvlab.staleness import Versions, change_message, first_check

__all__ = ["ModelOperator", "ProblemSnapshot", "WeightedBatch", "products_at_once"]


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
        """Refuse to go on with a model or a batch that have changed; a stream is the user's code, always."""
        if not first_check(self) and not self.problem.streamed:
            return
        self.problem.network.check_unchanged()
        if changed := self.versions.differing(self.problem.tensors):
            again = "and its blocks read them: call estimate() again"
            raise StaleError(change_message(changed, "the curvature was estimated", again))

    def batches(self) -> Iterator[tuple[Recording, Tensor]]:
        """Each batch's recording, with its rows' weights in the mean over all."""
        self.check_unchanged()
        if not self.problem.streamed:
            recording = self.problem.recording()
            yield recording, recording.row_weights
            return
        total = self._total_weight
        for recording in self.problem.recordings():
            yield recording, recording.weights / total

    @cached_property
    def _total_weight(self) -> Tensor:
        """Σ c_i of a stream, from one pass: every product has the same."""
        return self.problem.total_weight()


Which = Literal["hessian", "gauss_newton"]


# How many products share a batched pass: 10 × faster on small networks, up to 2 × on larger ones, for as much
# more memory as the graph has entries.
MOST_AT_ONCE = 16
ENTRIES_AT_ONCE = 2**23


def products_at_once(problem: Problem) -> int:
    """How many vectors a batched pass over the problem's data may take; a stream runs the model for each."""
    if problem.streamed:
        return 1
    recording = problem.recording()
    if isinstance(recording, ChainRecording):
        entries = sum(z.numel() for z in recording.preactivations)
    else:
        assert isinstance(recording, GraphRecording)
        entries = graph_entries(recording.forward.logits)
    return min(MOST_AT_ONCE, max(1, ENTRIES_AT_ONCE // max(entries, 1)))


def _concatenate(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class WeightedBatch(Protocol):
    """A batch with its graphs, as far as the mean over several goes."""

    @property
    def total_weight(self) -> Tensor:
        """Σ c_i."""


class ModelOperator:
    """Products with one of the two matrices of a problem's data, by parameter name."""

    def __init__(self, problem: Problem, which: Which) -> None:
        self.snapshot, self.problem, self.which = ProblemSnapshot.of(problem), problem, which
        self.parameters = problem.network.parameters
        self._products = ModelProducts(
            problem.network.call,
            problem.criterion,
            self.parameters,
            torch_layout=problem.torch_layout,
        )
        self._held: BatchProducts | None = None

    def _batches(self) -> Iterator[WeightedBatch]:
        """The batches with their graphs; that of a single one is kept."""
        self.snapshot.check_unchanged()
        if self._held is not None:
            yield self._held
            return
        for batch in self.problem.batches():
            made = self._products.prepare(batch.inputs, batch.targets)
            if not self.problem.streamed:
                self._held = made
            yield made

    def products(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The matrix over the parameters named in `vectors`, times them."""
        sums: dict[str, Tensor] = {}
        weights = []
        for batch in self._batches():
            found = self._of_batch(batch, vectors)
            # Not in place: under vmap the values are batches.
            sums = found if not sums else {name: sums[name] + value for name, value in found.items()}
            weights.append(batch.total_weight)
        total = torch.stack(weights).sum()
        return {name: value / total for name, value in sums.items()}

    def _of_batch(self, batch: WeightedBatch, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The product with one batch's sum."""
        assert isinstance(batch, BatchProducts)
        return batch.hessian(vectors) if self.which == "hessian" else batch.gauss_newton(vectors)

    def full_product(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All blocks at once, cross blocks included."""
        return self.products({name: vectors[name] for name in self._names()})

    def whole_product(self, at_once: int) -> WholeProduct:
        """The same, and with several vectors: the model runs once on a batch for all of them.

        `at_once` of them share a batched backward pass, where torch can batch all of it.
        """

        def several(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            named = {name: vectors[name] for name in self._names()}
            sums: dict[str, Tensor] = {}
            weights = []
            for batch in self._batches():
                found = self._several_of_batch(batch, named, at_once)
                sums = found if not sums else {name: sums[name] + value for name, value in found.items()}
                weights.append(batch.total_weight)
            total = torch.stack(weights).sum()
            return {name: value.div_(total) for name, value in sums.items()}

        return WholeProduct(several, self.full_product)

    def _several_of_batch(
        self, batch: WeightedBatch, vectors: Mapping[str, Tensor], at_once: int
    ) -> dict[str, Tensor]:
        count = len(next(iter(vectors.values())))

        def part(start: int, stop: int) -> dict[str, Tensor]:
            return {name: vector[start:stop] for name, vector in vectors.items()}

        if at_once > 1 and count > 1:
            batched = torch.vmap(lambda several: self._of_batch(batch, several))
            # What torch cannot batch is done by the loop below, which also raises errors of any other reason.
            with suppress(RuntimeError):
                starts = range(0, count, at_once)
                return _concatenate([batched(part(start, start + at_once)) for start in starts])
        ones = [self._of_batch(batch, {name: v[i] for name, v in vectors.items()}) for i in range(count)]
        return {name: torch.stack([one[name] for one in ones]) for name in ones[0]}

    def _names(self) -> list[str]:
        return [name for layer in self.problem.layers for name in layer.names]

    def block(self, name: str) -> OperatorBlock:
        """The diagonal block of one parameter."""
        parameter = self.parameters[name].detach()
        return OperatorBlock(tuple(parameter.shape), lambda x: self.products({name: x})[name], parameter)

    def layers(self) -> tuple[OperatorLayer, ...]:
        """One layer of blocks for each of the problem's layers."""
        return tuple(
            OperatorLayer(
                layer.name,
                {name: self.block(name) for name in layer.names},
                weight_name=layer.weight_name,
                bias_name=layer.bias_name,
            )
            for layer in self.problem.layers
        )
