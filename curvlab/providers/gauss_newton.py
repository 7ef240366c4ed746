"""Gauss-Newton, in two kinds.

    recursive (KFRA)   B^k = E[∇²ξ(h^k)],  B^{t-1} = (Wᵀ B^t W) ⊙ E[σ'σ'ᵀ]
    exact              B^t = E[J_iᵀ ∇²ξ_i J_i],  weight block E[(h_i h_iᵀ) ⊗ (J_iᵀ ∇²ξ_i J_i)]

With a criterion that is not convex either may be indefinite; the result says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from curvlab import device
from curvlab.curvature import Curvature, Definiteness
from curvlab.linalg import DenseFactor
from curvlab.problem import Problem
from curvlab.providers.base import INPUTS, Context, Provider, kronecker_layers
from curvlab.providers.gauss_newton_operator import exact_layers
from curvlab.providers.recursion import OUTPUT_HESSIAN, SLOPES, output_factors
from curvlab.providers.statistics import GaussNewtonBlocks, Statistic

__all__ = ["GaussNewton"]

BLOCKS = GaussNewtonBlocks()


@dataclass(frozen=True)
class GaussNewton(Provider):
    """Gauss-Newton: with the expectation at every layer (recursive, KFRA) or with none (exact).

    >>> GaussNewton()
    GaussNewton(kind='recursive')
    """

    needs_chain: ClassVar[bool] = False
    kind: Literal["recursive", "exact"] = "recursive"

    def check(self, problem: Problem, name: str) -> None:
        if self.kind == "recursive":
            problem.network.require_chain(name)

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        return (INPUTS, OUTPUT_HESSIAN, SLOPES) if self.kind == "recursive" else (BLOCKS, OUTPUT_HESSIAN)

    def curvature(self, context: Context, name: str) -> Curvature:
        (output,) = context.means[OUTPUT_HESSIAN]
        criterion = context.problem.criterion
        assert isinstance(output, Tensor)
        if self.kind == "recursive":
            definiteness = _definiteness(context.problem, [output])
            layers = kronecker_layers(context, output_factors(context, name, output, lambda _: None))
            return Curvature(name, criterion.name, layers, definiteness)
        blocks: tuple[Tensor, ...] = context.means[BLOCKS]  # type: ignore[assignment]
        definiteness = _exact_definiteness(context.problem, list(blocks))
        layers = exact_layers(context.problem, [DenseFactor(block) for block in blocks])
        versions = context.problem.versions
        return Curvature(name, criterion.name, layers, definiteness, versions=versions, live=True)


def _definiteness(problem: Problem, matrices: list[Tensor]) -> Definiteness:
    """Known from the criterion, or measured as the smallest eigenvalue of `matrices`."""
    criterion = problem.criterion
    if criterion.convex:
        return Definiteness(True, f"criterion `{criterion.name}` is convex")
    if not device.readable(matrices[0]):
        return Definiteness(False, f"criterion `{criterion.name}` is not known to be convex")
    spectra = [torch.linalg.eigvalsh(matrix) for matrix in matrices]
    smallest, worst = min((float(values[0]), float(values.abs().max())) for values in spectra)
    rounding = 8 * torch.finfo(matrices[0].dtype).eps * worst
    return Definiteness(smallest >= -rounding, f"measured on this batch: smallest eigenvalue {smallest:.2g}")


def _exact_definiteness(problem: Problem, blocks: list[Tensor]) -> Definiteness:
    """As above; a weight block mixes the examples' Hessians by their inputs, so each must be PSD by itself."""
    measured = _definiteness(problem, blocks)
    if problem.criterion.convex or not measured.psd:
        return measured
    return Definiteness(False, f"criterion `{problem.criterion.name}` is not known to be convex for each example")
