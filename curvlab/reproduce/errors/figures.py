"""Figures of the errors along training: by update and seed, and by layer beside the paper's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from curvlab.report.figures.axes import FONT, dress, log_axis, shorten
from curvlab.report.theme import Look
from curvlab.reproduce.errors.averages import ROUNDING
from curvlab.studies.small.errors import TOTAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["errors_by_layer", "errors_by_update"]

NAMES = {"error": "error", "relative": "relative error"}
PLATEAU = "loss, as a share of the uniform prediction's"


def errors_by_update(errors: pd.DataFrame, column: str, uninformed: float, look: Look) -> Axes:
    """The total error of each provider by update, a panel a seed; the grey line is the loss."""
    totals = errors[errors["layer"] == TOTAL]
    seeds = sorted(totals["seed"].unique())
    panels = _panels(len(seeds), 2.6)
    for axes, seed in zip(panels, seeds, strict=True):
        run = totals[totals["seed"] == seed]
        for provider, group in run.groupby("provider", sort=False):
            axes.plot(group["step"], group[column], **_style(look, str(provider)))
        if bool((run[column] > 0).all()):
            log_axis(axes, "y")
        loss = run.drop_duplicates("step")
        twin = axes.twinx()
        twin.plot(loss["step"], loss["loss"] / uninformed, color=look.theme.muted, alpha=0.5, linewidth=2.5)
        twin.set(ylim=(0, 1.15), yticks=[])
        twin.spines[:].set_visible(False)
        axes.set(xlabel="update", title=f"seed {seed}")
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        _dress(axes, look)
    panels[0].set_ylabel(f"{NAMES[column]}, Total")
    return _with_legend(panels, look, list(totals["provider"].unique()), PLATEAU)


def errors_by_layer(ours: pd.DataFrame, printed: pd.DataFrame, look: Look) -> Axes:
    """Mean errors by layer: absolute ones with the paper's (hollow), and relative ones."""
    panels = _panels(2, 4.2)
    layers = ours[[isinstance(layer, int) for layer in ours["layer"]]]
    for axes, column in zip(panels, ("error", "relative"), strict=True):
        for provider, group in layers.groupby("provider", sort=False):
            # An exact block is not a point of a logarithmic curve.
            shown = group if column == "relative" else group[group["relative"] > ROUNDING]
            axes.plot(shown["layer"], shown[column], marker="o", **_style(look, str(provider)))
        axes.set(xlabel="layer", ylabel=f"mean {NAMES[column]}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    known = printed[[isinstance(layer, int) for layer in printed["layer"]]]
    for provider, group in known.groupby("provider", sort=False):
        positive = group[group["error"] > 0]
        style: dict[str, Any] = {
            "color": look.colour(str(provider)),
            "linestyle": (0, (1.2, 1.6)),
            "linewidth": 1.2,
        }
        panels[0].plot(positive["layer"], positive["error"], marker="o", markerfacecolor="none", **style)
    log_axis(panels[0], "y")
    panels[1].set_ylim(bottom=0)
    for axes in panels:
        _dress(axes, look)
    return _with_legend(panels, look, list(layers["provider"].unique()), "" if known.empty else "the paper")


def _panels(count: int, width: float) -> list[Axes]:
    """`count` panels in rows of at most three, on one figure."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(width * columns, 7.0), 2.9 * rows + 0.4), layout="constrained")
    made = figure.subplots(rows, columns, squeeze=False).ravel()
    for spare in made[count:]:
        spare.remove()
    return list(made[:count])


def _dress(axes: Axes, look: Look) -> None:
    dress(axes, look)
    axes.get_figure(root=True).set_facecolor(look.theme.paper)  # type: ignore[union-attr]
    axes.title.set(color=look.theme.ink, fontsize=FONT)


def _style(look: Look, provider: str) -> dict[str, Any]:
    """The exact kinds are dashed: they are no rivals but what the recursions approximate."""
    exact = "[" in provider
    return {
        "color": look.colour(provider),
        "linewidth": 1.3,
        "linestyle": (0, (4, 2)) if exact else "-",
        "markersize": 3.5,
    }


def _with_legend(panels: list[Axes], look: Look, providers: list[str], extra: str) -> Axes:
    entries = [Line2D([], [], label=shorten(name), **_style(look, name)) for name in providers]
    if extra == PLATEAU:
        entries.append(Line2D([], [], color=look.theme.muted, alpha=0.5, linewidth=2.5, label=extra))
    elif extra:
        entries.append(
            Line2D(
                [],
                [],
                color=look.theme.ink,
                marker="o",
                markerfacecolor="none",
                linestyle=(0, (1.2, 1.6)),
                label=extra,
            )
        )
    figure = panels[0].get_figure(root=True)
    assert figure is not None
    box = figure.legend(
        handles=entries,
        loc="outside lower left",
        ncols=3,
        frameon=False,
        fontsize=FONT,
        labelcolor=look.theme.ink,
    )
    for text in box.get_texts():
        text.set_parse_math(False)
    return panels[0]
