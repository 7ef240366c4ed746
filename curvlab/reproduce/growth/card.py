"""Does KFI fit an 11 GB card at 150,528 inputs? The paper says it does not; `curvlab plan` is asked.

The paper's network 150528-1024-512-256-128-64-32-16-10 at batch 100, in float32: KFI's input factor E[hhᵀ] of
the first layer alone takes 150528² · 4 B = 90.6 GB. Peaks are those of a whole estimate and solve, counted on
fake tensors, with the parameters and the batch; SGD's is that of a step with momentum, counted the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pandas as pd
import torch

from curvlab.measure.memory import Allocation, track
from curvlab.studies.setup import Setup
from curvlab.studies.small.fake_problem import fake_problem
from curvlab.studies.small.plan import FORMS, bytes_of, plan

__all__ = ["CARD", "SOLVERS", "card_frame"]

CARD = "11GB"
NETWORK = Setup(arch="imagenet10-fcnn", data="imagenet10", batch=100, device="cpu")
# An iteration makes the tensors that the one before it made: a plan of two has the peak of any number.
SOLVERS = ("kfi", "sm-kfi", "ea-cg[max_iter=2]")
GB = 1e9


def card_frame(
    setup: Setup = NETWORK, *, provider: str = "pch-1", solvers: Sequence[str] = SOLVERS, card: str = CARD
) -> pd.DataFrame:
    """One row for each solver and form, and one for SGD with momentum; sizes in GB (10⁹ B).

    Columns: provider, solver, form, peak_gb, largest (shape of the largest tensor that is made), largest_gb,
    fits.

    >>> frame = card_frame(Setup(arch="9000-8-10", batch=100), solvers=["kfi"], card="200MB")
    >>> frame[["solver", "form", "fits"]].values.tolist()
    [['kfi', 'textbook', False], ['kfi', 'sample-space', True], ['sgd', 'momentum 0.9', True]]
    """
    planned = plan(setup, [provider], solvers, forms=FORMS[::-1], memory=card)
    rows = [_planned(row, torch.finfo(setup.torch_dtype).bits // 8) for row in planned.to_dict("records")]
    return pd.DataFrame([*rows, _sgd(setup, bytes_of(card))])


def _planned(row: dict[Any, Any], element_size: int) -> dict[str, Any]:
    shape = row["largest"].partition(" ")[0]
    return {
        "provider": row["provider"],
        "solver": row["solver"].partition("[")[0],
        "form": row["form"],
        "peak_gb": row["peak_bytes"] / GB,
        "largest": shape,
        "largest_gb": prod(map(int, shape.split("×"))) * element_size / GB,
        "fits": bool(row["fits"]),
    }


def _sgd(setup: Setup, limit: int) -> dict[str, Any]:
    """A second step of SGD with momentum: the first makes the buffers that every later one holds."""
    with fake_problem(setup) as problem:
        given = list(problem.tensors.values())
        optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9)
        batch = next(problem.batches())
        with track(given, record=True) as tracker:
            for _ in range(2):
                optimizer.zero_grad()
                with torch.enable_grad():
                    torch.nn.functional.cross_entropy(problem.model(batch.inputs), batch.targets).backward()
                optimizer.step()
        largest: Allocation = tracker.largest(1)[0]
        optimizer.zero_grad()
    return {
        "provider": "",
        "solver": "sgd",
        "form": "momentum 0.9",
        "peak_gb": tracker.peak_bytes / GB,
        "largest": "×".join(map(str, largest.shape)),
        "largest_gb": largest.bytes / GB,
        "fits": tracker.peak_bytes <= limit,
    }
