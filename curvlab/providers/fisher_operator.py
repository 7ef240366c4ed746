"""The Fisher matrix itself, cross-layer blocks included, by products: no Kronecker approximation.

    F v = E[Σ_r Jᵀ u_r u_rᵀ J v]        u_r the cotangents at the logits whose rows Jᵀu_r the Fisher is of

`empirical`: u is the gradient of the example's loss; `mc`: that of drawn labels; `exact`: the columns of the
labels' covariance. The rows are never formed: J v is one backward pass, and Jᵀ of the weighted u another, as
in products with the Gauss-Newton matrix. The diagonal is the true one, as structure=diagonal gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from curvlab.linalg import OperatorBlock
from curvlab.model.products import BatchProducts
from curvlab.model.terms import LossTerms
from curvlab.problem import Problem
from curvlab.providers.base import Context, row_layers
from curvlab.providers.operators import ModelOperator
from curvlab.providers.statistics import Cotangents, Means, OutputProducts

__all__ = ["FisherOperator"]


class FisherOperator(ModelOperator):
    """Products with the Fisher matrix of a problem's data, from the cotangents that a statistic names."""

    def __init__(self, problem: Problem, products: OutputProducts, diagonals: OutputProducts) -> None:
        super().__init__(problem, "gauss_newton")
        self.statistic, self.diagonals = products, diagonals
        self._cotangents: dict[BatchProducts, list[Cotangents]] = {}

    def _batches(self) -> Iterator[BatchProducts]:
        self.snapshot.check_unchanged()
        if self._held is not None:
            yield self._held
            return
        for recording in self.problem.recordings():
            made = self._products.prepare(recording.inputs_given, recording.targets_given)
            self._cotangents = {made: self.statistic.cotangents(recording)}
            if not self.problem.streamed:
                self._held = made
            yield made

    def _of_batch(self, batch: BatchProducts, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        cotangents = self._cotangents[batch]
        return batch.second_moment(vectors, lambda terms, along: _outer_product(terms, cotangents, along))

    @cached_property
    def diagonal(self) -> dict[str, Tensor]:
        """E[Σ_r (Jᵀu_r)²], by parameter, from one pass of its own."""
        self.snapshot.check_unchanged()
        means = Means((self.diagonals,))
        for recording in self.problem.recordings():
            means.add(recording)
        layers, _ = row_layers(Context(self.problem, means.values()), self.diagonals)
        return {name: block.diagonal() for layer in layers for name, block in layer.blocks.items()}

    def block(self, name: str) -> OperatorBlock:
        parameter = self.parameters[name].detach()
        return OperatorBlock(
            tuple(parameter.shape),
            lambda x: self.products({name: x})[name],
            parameter,
            diagonal_of=lambda: self.diagonal[name].clone(),
        )


def _outer_product(terms: LossTerms, cotangents: list[Cotangents], along: Tensor) -> Tensor:
    """Σ_r c_i u_r (u_r · y): over all terms of an example together, or term by term where each has a pass."""
    shape = (terms.examples, terms.per_example, terms.outputs)
    last = along.movedim(1, -1) if terms.classes_first else along
    y = last.reshape(shape)
    total = torch.zeros_like(y)
    weights = terms.example_weights[:, None, None]
    for one in cotangents:
        for stacked in one.stack:
            within = one.within[..., None]
            u = torch.where(within > 0, stacked.reshape(shape) * within, 0)
            inner = (u * y).sum((1, 2) if one.share_passes else 2, keepdim=True)
            total = total + one.weight * weights * inner * u
    return terms.as_logits(total.flatten(0, 1), torch.ones_like(terms.weights))
