"""Figures with one line per pair, provider or optimizer.

convergence    loss or accuracy against epochs or seconds
residuals      against the iteration of the solver
steps          what steps do as the damping changes, and as training goes on, the gradient in grey
eigenvalues    the largest and the median one of every layer, beside the damping
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from curvlab.report.drawing import (
    FONT,
    LINES,
    SMALL,
    WIDTH,
    Look,
    dress,
    empty,
    get_axes,
    handles,
    legend,
    log_axis,
    look_of,
    png,
    shorten,
)
from curvlab.report.training import bands

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "convergence_curves",
    "damping_curves",
    "eigenvalue_points",
    "learning_curve",
    "learning_curve_png",
    "point_curves",
    "residual_curves",
]

SIZE = (5.0, 4.2)
COLUMNS = 3  # of the legend, below: curves stand in pairs, and a legend beside them would halve them
LABELS = {
    "epoch": "epoch",
    "seconds": "training time (s)",
    "cpu_seconds": "processor time of training (s)",
    "train_loss": "training loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
}


def convergence_curves(
    convergence: pd.DataFrame,
    ax: Axes | None = None,
    look: Look | None = None,
    *,
    against: str = "epoch",
    measure: str = "train_loss",
) -> Axes:
    """`measure` against `"epoch"`, `"seconds"` or `"cpu_seconds"`, one line per optimizer; baselines grey.

    Of several seeds the line is the median, in a band from the lowest to the highest.

    >>> frame = pd.DataFrame({"optimizer": "sgd", "provider": "", "solver": "", "epoch": [0, 1],
    ...     "seconds": [0.0, 0.4], "train_loss": [2.3, 1.1]})
    >>> convergence_curves(frame, against="seconds").get_xlabel()
    'training time (s)'
    """
    ax, look = get_axes(ax, *SIZE), look_of(look, convergence)
    known = convergence[np.isfinite(convergence[measure].astype(float))]
    if known.empty:
        return empty(ax, look, f"no {LABELS.get(measure, measure)} was measured")
    baselines: list[Artist] = []
    for name, group, style in _runs(known, look):
        if "seed" in group and group["seed"].nunique() > 1:
            provider = group["provider"]
            group = bands(group, against, measure).assign(provider=provider.iloc[0])
            ax.fill_between(
                group[against], group["lower"], group["upper"], color=style["color"], alpha=0.15, linewidth=0
            )
        (line,) = ax.plot(group[against], group[measure], **style)
        if not _text(group, "provider"):
            baselines.append(Line2D([], [], **style, label=shorten(name)))
        line.set_label(shorten(name))
    ax.set(xlabel=LABELS.get(against, against), ylabel=LABELS.get(measure, measure))
    if against == "epoch":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if measure != "test_accuracy" and bool((known[measure] > 0).all()):
        log_axis(ax, "y")
    dress(ax, look)
    pairs = known[known["provider"].fillna("") != ""]
    second_order = handles(
        look, _distinct_names(pairs, "provider"), _distinct_names(pairs, "solver"), lines=True
    )
    legend(ax, look, second_order + baselines, columns=COLUMNS)
    return ax


def learning_curve(run: pd.DataFrame, title: str = "") -> Axes:
    """Four panels of one run: training loss and test accuracy (or loss) by epoch and by time.

    >>> frame = pd.DataFrame({"optimizer": "sgd", "provider": "", "solver": "", "epoch": [0, 1],
    ...     "seconds": [0.0, 0.4], "train_loss": [2.3, 1.1], "test_loss": [2.3, 1.2], "test_accuracy": 0.5})
    >>> [panel.get_ylabel() for panel in learning_curve(frame).get_figure().axes]
    ['training loss', 'training loss', 'test accuracy', 'test accuracy']
    """
    tested = "test_accuracy" if np.isfinite(run["test_accuracy"].astype(float)).any() else "test_loss"
    figure = Figure(figsize=(2 * SIZE[0], 2 * SIZE[1]), layout="constrained")
    figure.suptitle(title, fontsize=FONT + 1, parse_math=False)
    measures = [(measure, against) for measure in ("train_loss", tested) for against in ("epoch", "seconds")]
    panels = list(figure.subplots(2, 2).flat)
    for axes, (measure, against) in zip(panels, measures, strict=True):
        convergence_curves(run, axes, against=against, measure=measure)
    first: Axes = panels[0]
    return first


def residual_curves(traces: pd.DataFrame, ax: Axes | None = None, look: Look | None = None) -> Axes:
    """The largest recursive residual over the blocks, by iteration; a block that is done keeps its last.

    >>> frame = pd.DataFrame({"provider": "pch-1", "solver": "cg", "block": ["a", "a", "b"],
    ...     "iteration": [0, 1, 0], "residual": [1.0, 0.1, 0.5]})
    >>> residual_curves(frame).lines[0].get_ydata().tolist()
    [1.0, 0.5]
    """
    ax, look = get_axes(ax, WIDTH, 4.2), look_of(look, traces)
    known = (
        traces[np.isfinite(traces["residual"].astype(float)) & (traces["residual"] > 0)]
        if len(traces)
        else traces
    )
    if known.empty:
        return empty(ax, look, "no iterative solver ran")
    for index, ((provider, solver), group) in enumerate(known.groupby(["provider", "solver"], sort=False)):
        blocks = group.pivot_table(index="iteration", columns="block", values="residual", aggfunc="last")
        worst = blocks.sort_index().ffill().max(axis=1)
        style = _style(look, str(provider), str(solver), len(worst))
        # Markers in turns, and later lines thinner: of curves that cover each other each still shows.
        every = max(2, len(worst) // 6)
        style |= {"markevery": (index % every, every), "linewidth": max(1.0, 3.4 - 0.4 * index)}
        ax.plot(worst.index, worst.to_numpy(), **style)
    ax.set(xlabel="iteration", ylabel="recursive residual, largest over blocks")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    log_axis(ax, "y")
    dress(ax, look)
    entries = handles(look, _distinct_names(known, "provider"), _distinct_names(known, "solver"), lines=True)
    legend(ax, look, entries, columns=COLUMNS)
    return ax


def _runs(known: pd.DataFrame, look: Look) -> Iterator[tuple[str, pd.DataFrame, dict[str, Any]]]:
    """Each optimizer's rows with the style of its line; baselines take the dash patterns in turn."""
    baselines = 0
    for name, group in known.groupby("optimizer", sort=False):
        provider, solver = _text(group, "provider"), _text(group, "solver")
        if provider:
            style = _style(look, provider, solver, len(group))
        else:
            style = {
                "color": look.theme.muted,
                "linestyle": LINES[baselines % len(LINES)],
                "linewidth": 2.4,
                "alpha": 0.8,
            }
            baselines += 1
        yield str(name), group.sort_values("epoch"), style


