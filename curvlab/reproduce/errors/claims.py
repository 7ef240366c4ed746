"""The paper's claims about errors, judged by the frames of Tables 2 to 5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd

from curvlab.report.numbers import digits, percent
from curvlab.reproduce.errors.orderings import ordering_name
from curvlab.reproduce.judgement import Claim, Frames, Judgement, Verdict, unmeasured, verdict_of
from curvlab.reproduce.rows import rows_of

__all__ = ["accumulation_claim", "ordering_claim"]

MOSTLY, RARELY = 0.9, 0.5
PAPERS_OWN = ("fisher", "gauss-newton", "pch-1", "pch-2")


def ordering_claim(providers: Sequence[str], says: str) -> Claim:
    """That the Totals are ordered so, from the smallest error to the largest."""
    rule = (
        f"holds: in at least {percent(MOSTLY)} of the points of the smaller measured batch, and in every "
        f"seed's average; does not hold: in fewer than {percent(RARELY)}; mixed: between"
    )
    return Claim(says, rule, partial(_judge_ordering, ordering_name(providers)))


def _judge_ordering(ordering: str, frames: Frames) -> Judgement:
    if "orderings" not in frames:
        return unmeasured()
    shares = frames["orderings"]
    found = shares[(shares["ordering"] == ordering) & (shares["phase"] == "all")]
    if found.empty:
        return unmeasured("The frames do not have both.")
    first = found.sort_values("batch").iloc[0]
    words = [
        f"on {row.batch} examples {ordering} in {percent(row.share)} of {row.points} points "
        f"({percent(row.low)} to {percent(row.high)}), {row.seeds_holding} of {row.seeds} seeds"
        for row in rows_of(found.sort_values("batch"))
    ]
    of_ordering = shares[(shares["ordering"] == ordering) & (shares["batch"] == first["batch"])]
    words += [
        f"in the {row.phase} phase in {percent(row.share)} of {row.points} points ({row.seeds} of "
        f"{first['seeds']} seeds have one)"
        for row in rows_of(of_ordering)
        if row.phase in ("plateau", "late")
    ]
    verdict: Verdict = "mixed"
    if first["share"] >= MOSTLY and first["seeds_holding"] == first["seeds"]:
        verdict = "holds"
    elif first["share"] < RARELY:
        verdict = "does not hold"
    return Judgement(f"{'; '.join(words)}.", verdict)


def accumulation_claim() -> Claim:
    """That errors do not accumulate from layer to layer towards the input."""
    return Claim(
        "Errors do not accumulate with the layers, for any of the matrices.",
        "holds: the mean relative error next to the input is at most that at the last inner layer, for every "
        "provider that the paper measures; does not hold: for none of them; mixed: for some",
        _judge_accumulation,
    )


def _judge_accumulation(frames: Frames) -> Judgement:
    if "averages" not in frames:
        return unmeasured()
    means = frames["averages"]
    means = means[(means["phase"] == "all") & (means["batch"] == means["batch"].min())]
    inner = means[[not isinstance(layer, str) for layer in means["layer"]]]
    last = int(max(inner["layer"])) - 1
    kept, words = [], []
    for provider, group in inner.groupby("provider", sort=False):
        if provider not in PAPERS_OWN:
            continue
        by_layer = group.set_index("layer")
        ends = (by_layer.loc[last], by_layer.loc[1])
        kept.append(bool(ends[1]["relative"] <= ends[0]["relative"]))
        words.append(
            f"{provider} {_pair(ends, 'relative', percent)} relative, {_pair(ends, 'error', digits)} absolute"
        )
    return Judgement(f"At layer {last} and at layer 1: {'; '.join(words)}.", verdict_of(kept))


def _pair(ends: tuple[pd.Series, pd.Series], column: str, show: Callable[[float], str]) -> str:
    return " and ".join(show(float(end[column])) for end in ends)
