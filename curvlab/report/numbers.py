"""Numbers and names as people read them: three digits, one unit per column, lists in words.

The terminal and the page write every number of a `Column` by these functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from curvlab.studies.schema import ColumnKind

__all__ = [
    "MISSING",
    "Unit",
    "byte_unit",
    "byte_words",
    "column_unit",
    "count_words",
    "digits",
    "join_names",
    "number_words",
    "percent",
    "second_unit",
    "second_words",
    "sentence",
    "with_spread",
]


MISSING = "–"
SECONDS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
BYTES = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"), (1e15, "PB"))
OPERATIONS = ((1.0, "flop"), (1e3, "kflop"), (1e6, "Mflop"), (1e9, "Gflop"), (1e12, "Tflop"), (1e15, "Pflop"))
UNITS = {"seconds": SECONDS, "bytes": BYTES, "operations": OPERATIONS}


@dataclass(frozen=True)
class Unit:
    """A unit and how many seconds, bytes or operations it is."""

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

    >>> percent(0.1234), percent(3.5e-9), percent(float("nan"))
    ('12.3 %', 'under 0.001 %', '–')
    """
    if math.isnan(ratio):
        return MISSING
    if 0 < ratio < 1e-5:
        return "under 0.001 %"
    return f"{digits(100 * ratio)} %"


def second_words(seconds: float) -> str:
    """Seconds with the unit that suits them.

    >>> second_words(0.00152)
    '1.52 ms'
    """
    return _with_unit(seconds, second_unit([seconds]))


def byte_words(count: float) -> str:
    """Bytes with the unit that suits them.

    >>> byte_words(3_400_000), byte_words(90.6e9)
    ('3.40 MB', '90.6 GB')
    """
    return _with_unit(count, byte_unit([count]))


def with_spread(seconds: float, spread: float) -> str:
    """A median with its interquartile range, where that is known, in one unit and to the same place.

    >>> with_spread(0.0123, 0.0004), with_spread(0.0123, math.nan)
    ('12.3 ± 0.4 ms', '12.3 ms')
    """
    if math.isnan(seconds) or math.isnan(spread):
        return second_words(seconds)
    unit = second_unit([seconds])
    value = unit(seconds)
    places = len(value.partition(".")[2]) if "e" not in value else 0
    return f"{value} ± {spread / unit.size:.{places}f} {unit.name}"


def column_unit(kind: ColumnKind, values: Iterable[float]) -> Unit | None:
    """The one unit of a column of a table; None for a kind without units.

    >>> column_unit("operations", [2e6, 3e6]).name
    'Mflop'
    """
    return _unit(values, UNITS[kind]) if kind in UNITS else None


def number_words(kind: ColumnKind, value: float) -> str:
    """A number of a column by itself, with the unit that suits it.

    >>> number_words("percent", 0.872), number_words("loss", 0.64881), number_words("count", 20.0)
    ('87.2 %', '0.6488', '20')
    """
    if math.isnan(value):
        return MISSING
    if kind in UNITS:
        return _with_unit(value, _unit([value], UNITS[kind]))
    return FORMS.get(kind, digits)(value)


FORMS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: digits(value, 4),
    "plain": lambda value: f"{value:g}",
    "count": lambda value: f"{value:.0f}",
    "percent": percent,
    "flag": lambda value: "yes" if value else "no",
}


def _with_unit(value: float, unit: Unit) -> str:
    return MISSING if math.isnan(value) else f"{unit(value)} {unit.name}"


def _unit(values: Iterable[float], units: tuple[tuple[float, str], ...]) -> Unit:
    """The largest unit that the median value reaches; a column has one, so that it can be compared."""
    known = sorted(value for value in values if math.isfinite(value) and value > 0)
    typical = known[len(known) // 2] if known else 1.0
    fitting = [unit for unit in units if unit[0] <= typical]
    return Unit(*(fitting[-1] if fitting else units[0]))


def join_names(names: Sequence[str], last: str = "and") -> str:
    """Names as a list in words.

    >>> join_names(["a", "b", "c"])
    'a, b and c'
    """
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


def count_words(count: int, noun: str) -> str:
    """A count with its noun.

    >>> count_words(1, "pair"), count_words(3, "pair")
    ('1 pair', '3 pairs')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def sentence(text: str) -> str:
    """The text, ended by a full stop."""
    return text if text.endswith((".", "!", "?")) else text + "."
