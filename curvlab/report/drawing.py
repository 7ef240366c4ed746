"""How figures are drawn: colours and lines, axes in a theme, legends, and axes as SVG and PNG files.

One colour per provider, one line style and marker per solver. Known names have fixed places; all others take
the free places in alphabetical order, so a report, its figures and two runs of it agree, third-party names
included. The seven colours of a theme are at least 20 apart (CIELAB) in normal vision and with protan, deutan
and tritan deficiency.

Nothing here touches pyplot or matplotlib's global settings: each artist is given its colours and sizes. A
drawing in the `PAGE` theme has placeholder colours; `svg` makes each `var(--name)`, so that one inline SVG is
right in light and in dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib as mpl
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from curvlab.report.numbers import digits

__all__ = [
    "DARK",
    "FONT",
    "LIGHT",
    "PAGE",
    "WIDTH",
    "Look",
    "Theme",
    "dress",
    "empty",
    "figure_of",
    "get_axes",
    "handles",
    "legend",
    "log_axis",
    "look_of",
    "pairs_of",
    "png",
    "shorten",
    "shorten_pair",
    "svg",
]


@dataclass(frozen=True)
class Theme:
    """The colours of a figure: text and lines, and those that tell providers apart."""

    ink: str
    muted: str
    grid: str
    paper: str
    series: tuple[str, ...]

    def variables(self) -> dict[str, str]:
        """Each colour by the name of its CSS variable."""
        named = {"ink": self.ink, "muted": self.muted, "grid": self.grid, "paper": self.paper}
        return named | {f"series-{index}": colour for index, colour in enumerate(self.series)}


LIGHT = Theme(
    ink="#1d232b",
    muted="#5a6472",
    grid="#dde2e8",
    paper="#ffffff",
    series=("#08478c", "#e8811a", "#0a8562", "#c884ba", "#8f5204", "#2f9df5", "#45380e"),
)
DARK = Theme(
    ink="#e8ecf1",
    muted="#a3adba",
    grid="#343c47",
    paper="#161a20",
    series=("#3b8dfa", "#f0602f", "#4fe0ae", "#c767a8", "#f7c21a", "#bfe6fb", "#f4f59a"),
)
# Colours that nothing else has: the page replaces each by its CSS variable, so that one drawing
# serves light and dark.
PAGE = Theme(
    ink="#010203",
    muted="#010204",
    grid="#010205",
    paper="#fdfcfb",
    series=tuple(f"#0103{index:02x}" for index in range(len(LIGHT.series))),
)

PROVIDERS = {"pch-1": 0, "fisher": 1, "gauss-newton": 2, "pch-2": 3, "hessian": 4}
SOLVERS = {"ea-cg": 0, "cg": 1, "sm-kfi": 2, "kfi": 3, "exact": 4}

Dashes = tuple[float, tuple[float, ...] | None]
LINES: tuple[Dashes, ...] = (
    (0, None),
    (0, (5, 2)),
    (0, (1.2, 1.6)),
    (0, (6, 2, 1.2, 2)),
    (0, (9, 3)),
    (0, (3, 1.5, 1.2, 1.5, 1.2, 1.5)),
)
MARKERS = ("o", "s", "^", "D", "P", "X", "v")


@dataclass(frozen=True)
class Look:
    """Which place each provider and solver has, and the theme they are drawn in.

    >>> look = Look.of(["pch-1", "mine"], ["ea-cg"])
    >>> look.colour("pch-1"), look.colour("mine"), look.marker("ea-cg")
    ('#08478c', '#2f9df5', 'o')
    """

    providers: Mapping[str, int] = field(default_factory=dict)
    solvers: Mapping[str, int] = field(default_factory=dict)
    theme: Theme = LIGHT

    @classmethod
    def of(cls, providers: Iterable[str], solvers: Iterable[str] = (), theme: Theme = LIGHT) -> Look:
        """The look of these providers and solvers, in whatever order they are named."""
        return cls(_places(providers, PROVIDERS), _places(solvers, SOLVERS), theme)

    @classmethod
    def of_frames(cls, *frames: pd.DataFrame, theme: Theme = LIGHT) -> Look:
        """The look of all providers and solvers that occur in the `frames`."""
        return cls.of(_values(frames, "provider"), _values(frames, "solver"), theme)

    def colour(self, provider: str) -> str:
        """The provider's colour; the muted one for none (a first-order baseline) and for a control."""
        if provider not in self.providers:
            return self.theme.muted
        return self.theme.series[self.providers[provider] % len(self.theme.series)]

    def line(self, solver: str) -> Dashes:
        """The solver's dash pattern."""
        return LINES[self.solvers[solver] % len(LINES)]

    def marker(self, solver: str) -> str:
        """The solver's marker."""
        return MARKERS[self.solvers[solver] % len(MARKERS)]


