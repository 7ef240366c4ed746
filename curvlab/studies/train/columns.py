"""What a training run is told by: the columns of an epoch, and the hyperparameters that stand beside a curve.

Two curves compare methods only as far as learning rate, damping and momentum are fair, so these stand beside
every curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from curvlab.exceptions import SpecError
from curvlab.studies.schema import Column

__all__ = ["EPOCH", "PEAK", "RATES", "rate_words", "rates_of"]

RATES = (
    Column("lr", "plain", "learning rate", short="lr"),
    Column("alpha", "plain", "α"),
    Column("momentum", "plain", "momentum"),
)
"""What decides an optimizer's curve besides its method."""

EPOCH = (
    Column("epoch", "count", "epochs", short="Epoch"),
    Column("seconds", "number", "seconds", short="Seconds"),
    Column("train_loss", "loss", "training loss", short="Train loss"),
    Column("test_loss", "loss", "test loss", short="Test loss"),
    Column("test_accuracy", "percent", "test accuracy", short="Accuracy"),
    Column("status", "text", "status", short="Status"),
)
"""What every table of a run shows of an epoch."""

PEAK = Column("peak_bytes", "bytes", "peak", short="Peak")
"""The most memory that a step of the epoch took."""


def rates_of(spec: str) -> dict[str, float]:
    """Those settings of `RATES` that an optimizer has, by its spec; none where it names no optimizer.

    α is the damping of a second-order step: what another optimizer calls `alpha` is something else.

    >>> rates_of("sgd[lr=0.05]"), rates_of("adam")
    ({'lr': 0.05, 'momentum': 0.9}, {'lr': 0.001})
    """
    from curvlab.studies.train.optimizers import SecondOrderSpec, optimizers

    try:
        made = optimizers.make(spec)
    except SpecError:
        return {}
    names = ("lr", "alpha", "momentum") if isinstance(made, SecondOrderSpec) else ("lr", "momentum")
    return {name: float(getattr(made, name)) for name in names if hasattr(made, name)}


def rate_words(rates: Mapping[str, float]) -> str:
    """The settings that are known, as a list in words; empty where none is.

    >>> rate_words({"lr": 0.1, "alpha": 0.05, "momentum": float("nan")})
    'learning rate 0.1, α 0.05'
    """
    known = [one for one in RATES if not math.isnan(rates.get(one.name, math.nan))]
    return ", ".join(f"{one.heading} {rates[one.name]:g}" for one in known)
