"""Axes as files: SVG that follows the page's colour scheme, and PNG.

A drawing in the `PAGE` theme has placeholder colours; here each becomes `var(--name)`, so that one inline SVG
is right in light and in dark.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import matplotlib as mpl
from markupsafe import Markup

from curvlab.report.theme import PAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["png", "svg"]

# Text stays text: it can be selected, read aloud and set in the page's own font.
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "curvlab"}
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def svg(ax: Axes, name: str, description: str) -> Markup:
    """The figure of `ax` as an inline SVG; `name` keeps its identifiers apart from other figures'.

    >>> from curvlab.report.theme import Look
    >>> from curvlab.report.figures.axes import dress, get_axes
    >>> drawing = svg(dress(get_axes(None, 3, 2), Look(theme=PAGE)), "plain", "Nothing")
    >>> drawing.startswith('<svg role="img" aria-label="Nothing"'), "var(--ink)" in drawing
    (True, True)
    """
    buffer = io.StringIO()
    with mpl.rc_context(SETTINGS):  # type: ignore[arg-type]
        _save(ax, buffer, format="svg", metadata=NO_METADATA, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for variable, colour in PAGE.variables().items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    inches = ax.get_figure(root=True).get_figwidth()  # type: ignore[union-attr]
    opening = Markup('<svg role="img" aria-label="{}" style="--inches: {:.2f}" ').format(description, inches)
    return Markup(text.replace("<svg ", opening, 1))


def png(ax: Axes, dots_per_inch: int = 150) -> bytes:
    """The figure of `ax` as a PNG."""
    buffer = io.BytesIO()
    _save(ax, buffer, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return buffer.getvalue()


def _save(ax: Axes, buffer: io.IOBase, **options: object) -> None:
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.savefig(buffer, **options)  # type: ignore[arg-type]