def _values(frames: Iterable[pd.DataFrame], column: str) -> set[str]:
    found: set[str] = set()
    for frame in frames:
        if column in frame:
            found |= {str(value) for value in frame[column].dropna() if value}
    return found


def _places(names: Iterable[str], known: Mapping[str, int]) -> dict[str, int]:
    """Known names at their places, the others behind: a known place stays free for who owns it."""
    unique = sorted(set(names))
    others = [name for name in unique if name not in known]
    places = {name: known[name] for name in unique if name in known}
    free = [place for place in range(len(known) + len(unique)) if place not in known.values()]
    return places | dict(zip(others, free, strict=False))


FONT = 9.0
WIDTH = 6.2  # inches of a figure that stands by itself: whole, and legible, on a phone too
SMALL = 4.6  # of one whose text can be read on a phone, where 5 inches have its width
LONGEST = 34
LONGEST_PAIR = 42


def get_axes(ax: Axes | None, width: float, height: float) -> Axes:
    """The axes given, or new ones on a figure of their own, in inches."""
    if ax is not None:
        return ax
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def figure_of(ax: Axes) -> Figure:
    """The whole figure that axes are drawn on."""
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("these axes were taken off their figure: draw on those of `get_axes`")
    return figure


def look_of(look: Look | None, *frames: pd.DataFrame) -> Look:
    """The look given, or that of the frames alone."""
    return Look.of_frames(*frames) if look is None else look


def dress(ax: Axes, look: Look, *, grid: str = "both") -> Axes:
    """Put on the theme: paper, ink, a light grid on the axes named and two spines."""
    theme = look.theme
    ax.set_facecolor(theme.paper)
    figure = figure_of(ax)
    if len(figure.axes) == 1:
        figure.set_facecolor(theme.paper)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.muted)
    ax.tick_params(which="both", colors=theme.muted, labelcolor=theme.ink, labelsize=FONT, length=3)
    ax.set_axisbelow(True)
    ax.grid(False, which="both")
    if grid in ("x", "y", "both"):
        ax.grid(True, which="major", axis=grid, color=theme.grid, linewidth=0.8)  # type: ignore[arg-type]
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set(color=theme.ink, fontsize=FONT)
    ax.yaxis.labelpad = 7
    for text in ax.findobj(Text):
        text.set_parse_math(False)  # a name of the user's may have dollars in it
    return ax


