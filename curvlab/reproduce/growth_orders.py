"""Orders of growth: the paper's O(·) for one layer and curvlab's, and the exponents fitted to measured costs.

The paper's Table 1, with m for |Batch|:

    curvature time   m n_t² (Fisher), n_{t-1}² n_t (Gauss-Newton and PCH)
    KFI              time n_t³ + n_{t-1}³ + n_{t-1}² n_t + n_{t-1} n_t²,   space n_{t-1}² + n_t²
    EA-CG            time |CG| (n_t² + 2 n_t n_{t-1}),                     space n_{t-1} + n_t²

and, from its analysis of space, Σ n_t² for the blocks of any curvature. Table 1 leaves out a term of the
recursion that the paper's own analysis of time has, n_{t-1} n_t², and what E[σ'σ'ᵀ] and E[hhᵀ] take, m n²;
curvlab's polynomials have them. The latter are orders, too: their terms have no constants.

An exponent is the slope of log(cost) over log(size), and stands beside the one that a formula has there:

    log y = a + b log x,    b ± t_{0.975, points - 2} · stderr(b)    by least squares

A sum of powers is no power: over a ladder that ends, n³ + c n² has less than 3. So every formula is fitted
the same way, at the very sizes that were measured; the highest power is what it tends to. Operations and
bytes are counted, not sampled: their interval says how far the logarithms are from a line, and nothing of
noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan, prod
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.reproduce.growth_sweeps import ITERATIVE, SAMPLE_SPACE, SYMBOLS, TEXTBOOK, VARIABLES

__all__ = [
    "RESOURCES",
    "Exponent",
    "Order",
    "Term",
    "curvlab_order",
    "exponent_table",
    "fit_exponent",
    "fits",
    "paper_order",
]

RESOURCES = {"seconds": "time", "operations": "time", "peak_bytes": "space"}
POWERS = {1: "", 2: "²", 3: "³"}


@dataclass(frozen=True)
class Term:
    """A coefficient times powers of the sizes.

    >>> str(Term(2, outputs=1, inputs=2))
    '2 n_{t-1}² n_t'
    """

    coefficient: int = 1
    inputs: int = 0
    outputs: int = 0
    batch: int = 0
    iterations: int = 0

    def __call__(self, sizes: Mapping[str, float]) -> float:
        return self.coefficient * prod(float(sizes[name]) ** self.degree(name) for name in VARIABLES)

    def degree(self, variable: str) -> int:
        """The power of a variable."""
        power: int = getattr(self, variable)
        return power

    def __str__(self) -> str:
        symbols = (
            SYMBOLS[name] + POWERS[self.degree(name)]
            for name in ("iterations", "batch", "inputs", "outputs")
            if self.degree(name)
        )
        return " ".join([str(self.coefficient)] * (self.coefficient != 1) + list(symbols)) or "1"


@dataclass(frozen=True)
class Order:
    """A sum of terms: how a cost grows.

    >>> order = Order(Term(outputs=2), Term(2, outputs=1, inputs=1))
    >>> str(order), order({"outputs": 3, "inputs": 5, "batch": 1, "iterations": 1}), order.degree("inputs")
    ('n_t² + 2 n_{t-1} n_t', 39.0, 1)
    """

    terms: tuple[Term, ...]

    def __init__(self, *terms: Term) -> None:
        object.__setattr__(self, "terms", terms)

    def __call__(self, sizes: Mapping[str, float]) -> float:
        return sum(term(sizes) for term in self.terms)

    def degree(self, variable: str) -> int:
        """The exponent in one variable as it goes to infinity while the others stay."""
        return max(term.degree(variable) for term in self.terms)

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


def paper_order(resource: str, quantity: str, subject: str) -> Order | None:
    """The paper's O(·) of `time` or `space`; None where it says nothing.

    >>> str(paper_order("space", "solve", "ea-cg")), paper_order("space", "solve", "cg")
    ('n_{t-1} + n_t²', None)
    """
    return PAPER.get((resource, quantity, subject))


def curvlab_order(resource: str, quantity: str, subject: str, formulation: str) -> Order | None:
    """The order of what curvlab computes in this formulation; None where it computes nothing.

    >>> str(curvlab_order("time", "solve", "ea-cg", "sample space"))
    'm² n_{t-1} + m² n_t + |CG| n_t²'
    """
    return CURVLAB.get((resource, quantity, subject, formulation))


RECURSION_BLOCKS = Order(Term(inputs=2), Term(outputs=2))
TABLE_RECURSION = Order(Term(inputs=2, outputs=1))
PAPER: dict[tuple[str, str, str], Order] = {
    ("time", "curvature", "fisher"): Order(Term(batch=1, outputs=2)),
    ("time", "curvature", "gauss-newton"): TABLE_RECURSION,
    ("time", "curvature", "pch-1"): TABLE_RECURSION,
    ("space", "curvature", "fisher"): Order(Term(outputs=2)),
    ("space", "curvature", "gauss-newton"): RECURSION_BLOCKS,
    ("space", "curvature", "pch-1"): RECURSION_BLOCKS,
    ("time", "solve", "kfi"): Order(
        Term(outputs=3), Term(inputs=3), Term(inputs=2, outputs=1), Term(inputs=1, outputs=2)
    ),
    ("space", "solve", "kfi"): Order(Term(inputs=2), Term(outputs=2)),
    ("time", "solve", "ea-cg"): Order(
        Term(iterations=1, outputs=2), Term(2, iterations=1, inputs=1, outputs=1)
    ),
    ("space", "solve", "ea-cg"): Order(Term(inputs=1), Term(outputs=2)),
}

ROWS = Term(batch=1, outputs=1)  # the layer's output gradients, scaled, or the coefficients M of D = M H
GRADIENT = Term(inputs=1, outputs=1)
OUTPUT = Term(outputs=2)
OUTPUT_INVERSE = Term(outputs=3)
INPUT = Term(inputs=2)
FORM_INPUT = Term(batch=1, inputs=2)
MEAN = Term(batch=1, inputs=1)
GRAM = Term(batch=2, inputs=1)
GRAM_INVERSE = Term(batch=3)
GRAM_SPACE = Term(batch=2)
FORM_OUTPUT = Term(batch=1, outputs=2)
GRAM_OUTPUT = Term(batch=2, outputs=1)
RECURSION_TIME = Order(Term(inputs=2, outputs=1), Term(inputs=1, outputs=2), FORM_INPUT, FORM_OUTPUT)
RECURSION_SPACE = Order(INPUT, GRADIENT, OUTPUT, MEAN, ROWS)
CG_OUTPUT = Term(iterations=1, outputs=2)

CURVLAB: dict[tuple[str, str, str, str], Order] = {
    ("time", "curvature", "fisher", TEXTBOOK): Order(FORM_OUTPUT),
    ("space", "curvature", "fisher", TEXTBOOK): Order(OUTPUT, ROWS),
    ("time", "curvature", "gauss-newton", TEXTBOOK): RECURSION_TIME,
    ("space", "curvature", "gauss-newton", TEXTBOOK): RECURSION_SPACE,
    ("time", "curvature", "pch-1", TEXTBOOK): RECURSION_TIME,
    ("space", "curvature", "pch-1", TEXTBOOK): RECURSION_SPACE,
    ("time", "solve", "kfi", TEXTBOOK): Order(
        OUTPUT_INVERSE, Term(inputs=3), Term(inputs=2, outputs=1), Term(inputs=1, outputs=2), FORM_INPUT
    ),
    ("space", "solve", "kfi", TEXTBOOK): Order(INPUT, OUTPUT, GRADIENT),
    ("time", "solve", "kfi", SAMPLE_SPACE): Order(
        GRAM, GRAM_INVERSE, OUTPUT_INVERSE, FORM_OUTPUT, GRAM_OUTPUT
    ),
    ("space", "solve", "kfi", SAMPLE_SPACE): Order(GRAM_SPACE, OUTPUT, ROWS),
    ("time", "solve", "sm-kfi", TEXTBOOK): Order(OUTPUT_INVERSE, Term(inputs=1, outputs=2), MEAN),
    ("space", "solve", "sm-kfi", TEXTBOOK): Order(OUTPUT, GRADIENT),
    ("time", "solve", "sm-kfi", SAMPLE_SPACE): Order(OUTPUT_INVERSE, FORM_OUTPUT, MEAN),
    ("space", "solve", "sm-kfi", SAMPLE_SPACE): Order(OUTPUT, ROWS, Term(inputs=1)),
    ("time", "solve", "ea-cg", TEXTBOOK): Order(CG_OUTPUT, Term(iterations=1, inputs=1, outputs=1), MEAN),
    ("space", "solve", "ea-cg", TEXTBOOK): Order(OUTPUT, GRADIENT),
    ("time", "solve", "ea-cg", SAMPLE_SPACE): Order(GRAM, GRAM_OUTPUT, CG_OUTPUT),
    ("space", "solve", "ea-cg", SAMPLE_SPACE): Order(OUTPUT, GRAM_SPACE, ROWS, Term(inputs=1)),
    ("time", "solve", "cg", TEXTBOOK): Order(
        Term(iterations=1, inputs=1, outputs=2), Term(iterations=1, inputs=2, outputs=1), FORM_INPUT
    ),
    ("space", "solve", "cg", TEXTBOOK): Order(INPUT, OUTPUT, GRADIENT),
    ("time", "solve", "cg", SAMPLE_SPACE): Order(
        GRAM, GRAM_INVERSE, GRAM_OUTPUT, Term(iterations=1, batch=1, outputs=2)
    ),
    ("space", "solve", "cg", SAMPLE_SPACE): Order(OUTPUT, GRAM_SPACE, ROWS),
}

LADDER = ["quantity", "subject", "formulation", "variable"]
LEAST_POINTS = 3
NOTHING = "–"


@dataclass(frozen=True)
class Exponent:
    """A fitted exponent with its confidence interval; `constant` is the cost at size 1 on the fitted line."""

    exponent: float
    low: float
    high: float
    r2: float
    constant: float
    points: int


def fit_exponent(sizes: Sequence[float], costs: Sequence[float], confidence: float = 0.95) -> Exponent:
    """Fit log(cost) over log(size); points without a positive cost are left out, as they have no logarithm.

    >>> found = fit_exponent([1, 2, 4, 8], [3, 12, 48, 192])
    >>> round(found.exponent, 9), round(found.constant, 9), found.points
    (2.0, 3.0, 4)
    """
    x, y = np.asarray(sizes, dtype=float), np.asarray(costs, dtype=float)
    kept = y > 0
    points = int(kept.sum())
    if points < LEAST_POINTS:
        return Exponent(nan, nan, nan, nan, nan, points)
    x, y = np.log(x[kept]), np.log(y[kept])
    if np.ptp(y) == 0:  # no spread: no share of it can be explained, and the slope is exactly nought
        return Exponent(0.0, 0.0, 0.0, nan, float(np.exp(y[0])), points)
    line = stats.linregress(x, y)
    margin = stats.t.ppf((1 + confidence) / 2, points - 2) * line.stderr
    slope = float(line.slope)
    return Exponent(
        slope, slope - margin, slope + margin, float(line.rvalue) ** 2, float(np.exp(line.intercept)), points
    )


def fits(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each ladder and measure: the exponent, and those of the paper's and of curvlab's order.

    `paper_exponent` is the highest power of the variable in the paper's O(·), and `paper_ladder` what the
    same fit finds on its values at the measured sizes; likewise `curvlab_`. NaN, and an empty text, where
    nothing is said (or computed).
    """
    found = [
        _row(dict(zip(LADDER, map(str, names), strict=True)), ladder.sort_values("value"), measure)
        for names, ladder in rows.groupby(LADDER, sort=False)
        for measure in RESOURCES
    ]
    return pd.DataFrame(found)


