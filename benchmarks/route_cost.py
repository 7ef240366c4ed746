"""The cost model against the clock: for m rows and n = n_{t-1} inputs, the route it chose and the best one.

One layer of `OUTPUTS` units is solved, and its weights updated, on every route that exists for it: for the
gradient of the batch, in factors, and for a tensor, as any other gradient is (with the mean input factor only
one route is left then, so there is nothing to choose). A route
that takes several times as long as the fastest at its first call is not measured further. Times are those of
the processor, which other programs on the machine change little.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from time import process_time

import torch

import curvlab
from benchmarks.workload import cold
from curvlab.architectures import FCNN
from curvlab.exceptions import PairError
from curvlab.measure.stopwatch import interleaved
from curvlab.solvers import solvers

ROWS = (32, 100, 500, 1000)
WIDTHS = (64, 256, 1024, 3072)
OUTPUTS = 256
FULL = ("kfi", "cg", "exact")
CHOICES = [
    *((solver, "own") for solver in (*FULL, "sm-kfi", "ea-cg")),
    *((solver, "other") for solver in FULL),
]
ROUTES = ("sample", "row", "dense")
LIMIT = 1.2
HOPELESS = 3.0
ALPHA = 0.05


def rows(repetitions: int) -> list[dict[str, object]]:
    """One row for each solver, m and n."""
    measured = [
        {"solver": solver, "gradient": given, "n": n, "m": m, **row(problem, solver, given, repetitions)}
        for n, m in product(WIDTHS, ROWS)
        for problem in [first_layer(m, n)]
        for solver, given in CHOICES
    ]
    return sorted(measured, key=lambda found: CHOICES.index((str(found["solver"]), str(found["gradient"]))))


def first_layer(m: int, n: int) -> curvlab.Problem:
    """A network of two layers, of which the first is looked at."""
    model = FCNN(widths=(n, OUTPUTS, 10)).build(seed=0)
    draws = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(m, n, generator=draws), torch.randint(10, (m,), generator=draws)
    return curvlab.Problem(model, "cross-entropy", inputs, targets, layers=["0"])


def row(problem: curvlab.Problem, solver: str, given: str, repetitions: int) -> dict[str, object]:
    """The chosen route, and how its time compares with the best route's."""
    curvature, gradient = curvlab.estimate("pch-1", problem), problem.gradient()
    model = copy.deepcopy(problem.model)  # updated in place of the problem's, which the curvature is of

    formed = dict(gradient.items())

    def solve(route: str) -> curvlab.Solution:
        renewed, own = cold(curvature, gradient)
        used = own if given == "own" else formed
        solution = curvlab.solve(f"{solver}[route={route}]", renewed, used, alpha=ALPHA)
        solution.add_to(model, lr=1e-6)
        return solution

    chosen = solve("auto").blocks["0.weight"].route
    # With the mean input factor there is nothing to take a QR decomposition of: `row` is `dense`.
    routes = [r for r in ROUTES if r != "row" or solvers.make(solver).input_factor == "full"]
    calls = {route: partial(solve, route) for route in routes}
    timings = interleaved({route: calls[route] for route in _worth(calls, chosen)}, repetitions)
    medians = {route: timing.processor.median for route, timing in timings.items()}
    best = min(medians, key=lambda route: medians[route])
    share = medians[chosen] / medians[best]
    return {
        "chosen": chosen,
        "best": best,
        **{f"{route}, ms": f"{medians[route] * 1e3:.2f}" for route in ROUTES if route in medians},
        "times best": f"{share:.2f}",
        "verdict": "ok" if share <= LIMIT else "ABOVE",
    }


def _worth(calls: Mapping[str, Callable[[], object]], chosen: str) -> list[str]:
    """The routes that exist here and may be the fastest, and the chosen one."""
    first: dict[str, float] = {}
    for route, call in calls.items():
        try:
            first[route] = _seconds(call)
        except PairError:
            continue
        if first[route] <= 2 * HOPELESS * min(first.values()):  # a first call has more to do
            first[route] = _seconds(call)
    return [route for route, s in first.items() if route == chosen or s <= HOPELESS * min(first.values())]


def _seconds(call: Callable[[], object]) -> float:
    started = process_time()
    call()
    return process_time() - started
