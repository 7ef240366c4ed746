"""Axes as files: SVG that follows the page's colour scheme, and PNG.

A drawing in the `PAGE` theme has placeholder colours; here each becomes `var(--name)`, so that one inline SVG
is right in light and in dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection
from typing import TYPE_CHECKING
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib as mpl
from markupsafe import Markup

from curvlab.report.theme import PAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["png", "svg"]

# Text stays text: it can be selected, read aloud and set in the page's own font.
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "curvlab"}
REFERENCE = re.compile(r"^#([^#]+)$|url\(#([^)]+)\)")
PAGE_VARIABLES = PAGE.variables()
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
    root = ElementTree.fromstring(buffer.getvalue())
    _compact(root)
    root.attrib = {
        "role": "img",
        "aria-label": description,
        "style": f"--inches: {ax.get_figure(root=True).get_figwidth():.2f}",  # type: ignore[union-attr]
        **root.attrib,
    }
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key != "aria-label":
                element.set(key, _in_page(value, name))
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _in_page(value: str, name: str) -> str:
    """An attribute with the page's colours, and references to the identifiers of this figure."""
    value = (
        re.sub(r"^#(?=\w+$)|(?<=url\()#", f"#{name}-", value)
        if value.startswith("#") or "url(#" in value
        else value
    )
    for variable, colour in PAGE_VARIABLES.items():
        value = value.replace(colour, f"var(--{variable})")
    return value


def _compact(element: Element) -> None:
    """The same drawing in about half the letters: without what the page's style says once for all figures.

    >>> drawing = ElementTree.fromstring(
    ...     '<svg><g id="a"> <path d="M 70.064146 3.1 L 1 2" style="stroke: red; fill: none"/> </g></svg>'
    ... )
    >>> _compact(drawing)
    >>> ElementTree.tostring(drawing, encoding="unicode")
    '<svg><path d="M70.06 3.1L1 2" style="stroke:red;fill:none" /></svg>'
    """
    used = {
        found
        for one in element.iter()
        for value in one.attrib.values()
        for groups in REFERENCE.findall(value)
        for found in groups
    }
    _compact_children(element, used)
    element.tag, element.text = element.tag.rpartition("}")[2], None
    element.attrib = _attributes(element, used)


def _compact_children(element: Element, used: Collection[str]) -> None:
    kept: list[Element] = []
    for child in list(element):
        child.tag = child.tag.rpartition("}")[2]
        if child.tag in ("metadata", "style"):
            continue
        _compact_children(child, used)
        child.attrib = _attributes(child, used)
        if child.tag not in ("text", "tspan", "title", "desc"):
            child.text = None
        child.tail = None
        if child.tag == "g" and not child.attrib:
            kept += list(child)  # a group that says nothing of its members
        elif not _draws_nothing(child):
            kept.append(child)
    element[:] = kept


def _draws_nothing(element: Element) -> bool:
    unfilled = element.tag == "path" and element.get("style") == "fill:none" and "id" not in element.attrib
    return unfilled or (element.tag in ("g", "defs") and not len(element))


def _attributes(element: Element, used: Collection[str]) -> dict[str, str]:
    """Those that count, with numbers to a hundredth of a point and no space where none is needed."""
    found = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    if found.get("id") not in used:
        found.pop("id", None)
    if found.get("transform", "").startswith(("rotate(0 ", "rotate(-0 ")):
        del found["transform"]
    found.pop("version", None)
    for key, value in found.items():
        if key == "style":
            value = re.sub(r"\s*font-family: [^;]*(?:;|$)", "", value)
            found[key] = re.sub(r"([;:])\s+", r"\1", value).strip()
        elif key == "d":
            found[key] = re.sub(r"\s*([A-Za-z])\s*", r"\1", _round_numbers(value)).strip()
        elif key in ("x", "y", "width", "height", "transform", "points"):
            found[key] = _round_numbers(value)
    return found


def _round_numbers(numbers: str) -> str:
    return re.sub(
        r"-?\d+\.\d+(?![\de])", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), numbers
    )


def png(ax: Axes, dots_per_inch: int = 150) -> bytes:
    """The figure of `ax` as a PNG."""
    buffer = io.BytesIO()
    _save(ax, buffer, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return buffer.getvalue()


def _save(ax: Axes, buffer: io.IOBase, **options: object) -> None:
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.savefig(buffer, **options)  # type: ignore[arg-type]
