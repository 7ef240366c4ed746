"""Fisher: B^t = E[g^t g^tᵀ], the second moment of the gradients at the pre-activations.

Three kinds differ in the labels behind the gradients: the given ones (`empirical`: what the paper and
KFAC practice call Fisher), labels drawn from the model's own prediction (`mc`), or the expectation
over them (`exact`). Every kind is a Gram matrix, so it is positive semi-definite, and is kept as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from curvlab.curvature import Curvature, Definiteness
from curvlab.linalg import Factor
from curvlab.problem import Problem
from curvlab.providers.base import INPUTS, Context, Provider, kronecker_layers
from curvlab.providers.statistics import GradientProducts, Statistic

__all__ = ["Fisher"]


@dataclass(frozen=True)
class Fisher(Provider):
    """Second moment of the gradients, with labels given, sampled or in expectation.

    >>> Fisher(kind="mc", samples=4)
    Fisher(kind='mc', samples=4, seed=0)
    """

    needs_chain: ClassVar[bool] = False
    kind: Literal["empirical", "mc", "exact"] = "empirical"
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples={self.samples}: at least one draw an example is needed")

    @property
    def products(self) -> GradientProducts:
        """The statistic that gives B^t."""
        return GradientProducts(self.kind, self.samples, self.seed) if self.kind == "mc" else GradientProducts(self.kind)

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        return (INPUTS, self.products)

    def curvature(self, context: Context, name: str) -> Curvature:
        factors = context.means[self.products]
        outputs: dict[str, Factor] = {
            layer.name: factor  # type: ignore[misc]
            for layer, factor in zip(context.network.selected, factors, strict=True)
        }
        criterion = context.problem.criterion
        sampled = self.kind != "empirical"
        notes = (f"criterion `{criterion.name}` is not a likelihood",) if sampled and not criterion.likelihood else ()
        definiteness = Definiteness(True, "a second moment")
        return Curvature(name, criterion.name, kronecker_layers(context, outputs), definiteness, notes=notes)
