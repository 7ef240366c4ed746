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

from curvlab.criteria import Criterion
from curvlab.curvature import Curvature, Definiteness
from curvlab.exceptions import SpecError
from curvlab.linalg import DenseFactor
from curvlab.measure import device
from curvlab.problem import Problem
from curvlab.providers.base import INPUTS, Context, Provider, kronecker_layers
from curvlab.providers.gauss_newton_operator import exact_layers
from curvlab.providers.recursion import OUTPUT_HESSIAN, SLOPES, recurse
from curvlab.providers.statistics import GaussNewtonBlocks, OutputSpectrum, Statistic

__all__ = ["GaussNewton"]

BLOCKS = GaussNewtonBlocks()
SPECTRUM = OutputSpectrum()


@dataclass(frozen=True)
class GaussNewton(Provider):
    """Gauss-Newton: with the expectation at every layer (recursive, KFRA) or with none (exact).

    >>> GaussNewton()
    GaussNewton(kind='recursive')
    """

    needs_chain: ClassVar[bool] = False
    kind: Literal["recursive", "exact"] = "recursive"

    def __post_init__(self) -> None:
        if self.kind not in ("recursive", "exact"):
            raise SpecError(f"kind={self.kind!r}: expected recursive or exact")

    def check(self, problem: Problem, name: str) -> None:
        if self.kind == "recursive":
            problem.network.require_chain(name)

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        if self.kind == "recursive":
            return (INPUTS, OUTPUT_HESSIAN, SLOPES)
        return (BLOCKS,) if problem.criterion.convex else (BLOCKS, SPECTRUM)

    def curvature(self, context: Context, name: str) -> Curvature:
        return _recursive(context, name) if self.kind == "recursive" else _exact(context, name)


def _recursive(context: Context, name: str) -> Curvature:
    chain, criterion = context.network.require_chain(name), context.problem.criterion
    (top,) = context.tensors(OUTPUT_HESSIAN)
    outputs = recurse(chain, top, context.tensors(SLOPES), [None] * len(chain.activations))
    definiteness = _known(criterion) or _measured_mean(top)
    return Curvature(name, criterion.name, kronecker_layers(context, outputs), definiteness)


def _exact(context: Context, name: str) -> Curvature:
    problem = context.problem
    layers = exact_layers(problem, [DenseFactor(block) for block in context.tensors(BLOCKS)])
    definiteness = _known(problem.criterion) or _measured_examples(*context.tensors(SPECTRUM))
    versions = problem.versions
    return Curvature(name, problem.criterion.name, layers, definiteness, versions=versions, live=True)


def _known(criterion: Criterion) -> Definiteness | None:
    return Definiteness(True, f"criterion `{criterion.name}` is convex") if criterion.convex else None


def _measured_mean(output: Tensor) -> Definiteness:
    """From E[∇²ξ]: congruences and Hadamard products with E[σ'σ'ᵀ] keep it positive semi-definite."""
    if not device.readable(output):
        return Definiteness(False, "the criterion is not known to be convex")
    eigenvalues = torch.linalg.eigvalsh(output)
    smallest = float(eigenvalues[0])
    rounding = 8 * torch.finfo(output.dtype).eps * float(eigenvalues.abs().max())
    return Definiteness(smallest >= -rounding, f"measured on this data: smallest eigenvalue {smallest:.2g}")


def _measured_examples(negative: Tensor, total: Tensor) -> Definiteness:
    """From each example's ∇²ξ: a weight block mixes the examples by their inputs, so each must be PSD."""
    if not device.readable(negative):
        return Definiteness(False, "the criterion is not known to be convex")
    rounding = 8 * torch.finfo(negative.dtype).eps * float(total)
    return Definiteness(
        float(negative) <= rounding,
        f"measured on this data: negative eigenvalues of the examples' output Hessians sum to "
        f"{float(-negative):.2g} in the mean",
    )
