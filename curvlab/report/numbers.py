"""Numbers as people read them: three digits, one unit a column, and nothing where nothing is known."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["MISSING", "Unit", "byte_unit", "byte_words", "digits", "percent", "second_unit", "second_words"]

MISSING = "–"
SECONDS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
BYTES = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"))


@dataclass(frozen=True)
class Unit:
    """A unit and how many seconds or bytes it is."""

    size: float
    name: str

    def __call__(self, value: float) -> str:
        return digits(value / self.size)


def second_unit(values: Iterable[float]) -> Unit:
    """The unit in which the typical of these seconds reads well.

    >>> second_unit([0.0021, 0.013]).name
    'ms'
    """
    return _unit(values, SECONDS)


def byte_unit(values: Iterable[float]) -> Unit:
    """The unit in which the typical of these byte counts reads well (1 kB = 1000 B)."""
    return _unit(values, BYTES)


def digits(value: float, count: int = 3) -> str:
    """Three significant digits, without an exponent while that is short.

    >>> digits(0.012345), digits(1234.5), digits(1.2e-7), digits(0.0), digits(float("nan"))
    ('0.0123', '1234', '1.20e-07', '0', '–')
    """
    value = float(value)
    if math.isnan(value):
        return MISSING
    if value == 0:
        return "0"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    exponent = math.floor(math.log10(abs(value)))
    if not -4 <= exponent <= 6:
        return f"{value:.{count - 1}e}"
    return f"{value:.{max(0, count - 1 - exponent)}f}"


def percent(ratio: float) -> str:
    """A ratio in per cent.

    >>> percent(0.1234), percent(3.5e-9)
    ('12.3 %', 'under 0.001 %')
    """
    if 0 < ratio < 1e-5:
        return "under 0.001 %"
    return f"{digits(100 * ratio)} %"


def second_words(seconds: float) -> str:
    """Seconds with the unit that suits them.

    >>> second_words(0.00152)
    '1.52 ms'
    """
    unit = second_unit([seconds])
    return f"{unit(seconds)} {unit.name}"


def byte_words(count: float) -> str:
    """Bytes with the unit that suits them.

    >>> byte_words(3_400_000)
    '3.40 MB'
    """
    unit = byte_unit([count])
    return f"{unit(count)} {unit.name}"


def _unit(values: Iterable[float], units: tuple[tuple[float, str], ...]) -> Unit:
    """The largest unit that the median value reaches; a column has one, so that it can be compared."""
    known = sorted(value for value in values if math.isfinite(value) and value > 0)
    typical = known[len(known) // 2] if known else 1.0
    fitting = [unit for unit in units if unit[0] <= typical]
    return Unit(*(fitting[-1] if fitting else units[0]))
