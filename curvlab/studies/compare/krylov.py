"""Lanczos' method on one symmetric matrix: a basis in which it is tridiagonal, one product per step.

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

__all__ = ["Krylov", "weighted_median"]

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
