"""Which coordinates a layer is solved in: a stated cost model, or what the user forces.

Costs are floating-point operations at the speed of a matrix product. Memory traffic counts `FLOPS_PER_BYTE`
operations a byte (about what one core does while it waits for a byte), and a factorisation of order k what it
takes at that speed: k³/3 + 200k² for Cholesky, 9k³ + 3000k² for eigenvectors, 5k²n + 4000k² for the QR
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
from dataclasses import dataclass
from typing import Literal, get_args

from curvlab.curvature import LayerCurvature
from curvlab.exceptions import PairError
from curvlab.gradient import RowGradient
from curvlab.linalg import DenseFactor, GramFactor
from curvlab.linalg.inputs import InputKind
from curvlab.solvers.mean_side import MeanSide
from curvlab.solvers.sides import (
    DenseSide,
    EigenSide,
    InputSide,
    RowSide,
    SampleSide,
    WeightGradient,
)

__all__ = ["Eigen", "Inverse", "Iteration", "Route", "Work", "costs", "mean_costs", "side_for"]

Route = Literal["auto", "sample", "row", "dense"]
FLOPS_PER_BYTE = 6.0
SYMMETRIC = 0.65  # share of a full product that a symmetric one costs
PASSES = 30.0  # operations a byte of a vector that the vector operations of an iteration take


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


def side_for(
    layer: LayerCurvature,
    gradient: WeightGradient,
    kind: InputKind,
    route: Route,
    work: Work,
) -> InputSide:
    """The side of `layer` to solve on, by the cost model or as `route` forces it.

    An iteration takes inner products of coordinates: these are then orthonormal, and the norm of G⊥ is known.
    """
    inputs = layer.inputs
    assert inputs is not None
    own = isinstance(gradient, RowGradient) and gradient.inputs is inputs.full
    iterative = isinstance(work, Iteration)
    if route == "auto":
        chosen = _choose(layer, gradient, kind, work, own)
    else:
        chosen = _forced(layer, kind, route, own)
    if kind == "mean":
        return MeanSide(inputs, chosen, norm=iterative)
    assert isinstance(inputs.full, GramFactor | DenseFactor)
    if chosen == "dense" or isinstance(inputs.full, DenseFactor):
        return DenseSide(inputs.full)
    if chosen == "row":
        return RowSide(inputs.full)
    return EigenSide(inputs.full) if iterative else SampleSide(inputs.full)


def _choose(
    layer: LayerCurvature,
    gradient: WeightGradient,
    kind: InputKind,
    work: Work,
    own: bool,
) -> str:
    assert layer.inputs is not None
    full = layer.inputs.full
    o, n = gradient.shape
    if kind == "mean":
        if not (own and isinstance(gradient, RowGradient)):
            return "dense"
        rows = gradient.inputs.rows
        options = mean_costs(rows.shape[0], n, o, rows.element_size(), isinstance(work, Iteration))
    elif isinstance(full, GramFactor):
        options = costs(full.rows.shape[0], n, o, work, full.rows.element_size())
        options = {k: v for k, v in options.items() if _possible(k, full, own)}
    else:
        return "dense"
    return min(options, key=lambda name: options[name])


def _possible(route: str, full: GramFactor, own: bool) -> bool:
    return route == "dense" or (route == "sample" and own) or (route == "row" and full.narrow)


def _forced(layer: LayerCurvature, kind: InputKind, route: str, own: bool) -> str:
    if route not in get_args(Route):
        raise PairError(f"route `{route}` does not exist; use one of {', '.join(get_args(Route))}")
    assert layer.inputs is not None
    full = layer.inputs.full
    if route == "sample" and not own:
        raise PairError(
            f"layer `{layer.name}`: route `sample` needs the gradient of the very batch the curvature was "
            f"estimated on, as problem.gradient() gives it; use route `row`, `dense` or `auto` for any other"
        )
    if route == "row" and kind == "full" and not (isinstance(full, GramFactor) and full.narrow):
        raise PairError(
            f"layer `{layer.name}`: route `row` needs an input factor kept as fewer rows than it has "
            f"columns; use route `dense` or `auto`"
        )
    return route
