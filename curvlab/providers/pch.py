"""PCH, the positive-curvature Hessian: the Hessian's layer blocks, made positive semi-definite.

On a chain of Linear layers by the paper's recursion, with an expectation at every layer:

    B^k = PosEig_{γ_out}(E[∇²ξ(h^k)])
    B^{t-1} = (Wᵀ B^t W) ⊙ E[σ'σ'ᵀ] + diag(PosEig_γ(E[σ'' ⊙ (Wᵀ g^t)]))

γ = -1 takes absolute values (PCH-1), γ = 0 clips (PCH-2). The output layer has a γ of its own, -1 in
both: the paper's tables show no error there for either. That is `poseig=node`, PosEig at every step. With
`poseig=last` the recursion stays signed, and PosEig is taken once, of each layer's own block:

    S^k = E[∇²ξ(h^k)],  S^{t-1} = (Wᵀ S^t W) ⊙ E[σ'σ'ᵀ] + diag(E[σ'' ⊙ (Wᵀ g^t)])
    B^k = PosEig_{γ_out}(S^k),  B^t = PosEig_γ(S^t)

On any other network (`kind=rows`) by signed curvature propagation (`curvlab.providers.propagation`): rows v⁺
and v⁻ with E[v⁺v⁺ᵀ] - E[v⁻v⁻ᵀ] the block of the Hessian with mean second-order terms. PosEig is taken of a
layer's own block, in the space of its rows (`last`), or of ∇²ξ and of every term before the rows are made
(`node`). `kind=exact` is the matrix that those rows estimate with `node`, over all parameters, by products
(`curvlab.providers.pch_operator`).

Where every activation is piecewise linear and the criterion convex, PCH is Gauss-Newton: the same recursion
(`recurse`) without PosEig and without the diagonal term, or the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import torch
from torch import Tensor

from curvlab.curvature import Curvature, Definiteness
from curvlab.exceptions import SpecError
from curvlab.linalg import DenseFactor, Factor, congruence, poseig, poseig_diagonal, poseig_difference
from curvlab.linalg.execution import askable
from curvlab.model.layers import Chain
from curvlab.problem import Problem
from curvlab.providers.base import INPUTS, ChainOrRows, Context, Provider, factor_layers, kronecker_layers
from curvlab.providers.ekfac import EigenMoments, eigen_layers, row_statistics
from curvlab.providers.example_rows import modules_of
from curvlab.providers.operators import products_at_once
from curvlab.providers.pch_operator import PositiveHessian
from curvlab.providers.propagation import NODE_CURVATURES, PropagatedCurvature
from curvlab.providers.sides import side_count
from curvlab.providers.statistics import (
    OutputHessian,
    SecondOrderTerms,
    SlopeProducts,
    Statistic,
    sides_for,
)

__all__ = ["OUTPUT_HESSIAN", "PCH", "SLOPE_PRODUCTS", "recurse"]

OUTPUT_HESSIAN = OutputHessian()
SLOPE_PRODUCTS = SlopeProducts()
SECOND_ORDER_TERMS = SecondOrderTerms()


@dataclass(frozen=True)
class PCH(ChainOrRows):
    """The Hessian's layer blocks with negative curvature multiplied by gamma ≤ 0.

    Args:
        kind: `recursive`, the paper's, on chains of Linear layers; `rows` on any model; `auto` is the first
            where it can be. `exact` is a matrix by products, for `cg`, with its cross-layer blocks.
        gamma: what negative eigenvalues are multiplied by; -1 takes absolute values, 0 clips.
        output_gamma: the same at the output layer (`poseig=node`: for ∇²ξ).
        poseig: where that is done: at every `node`, as in the paper, or `last`, once for each layer's block;
            `auto` is `node` for the recursion and for `exact`, and `last` for rows.
        samples: for `rows`, how many draws of random signs go back, or `all` for every column by itself.

    >>> PCH(gamma=0.0).kind
    'auto'
    """

    kind: Literal["auto", "recursive", "rows", "exact"] = "auto"
    gamma: float = -1.0
    output_gamma: float = -1.0
    poseig: Literal["auto", "node", "last"] = "auto"
    samples: int | Literal["all"] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("gamma", "output_gamma"):
            if not -inf < getattr(self, field) <= 0:
                raise SpecError(
                    f"{field}={getattr(self, field)} must be finite and at most 0: it multiplies "
                    f"negative eigenvalues (-1 takes absolute values, 0 clips)"
                )
        if self.samples != "all" and self.samples < 1:
            raise SpecError(f"samples={self.samples}: expected `all` or a number of at least 1")
        if self.kind == "recursive" and self.structure != "kronecker":
            raise SpecError(
                f"structure={self.structure} does not go with kind=recursive; it does with kind=rows"
            )
        if self.kind == "exact":
            self._check_exact()

    def _check_exact(self) -> None:
        """Refuse fields that the matrix by products has no use for."""
        if self.poseig == "last":
            raise SpecError(
                "poseig=last does not go with kind=exact, whose blocks are products: PosEig of one would "
                "need its eigenvectors. Use poseig=node, or kind=rows"
            )
        if self.structure not in ("kronecker", "full"):
            raise SpecError(
                f"structure={self.structure} does not go with kind=exact, which always has its cross-layer "
                f"blocks. Leave the field out, or use kind=rows"
            )

    def for_mean_input(self, problem: Problem) -> Provider:
        return super().for_mean_input(problem) if self.resolve(problem) == "rows" else self

    def resolved(self, problem: Problem) -> Provider:
        found = super().resolved(problem)
        kind = self.resolve(problem)
        if self.poseig != "auto" or kind == "recursive" or not isinstance(found, PCH):
            return found
        return replace(found, poseig="node" if kind == "exact" else "last")

    def products(self, problem: Problem) -> PropagatedCurvature:
        """The statistic that gives the output sides of the kind `rows`."""
        drawn = None if self.samples == "all" else self.samples
        at_nodes = (self.gamma, self.output_gamma) if self.poseig == "node" else None
        return PropagatedCurvature(sides_for(self.sides, problem), drawn, self.seed, at_nodes)

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        kind = self.resolve(problem)
        if kind == "recursive":
            return (INPUTS, OUTPUT_HESSIAN, SLOPE_PRODUCTS, SECOND_ORDER_TERMS)
        if kind == "exact":
            return (NODE_CURVATURES,)
        products = self.products(problem)
        return row_statistics(products, self.structure, self._gammas(problem))

    def curvature(self, context: Context, name: str) -> Curvature:
        kind = self.resolve(context.problem)
        if kind != "rows":
            return self._recursive(context, name) if kind == "recursive" else self._exact(context, name)
        problem = context.problem
        products = self.products(problem).bound(context.means)
        signed = products.signed(problem.criterion)
        factors = context.factors(products)
        outputs = list(self._positive_sides(problem, factors)) if signed else factors
        layers, notes = factor_layers(context, outputs, products.sides)
        if self.structure == "ekfac":
            moments = context.tensors(EigenMoments(products, self._gammas(problem)))
            layers = eigen_layers(problem.layers, layers, moments, self._gamma_of(problem))
        return Curvature(
            name,
            problem.criterion.name,
            layers,
            Definiteness(True, "by PosEig"),
            notes=(*self._propagation_notes(context, products), *self.row_notes(problem), *notes),
            structure=self.structure,
        )

    def _positive_sides(self, problem: Problem, factors: Sequence[Factor]) -> Iterator[Factor]:
        """PosEig of each side of v⁺ minus that of v⁻; a layer whose output is the logits has γ_out."""
        pairs = iter(zip(factors[: len(factors) // 2], factors[len(factors) // 2 :], strict=True))
        if self.structure == "full":
            yield poseig_difference(*next(pairs), self.gamma)
            return
        for gamma, pair in zip(self._gammas(problem), pairs, strict=True):
            yield poseig_difference(*pair, gamma)

    def _gamma_of(self, problem: Problem) -> dict[str, float]:
        """γ of each layer: γ_out where its output is the logits."""
        last = problem.reading.output_layers
        return {one.name: self.output_gamma if one.name in last else self.gamma for one in problem.layers}

    def _gammas(self, problem: Problem) -> tuple[float, ...]:
        """γ of each side, or of each group of parameters."""
        gammas = self._gamma_of(problem)
        if self.structure == "layer":
            return tuple(gammas[members[0].name] for _, members in modules_of(problem.layers))
        sides = self.structure in ("kronecker", "ekfac")
        return tuple(
            gammas[layer.name]
            for layer in problem.layers
            for _ in range(side_count(layer) if sides else len(layer.names))
        )

    def _exact(self, context: Context, name: str) -> Curvature:
        problem, means = context.problem, context.tensors(NODE_CURVATURES)
        operator = PositiveHessian(problem, means, self.gamma, self.output_gamma)
        return Curvature(
            name,
            problem.criterion.name,
            operator.layers(),
            Definiteness(True, "by PosEig"),
            notes=("kind=exact, poseig=node", *self._node_notes(problem, _all_zero(means))),
            full_product=operator.full_product,
            versions=problem.versions,
            live=True,
            structure="full",
            products_at_once=products_at_once(problem),
        )

    def _propagation_notes(self, context: Context, products: PropagatedCurvature) -> Iterator[str]:
        yield f"kind=rows, poseig={'node' if self.poseig == 'node' else 'last'}"
        if self.samples != "all":
            yield f"of {self.samples} draw{'s' if self.samples > 1 else ''} of random signs per example"
        yield from self._node_notes(context.problem, not any(map(any, products.present)))

    def _node_notes(self, problem: Problem, straight: bool) -> Iterator[str]:
        """What is to be said of the network's non-linear nodes, `straight` where all M̄ are zero."""
        if straight and problem.criterion.convex:
            yield "equals Gauss-Newton here: every activation is piecewise linear"
        if problem.reading.left_out:
            functions = ", ".join(f"`{function}`" for function in problem.reading.left_out)
            yield f"without the own curvature of {functions}: Gauss-Newton there"

    def _recursive(self, context: Context, name: str) -> Curvature:
        chain = context.problem.require_chain(name)
        criterion = context.problem.criterion
        same = bool(criterion.convex) and all(a.piecewise_linear for a in chain.activations)
        outputs = self._signed(context, chain) if self.poseig == "last" else self._positive(context, chain)
        return Curvature(
            name,
            criterion.name,
            kronecker_layers(context, outputs),
            Definiteness(True, "by PosEig"),
            notes=("equals Gauss-Newton here: every activation is piecewise linear",) if same else (),
        )

    def _positive(self, context: Context, chain: Chain) -> list[DenseFactor]:
        """PosEig at every step of the recursion."""
        (output,) = context.tensors(OUTPUT_HESSIAN)
        top = self._output_block(context, output)
        diagonals = [poseig_diagonal(term, self.gamma) for term in context.tensors(SECOND_ORDER_TERMS)]
        return recurse(chain, top, context.tensors(SLOPE_PRODUCTS), diagonals)

    def _signed(self, context: Context, chain: Chain) -> list[DenseFactor]:
        """The recursion as it is, and PosEig of each block that comes out."""
        (output,) = context.tensors(OUTPUT_HESSIAN)
        terms = context.tensors(SECOND_ORDER_TERMS)
        signed = [factor.matrix for factor in recurse(chain, output, context.tensors(SLOPE_PRODUCTS), terms)]
        top = [self._output_block(context, signed.pop())] if chain.layers[-1].selected else []
        return [DenseFactor(block) for block in [*(poseig(one, self.gamma) for one in signed), *top]]

    def _output_block(self, context: Context, block: Tensor) -> Tensor:
        """PosEig of E[∇²ξ]; where the criterion is convex it is PSD, and PosEig would only add rounding."""
        return block if context.problem.criterion.convex else poseig(block, self.output_gamma)


