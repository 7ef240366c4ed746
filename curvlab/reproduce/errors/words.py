"""Tables and sentences of the error pages: ours beside the paper's."""

from __future__ import annotations

import pandas as pd

from curvlab.report.content import Answer
from curvlab.report.numbers import MISSING, digits, percent
from curvlab.report.tables import Entry, Table
from curvlab.report.words import listed
from curvlab.reproduce.errors.averages import INNER, ROUNDING
from curvlab.reproduce.rows import rows_of
from curvlab.studies.small.errors import TOTAL

__all__ = ["average_table", "error_answer", "share_table"]


def average_table(means: pd.DataFrame, printed: pd.DataFrame, column: str, caption: str) -> Table:
    """Layers down, providers across, each with the deviation over seeds and beside the paper's number."""
    providers = list(dict.fromkeys(means["provider"]))
    in_paper = set(printed["provider"])
    heads, numeric = ["layer"], [False]
    for provider in providers:
        heads += [provider, *(["the paper's"] if provider in in_paper else [])]
        numeric += [True] * (2 if provider in in_paper else 1)
    ours = means.set_index(["provider", "layer"])
    paper = printed.set_index(["provider", "layer"])["error"]
    rows = []
    for layer in dict.fromkeys(means["layer"]):
        if column == "relative" and layer == INNER:
            continue
        row = [Entry(str(layer), float(layer) if isinstance(layer, int) else None)]
        for provider in providers:
            value = ours.loc[(provider, layer)]
            row.append(_with_deviation(float(value[column]), float(value[f"{column}_deviation"])))
            if provider in in_paper:
                row.append(_printed(paper, provider, layer))
        rows.append(tuple(row))
    return Table(caption, tuple(heads), tuple(numeric), tuple(rows), sortable=False)


def _with_deviation(mean: float, deviation: float) -> Entry:
    if mean < ROUNDING:
        return Entry("0", mean)
    spread = "" if pd.isna(deviation) else f" ± {digits(deviation, 2)}"
    return Entry(digits(mean) + spread, mean)


def _printed(paper: pd.Series, provider: str, layer: object) -> Entry:
    if (provider, layer) not in paper.index:
        return Entry(MISSING)
    value = float(paper.loc[(provider, layer)])  # type: ignore[index]
    return Entry(f"{value:.4f}", value)


def share_table(shares: pd.DataFrame) -> Table:
    """One row for each measured batch, phase and ordering."""
    heads = ("ordering", "batch", "phase", "points", "holds in", "95 % interval", "seeds", "95 % interval")
    rows = tuple(
        (
            Entry(row.ordering),
            Entry(str(row.batch), float(row.batch)),
            Entry(row.phase),
            Entry(str(row.points), float(row.points)),
            Entry(percent(row.share), row.share),
            Entry(f"{percent(row.low)} to {percent(row.high)}", row.low),
            Entry(f"{row.seeds_holding} of {row.seeds}", row.seeds_holding / max(row.seeds, 1)),
            Entry(f"{percent(row.seeds_low)} to {percent(row.seeds_high)}", row.seeds_low),
        )
        for row in rows_of(shares)
    )
    return Table("Orderings", heads, (False, True, False, True, True, False, True, False), rows)


def error_answer(means: pd.DataFrame, printed: pd.DataFrame, shares: pd.DataFrame, batch: int) -> Answer:
    """The Totals beside the paper's, and how often its orderings hold."""
    totals = means[means["layer"] == TOTAL].set_index("provider")["error"]
    paper = printed[printed["layer"] == TOTAL].set_index("provider")["error"]
    ours = listed([f"{name} {digits(float(totals[name]))}" for name in paper.index if name in totals])
    theirs = listed([f"{name} {value:.4f}" for name, value in paper.items()])
    holds = [
        f"{row.ordering} in {percent(row.share)} of {row.points} points "
        f"({percent(row.low)} to {percent(row.high)}) and in {row.seeds_holding} of {row.seeds} seeds"
        for row in rows_of(shares[(shares["batch"] == batch) & (shares["phase"] == "all")])
    ]
    return Answer(
        f"Total errors: {ours}.",
        (
            f"The paper has {theirs}. Not all of its settings are known; agreement is not to be expected.",
            f"Its orderings, measured on {batch} examples: {'; '.join(holds)}.",
            *_depth(means),
        ),
    )


def _depth(means: pd.DataFrame) -> tuple[str, ...]:
    """Whether errors accumulate towards the input: relative ones at the last inner and the first layer."""
    layers = means[[isinstance(layer, int) for layer in means["layer"]]]
    last = max(layers["layer"]) - 1
    words = []
    for provider, group in layers.groupby("provider", sort=False):
        relative = group.set_index("layer")["relative"]
        words.append(f"{provider} {percent(float(relative[last]))} and {percent(float(relative[1]))}")
    return (f"Relative errors at layer {last} and at layer 1, next to the input: {'; '.join(words)}.",)
