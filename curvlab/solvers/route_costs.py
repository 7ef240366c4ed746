"""What each route of the input side costs: the model by which one is chosen.

Costs are floating-point operations at the speed of a matrix product. Memory traffic counts `FLOPS_PER_BYTE`
operations per byte (about what one core does while it waits for a byte), and a factorisation of order k what
it takes at that speed (`_cholesky`, `_eigh`, `_qr`). For m rows, n = n_{t-1} inputs and o = n_t outputs:

    sample   K            m²n + solve(m)                  and the update  2 o m n
    row      QR, G, D     qr(m, n) + 10 o m n + solve(m)      + traffic of G and D
             K, G, D      m²n + 6 o m n + solve(m)            + traffic of G and D, by `Woodbury`
    dense    E[hhᵀ], G    m n² + 2 o m n + solve(n)           + traffic of G and D

where solve(k) is the work on coordinates of k columns (see `Work`). The mean input factor has nothing of
n × n: it chooses between the sample space (to iterate: ‖G⊥‖ by the Gram matrix, m²n) and forming G.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

__all__ = ["Eigen", "Inverse", "Iteration", "Route", "Work", "costs", "mean_costs"]

Route = Literal["auto", "sample", "row", "dense"]
FLOPS_PER_BYTE = 6.0
SYMMETRIC = 0.65  # share of a full product that a symmetric one costs
PASSES = 30.0  # operations per byte of a vector that the vector operations of an iteration take


def _cholesky(k: int) -> float:
    return k**3 / 3 + 200.0 * k * k


def _eigh(k: int) -> float:
    return 9.0 * k**3 + 3000.0 * k * k


def _qr(k: int, n: int) -> float:
    return 5.0 * k * k * n + 4000.0 * k * k


class Work(ABC):
    """What a solver does in coordinates of k columns."""

    @abstractmethod
    def solve(self, k: int, o: int, diagonal: bool = False) -> float:
        """Operations; `diagonal` where an iteration may take the eigenvectors of the k × k matrix."""

    def row(self, m: int, n: int, o: int, update: float, traffic: float) -> float:
        """Operations of the route `row` beside the solve: QR, G, GQ twice, ‖G⊥‖ and D."""
        return _qr(m, n) + 5 * update + 6 * traffic


@dataclass(frozen=True)
class Inverse(Work):
    """The factored inverse: a Cholesky factorisation, its inverse or its solves, and products with B⁻¹."""

    def solve(self, k: int, o: int, diagonal: bool = False) -> float:
        inverse = 2.0 * k * k * o if o < k else 2.0 * k * k * o + 1.3 * k**3 + 300.0 * k * k
        return _cholesky(k) + inverse + 2.0 * o * o * k

    def row(self, m: int, n: int, o: int, update: float, traffic: float) -> float:
        """By Woodbury's identity: K, G, its product with the rows, B⁻¹ on the left of G, and D."""
        return 2 * SYMMETRIC * m * m * n + 3 * update + 2.0 * o * o * n + 5 * traffic


@dataclass(frozen=True)
class Eigen(Work):
    """The exact solution: eigenvectors, and products with them and with those of B."""

    def solve(self, k: int, o: int, diagonal: bool = False) -> float:
        return _eigh(k) + 4.0 * k * k * o + 4.0 * o * o * k


@dataclass(frozen=True)
class Iteration(Work):
    """CG: products with B and, unless its eigenvectors are the basis, with the k × k matrix."""

    count: int
    element_size: int = 4

    def solve(self, k: int, o: int, diagonal: bool = False) -> float:
        once = _eigh(k) + 4.0 * k * k * o if diagonal else 0.0
        product = 2.0 * o * o * k + (0.0 if diagonal else 2.0 * o * k * k)
        return once + self.count * (product + PASSES * self.element_size * o * k)


def costs(m: int, n: int, o: int, work: Work, element_size: int) -> dict[str, float]:
    """Operations of each route with the full input factor.

    >>> c = costs(m=100, n=150528, o=1024, work=Inverse(), element_size=4)
    >>> min(c, key=c.get)
    'sample'
    """
    traffic = FLOPS_PER_BYTE * element_size * o * n
    update = 2.0 * o * m * n
    return {
        "sample": 2 * SYMMETRIC * m * m * n + update + work.solve(m, o, diagonal=True),
        "row": work.row(m, n, o, update, traffic) + work.solve(m, o),
        "dense": 2 * SYMMETRIC * m * n * n + update + 4 * traffic + work.solve(n, o),
    }


def mean_costs(m: int, n: int, o: int, element_size: int, iterative: bool) -> dict[str, float]:
    """Operations of each route with the mean input factor.

    An iteration needs ‖G⊥‖ and multiplies G⊥ by a number; the factored inverse needs no norm and
    multiplies G⊥, in coefficients or formed, by an o × o matrix.

    >>> c = mean_costs(m=1000, n=3072, o=16, element_size=4, iterative=True)
    >>> min(c, key=c.get)
    'dense'
    """
    traffic = FLOPS_PER_BYTE * element_size * o * n
    update = 2.0 * o * m * n
    if iterative:
        grams = 2 * SYMMETRIC * m * m * (n + o)
        return {"sample": grams + update, "dense": update + 4 * traffic}
    left = 2.0 * o * o
    return {"sample": left * m + update, "dense": left * n + update + 6 * traffic}
