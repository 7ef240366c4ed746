"""Figures, words and pages from the frames of a comparison.

    write_report(comparison, folder)              report.html, report.md and figures/*.png
    recommend(cells, errors, convergence)         the answer in words
    cost_bars(cells), error_heatmap(errors), …    functions from a frame to matplotlib Axes

A `Look` gives each provider one colour and each solver one line style, in light or dark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curvlab.report.drawing import DARK, LIGHT, Look, Theme
    from curvlab.report.figures import (
        convergence_curves,
        cost_bars,
        eigenvalue_points,
        error_heatmap,
        memory_bars,
        pareto_scatter,
        residual_curves,
    )
    from curvlab.report.pages import write_report
    from curvlab.report.recommendation import Recommendation, recommend

__all__ = [
    "DARK",
    "LIGHT",
    "Look",
    "Recommendation",
    "Theme",
    "convergence_curves",
    "cost_bars",
    "eigenvalue_points",
    "error_heatmap",
    "memory_bars",
    "pareto_scatter",
    "recommend",
    "residual_curves",
    "write_report",
]

# Imported when first asked for: the terminal writes numbers by this package, and needs no matplotlib for it.
_MODULES = {
    "DARK": "drawing",
    "LIGHT": "drawing",
    "Look": "drawing",
    "Recommendation": "recommendation",
    "Theme": "drawing",
    "recommend": "recommendation",
    "write_report": "pages",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module `curvlab.report` has no attribute `{name}`")
    found = getattr(importlib.import_module(f"curvlab.report.{_MODULES.get(name, 'figures')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