def _row(names: dict[str, str], ladder: pd.DataFrame, measure: str) -> dict[str, Any]:
    quantity, subject, formulation, variable = (names[name] for name in LADDER)
    resource = RESOURCES[measure]
    fitted = fit_exponent(ladder["value"].tolist(), ladder[measure].tolist())
    fixed = [f"{SYMBOLS[name]} = {ladder[name].iloc[0]}" for name in VARIABLES if _stays(names, name)]
    return {
        **names,
        "measure": measure,
        "exponent": fitted.exponent,
        "low": fitted.low,
        "high": fitted.high,
        "r2": fitted.r2,
        "constant": fitted.constant,
        "points": fitted.points,
        "first": ladder["value"].iloc[0],
        "last": ladder["value"].iloc[-1],
        "fixed": ", ".join(fixed),
        **_order("paper", paper_order(resource, quantity, subject), ladder, variable),
        **_order("curvlab", curvlab_order(resource, quantity, subject, formulation), ladder, variable),
    }


def _stays(names: dict[str, str], size: str) -> bool:
    """Whether a size has a meaning in a ladder, and is not the one that grows."""
    return size != names["variable"] and (size != "iterations" or names["subject"] in ITERATIVE)


def _order(whose: str, order: Order | None, ladder: pd.DataFrame, variable: str) -> dict[str, Any]:
    if order is None:
        return {whose: "", f"{whose}_exponent": nan, f"{whose}_ladder": nan}
    points = ladder[list(VARIABLES)].to_dict("records")
    values = [order({str(name): size for name, size in point.items()}) for point in points]
    fitted = fit_exponent(ladder["value"].tolist(), values)
    return {
        whose: str(order),
        f"{whose}_exponent": float(order.degree(variable)),
        f"{whose}_ladder": fitted.exponent,
    }


