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

from dataclasses import dataclass, replace
from typing import Literal

from curvlab.curvature import Curvature, Definiteness
from curvlab.exceptions import SpecError
from curvlab.problem import Problem
from curvlab.providers.base import Context, RowFields, check_draws, row_layers
from curvlab.providers.fisher_operator import FisherOperator
from curvlab.providers.operators import products_at_once
from curvlab.providers.statistics import (
    ExpectedGradientProducts,
    GradientProducts,
    OutputProducts,
    SampledGradientProducts,
    Statistic,
    input_statistic,
    sides_for,
)

__all__ = ["Fisher"]


@dataclass(frozen=True)
class Fisher(RowFields):
    """Second moment of the gradients, with labels given, sampled or in expectation; Kronecker-factored.

    So it approximates the Fisher matrix, block by block. `structure=full` is the Fisher matrix itself, with
    its cross-layer blocks, by products (`cg` only); `structure=diagonal` is its true diagonal. `samples`
    draws an example matter to the kind `mc` only.

    >>> Fisher(kind="mc", samples=4).kind
    'mc'
    """

    kind: Literal["empirical", "mc", "exact"] = "empirical"
    samples: int = 1
    structure: Literal["kronecker", "diagonal", "full"] = "kronecker"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1:
            raise SpecError(f"samples={self.samples}: at least one draw an example is needed")
        if self.structure == "full" and (self.sharing != "expand" or self.positions != "all"):
            raise SpecError(
                "structure=full is the matrix itself, which has no sides: sharing= and positions= are of "
                "structure=kronecker"
            )

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
        if self.structure == "full":
            return ()
        products = self.products(problem)
        return (products,) if self.structure == "diagonal" else (input_statistic(products.sides), products)

    def curvature(self, context: Context, name: str) -> Curvature:
        problem = context.problem
        honest = self.kind == "empirical" or problem.criterion.likelihood
        said = () if honest else (f"criterion `{problem.criterion.name}` is not a likelihood",)
        if self.structure == "full":
            return self._full(problem, name, said)
        layers, notes = row_layers(context, self.products(problem))
        return Curvature(
            name,
            problem.criterion.name,
            layers,
            Definiteness(True, "a second moment"),
            notes=(*said, *self.row_notes(problem), *notes),
            structure=self.structure,
        )

    def _full(self, problem: Problem, name: str, notes: tuple[str, ...]) -> Curvature:
        """The matrix itself, by products."""
        diagonal = replace(self, structure="diagonal").products(problem)
        operator = FisherOperator(problem, self.products(problem), diagonal)
        return Curvature(
            name,
            problem.criterion.name,
            operator.layers(),
            Definiteness(True, "a second moment"),
            exact=True,
            notes=notes,
            full_product=operator.full_product,
            versions=problem.versions,
            live=True,
            structure="full",
            products_at_once=products_at_once(problem),
        )
