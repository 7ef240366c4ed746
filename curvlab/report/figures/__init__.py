"""Figures: functions from a frame to matplotlib Axes.

Each takes the frame, optional axes to draw on (say those of `plt.subplots()`; a figure of its own otherwise,
which `.get_figure()` gives) and an optional `Look` (shared colours, light or dark).
"""

from __future__ import annotations

from curvlab.report.figures.bars import cost_bars, memory_bars
from curvlab.report.figures.curves import (
    convergence_curves,
    learning_curve,
    learning_curve_png,
    residual_curves,
)
from curvlab.report.figures.heatmap import error_heatmap
from curvlab.report.figures.scatter import pareto_scatter
from curvlab.report.figures.spectra import eigenvalue_points
from curvlab.report.figures.steps import damping_curves, point_curves

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