def exponent_table(fitted: pd.DataFrame, resource: str) -> pd.DataFrame:
    """Table 1 of `"time"` or `"space"`, in words: the paper's order and exponents, then both formulations'.

    An exponent reads `2.91 [2.85, 2.97]`, with its 95 % interval; `3 (2.84)` is an order's highest power
    and, in parentheses, its exponent over the ladder.
    """
    chosen = fitted[fitted["measure"].map(RESOURCES) == resource]
    groups = chosen.groupby(["quantity", "subject", "variable"], sort=False)
    return pd.DataFrame([_words(group) for _, group in groups])


def _words(group: pd.DataFrame) -> dict[str, str]:
    head = group.iloc[0]
    words = {
        "quantity": head["quantity"],
        "subject": head["subject"],
        "in": SYMBOLS[head["variable"]],
        "paper": head["paper"] or NOTHING,
        "paper's exponent": _order_words(head, "paper"),
    }
    for formulation in (TEXTBOOK, SAMPLE_SPACE):
        part = group[group["formulation"] == formulation]
        if len(part):
            words[f"{formulation}: over"] = f"{part.iloc[0]['first']} to {part.iloc[0]['last']}"
            for _, row in part.iterrows():
                words[f"{formulation}: {row['measure']}"] = _interval(row)
            words[f"{formulation}: order"] = part.iloc[0]["curvlab"] or NOTHING
            words[f"{formulation}: its exponent"] = _order_words(part.iloc[0], "curvlab")
    return words


def _order_words(row: pd.Series, whose: str) -> str:
    asymptotic, ladder = row[f"{whose}_exponent"], row[f"{whose}_ladder"]
    return NOTHING if pd.isna(asymptotic) else f"{asymptotic:.0f} ({ladder:z.2f})"


def _interval(row: pd.Series) -> str:
    if pd.isna(row["exponent"]):
        return NOTHING
    return f"{row['exponent']:z.2f} [{row['low']:z.2f}, {row['high']:z.2f}]"
