"""The plateau: where a deep sigmoid network begins, predicting every class alike whatever it is shown."""

from __future__ import annotations

from functools import cache

import torch

from curvlab.criteria.registry import criterion_named

__all__ = ["CLASSES", "LATE", "LEFT", "uninformed"]

CLASSES = 10
LEFT, LATE = 0.98, 0.90
"""A run has left the plateau below this share of the uninformed loss, and is late in training below that."""


@cache
def uninformed(criterion: str) -> float:
    """The loss of the uniform prediction over ten classes: the height of the plateau.

    >>> round(uninformed("cross-entropy"), 4), round(uninformed("robust"), 4)
    (2.3026, 0.6225)
    """
    return float(criterion_named(criterion).losses(torch.zeros(1, CLASSES), torch.tensor([0])))
