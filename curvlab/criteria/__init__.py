"""Losses of the logits, per example, with their output Hessian and whether they are convex."""

from curvlab.criteria.base import Criterion
from curvlab.criteria.function import FunctionCriterion
from curvlab.criteria.registry import criterion_from
from curvlab.criteria.separable import BCE, MSE, SeparableCriterion, Tukey
from curvlab.criteria.softmax import CrossEntropy, Robust

__all__ = [
    "BCE",
    "MSE",
    "Criterion",
    "CrossEntropy",
    "FunctionCriterion",
    "Robust",
    "SeparableCriterion",
    "Tukey",
    "criterion_from",
]
