"""The look of every figure: one colour per provider, one line style and marker per solver.

Known names have fixed places; all others take the free places in alphabetical order, so a report, its
figures and two runs of it agree, third-party names included. The seven colours of a theme are at least
20 apart (CIELAB) in normal vision and with protan, deutan and tritan deficiency.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pandas as pd

__all__ = ["DARK", "LIGHT", "PAGE", "Look", "Theme"]


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
