"""Eigenvalues beside the damping: the largest and the median of each layer's curvature, and of the Hessian.

Where (1-α) λ_max < α, the damped matrix (1-α) C + αI is αI but for less than half of its largest entry: every
direction is then nearly -g/α, whatever C is, and a comparison of directions compares nothing.

Blocks with factors have their eigenvalues from the factors, exactly. Of a matrix-free block, or where the
factors are large, a few Lanczos steps from a random start give the largest (from below) and the median of the
quadrature (`krylov`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.linalg import Block, FactorBlock, KroneckerBlock, ShiftedBlock, ViewedBlock
from curvlab.linalg.factors import DiagonalFactor, Factor
from curvlab.measure.flops import counting
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.studies.compare.krylov import Krylov, weighted_median

__all__ = ["LayerSpectrum", "damping_rules", "largest_of_hessian", "layer_spectra"]

FACTORS_UP_TO = 1024
VALUES_UP_TO = 2 * 10**7
STEPS = 12
OPERATIONS = 5e11  # of the Lanczos steps on the whole Hessian, which are fewer where it is large
LAYERS_UP_TO = 200


@dataclass(frozen=True)
class LayerSpectrum:
    """The largest and the median eigenvalue of a layer's blocks; `exact` unless Lanczos steps found them."""

    layer: str
    largest: float
    median: float
    exact: bool


def damping_rules(largest: float, alpha: float) -> bool:
    """Whether α outweighs every eigenvalue of the matrix that it damps.

    >>> damping_rules(0.039, 0.05), damping_rules(3.0, 0.05)
    (True, False)
    """
    return (1 - alpha) * largest < alpha


def layer_spectra(curvature: Curvature, seed: int = 0) -> list[LayerSpectrum]:
    """One entry per layer of the curvature.

    >>> from torch import nn
    >>> problem = Problem(nn.Linear(2, 2), "mse", torch.eye(2), torch.zeros(2, 2))
    >>> [found] = layer_spectra(estimate("gauss-newton", problem))
    >>> round(found.largest, 6), round(found.median, 6), found.exact
    (1.0, 0.5, True)
    """
    blocks = curvature.blocks
    return [
        _layer(layer.name, [blocks[name] for name in layer.blocks], seed)
        for layer in curvature.layers[:LAYERS_UP_TO]
    ]


def _layer(name: str, blocks: list[Block], seed: int) -> LayerSpectrum:
    exact = all(map(_cheap, blocks)) and sum(block.numel for block in blocks) <= VALUES_UP_TO
    measured = [_exact(block) if exact else _lanczos(block, seed) for block in blocks]
    values = torch.cat([found for found, _ in measured])
    weights = torch.cat([weights for _, weights in measured])
    return LayerSpectrum(name, float(values.max()), weighted_median(values, weights), exact)


def _exact(block: Block) -> tuple[Tensor, Tensor]:
    values = block.eigvalsh().detach().to("cpu", torch.float64)
    return values, torch.ones_like(values)


def _lanczos(block: Block, seed: int) -> tuple[Tensor, Tensor]:
    example, draws = block.example, torch.Generator().manual_seed(seed)
    start = torch.randn(block.numel, generator=draws, dtype=torch.float64).to(example)
    space = Krylov(lambda x: (block @ x.reshape(block.shape)).flatten(), start)
    space.grow(STEPS)
    values, weights = space.ritz()
    return values, weights * block.numel


def _cheap(block: Block) -> bool:
    """Whether the eigenvalues are read off small factors."""
    if isinstance(block, ShiftedBlock):
        return _cheap(block.block)
    if isinstance(block, ViewedBlock):
        return all(map(_cheap, block.products))
    if isinstance(block, KroneckerBlock):
        return all(map(_small, (block.output, block.input)))
    return isinstance(block, FactorBlock) and _small(block.factor)


def _small(factor: Factor) -> bool:
    return factor.rank_bound <= FACTORS_UP_TO or isinstance(factor, DiagonalFactor)


def largest_of_hessian(problem: Problem, seed: int = 0) -> float:
    """The largest eigenvalue of the whole Hessian, cross-layer blocks included, from below; NaN without one.

    >>> from torch import nn
    >>> problem = Problem(nn.Linear(1, 1), "mse", torch.ones(1, 1), torch.zeros(1, 1))
    >>> round(largest_of_hessian(problem), 4)
    4.0
    """
    hessian = estimate("hessian[structure=full]", problem)
    example, draws = problem.network.example, torch.Generator().manual_seed(seed)
    start = torch.randn(hessian.numel, generator=draws, dtype=torch.float64).to(example)
    space = Krylov(hessian.flat_product, start)
    with counting() as counted:
        space.grow(1)
    # Another product is the same work again: fewer steps where that is much.
    space.grow(max(2, min(STEPS, int(OPERATIONS / max(counted.total, 1)))) - 1)
    return float(space.ritz()[0][-1]) if space.steps else math.nan
