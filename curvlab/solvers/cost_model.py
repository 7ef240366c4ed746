"""Which coordinates a layer is solved in: a stated cost model, or what the user forces.

Costs are floating-point operations at the speed of a matrix product. Memory traffic counts `FLOPS_PER_BYTE`
operations per byte (about what one core does while it waits for a byte), and a factorisation of order k what
it takes at that speed: k³/3 + 200k² for Cholesky, 9k³ + 3000k² for eigenvectors, 5k²n + 4000k² for the QR
decomposition of k rows of n. For m rows, n = n_{t-1} inputs and o = n_t outputs:

    sample   K            m²n + solve(m)                  and the update  2 o m n
    row      QR, G, D     qr(m, n) + 10 o m n + solve(m)      + traffic of G and D
    dense    E[hhᵀ], G    m n² + 2 o m n + solve(n)           + traffic of G and D

where solve(k) is the work on coordinates of k columns: factorisation and products of the factored inverse
and of the exact solution; an iteration's products with B (and with the k × k matrix, unless it is diagonal).

The mean input factor has nothing of n × n; it only chooses between the sample space (for an iteration: ‖G⊥‖
from the Gram matrix, m²n) and forming G (traffic of G and of the update).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from curvlab.curvature import LayerCurvature
from curvlab.exceptions import PairError
from curvlab.linalg import DiagonalFactor, Factor, GramFactor
from curvlab.linalg.factors import InputKind
from curvlab.linalg.steps import RowGradient
from curvlab.solvers.input_coordinates import (
    DenseCoordinates,
    DiagonalCoordinates,
    EigenCoordinates,
    InputCoordinates,
    MeanCoordinates,
    RowCoordinates,
    SampleCoordinates,
    WeightGradient,
)
from curvlab.solvers.systems import input_factors

__all__ = ["Eigen", "Inverse", "Iteration", "Route", "Work", "choose_coordinates", "costs", "mean_costs"]

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

    def outside(self, n: int, o: int) -> float:
        """Operations on what lies outside of the coordinates."""
        return 0.0


@dataclass(frozen=True)
class Inverse(Work):
    """The factored inverse: a Cholesky factorisation, its inverse or its solves, and products with B⁻¹."""

    def solve(self, k: int, o: int, diagonal: bool = False) -> float:
        inverse = 2.0 * k * k * o if o < k else 2.0 * k * k * o + 1.3 * k**3 + 300.0 * k * k
        return _cholesky(k) + inverse + 2.0 * o * o * k

    def outside(self, n: int, o: int) -> float:
        return 2.0 * o * o * n


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
        "row": _qr(m, n) + 5 * update + 6 * traffic + work.solve(m, o) + work.outside(n, o),
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


def choose_coordinates(
    layer: LayerCurvature,
    gradient: WeightGradient,
    kind: InputKind,
    route: Route,
    work: Work,
) -> InputCoordinates:
    """The coordinates to solve `layer` in, by the cost model or as `route` forces them.

    An iteration takes inner products of coordinates: these are then orthonormal, and the norm of G⊥ is known.
    """
    inputs = input_factors(layer)
    own = isinstance(gradient, RowGradient) and gradient.inputs.shares_rows_with(inputs.full)
    iterative = isinstance(work, Iteration)
    if kind == "mean" and not own and route != "sample":
        return MeanCoordinates(inputs, "dense", norm=iterative)  # E[hhᵀ] is not even formed
    if route == "auto":
        chosen = _cheapest_route(inputs.full, gradient.shape, kind, work, own)
    else:
        chosen = _check_route(layer.name, inputs.full, kind, route, own)
    if kind == "mean":
        return MeanCoordinates(inputs, chosen, norm=iterative)
    if isinstance(inputs.full, DiagonalFactor):
        return DiagonalCoordinates(inputs.full)
    if chosen == "dense" or not isinstance(inputs.full, GramFactor):
        return DenseCoordinates(inputs.full)
    if chosen == "row":
        return RowCoordinates(inputs.full)
    return EigenCoordinates(inputs.full) if iterative else SampleCoordinates(inputs.full)


def _cheapest_route(full: Factor, shape: Sequence[int], kind: InputKind, work: Work, own: bool) -> str:
    """The cheapest route for a weight of this shape; `own`: its gradient has the rows of `full`."""
    if not isinstance(full, GramFactor) or (kind == "mean" and not own):
        return "dense"
    (m, n), o, size = full.rows.shape, shape[0], full.rows.element_size()
    if kind == "mean":
        options = mean_costs(m, n, o, size, isinstance(work, Iteration))
    else:
        options = costs(m, n, o, work, size)
        possible = {"dense"} | ({"sample"} if own else set()) | ({"row"} if full.narrow else set())
        options = {name: cost for name, cost in options.items() if name in possible}
    return min(options, key=lambda name: options[name])


def _check_route(layer: str, full: Factor, kind: InputKind, route: Route, own: bool) -> str:
    """The route that a forced one runs as; refused where there is none."""
    if route == "sample" and not own:
        raise PairError(
            f"layer `{layer}`: route `sample` needs the gradient of the very batch the curvature was "
            f"estimated on, as problem.gradient() gives it; use route `row`, `dense` or `auto` for any other"
        )
    if kind == "mean":
        # The row space of the mean factor is one vector: both routes form G and are one and the same.
        return "dense" if route == "row" else route
    if route == "row" and not (isinstance(full, GramFactor) and full.narrow):
        raise PairError(
            f"layer `{layer}`: route `row` needs an input factor kept as fewer rows than it has "
            f"columns; use route `dense` or `auto`"
        )
    return route