def empty(ax: Axes, look: Look, reason: str) -> Axes:
    """Axes that say why there is nothing to draw."""
    dress(ax, look, grid="none")
    ax.set(xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.text(
        0.5,
        0.5,
        reason,
        transform=ax.transAxes,
        ha="center",
        va="center",
        color=look.theme.muted,
        fontsize=FONT,
    )
    return ax


def log_axis(ax: Axes, axis: str) -> None:
    """A logarithmic axis whose ticks are plain numbers: browsers set mathematical text badly."""
    (ax.set_xscale if axis == "x" else ax.set_yscale)("log")
    which = ax.xaxis if axis == "x" else ax.yaxis
    low, high = sorted(ax.get_xlim() if axis == "x" else ax.get_ylim())
    decades = high / max(low, 1e-300)
    if decades < 100:
        which.set_major_locator(LogLocator(subs=(1, 2, 5) if decades > 4 else (1, 1.5, 2, 3, 4, 5, 6, 8)))
    which.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    which.set_minor_formatter(NullFormatter())


def handles(look: Look, providers: Iterable[str], solvers: Iterable[str], *, lines: bool) -> list[Artist]:
    """Legend entries: one swatch per provider, then one line or marker per solver."""
    ink = look.theme.ink
    swatches: list[Artist] = [Patch(color=look.colour(name), label=shorten(name)) for name in providers]
    marks: list[Artist] = [
        Line2D(
            [],
            [],
            color=ink,
            marker=look.marker(name),
            markersize=4.5,
            linestyle=look.line(name) if lines else "none",  # type: ignore[arg-type]
            linewidth=1.4,
            label=shorten(name),
        )
        for name in solvers
    ]
    return swatches + marks


def legend(ax: Axes, look: Look, entries: Sequence[Artist], *, columns: int) -> None:
    """A legend below the axes, where it covers nothing: `columns` wide, or as many as there is room for.

    Axes that are alone on their figure keep their height: the figure grows by the rows that long names cost.
    """
    figure = figure_of(ax)
    height, grid = figure.get_figheight(), ax.get_subplotspec()
    panels = 1 if grid is None else grid.get_gridspec().ncols
    fitting = _columns_that_fit(entries, columns, 72 * figure.get_figwidth() / panels - BESIDE_LEGEND)
    if len(figure.axes) == 1:
        rows, planned = (-(-len(entries) // count) for count in (fitting, columns))
        figure.set_figheight(height + (rows - planned) * LEGEND_ROW / 72)
    under = -0.6 / max(height - 0.9, 0.5)  # the ticks and the label of the axis, in heights of the axes
    box = ax.legend(
        handles=list(entries),
        loc="upper left",
        bbox_to_anchor=(0.0, under),
        ncols=fitting,
        columnspacing=COLUMN_SPACING,
        frameon=False,
        fontsize=FONT,
        labelcolor=look.theme.ink,
        handlelength=HANDLE,
        borderaxespad=0.0,
    )
    for text in box.get_texts():
        text.set_parse_math(False)


HANDLE, COLUMN_SPACING = 2.6, 1.4  # in font sizes, as matplotlib counts them
BESIDE_LEGEND = 58.0  # points left of the axes: ticks, their labels and that of the axis
LEGEND_ROW = 1.55 * FONT  # points


def _columns_that_fit(entries: Sequence[Artist], most: int, room: float) -> int:
    """How many columns of a legend stand in so many points: matplotlib would narrow the axes instead."""
    font = FontProperties(size=FONT)
    widths = [
        text_to_path.get_text_width_height_descent(str(entry.get_label()), font, False)[0]
        + (HANDLE + 0.8) * FONT
        for entry in entries
    ]
    for columns in range(min(most, len(entries)), 1, -1):
        longest = [max(column) for column in np.array_split(widths, columns)]
        if sum(longest) + (columns - 1) * COLUMN_SPACING * FONT <= room:
            return columns
    return 1


def pairs_of(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """The pairs (provider, solver) of the frame, in its order."""
    return list(dict.fromkeys(zip(frame["provider"].astype(str), frame["solver"].astype(str), strict=True)))


def shorten(name: str, longest: int = LONGEST) -> str:
    """A name that fits a legend or an axis, on one line."""
    name = " ".join(name.split())
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def shorten_pair(provider: str, solver: str) -> str:
    """A pair's name that fits; the provider gives way, since the pairs of one provider differ in the solver.

    >>> shorten_pair("gauss-newton[kind=rows,samples=1,positions=4]", "ea-cg")
    'gauss-newton[kind=rows,samples=1,… + ea-cg'
    """
    if not solver:
        return shorten(provider)
    end = f" + {shorten(solver, LONGEST_PAIR // 2)}"
    return shorten(provider, LONGEST_PAIR - len(end)) + end


def _tick(value: float) -> str:
    text = digits(value, 2)
    return (
        text.rstrip("0").rstrip(".")
        if "." in text and "e" not in text
        else text.replace(".0e", "e").replace("e-0", "e-")
    )


# Text stays text: it can be selected, read aloud and set in the page's own font.
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "curvlab"}
REFERENCE = re.compile(r"^#([^#]+)$|url\(#([^)]+)\)")
PAGE_VARIABLES = PAGE.variables()
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def svg(ax: Axes, name: str, description: str) -> Markup:
    """The figure of `ax` as an inline SVG; `name` keeps its identifiers apart from other figures'.

    >>> from curvlab.report.drawing import Look
    >>> from curvlab.report.drawing import dress, get_axes
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
        "style": f"--inches: {figure_of(ax).get_figwidth():.2f}",
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
    figure_of(ax).savefig(buffer, **options)  # type: ignore[arg-type]
