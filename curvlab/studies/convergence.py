"""Convergence cells: one optimizer trained for a few epochs, by epoch and by wall clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from curvlab.studies.setup import Setup
from curvlab.studies.train import TrainPlan, train

__all__ = ["COLUMNS", "convergence"]

COLUMNS = ["epoch", "seconds", "train_loss", "test_loss", "test_accuracy", "status"]


def convergence(setup: Setup, optimizer: str, epochs: int, batch: int) -> dict[str, Any]:
    """The fields of an optimizer's row: `epochs` holds one entry an epoch, the first before training.

    A run that diverged has failed, with its epochs so far.

    >>> row = convergence(Setup(data="digits[train=200]"), "sgd", epochs=1, batch=100)
    >>> [entry["epoch"] for entry in row["epochs"]]
    [0, 1]
    """
    frame = train(TrainPlan(replace(setup, batch=batch), optimizer, epochs))
    last = frame.iloc[-1]
    ended = (
        {}
        if last["status"] == "ok"
        else {"status": "failed", "message": f"{last['status']}: {last['message']}"}
    )
    return {"epochs": frame[COLUMNS].to_dict("records"), **ended}
