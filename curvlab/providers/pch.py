"""PCH, the positive-curvature Hessian: the exact recursion's mean, made positive semi-definite.

    B^k = PosEig_{γ_out}(E[∇²ξ(h^k)])
    B^{t-1} = (Wᵀ B^t W) ⊙ E[σ'σ'ᵀ] + diag(PosEig_γ(E[σ'' ⊙ (Wᵀ g^t)]))

γ = -1 takes absolute values (PCH-1), γ = 0 clips (PCH-2). The output layer has a γ of its own, -1 in
both: the paper's tables show no error there for either. Where every activation is piecewise linear
and the criterion convex, PCH is Gauss-Newton: that is the same recursion (`recurse`) without PosEig and
without the diagonal term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

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

    >>> PCH(gamma=0.0)
    PCH(gamma=0.0, output_gamma=-1.0)
    """

    gamma: float = -1.0
    output_gamma: float = -1.0

    def __post_init__(self) -> None:
        check_choices(self)
        for field in ("gamma", "output_gamma"):
            if not -inf < getattr(self, field) <= 0:
                raise SpecError(
                    f"{field}={getattr(self, field)} must be finite and at most 0: it multiplies "
                    f"negative eigenvalues (-1 takes absolute values, 0 clips)"
                )

    def statistics(self, problem: Problem) -> tuple[Statistic, ...]:
        return (INPUTS, OUTPUT_HESSIAN, SLOPE_PRODUCTS, SECOND_ORDER_TERMS)

    def curvature(self, context: Context, name: str) -> Curvature:
        chain = context.problem.require_chain(name)
        criterion = context.problem.criterion
        (output,) = context.tensors(OUTPUT_HESSIAN)
        # Where the criterion is convex the mean is PSD already: PosEig would only add rounding.
        top = output if criterion.convex else poseig(output, self.output_gamma)
        diagonals = [poseig_diagonal(term, self.gamma) for term in context.tensors(SECOND_ORDER_TERMS)]
        outputs = recurse(chain, top, context.tensors(SLOPE_PRODUCTS), diagonals)
        same = bool(criterion.convex) and all(a.piecewise_linear for a in chain.activations)
        return Curvature(
            name,
            criterion.name,
            kronecker_layers(context, outputs),
            Definiteness(True, "by PosEig"),
            notes=("equals Gauss-Newton here: every activation is piecewise linear",) if same else (),
        )


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
