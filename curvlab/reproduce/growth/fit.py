"""Growth exponents: the slope of log(cost) over log(size), beside the one that a formula has there.

    log y = a + b log x,    b ± t_{0.975, points - 2} · stderr(b)    by least squares

A sum of powers is no power: over a ladder that ends, n³ + c n² has less than 3. So every formula is fitted
the same way, at the very sizes that were measured; the highest power is what it tends to. Operations and
bytes are counted, not sampled: their interval says how far the logarithms are from a line, and nothing of
noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.reproduce.growth.orders import RESOURCES, Order, curvlab_order, paper_order
from curvlab.reproduce.growth.sweeps import ITERATIVE, SAMPLE_SPACE, SYMBOLS, TEXTBOOK, VARIABLES

__all__ = ["Exponent", "exponent_table", "fit_exponent", "fits"]

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
