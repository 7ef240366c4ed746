"""The exact Hessian: mean bias blocks as matrices, weight blocks as operators, cross-layer blocks on request.

    bias     E[H_i^t]
    weight   E[(h_i h_iᵀ) ⊗ H_i^t]          never its Kronecker approximation
    full     all blocks of the Hessian of the mean loss, in `@`, `to_dense` and `cg`

On a chain everything comes from the recording's own tensors, by the recursions of
`hessian_recursion`. Any other model is differentiated twice by torch.func.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab import device
from curvlab.curvature import Curvature, Definiteness, LayerCurvature
from curvlab.linalg import DenseFactor, OperatorBlock
from curvlab.problem import Problem
from curvlab.providers.base import Context, Provider
from curvlab.providers.hessian_chain import BiasHessians, ChainHessian
from curvlab.providers.hessian_graph import GraphHessian
from curvlab.providers.statistics import Statistic

__all__ = ["Hessian"]

BIAS_HESSIANS = BiasHessians()


@dataclass(frozen=True)
class Hessian(Provider):
    """The exact Hessian of the mean loss, block diagonal unless full=true.

    >>> Hessian(full=True)
    Hessian(full=True)
    """

    needs_chain: ClassVar[bool] = False
    full: bool = False

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        return () if problem.network.chain is None else (BIAS_HESSIANS,)

    def curvature(self, context: Context, name: str) -> Curvature:
        problem = context.problem
        operator = GraphHessian(problem) if context.network.chain is None else ChainHessian(problem)
        means: tuple[Tensor | None, ...] = context.means.get(BIAS_HESSIANS, (None,) * len(context.network.selected))  # type: ignore[assignment]
        layers = tuple(
            _layer(operator, index, mean) for index, mean in enumerate(means)
        )
        measured = [mean for mean in means if mean is not None]
        return Curvature(
            name,
            problem.criterion.name,
            layers,
            _definiteness(measured),
            exact=True,
            full_product=operator.full_product if self.full else None,
            versions=problem.versions,
            live=True,
        )


def _layer(operator: ChainHessian | GraphHessian, index: int, mean: Tensor | None) -> LayerCurvature:
    layer = operator.layers[index]
    weight = bias = None
    if layer.weight_name is not None:
        weight = operator.weight_block(index)
    if layer.bias_name is not None and mean is None:
        shape = (layer.module.out_features,)
        bias = OperatorBlock(shape, operator.bias_product(index), layer.weight)
    output = None if mean is None else DenseFactor(mean)
    return LayerCurvature(
        layer.name, layer.weight_name, layer.bias_name, output, weight_operator=weight, bias_operator=bias
    )


def _definiteness(means: list[Tensor]) -> Definiteness:
    """Measured on the bias blocks where they are small enough; a Hessian is never promised to be PSD."""
    small = [mean for mean in means if len(mean) <= 256 and device.readable(mean)]
    if not small:
        return Definiteness(False, "a Hessian may have negative eigenvalues")
    smallest = min(float(torch.linalg.eigvalsh(mean)[0]) for mean in small)
    return Definiteness(False, f"a Hessian; smallest eigenvalue of the bias blocks looked at {smallest:.2g}")