def recurse(
    chain: Chain, top: Tensor, slope_products: Sequence[Tensor], diagonals: Sequence[Tensor | None]
) -> list[DenseFactor]:
    """B^t for each layer with blocks, from the output layer's B^k = `top` and of the hidden layers the rest.

        B^{t-1} = (W^tᵀ B^t W^t) ⊙ E[σ'σ'ᵀ] + diag(d^{t-1})

    `slope_products` are E[σ'σ'ᵀ] and `diagonals` d (None where it is 0): an expectation at every layer.
    """
    lowest = min(index for index, layer in enumerate(chain.layers) if layer.selected)
    blocks = [top]
    for index in range(len(chain.layers) - 1, lowest, -1):
        block = congruence(chain.layers[index].weight, blocks[-1]).mul_(slope_products[index - 1])
        diagonal = diagonals[index - 1]
        if diagonal is not None:
            block.diagonal().add_(diagonal)
        blocks.append(block)
    layers = chain.layers[lowest:]
    return [DenseFactor(b) for layer, b in zip(layers, reversed(blocks), strict=True) if layer.selected]


def _all_zero(nodes: Sequence[Tensor]) -> bool:
    """Whether no node has a curvature of its own, where that can be asked: one read for all."""
    if not all(askable(node) for node in nodes):
        return False
    return not nodes or not bool(torch.stack([node.any() for node in nodes]).any())
