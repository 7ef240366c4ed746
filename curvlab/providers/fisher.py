"""Fisher: B^t = E[g^t g^tᵀ], the second moment of the gradients at the pre-activations.

Three kinds differ in the labels behind the gradients: the given ones (`empirical`: what the paper and
KFAC practice call Fisher), labels drawn from the model's own prediction (`mc`), or the expectation
over them (`exact`). Every kind is a Gram matrix, so it is positive semi-definite, and is kept as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from curvlab.curvature import Curvature, Definiteness
from curvlab.exceptions import SpecError
from curvlab.problem import Problem
from curvlab.providers.base import INPUTS, Context, Provider, kronecker_layers
from curvlab.providers.statistics import (
    ExpectedGradientProducts,
    GradientProducts,
    SampledGradientProducts,
    Statistic,
)
from curvlab.specs import check_choices

__all__ = ["Fisher"]


@dataclass(frozen=True)
class Fisher(Provider):
    """Second moment of the gradients, with labels given, sampled or in expectation.

    `samples` draws an example and their `seed` matter to the kind `mc` only.

    >>> Fisher(kind="mc", samples=4)
    Fisher(kind='mc', samples=4, seed=0)
    """

    needs_chain: ClassVar[bool] = False
    kind: Literal["empirical", "mc", "exact"] = "empirical"
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        if self.samples < 1:
            raise SpecError(f"samples={self.samples}: at least one draw an example is needed")

    @property
    def products(self) -> Statistic:
        """The statistic that gives B^t."""
        if self.kind == "mc":
            return SampledGradientProducts(self.samples, self.seed)
        return GradientProducts() if self.kind == "empirical" else ExpectedGradientProducts()

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        return (INPUTS, self.products)

    def curvature(self, context: Context, name: str) -> Curvature:
        criterion = context.problem.criterion
        honest = self.kind == "empirical" or criterion.likelihood
        return Curvature(
            name,
            criterion.name,
            kronecker_layers(context, context.factors(self.products)),
            Definiteness(True, "a second moment"),
            notes=() if honest else (f"criterion `{criterion.name}` is not a likelihood",),
        )
