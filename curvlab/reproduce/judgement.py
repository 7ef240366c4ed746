"""A claim of the paper and what became of it: what it says, what was measured, whether it holds.

Verdicts are computed from the frames by rules that stand beside them in words, so that a reader can disagree
with the rule and not only with the result. Losses and times within five per cent of each other are level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

__all__ = ["CLOSE", "Claim", "Frames", "Judgement", "Verdict", "unmeasured", "verdict_of"]

Verdict = Literal["holds", "does not hold", "mixed", "not measured"]
Frames = Mapping[str, pd.DataFrame]
"""The frames of one experiment by name."""
CLOSE = 0.05


@dataclass(frozen=True)
class Judgement:
    """What was measured, in a sentence or two, and the verdict."""

    measured: str
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    """What the paper says, in our words, the rule of the verdict, and the function that applies it."""

    says: str
    rule: str
    judge: Callable[[Frames], Judgement]


def verdict_of(outcomes: Sequence[bool]) -> Verdict:
    """Of the cases of a claim: all of them, some or none.

    >>> verdict_of([True, False])
    'mixed'
    """
    return "holds" if all(outcomes) else "mixed" if any(outcomes) else "does not hold"


def unmeasured(reason: str = "Not measured here yet.") -> Judgement:
    """Where the frames that a claim needs are not there."""
    return Judgement(reason, "not measured")
