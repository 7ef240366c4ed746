"""Figures, words and pages from the frames of a comparison.

    write_report(comparison, folder)              report.html, report.md and figures/*.png
    recommend(cells, errors, convergence)         the answer in words
    cost_bars(cells), error_heatmap(errors), …    functions from a frame to matplotlib Axes

A `Look` gives each provider one colour and each solver one line style, in light or dark.
"""

from __future__ import annotations

from curvlab.report.figures import (
    convergence_curves,
    cost_bars,
    error_heatmap,
    memory_bars,
    pareto_scatter,
    residual_curves,
)
from curvlab.report.recommend import Recommendation, recommend
from curvlab.report.theme import DARK, LIGHT, Look, Theme
from curvlab.report.write import write_report

__all__ = [
    "DARK",
    "LIGHT",
    "Look",
    "Recommendation",
    "Theme",
    "convergence_curves",
    "cost_bars",
    "error_heatmap",
    "memory_bars",
    "pareto_scatter",
    "recommend",
    "residual_curves",
    "write_report",
]
