"""Which coordinates a layer is solved in: a stated cost model, or what the user forces.

Costs are floating-point operations, with memory traffic counted at `FLOPS_PER_BYTE` operations a byte
(about what one core does while it waits for a byte). For m rows, n = n_{t-1} inputs, o = n_t outputs and
i passes of the solver over the system:

    sample   K            m²n + i (o m² + o² m)      and the update  2 o m n
    row      QR, G, D     4 m²n + 8 o m n + i (o m² + o² m)           + traffic of G and D
    dense    E[hhᵀ], G    m n² + 2 o m n + n³/3 + i (o n² + o² n)     + traffic of G and D

The mean input factor has nothing of n × n; it only chooses between the sample space (for an iteration: ‖G⊥‖
from the Gram matrix, m²n) and forming G (traffic of G and D).
"""

from __future__ import annotations

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

__all__ = ["Route", "costs", "mean_costs", "side_for"]

Route = Literal["auto", "sample", "row", "dense"]
FLOPS_PER_BYTE = 6.0
SYMMETRIC = 0.65  # share of a full product that a symmetric one costs


def costs(m: int, n: int, o: int, passes: float, element_size: int) -> dict[str, float]:
    """Operations of each route with the full input factor.

    >>> c = costs(m=100, n=150528, o=1024, passes=1, element_size=4)
    >>> min(c, key=c.get)
    'sample'
    """
    traffic = FLOPS_PER_BYTE * element_size * o * n
    update = 2.0 * o * m * n
    small = passes * 2 * (o * m * m + o * o * m)
    return {
        "sample": 2 * SYMMETRIC * m * m * n + m**3 / 3 + small + update,
        "row": 8.0 * m * m * n + 4 * update + small + 6 * traffic,
        "dense": 2 * SYMMETRIC * m * n * n
        + update
        + n**3 / 3
        + passes * 2 * (o * n * n + o * o * n)
        + 4 * traffic,
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
        return {"sample": 2.0 * m * m * n + update, "dense": update + 6 * traffic}
    left = 2.0 * o * o
    return {"sample": left * m + update, "dense": left * n + update + 6 * traffic}


def side_for(
    layer: LayerCurvature,
    gradient: WeightGradient,
    kind: InputKind,
    route: Route,
    passes: float,
    iterative: bool = False,
) -> InputSide:
    """The side of `layer` to solve on, by the cost model or as `route` forces it.

    `iterative` is for solvers that take inner products of coordinates: these are then orthonormal, and
    the norm of G⊥ is known.
    """
    inputs = layer.inputs
    assert inputs is not None
    own = isinstance(gradient, RowGradient) and gradient.inputs is inputs.full
    if route == "auto":
        chosen = _choose(layer, gradient, kind, passes, own, iterative)
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
    passes: float,
    own: bool,
    iterative: bool,
) -> str:
    assert layer.inputs is not None
    full = layer.inputs.full
    o, n = gradient.shape
    if kind == "mean":
        if not (own and isinstance(gradient, RowGradient)):
            return "dense"
        rows = gradient.inputs.rows
        options = mean_costs(rows.shape[0], n, o, rows.element_size(), iterative)
    elif isinstance(full, GramFactor):
        options = costs(full.rows.shape[0], n, o, passes, full.rows.element_size())
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