def _style(look: Look, provider: str, solver: str, points: int) -> dict[str, Any]:
    """Colour by provider, dashes and marker by solver, with some eight markers however long the line."""
    return {
        "color": look.colour(provider),
        "linestyle": look.line(solver),
        "marker": look.marker(solver),
        "markevery": max(1, points // 8),
        "markersize": 4,
        "linewidth": 1.5,
    }


def _text(group: pd.DataFrame, column: str) -> str:
    value = group[column].iloc[0]
    return str(value) if pd.notna(value) else ""


def _distinct_names(frame: pd.DataFrame, column: str) -> list[str]:
    return list(dict.fromkeys(frame[column].astype(str)))


def learning_curve_png(run: pd.DataFrame, title: str) -> bytes:
    """The learning curve of one run as a PNG file."""
    return png(learning_curve(run, title), dots_per_inch=110)


STEP_SIZE = (5.0, 4.0)
GRADIENT = "identity"
STEP_LABELS = {
    "sine": "distance to the Newton step (%)",
    "decrease": "decrease, best step size (%)",
    "decrease_full": "decrease, step size 1 (%)",
    "predicted": "predicted decrease, step size 1 (%)",
    "weight_relative": "weight blocks: distance from H (%)",
    "error_relative": "bias blocks: distance from |H| (%)",
}


def damping_curves(
    dampings: pd.DataFrame, ax: Axes | None = None, look: Look | None = None, *, measure: str = "sine"
) -> Axes:
    """`measure` in per cent against α, one line per pair; the control is grey.

    >>> frame = pd.DataFrame({"provider": "pch-1", "solver": "kfi", "alpha": [0.01, 0.1], "sine": [0.5, 0.2]})
    >>> damping_curves(frame).get_xlabel()
    'damping α'
    """
    ax, look = get_axes(ax, *STEP_SIZE), look_of(look, dampings[dampings["solver"] != ""])
    known = dampings[np.isfinite(dampings[measure].astype(float))]
    if known.empty:
        return empty(ax, look, "not known at any damping")
    ranks = _ranks(known)
    for (provider, solver), group in known.groupby(["provider", "solver"], sort=False):
        ordered = group.sort_values("alpha")
        _line(ax, look, ordered["alpha"], 100 * ordered[measure], str(provider), str(solver), ranks)
    if measure in ("decrease_full", "predicted"):
        _cut_below(ax, 100 * known[measure].astype(float))
    ax.set(xlabel="damping α", ylabel=STEP_LABELS.get(measure, measure))
    log_axis(ax, "x")
    return _finish(ax, look, known)


def _cut_below(ax: Axes, values: pd.Series[float]) -> None:
    """End the axis at -100 %: what raises the loss further is as useless, and would hide all the rest."""
    if ax.get_ylim()[0] < -100:
        high = max(float(values.max()), 0.0)
        ax.set_ylim(-100, high + 0.05 * (high + 100))


def point_curves(
    points: pd.DataFrame, ax: Axes | None = None, look: Look | None = None, *, measure: str = "sine"
) -> Axes:
    """`measure` in per cent at each point of the training, in the order in which they were asked for.

    >>> frame = pd.DataFrame({"provider": "pch-1", "solver": "kfi", "point": ["init", "epoch:1"],
    ...     "sine": [0.5, 0.2]})
    >>> [label.get_text() for label in point_curves(frame).get_xticklabels()]
    ['init', 'epoch:1']
    """
    ax, look = get_axes(ax, *STEP_SIZE), look_of(look, points[points["solver"] != ""])
    names = list(dict.fromkeys(points["point"]))
    known = points[np.isfinite(points[measure].astype(float))]
    if known.empty:
        return empty(ax, look, "not known at any point")
    if measure in ("weight_relative", "error_relative"):  # of a provider, whatever the solver
        known = known.drop_duplicates(["provider", "point"]).assign(solver="")
    ranks = _ranks(known)
    for (provider, solver), group in known.groupby(["provider", "solver"], sort=False):
        places = [names.index(point) for point in group["point"]]
        _line(ax, look, places, 100 * group[measure], str(provider), str(solver), ranks)
    ax.set_xticks(range(len(names)), names)
    low, high = ax.get_ylim()
    ax.set(ylabel=STEP_LABELS.get(measure, measure), ylim=(min(0, low), high))
    return _finish(ax, look, known)


def _ranks(known: pd.DataFrame) -> dict[str, int]:
    """Each provider's place from the end: lines of later ones are thinner, so that equal ones are seen."""
    providers = dict.fromkeys(known["provider"].astype(str))
    return {provider: rank for rank, provider in enumerate(reversed(providers))}


def _line(
    ax: Axes, look: Look, x: object, y: object, provider: str, solver: str, ranks: Mapping[str, int]
) -> None:
    rank = min(ranks[provider], 3)
    if provider == GRADIENT:
        ax.plot(x, y, color=look.theme.muted, linewidth=3, alpha=0.8, zorder=1)  # type: ignore[arg-type]
        return
    ax.plot(
        x,  # type: ignore[arg-type]
        y,  # type: ignore[arg-type]
        color=look.colour(provider),
        linestyle=look.line(solver) if solver else "-",
        marker=look.marker(solver) if solver else "o",
        markersize=4 + rank,
        linewidth=1.4 + 0.6 * rank,
        zorder=2 + len(ranks) - ranks[provider],
    )


def _finish(ax: Axes, look: Look, known: pd.DataFrame) -> Axes:
    dress(ax, look)
    pairs = known[known["provider"] != GRADIENT]
    providers, solvers = (list(dict.fromkeys(pairs[name].astype(str))) for name in ("provider", "solver"))
    solvers = list(filter(None, solvers))
    entries: list[Artist] = handles(look, providers, solvers, lines=True)
    if (known["provider"] == GRADIENT).any():
        entries.append(Line2D([], [], color=look.theme.muted, linewidth=3, label="gradient"))
    legend(ax, look, entries, columns=3)
    return ax


FEW, MOST = 8, 24  # layers: so many stand on a small figure; of more than the second every so many is named
KINDS = {"largest": "-", "median": ":"}


def eigenvalue_points(
    spectra: pd.DataFrame, ax: Axes | None = None, look: Look | None = None, *, alpha: float | None = None
) -> Axes:
    """The largest eigenvalue of each layer (solid) and its median one (dotted), by provider.

    Below the grey line, α/(1-α), the damping is larger than what it damps. Only positive values are drawn,
    on a logarithmic axis. Lines are the thinner the later they come, so that equal ones are seen.

    >>> frame = pd.DataFrame({"provider": "fisher", "layer": ["0", "2"], "largest": [0.3, 2.0],
    ...     "median": [0.001, 0.02]})
    >>> [label.get_text() for label in eigenvalue_points(frame, alpha=0.1).get_xticklabels()]
    ['0', '2']
    """
    layers = list(dict.fromkeys(spectra["layer"].astype(str)))
    size = (SMALL, 4.0) if len(layers) <= FEW else (7.0, 4.0)
    ax, look = get_axes(ax, *size), look_of(look, spectra.assign(solver=""))
    if not (spectra["largest"].astype(float) > 0).any():
        return empty(ax, look, "no layer has a positive eigenvalue")
    providers = list(dict.fromkeys(spectra["provider"].astype(str)))
    for rank, provider in enumerate(reversed(providers)):
        own = spectra[spectra["provider"] == provider]
        places = own["layer"].astype(str).map(layers.index).to_numpy()
        for column, line in KINDS.items():
            values = own[column].astype(float).to_numpy()
            shown = np.where(values > 0, values, np.nan)
            ax.plot(
                places,
                shown,
                color=look.colour(provider),
                linestyle=line,
                marker="o",
                markersize=4 + 1.6 * min(rank, 3),
                linewidth=1.4 + 0.9 * min(rank, 3),
                zorder=2 + len(providers) - rank,
            )
    ends: list[Artist] = [
        Line2D([], [], color=look.theme.ink, linestyle=line, label=f"{column} eigenvalue")  # type: ignore[arg-type]
        for column, line in KINDS.items()
    ]
    if alpha is not None and 0 < alpha < 1:
        ax.axhline(alpha / (1 - alpha), color=look.theme.muted, linewidth=3, alpha=0.8, zorder=1)
        ends.append(Line2D([], [], color=look.theme.muted, linewidth=3, label="damping α/(1-α)"))
    step = -(-len(layers) // MOST)
    ax.set_xticks(range(0, len(layers), step), [shorten(name) for name in layers[::step]])
    ax.tick_params(axis="x", rotation=0 if len(layers) <= FEW and max(map(len, layers)) <= 5 else 60)
    ax.set(xlabel="layer", ylabel="eigenvalue")
    log_axis(ax, "y")
    dress(ax, look)
    legend(ax, look, [*handles(look, providers, [], lines=True), *ends], columns=3)
    return ax
