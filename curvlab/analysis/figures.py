"""What the plots of this package share; matplotlib is imported when the first of them is drawn."""

from __future__ import annotations

from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["axes_for", "new_figure"]


def axes_for(ax: Axes | None, *, width: float = 6.4, height: float = 3.6) -> Axes:
    """The given axes, or those of a new figure."""
    if ax is not None:
        return ax
    axes = new_figure(width, height).subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def new_figure(width: float, height: float) -> Figure:
    """A figure that no window shows, and that a notebook displays, whether or not it has imported pyplot."""
    return _figure_class()(figsize=(width, height), layout="constrained")


@cache
def _figure_class() -> type[Figure]:
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            drawn = BytesIO()
            self.savefig(drawn, format="png", dpi=100)
            return drawn.getvalue()

    return NotebookFigure
