"""Criteria by name: the registry behind `criterion="robust[delta=5]"` and `--criterion`.

Other packages add theirs through the entry-point group `curvlab.criteria`.
"""

from __future__ import annotations

from typing import Any

from curvlab.criteria import BCE, MSE, Criterion, CrossEntropy, Robust, Tukey, criterion_from
from curvlab.registry import Registry

__all__ = ["criteria", "criterion_named"]

criteria: Registry[Criterion] = Registry("criterion", "curvlab.criteria")
criteria.register("cross-entropy", CrossEntropy)
criteria.register("robust", Robust)
criteria.register("mse", MSE)
criteria.register("tukey", Tukey)
criteria.register("bce", BCE)


def criterion_named(criterion: str | Any) -> Criterion:
    """A criterion from its name, a torch loss, a function or a `Criterion`.

    >>> criterion_named("robust[delta=3]").delta
    3.0
    """
    return criteria.make(criterion) if isinstance(criterion, str) else criterion_from(criterion)
