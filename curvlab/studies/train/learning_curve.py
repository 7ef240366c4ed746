"""Learning curves: loss and accuracy over epochs and over seconds of training."""

from __future__ import annotations

import io
from collections.abc import Mapping
from math import isfinite
from pathlib import Path

import pandas as pd

from curvlab.files import write_bytes_atomic

__all__ = ["save_curves"]

PANELS = (
    ("epoch", "train_loss"),
    ("seconds", "train_loss"),
    ("epoch", "test_accuracy"),
    ("seconds", "test_accuracy"),
)
LABELS = {
    "epoch": "epoch",
    "seconds": "seconds of training",
    "train_loss": "training loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
}


def save_curves(frames: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Draw the runs of `frames`, by label, to `path`; the format is that of its suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    classes = any(frame["test_accuracy"].map(isfinite).any() for frame in frames.values())
    panels = [(x, y if classes else y.replace("test_accuracy", "test_loss")) for x, y in PANELS]
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (x, y) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for label, frame in frames.items():
            axes.plot(frame[x], frame[y], marker="o", markersize=3, label=label)
        axes.set_xlabel(LABELS[x])
        axes.set_ylabel(LABELS[y])
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=110)
    write_bytes_atomic(path, buffer.getvalue())
