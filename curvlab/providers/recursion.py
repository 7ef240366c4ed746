"""The recursions of Gauss-Newton and PCH over a chain: the expectation is taken at every layer.

    B^k = f(E[∇²ξ(h^k)])
    B^{t-1} = (W^tᵀ B^t W^t) ⊙ E[σ'σ'ᵀ] + diag(d^{t-1})

Gauss-Newton has f = identity and d = 0; PCH has f = PosEig and d = PosEig(E[σ'' ⊙ (Wᵀg)]).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from curvlab.linalg import DenseFactor, Factor, congruence
from curvlab.network import Chain
from curvlab.providers.base import Context
from curvlab.providers.statistics import OutputHessian, SlopeProducts

__all__ = ["OUTPUT_HESSIAN", "SLOPES", "output_factors", "recurse"]

SLOPES = SlopeProducts()
OUTPUT_HESSIAN = OutputHessian()


def recurse(
    chain: Chain, top: Tensor, slopes: tuple[Tensor, ...], bends: tuple[Tensor | None, ...]
) -> dict[str, Tensor]:
    """B^t for the layers from the output down to the lowest that has blocks, by layer name."""
    lowest = min(index for index, layer in enumerate(chain.layers) if layer.selected)
    block = top
    blocks = {chain.layers[-1].name: block}
    for index in range(len(chain.layers) - 1, lowest, -1):
        block = congruence(chain.layers[index].weight, block).mul_(slopes[index - 1])
        bend = bends[index - 1]
        if bend is not None and bend.ndim:
            block.diagonal().add_(bend)
        blocks[chain.layers[index - 1].name] = block
    return blocks


def output_factors(
    context: Context, who: str, top: Tensor, bend: Callable[[int], Tensor | None]
) -> dict[str, Factor]:
    """The recursion from `top` down, as factors by layer name; `bend(t)` is d of hidden layer t."""
    chain = context.network.require_chain(who)
    slopes: tuple[Tensor, ...] = context.means[SLOPES]  # type: ignore[assignment]
    blocks = recurse(chain, top, slopes, tuple(bend(index) for index in range(len(slopes))))
    return {name: DenseFactor(block) for name, block in blocks.items()}
