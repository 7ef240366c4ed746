"""Figures: functions from a frame to matplotlib Axes.

Each takes the frame, optional axes to draw on (say those of `plt.subplots()`; a figure of its own otherwise,
which `.get_figure()` gives) and an optional `Look` (shared colours, light or dark).
"""

from __future__ import annotations

from curvlab.report.figures.curves import (
    convergence_curves,
    damping_curves,
    eigenvalue_points,
    learning_curve,
    learning_curve_png,
    point_curves,
    residual_curves,
)
from curvlab.report.figures.pairs import cost_bars, error_heatmap, memory_bars, pareto_scatter

__all__ = [
    "convergence_curves",
    "cost_bars",
    "damping_curves",
    "eigenvalue_points",
    "error_heatmap",
    "learning_curve",
    "learning_curve_png",
    "memory_bars",
    "pareto_scatter",
    "point_curves",
    "residual_curves",
]
