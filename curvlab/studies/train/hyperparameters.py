"""What decides an optimizer's curve besides its method: learning rate, damping and momentum.

Two curves compare methods only as far as these are fair, so they stand beside every curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from curvlab.exceptions import SpecError

__all__ = ["RATES", "rate_words", "rates_of"]

RATES = {"lr": "learning rate", "alpha": "α", "momentum": "momentum"}


def rates_of(spec: str) -> dict[str, float]:
    """Those settings of `RATES` that an optimizer has, by its spec; none where it names no optimizer.

    >>> rates_of("sgd[lr=0.05]"), rates_of("adam")
    ({'lr': 0.05, 'momentum': 0.9}, {'lr': 0.001})
    """
    from curvlab.studies.train.optimizers import optimizers

    try:
        made = optimizers.make(spec)
    except SpecError:
        return {}
    return {name: float(getattr(made, name)) for name in RATES if hasattr(made, name)}


def rate_words(rates: Mapping[str, float]) -> str:
    """The settings that are known, as a list in words; empty where none is.

    >>> rate_words({"lr": 0.1, "alpha": 0.05, "momentum": float("nan")})
    'learning rate 0.1, α 0.05'
    """
    known = {name: rates[name] for name in RATES if name in rates and not math.isnan(rates[name])}
    return ", ".join(f"{RATES[name]} {value:g}" for name, value in known.items())
