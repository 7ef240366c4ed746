"""What the plots of this package share; matplotlib is imported when the first of them is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["axes_for"]


def axes_for(ax: Axes | None, *, width: float = 6.4, height: float = 3.6) -> Axes:
    """The given axes, or those of a new figure that no window shows: a notebook displays its `figure`."""
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes
