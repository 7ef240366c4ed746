"""Error by layer and provider, ‖B̃^t - |B^t|‖_F of bias blocks: layers down, providers across (Table 2)."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm

from curvlab.report.figures.axes import FONT, dress, empty, get_axes, look_of, shorten
from curvlab.report.numbers import MISSING, digits
from curvlab.report.theme import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["error_heatmap"]

LABELS = {
    "error": "bias blocks: distance from the absolute Hessian |H|",
    "relative": "bias blocks: relative distance from the absolute Hessian |H|",
    "weight_error": "weight blocks: distance from the Hessian H",
    "weight_relative": "weight blocks: relative distance from the Hessian H",
}
FAINTEST = 1e-3  # of the largest: what is smaller has the lightest colour, or rounding would take all others


def error_heatmap(
    errors: pd.DataFrame, ax: Axes | None = None, look: Look | None = None, *, column: str = "error"
) -> Axes:
    """Heat map of `column` with the number in each cell; the colour is logarithmic, darker is worse.

    >>> frame = pd.DataFrame({"layer": [1, "Total"], "provider": "pch-1", "error": [0.5, 0.5]})
    >>> [text.get_text() for text in error_heatmap(frame).texts]
    ['0.500', '0.500']
    """
    table = errors.pivot_table(index="layer", columns="provider", values=column, sort=False, dropna=False)
    rows, columns = table.shape
    ax = get_axes(ax, 2.2 + 1.15 * max(columns, 3), 0.9 + 0.34 * max(rows, 2))
    look = look_of(look, errors)
    if table.empty:
        return empty(ax, look, "no error was measured")
    values = table.to_numpy(dtype=float)
    _draw(ax, look, values)
    ax.set_xticks(np.arange(columns) + 0.5, [fill(shorten(str(name)), 16) for name in table.columns])
    ax.set_yticks(np.arange(rows) + 0.5, [str(layer) for layer in table.index], rotation=0)
    ax.set(xlabel=LABELS.get(column, column), ylabel="layer")
    dress(ax, look, grid="none")
    ax.xaxis.tick_top()
    ax.tick_params(which="both", length=0, labelsize=FONT)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if "Total" in table.index:
        ax.axhline(list(table.index).index("Total"), color=look.theme.paper, linewidth=6)
    return ax


def _draw(ax: Axes, look: Look, values: np.ndarray) -> None:
    import seaborn

    positive = values[np.isfinite(values) & (values > 0)]
    high = float(positive.max()) if positive.size else 1.0
    low = max(float(positive.min()), high * FAINTEST) if positive.size else high / 10
    norm = LogNorm(low, high if high > low else low * 10, clip=True)
    seaborn.heatmap(
        np.clip(values, low, None),
        ax=ax,
        norm=norm,
        cmap="crest",
        annot=np.vectorize(digits)(values),
        fmt="",
        annot_kws={"fontsize": FONT, "parse_math": False},
        linewidths=1.5,
        linecolor=look.theme.paper,
        cbar=False,
    )
    for row, column in np.argwhere(np.isnan(values)):
        ax.text(
            column + 0.5, row + 0.5, MISSING, ha="center", va="center", color=look.theme.muted, fontsize=FONT
        )
