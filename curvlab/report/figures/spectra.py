"""Eigenvalues beside the damping: the largest and the median one of every layer, one line per provider."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.lines import Line2D

from curvlab.report.figures.axes import dress, empty, get_axes, handles, legend, log_axis, look_of, shorten
from curvlab.report.theme import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["eigenvalue_points"]

HEIGHT, WIDTH, MOST = 4.0, 7.0, 24
KINDS = {"largest": "-", "median": ":"}


def eigenvalue_points(
    spectra: pd.DataFrame, ax: Axes | None = None, look: Look | None = None, *, alpha: float | None = None
) -> Axes:
    """The largest eigenvalue of each layer (solid) and its median one (dotted), by provider.

    Below the grey line, α/(1-α), the damping is larger than what it damps. Only positive values are drawn,
    on a logarithmic axis. Lines are the thinner the later they come, so that equal ones are seen.

    >>> frame = pd.DataFrame({"provider": "fisher", "layer": ["0", "2"], "largest": [0.3, 2.0],
    ...     "median": [0.001, 0.02]})
    >>> [label.get_text() for label in eigenvalue_points(frame, alpha=0.1).get_xticklabels()]
    ['0', '2']
    """
    layers = list(dict.fromkeys(spectra["layer"].astype(str)))
    ax, look = get_axes(ax, WIDTH, HEIGHT), look_of(look, spectra.assign(solver=""))
    if not (spectra["largest"].astype(float) > 0).any():
        return empty(ax, look, "no layer has a positive eigenvalue")
    providers = list(dict.fromkeys(spectra["provider"].astype(str)))
    for rank, provider in enumerate(reversed(providers)):
        own = spectra[spectra["provider"] == provider]
        places = own["layer"].astype(str).map(layers.index).to_numpy()
        for column, line in KINDS.items():
            values = own[column].astype(float).to_numpy()
            shown = np.where(values > 0, values, np.nan)
            ax.plot(
                places,
                shown,
                color=look.colour(provider),
                linestyle=line,
                marker="o",
                markersize=4 + 1.6 * min(rank, 3),
                linewidth=1.4 + 0.9 * min(rank, 3),
                zorder=2 + len(providers) - rank,
            )
    ends: list[Artist] = [
        Line2D([], [], color=look.theme.ink, linestyle=line, label=f"{column} eigenvalue")  # type: ignore[arg-type]
        for column, line in KINDS.items()
    ]
    if alpha is not None and 0 < alpha < 1:
        ax.axhline(alpha / (1 - alpha), color=look.theme.muted, linewidth=3, alpha=0.8, zorder=1)
        ends.append(Line2D([], [], color=look.theme.muted, linewidth=3, label="damping α/(1-α)"))
    step = -(-len(layers) // MOST)  # of many layers every so many are named
    ax.set_xticks(range(0, len(layers), step), [shorten(name) for name in layers[::step]])
    ax.tick_params(axis="x", rotation=0 if len(layers) <= 8 else 60)
    ax.set(xlabel="layer", ylabel="eigenvalue")
    log_axis(ax, "y")
    dress(ax, look)
    legend(ax, look, [*handles(look, providers, [], lines=True), *ends], columns=3)
    return ax
