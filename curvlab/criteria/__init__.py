"""Losses of the logits, per example, with their output Hessian and whether they are convex."""

from curvlab.criteria.base import Criterion
from curvlab.criteria.bce import BCE
from curvlab.criteria.conversion import criterion_from
from curvlab.criteria.cross_entropy import CrossEntropy
from curvlab.criteria.function import FunctionCriterion
from curvlab.criteria.regression import MSE, Tukey
from curvlab.criteria.robust import Robust
from curvlab.criteria.separable import SeparableCriterion

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
