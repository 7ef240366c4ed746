"""Eigenvalues beside the damping: the largest and the median of each layer's curvature, and of the Hessian.

Where (1-α) λ_max < α, the damped matrix (1-α) C + αI is αI but for less than half of its largest entry: every
direction is then nearly -g/α, whatever C is, and a comparison of directions compares nothing.

Blocks with factors have their eigenvalues from the factors, exactly. Of a matrix-free block, or where the
factors are large, a few steps of Lanczos' method (`Krylov`) from a random start give the largest (from below)
and the median of the quadrature. It makes a basis in which a symmetric matrix is tridiagonal, with one
product per step:

    H V = V T + β_k v_{k+1} e_kᵀ        V orthonormal, its first column along the start, T tridiagonal

From one basis every damped system with the start as right-hand side is solved, whatever the damping,

    (s H + τ I) x = b        x ≈ V y,  (s T + τ I) y = ‖b‖ e_1,  ‖residual‖ = s β_k |y_k|

which are the iterates of conjugate gradients; and the eigenvalues of T (Ritz values) lie between those of H.
All vectors are orthogonalised against all before them, twice: with k a few hundred that costs less than the
products, and no eigenvalue shows up several times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.linalg import Block, FactorBlock, KroneckerBlock, ShiftedBlock, ViewedBlock
from curvlab.linalg.factors import DiagonalFactor, Factor
from curvlab.measure.operations import counting
from curvlab.problem import Problem
from curvlab.providers import estimate

__all__ = [
    "Krylov",
    "LayerSpectrum",
    "damping_rules",
    "largest_of_hessian",
    "layer_spectra",
    "weighted_median",
]

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


BREAKDOWN = 1e-12  # relative to the largest entry of T: the space is invariant


@dataclass(eq=False)
class Krylov:
    """The space that grows from `start` by products with a symmetric matrix, in the start's dtype.

    >>> matrix = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    >>> space = Krylov(lambda x: matrix @ x, torch.ones(3, dtype=torch.float64))
    >>> space.grow(3)
    >>> solution, residual = space.solve(scale=0.5, shift=1.0)
    >>> [round(float(x), 6) for x in solution], residual < 1e-9
    ([0.666667, 0.5, 0.333333], True)
    """

    product: Callable[[Tensor], Tensor]
    start: Tensor
    diagonal: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.norm = float(self.start.norm())
        self._basis = self.start.new_zeros(4, self.start.numel())  # rows: grown by doubling
        if self.norm > 0:
            self._basis[0] = self.start / self.norm

    @property
    def steps(self) -> int:
        """How many products were made."""
        return len(self.diagonal)

    @property
    def exhausted(self) -> bool:
        """Whether the space is invariant: no further product would add to it."""
        if self.norm == 0 or self.steps >= self.start.numel():
            return True
        if not self.steps:
            return False
        return self.beside[-1] <= BREAKDOWN * max(map(abs, [*self.diagonal, *self.beside]))

    def grow(self, steps: int) -> None:
        """Make `steps` products more, fewer where the space is invariant before."""
        for _ in range(steps):
            if self.exhausted:
                return
            last = self._basis[self.steps]
            image = self.product(last)
            self.diagonal.append(float(image @ last))
            basis = self._basis[: self.steps]
            for _ in range(2):
                image = image - basis.T @ (basis @ image)
            self.beside.append(float(image.norm()))
            if self.steps == len(self._basis):
                self._basis = torch.cat([self._basis, torch.zeros_like(self._basis)])
            if self.beside[-1] > 0:
                self._basis[self.steps] = image / self.beside[-1]

    def tridiagonal(self) -> Tensor:
        """T, in float64."""
        between = torch.tensor(self.beside[: self.steps - 1], dtype=torch.float64)
        main = torch.tensor(self.diagonal, dtype=torch.float64)
        return torch.diag(main) + torch.diag(between, 1) + torch.diag(between, -1)

    def ritz(self) -> tuple[Tensor, Tensor]:
        """The Ritz values, ascending, and the weight of each in the spectral measure of the start."""
        values, vectors = torch.linalg.eigh(self.tridiagonal())
        return values, vectors[0].square()

    def solve(self, scale: float, shift: float) -> tuple[Tensor, float]:
        """x with (scale H + shift I) x = start, and its relative residual."""
        if self.norm == 0:
            return torch.zeros_like(self.start), 0.0
        size = self.steps
        matrix = scale * self.tridiagonal() + shift * torch.eye(size, dtype=torch.float64)
        right = torch.zeros(size, dtype=torch.float64)
        right[0] = self.norm
        y = torch.linalg.solve(matrix, right)
        left = 0.0 if self.exhausted else scale * self.beside[-1] * abs(float(y[-1])) / self.norm
        return self._basis[:size].T @ y.to(self.start), left


def weighted_median(values: Tensor, weights: Tensor) -> float:
    """The value below which half of the weight lies.

    >>> weighted_median(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.2, 0.6, 0.2]))
    1.0
    """
    if not values.numel():
        return math.nan
    order = values.argsort()
    reached = weights[order].cumsum(0) >= 0.5 * float(weights.sum()) * (1 - 1e-9)
    return float(values[order][int(reached.to(torch.int8).argmax())])
