"""The exact Hessian of any module, by differentiating its own forward twice with torch.func.

Used where the Linear layers form no chain: residual connections, convolutions or normalisation in
between, Linear layers over sequences. Every product runs the model on the data again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.func import functional_call, grad, vjp

from curvlab.linalg import OperatorBlock
from curvlab.network import Layer
from curvlab.problem import Batch, Problem

__all__ = ["GraphHessian"]


class GraphHessian:
    """Products with the exact Hessian of a model that is no chain."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.layers: tuple[Layer, ...] = problem.network.selected
        self._check_losses()

    def _check_losses(self) -> None:
        """Run the criterion's own checks on every batch, once."""
        for batch in self.problem.batches():
            with torch.no_grad():
                logits = self.problem.model(batch.inputs)
            self.problem.criterion.check(logits, batch.targets)

    def _weights(self, logits: Tensor, batch: Batch) -> Tensor:
        weights = self.problem.criterion.weights(logits, batch.targets)
        return logits.new_ones(len(logits)) if weights is None else weights

    def _loss_sum(self, batch: Batch, parameters: dict[str, Tensor]) -> Tensor:
        logits = functional_call(self.problem.model, parameters, (batch.inputs,))
        criterion = self.problem.criterion
        return self._weights(logits, batch).detach() @ criterion.losses(logits, batch.targets)

    def _total_weight(self) -> Tensor:
        totals = []
        for batch in self.problem.batches():
            with torch.no_grad():
                totals.append(self._weights(self.problem.model(batch.inputs), batch).sum())
        return torch.stack(totals).sum()

    def products(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The Hessian over the parameters named in `vectors`, times them."""
        live = dict(self.problem.model.named_parameters())
        parameters = {name: live[name].detach() for name in vectors}
        results: dict[str, Tensor] = {}
        for batch in self.problem.batches():
            _, pull = vjp(grad(lambda p, batch=batch: self._loss_sum(batch, p)), parameters)  # type: ignore[misc]
            (values,) = pull(dict(vectors))
            for name, value in values.items():
                results[name] = value if name not in results else results[name] + value
        total = self._total_weight()
        return {name: value.detach() / total for name, value in results.items()}

    def full_product(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All blocks at once."""
        names = [n for layer in self.layers for n in (layer.weight_name, layer.bias_name) if n is not None]
        return self.products({name: vectors[name] for name in names})

    def weight_block(self, index: int) -> OperatorBlock:
        """The diagonal block of one weight."""
        layer = self.layers[index]
        name = layer.weight_name
        assert name is not None
        return OperatorBlock(tuple(layer.weight.shape), lambda x: self.products({name: x})[name], layer.weight)

    def bias_product(self, index: int) -> Callable[[Tensor], Tensor]:
        """The diagonal block of one bias."""
        name = self.layers[index].bias_name
        assert name is not None
        return lambda x: self.products({name: x})[name]
