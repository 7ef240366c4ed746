"""The recursions of Gauss-Newton and PCH over a chain: the expectation is taken at every layer.

    B^k = f(E[∇²ξ(h^k)])
    B^{t-1} = (W^tᵀ B^t W^t) ⊙ E[σ'σ'ᵀ] + diag(d^{t-1})

Gauss-Newton has f = identity and d = 0; PCH has f = PosEig and d = PosEig(E[σ'' ⊙ (Wᵀg)]).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from curvlab.linalg import DenseFactor, congruence
from curvlab.model.graph import Chain
from curvlab.providers.statistics import OutputHessian, SlopeProducts

__all__ = ["OUTPUT_HESSIAN", "SLOPES", "recurse"]

OUTPUT_HESSIAN = OutputHessian()
SLOPES = SlopeProducts()


def recurse(
    chain: Chain, top: Tensor, slopes: Sequence[Tensor], bends: Sequence[Tensor | None]
) -> list[DenseFactor]:
    """B^t for each layer with blocks; `slopes` and `bends` are E[σ'σ'ᵀ] and d of the hidden layers."""
    lowest = min(index for index, layer in enumerate(chain.layers) if layer.selected)
    blocks = [top]
    for index in range(len(chain.layers) - 1, lowest, -1):
        block = congruence(chain.layers[index].weight, blocks[-1]).mul_(slopes[index - 1])
        bend = bends[index - 1]
        if bend is not None:
            block.diagonal().add_(bend)
        blocks.append(block)
    layers = chain.layers[lowest:]
    return [DenseFactor(b) for layer, b in zip(layers, reversed(blocks), strict=True) if layer.selected]
