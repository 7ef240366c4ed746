"""PCH, the positive-curvature Hessian: the exact recursion's mean, made positive semi-definite.

    B^k = PosEig_{γ_out}(E[∇²ξ(h^k)])
    B^{t-1} = (Wᵀ B^t W) ⊙ E[σ'σ'ᵀ] + diag(PosEig_γ(E[σ'' ⊙ (Wᵀ g^t)]))

γ = -1 takes absolute values (PCH-1), γ = 0 clips (PCH-2). The output layer has a γ of its own, -1 in
both: the paper's tables show no error there for either. That is `poseig=node`, PosEig at every step. With
`poseig=last` the recursion stays signed, and PosEig is taken once, of each layer's own block:

    S^k = E[∇²ξ(h^k)],  S^{t-1} = (Wᵀ S^t W) ⊙ E[σ'σ'ᵀ] + diag(E[σ'' ⊙ (Wᵀ g^t)])
    B^k = PosEig_{γ_out}(S^k),  B^t = PosEig_γ(S^t)

Where every activation is piecewise linear and the criterion convex, PCH is Gauss-Newton: that is the same
recursion (`recurse`) without PosEig and without the diagonal term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from curvlab.curvature import Curvature, Definiteness
from curvlab.exceptions import SpecError
from curvlab.linalg import DenseFactor, congruence, poseig, poseig_diagonal
from curvlab.model.layers import Chain
from curvlab.problem import Problem
from curvlab.providers.base import INPUTS, Context, Provider, kronecker_layers
from curvlab.providers.statistics import OutputHessian, SecondOrderTerms, SlopeProducts, Statistic
from curvlab.specs import check_choices

__all__ = ["OUTPUT_HESSIAN", "PCH", "SLOPE_PRODUCTS", "recurse"]

OUTPUT_HESSIAN = OutputHessian()
SLOPE_PRODUCTS = SlopeProducts()
SECOND_ORDER_TERMS = SecondOrderTerms()


@dataclass(frozen=True)
class PCH(Provider):
    """The Hessian's recursion with negative curvature multiplied by gamma ≤ 0.

    Args:
        gamma: what negative eigenvalues are multiplied by; -1 takes absolute values, 0 clips.
        output_gamma: the same at the output layer.
        poseig: where that is done: at every `node` of the recursion, as in the paper, or `last`, once for
            each layer's block; `auto` is `node`.

    >>> PCH(gamma=0.0)
    PCH(gamma=0.0, output_gamma=-1.0, poseig='auto')
    """

    gamma: float = -1.0
    output_gamma: float = -1.0
    poseig: Literal["auto", "node", "last"] = "auto"

    def __post_init__(self) -> None:
        check_choices(self)
        for field in ("gamma", "output_gamma"):
            if not getattr(self, field) <= 0:
                raise SpecError(
                    f"{field}={getattr(self, field)} must be at most 0: it multiplies negative eigenvalues "
                    f"(-1 takes absolute values, 0 clips)"
                )

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        return (INPUTS, OUTPUT_HESSIAN, SLOPE_PRODUCTS, SECOND_ORDER_TERMS)

    def curvature(self, context: Context, name: str) -> Curvature:
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
