"""PCH with exact Jacobians, by products: `pch[kind=exact]`.

    C = E[ Jᵀ PosEig_{γ_out}(∇²ξ_i) J + Σ_n J_nᵀ PosEig_γ(M̄_n) J_n ]

over all parameters, cross-layer blocks included: the Gauss-Newton matrix of the network augmented with the
inputs of its non-linear nodes (`curvlab.model.augmented`), whose output curvature is made positive: ∇²ξ of
every example, and M̄_n after the mean over all rows, batches and ranks, which is a pass of its own. It is
positive semi-definite on any graph. On a chain with one example its bias blocks are those of the paper's
recursion, which takes an expectation at every layer and is exact there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from torch import Tensor

from curvlab.model.augmented import AugmentedBatch, ChainAugmented, GraphAugmented, augmented
from curvlab.model.nodes import CurvatureRoot
from curvlab.model.recording import Recording
from curvlab.problem import Problem
from curvlab.providers.operators import ModelOperator, WeightedBatch

__all__ = ["PositiveHessian"]


class PositiveHessian(ModelOperator):
    """Products with the matrix of `pch[kind=exact]`; `means` are the nodes' M̄ over all rows of all ranks."""

    def __init__(self, problem: Problem, means: Sequence[Tensor], gamma: float, output_gamma: float) -> None:
        super().__init__(problem, "gauss_newton")
        self._means, self._gamma, self._output_gamma = means, gamma, output_gamma
        self._batch: AugmentedBatch | None = None

    @cached_property
    def _roots(self) -> tuple[CurvatureRoot, ...]:
        return tuple(CurvatureRoot.positive(mean, self._gamma) for mean in self._means)

    def _batches(self) -> Iterator[WeightedBatch]:
        self.snapshot.check_unchanged()
        if self._batch is not None:
            yield self._batch
            return
        for recording in self.problem.recordings():
            made = augmented(recording)
            if not self.problem.streamed:
                self._batch = made
            yield made

    def _of_batch(self, batch: WeightedBatch, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(batch, ChainAugmented | GraphAugmented)
        return batch.product(vectors, self)

    def at_logits(self, recording: Recording, vectors: Tensor) -> Tensor:
        """PosEig(∇²ξ_i) y; of a convex criterion ∇²ξ_i itself."""
        logits, targets, criterion = recording.logits, recording.targets, recording.criterion
        if criterion.convex:
            return criterion.hessian_products(logits, targets, vectors)
        plus, minus = criterion.hessian_factors(logits, targets)
        image = (plus * (plus * vectors).sum(-1, keepdim=True)).sum(0)
        if minus is None:
            return image
        return image + abs(self._output_gamma) * (minus * (minus * vectors).sum(-1, keepdim=True)).sum(0)

    def at_node(self, number: int, rows: Tensor) -> Tensor:
        """PosEig(M̄_n) y."""
        root = self._roots[number]
        return root.times(root.times(rows))
