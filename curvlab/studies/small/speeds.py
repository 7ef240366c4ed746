"""How fast a device does each kind of operation, by size: measured one operation at a time.

    seconds of an operation = max(flops / rate(kind, side), stream(bytes))

`side` is the shortest side of its matrices: a product of few rows reads as much as it computes, a small
factorisation is a chain of dependent numbers, and neither comes near the peak. Kinds are products and the
factorisations that solvers use. `stream` is the time of an addition that touches as many bytes, in a cache or
not. What every operation costs the host, however small, is taken off: it is counted apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from statistics import median

import torch
from torch import Tensor

from curvlab.measure.operations import Launch, Operations
from curvlab.measure.stopwatch import timed

__all__ = ["Curve", "Speeds", "measure_speeds"]

SIDES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FACTORISED = (8, 16, 32, 64, 128, 256, 512, 1024)
ENTRIES = tuple(1 << k for k in range(8, 24, 2))
OTHER, COLUMNS = 512, 256
ROUNDS, LEAST = 5, 2e-3


@dataclass(frozen=True)
class Curve:
    """A positive quantity by a positive size, interpolated between the measured points on both logarithms.

    >>> Curve(((1, 1.0), (4, 16.0))).at(2), Curve(((1, 1.0), (4, 16.0))).at(100)
    (4.0, 16.0)
    """

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        """The quantity; beyond the ends that of the end."""
        place = bisect_left(self.points, (size,))
        if place == 0:
            return self.points[0][1]
        if place == len(self.points):
            return self.points[-1][1]
        (before, low), (after, high) = self.points[place - 1 : place + 1]
        share = (log(size) - log(before)) / (log(after) - log(before))
        return exp((1 - share) * log(low) + share * log(high))


@dataclass(frozen=True)
class Speeds:
    """Operations a second of products and of each factorisation by side, bytes a second by bytes."""

    product: Curve
    factorisations: dict[str, Curve]
    stream: Curve

    def of(self, launch: Launch) -> float:
        """Seconds of one operation, without what it costs the host."""
        moved = launch.bytes / self.stream.at(max(1, launch.bytes))
        if not launch.flops:
            return moved
        curve = self.factorisations.get(launch.name, self.product)
        return max(moved, launch.flops / curve.at(max(1, launch.side)))

    def seconds(self, asked: Operations) -> float:
        """Those of a whole run."""
        return sum(self.of(launch) for launch in asked.launches)


def measure_speeds(device: str | torch.device = "cpu") -> Speeds:
    """Measure them on a device: about two seconds on a CPU."""
    device = torch.device(device)
    small = torch.ones(1, 1, device=device)
    launch = _seconds(lambda: small @ small, device)

    def rate(work: Callable[[], object], amount: float) -> float:
        """Amount a second, the host's part taken off."""
        seconds = _seconds(work, device)
        return amount / max(seconds - launch, seconds / 10)

    def product(side: int) -> float:
        other = torch.ones(OTHER, OTHER, device=device)
        given = torch.ones(side, OTHER, device=device)
        return rate(lambda: given @ other, 2 * side * OTHER**2)

    def addition(entries: int) -> float:
        x, into = torch.ones(entries, device=device), torch.empty(entries, device=device)
        return rate(lambda: torch.add(x, x, out=into), 12 * entries)

    return Speeds(
        Curve(tuple((side, product(side)) for side in SIDES)),
        {name: _curve(work, amount, rate, device) for name, (work, amount) in _FACTORISATIONS.items()},
        Curve(tuple((12 * entries, addition(entries)) for entries in ENTRIES)),
    )


Rate = Callable[[Callable[[], object], float], float]
Work = Callable[[Tensor, Tensor, Tensor], object]


def _curve(work: Work, amount: Callable[[int], float], rate: Rate, device: torch.device) -> Curve:
    points = []
    for side in FACTORISED:
        matrix = torch.full((side, side), 1 / side, device=device)
        matrix.diagonal().add_(1)
        lower, columns = torch.linalg.cholesky(matrix), torch.ones(side, COLUMNS, device=device)
        points.append((side, rate(lambda a=matrix, b=lower, c=columns: work(a, b, c), amount(side))))  # type: ignore[misc]
    return Curve(tuple(points))


_FACTORISATIONS: dict[str, tuple[Work, Callable[[int], float]]] = {
    "aten.linalg_cholesky_ex": (lambda a, lower, x: torch.linalg.cholesky_ex(a), lambda n: n**3 / 3),
    "aten.cholesky_inverse": (lambda a, lower, x: torch.cholesky_inverse(lower), lambda n: 2 * n**3 / 3),
    "aten.cholesky_solve": (
        lambda a, lower, x: torch.cholesky_solve(x, lower),
        lambda n: 2 * n**2 * COLUMNS,
    ),
    "aten.linalg_solve_triangular": (
        lambda a, lower, x: torch.linalg.solve_triangular(lower, x, upper=False),
        lambda n: n**2 * COLUMNS,
    ),
}


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the median of rounds of as many as take `LEAST` seconds together."""
    work()
    once = timed(work, device)[0]
    calls = max(1, round(LEAST / max(once, 1e-7)))

    def several() -> None:
        for _ in range(calls):
            work()

    return median(timed(several, device)[0] / calls for _ in range(ROUNDS))
