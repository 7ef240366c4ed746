"""Fisher: the second moment of the gradients, Kronecker-factored by layer.

Three kinds differ in the labels behind the gradients: the given ones (`empirical`: what the paper and
KFAC practice call Fisher), labels drawn from the model's own prediction (`mc`), or the expectation
over them (`exact`). For a weight the block is A ⊗ B, with the sides of `curvlab.providers.sides`; the bias
block E[ḡḡᵀ] is exact. Every kind is a Gram matrix, so it is positive semi-definite, and is kept as one.

With T loss terms per example (a loss per token) the terms' rows are summed as outer products in `mc` and
`exact`, so that `exact` is the Gauss-Newton matrix for cross-entropy there too; `empirical` is the second
moment of the examples' own gradients, in which terms are averaged first: smaller by about T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from curvlab.curvature import Curvature, Definiteness
from curvlab.exceptions import SpecError
from curvlab.problem import Problem
from curvlab.providers.base import Context, RowFields, check_draws, factor_layers
from curvlab.providers.ekfac import EigenMoments, eigen_layers, row_statistics
from curvlab.providers.statistics import (
    ExpectedGradientProducts,
    GradientProducts,
    OutputProducts,
    SampledGradientProducts,
    Statistic,
    sides_for,
)

__all__ = ["Fisher"]


@dataclass(frozen=True)
class Fisher(RowFields):
    """Second moment of the gradients, with labels given, sampled or in expectation; Kronecker-factored.

    So it approximates the Fisher matrix, block by block. `structure=full` is the Fisher matrix itself, with
    its cross-layer blocks, of the examples' own rows; `structure=diagonal` is its true diagonal. `samples`
    draws an example matter to the kind `mc` only.

    >>> Fisher(kind="mc", samples=4).kind
    'mc'
    """

    kind: Literal["empirical", "mc", "exact"] = "empirical"
    samples: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1:
            raise SpecError(f"samples={self.samples}: at least one draw per example is needed")

    def check(self, problem: Problem, name: str) -> None:
        super().check(problem, name)
        if self.kind == "mc":
            check_draws(self.samples, problem, name)

    def products(self, problem: Problem) -> OutputProducts:
        """The statistic that gives the output sides."""
        sides = sides_for(self.sides, problem)
        if self.kind == "mc":
            return SampledGradientProducts(sides, self.samples, self.seed)
        return GradientProducts(sides) if self.kind == "empirical" else ExpectedGradientProducts(sides)

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        products = self.products(problem)
        return row_statistics(products, self.structure)

    def curvature(self, context: Context, name: str) -> Curvature:
        problem = context.problem
        honest = self.kind == "empirical" or problem.criterion.likelihood
        said = () if honest else (f"criterion `{problem.criterion.name}` is not a likelihood",)
        products = self.products(problem)
        layers, notes = factor_layers(context, context.factors(products), products.sides)
        if self.structure == "ekfac":
            layers = eigen_layers(problem.layers, layers, context.tensors(EigenMoments(products)))
        return Curvature(
            name,
            problem.criterion.name,
            layers,
            Definiteness(True, "a second moment"),
            exact=self.structure == "full" and self.kind != "mc",
            notes=(*said, *self.row_notes(problem), *notes),
            structure=self.structure,
        )
