"""Steps of models with batch normalisation in training mode: two functions of the same parameters.

    gradient     of E[ξ] with the statistics of the batch, as every first-order optimizer takes it
    curvature    of E[ξ] with the running statistics: an affine map of each example by itself

With the batch's statistics the examples of a batch depend on each other, so that no curvature is a mean over
examples; with the running ones it is. They agree in the limit of large batches and slow statistics. The
forward of the gradient is the model's own in training mode: it updates the running statistics, once, as
torch does, and the curvature is then taken with the updated ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.criteria.base import LossTerms
from curvlab.exceptions import ProblemError
from curvlab.linalg.steps import Gradient
from curvlab.model.network import uses_batch
from curvlab.problem import Problem

__all__ = ["NOTE", "BatchStatistics", "running_statistics"]

NOTE = (
    "batch normalisation: the curvature is taken with the running statistics, the gradient with the batch's"
)


@dataclass(frozen=True, eq=False)
class BatchStatistics:
    """The normalisation layers that a step found in training mode, and that it keeps in evaluation mode."""

    layers: tuple[nn.Module, ...]

    def gradient(self, problem: Problem) -> tuple[Tensor, Gradient]:
        """E[ξ] and its gradient with the statistics of each batch; running statistics are updated."""
        parameters = problem.network.parameters
        sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        losses, weights = [], []
        for batch in problem.batches():
            with self._in_use(), torch.enable_grad():
                logits = problem.network.call(batch.inputs)
                terms = self._terms(problem, logits, batch.targets)
                slopes = terms.criterion.gradients(terms.logits, terms.targets)
                cotangent = terms.as_logits(slopes, terms.weights)
                found = torch.autograd.grad(logits, list(parameters.values()), cotangent, allow_unused=True)
            for total, value in zip(sums.values(), found, strict=True):
                if value is not None:
                    total += value
            losses.append(terms.loss * terms.total_weight)
            weights.append(terms.total_weight)
        weight = torch.stack(weights).sum()
        entries = {name: (total / weight).detach() for name, total in sums.items()}
        return torch.stack(losses).sum() / weight, Gradient(entries)

    def loss(self, problem: Problem) -> Tensor:
        """E[ξ] with the statistics of each batch; running statistics are left as they were."""
        losses, weights = [], []
        before = _copies(self.layers)
        try:
            for batch in problem.batches():
                with self._in_use(), torch.no_grad():
                    terms = self._terms(problem, problem.network.call(batch.inputs), batch.targets)
                losses.append(terms.loss * terms.total_weight)
                weights.append(terms.total_weight)
        finally:
            _restore(before)
        return torch.stack(losses).sum() / torch.stack(weights).sum()

    @staticmethod
    def _terms(problem: Problem, logits: Tensor, targets: Tensor) -> LossTerms:
        return LossTerms.of(problem.criterion, logits, targets, torch_layout=problem.torch_layout)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """The layers in training mode again."""
        for layer in self.layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in self.layers:
                layer.training = False


@contextmanager
def running_statistics(model: nn.Module) -> Iterator[BatchStatistics]:
    """Normalisation layers of `model` in evaluation mode, all others in the mode that they are in.

    Afterwards the modes are what they were; after an exception the running statistics are, too.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train()
    >>> with running_statistics(model) as statistics:
    ...     print(len(statistics.layers), model[0].training, model[1].training)
    1 True False
    >>> model[1].training
    True
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and uses_batch(module)
    ]
    for name, module in found:
        if module.running_mean is None or module.running_var is None:
            raise ProblemError(
                f'batchnorm="running": layer `{name}` ({type(module).__name__}) has no running statistics. '
                f"Make it with track_running_stats=True"
            )
    statistics = BatchStatistics(tuple(module for _, module in found))
    before = _copies(statistics.layers)
    for layer in statistics.layers:
        layer.training = False
    try:
        yield statistics
    except BaseException:
        _restore(before)
        raise
    finally:
        for layer in statistics.layers:
            layer.training = True


def _copies(layers: tuple[nn.Module, ...]) -> list[tuple[Tensor, Tensor]]:
    return [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]


def _restore(copies: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in copies:
            buffer.copy_(value)
