"""Sentences of the figures' pages: where each run ended."""

from __future__ import annotations

import pandas as pd

from curvlab.report.content import Answer
from curvlab.report.numbers import digits, percent
from curvlab.report.words import listed
from curvlab.reproduce.rows import rows_of

__all__ = ["curve_answer", "end_frame"]


def end_frame(curves: pd.DataFrame) -> pd.DataFrame:
    """The last row of every run."""
    ordered = curves.sort_values("epoch", kind="stable")
    return ordered.groupby(["criterion", "seed", "optimizer"], sort=False).tail(1)


def curve_answer(ends: pd.DataFrame) -> Answer:
    """For each criterion and seed, the runs from the lowest training loss up."""
    paragraphs = []
    for (criterion, seed), part in ends.groupby(["criterion", "seed"], sort=False):
        ranked = part.sort_values("train_loss")
        words = [
            f"{row.optimizer} {digits(row.train_loss)} and {percent(row.test_accuracy)} "
            f"in {digits(row.cpu_seconds)} s"
            for row in rows_of(ranked)
            if row.status == "ok"
        ]
        lost = [
            f"{row.optimizer} ({row.status} in epoch {row.epoch})"
            for row in rows_of(ranked)
            if row.status != "ok"
        ]
        text = (
            f"{criterion}, seed {seed}: training loss, test accuracy and time at the end: {'; '.join(words)}."
        )
        paragraphs.append(text + (f" Not finished: {listed(lost)}." if lost else ""))
    best = ends[ends["status"] == "ok"].sort_values("train_loss").groupby("criterion", sort=False).head(1)
    leaders = [f"{row.optimizer} ({row.criterion})" for row in rows_of(best)]
    headline = f"Lowest training loss: {listed(leaders)}." if leaders else "No run ended with a finite loss."
    return Answer(headline, tuple(paragraphs))
