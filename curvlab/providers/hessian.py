"""The exact Hessian: mean bias blocks as matrices, weight blocks as operators, cross-layer blocks on request.

    bias     E[H_i^t]
    weight   E[(h_i h_iᵀ) ⊗ H_i^t]          never its Kronecker approximation
    full     all blocks of the Hessian of the mean loss, in `@`, `to_dense` and `cg`

On a chain everything comes from the recording's own tensors, by the recursions of
`hessian_recursion`. Any other model is differentiated twice by torch.func.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.curvature import Curvature, Definiteness, LayerCurvature
from curvlab.linalg import DenseFactor
from curvlab.measure import device
from curvlab.problem import Problem
from curvlab.providers.base import Context, Provider
from curvlab.providers.hessian_chain import BiasHessians, ChainHessian
from curvlab.providers.hessian_graph import GraphHessian
from curvlab.providers.statistics import Statistic

__all__ = ["Hessian"]

BIAS_HESSIANS = BiasHessians()
LOOK_AT_UP_TO = 256


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
        operator: ChainHessian | GraphHessian
        if problem.network.chain is None:
            operator = GraphHessian(problem)
            layers, definiteness = _graph_layers(operator), UNKNOWN
        else:
            operator = ChainHessian(problem)
            means = context.tensors(BIAS_HESSIANS)
            layers = _chain_layers(operator, means)
            definiteness = self._known(problem) or _looked_at(means)
        return Curvature(
            name,
            problem.criterion.name,
            layers,
            definiteness,
            exact=True,
            full_product=operator.full_product if self.full else None,
            versions=problem.versions,
            live=True,
        )

    def _known(self, problem: Problem) -> Definiteness | None:
        """Without σ'', and with a convex criterion, each diagonal block is Gauss-Newton's."""
        chain = problem.network.chain
        assert chain is not None
        straight = all(activation.piecewise_linear for activation in chain.activations)
        if problem.criterion.convex and straight and (not self.full or len(chain.layers) == 1):
            return Definiteness(True, "a convex criterion and piecewise linear activations")
        return None


UNKNOWN = Definiteness(False, "a Hessian may have negative eigenvalues")


def _chain_layers(operator: ChainHessian, means: Sequence[Tensor]) -> tuple[LayerCurvature, ...]:
    layers = []
    for index, (layer, mean) in enumerate(zip(operator.layers, means, strict=True)):
        weight = None if layer.weight_name is None else operator.weight_block(index)
        names = (layer.name, layer.weight_name, layer.bias_name)
        layers.append(LayerCurvature(*names, DenseFactor(mean), weight_operator=weight))
    return tuple(layers)


def _graph_layers(operator: GraphHessian) -> tuple[LayerCurvature, ...]:
    layers = []
    for layer in operator.layers:
        names = (layer.weight_name, layer.bias_name)
        weight, bias = (None if name is None else operator.block(name) for name in names)
        layers.append(LayerCurvature(layer.name, *names, None, weight_operator=weight, bias_operator=bias))
    return tuple(layers)


def _looked_at(means: Sequence[Tensor]) -> Definiteness:
    """Not promised to be PSD; the smallest eigenvalue of the smaller bias blocks tells how far from it."""
    small = [mean for mean in means if len(mean) <= LOOK_AT_UP_TO and device.readable(mean)]
    if not small:
        return UNKNOWN
    smallest = min(float(torch.linalg.eigvalsh(mean)[0]) for mean in small)
    return Definiteness(False, f"a Hessian; smallest eigenvalue of the smaller bias blocks {smallest:.2g}")
