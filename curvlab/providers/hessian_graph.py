"""The exact Hessian of any module, by differentiating its own forward twice with torch.func.

Used where the Linear layers form no chain: residual connections, convolutions or normalisation in
between, Linear layers over sequences. Every product runs the model on the data again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call, grad, vjp

from curvlab.linalg import OperatorBlock
from curvlab.model.recording import uncompiled
from curvlab.problem import Batch, Problem
from curvlab.providers.live import LiveData

__all__ = ["GraphHessian"]


class GraphHessian:
    """Products with the exact Hessian of a model that is no chain."""

    def __init__(self, problem: Problem) -> None:
        self.data = LiveData.of(problem)
        self.problem = problem
        self.layers = problem.network.selected
        self.total_weight = problem.total_weight()

    def _loss_sum(self, batch: Batch, parameters: dict[str, Tensor]) -> Tensor:
        """Σ c_i ξ_i."""
        logits = functional_call(self.problem.model, parameters, (batch.inputs,))
        criterion = self.problem.criterion
        weights = criterion.weights(logits, batch.targets)
        losses = criterion.losses(logits, batch.targets)
        return losses.sum() if weights is None else weights @ losses

    def products(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The Hessian over the parameters named in `vectors`, times them."""
        self.data.check_unchanged()
        self.problem.network.check_modes()
        live = dict(self.problem.model.named_parameters())
        parameters = {name: live[name].detach() for name in vectors}
        results = {name: torch.zeros_like(value) for name, value in parameters.items()}
        for batch in self.problem.batches():
            with uncompiled():
                pull = vjp(grad(partial(self._loss_sum, batch)), parameters)[1]
            (values,) = pull(dict(vectors))
            for name, value in values.items():
                results[name] += value.detach()
        return {name: value / self.total_weight for name, value in results.items()}

    def full_product(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All blocks at once."""
        names = [n for layer in self.layers for n in (layer.weight_name, layer.bias_name) if n is not None]
        return self.products({name: vectors[name] for name in names})

    def block(self, name: str) -> OperatorBlock:
        """The diagonal block of one parameter."""
        parameter = self.problem.model.get_parameter(name).detach()
        return OperatorBlock(tuple(parameter.shape), lambda x: self.products({name: x})[name], parameter)
