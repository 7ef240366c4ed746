"""How far a weight block is from the exact E[(h_i h_iᵀ) ⊗ H_i], with neither matrix formed.

Entry (μ, ν) of the H_i meets the inputs only through the m × m kernel κ_ij = c_i c_j (h_i·h_j)²:

    ‖E[(h_i h_iᵀ) ⊗ Δ_i]‖_F² = Σ_μν δ_μνᵀ κ δ_μν      with δ_μν = ([Δ_1]_μν, …, [Δ_m]_μν)

Let H̄ be the mean of the H_i under the row sums of κ. Then for every block E[hhᵀ] ⊗ B

    ‖E[hhᵀ] ⊗ B - E[hhᵀ ⊗ H_i]‖² = ‖E[hhᵀ]‖² ‖B - H̄‖² + ‖E[hhᵀ ⊗ (H_i - H̄)]‖²

because the two terms are orthogonal. Nothing cancels, one pass over the H_i serves every provider, and the
last term is the floor: the error that is left with the best B there is, H̄ itself.

The H_i are read a few columns at a time, for all examples, as Hessian-vector products with unit vectors:
memory grows with the number of examples only by what those columns take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.model.recording import ChainRecording
from curvlab.providers.hessian import hessian_products

__all__ = ["WeightYardstick", "gauss_newton_error", "weight_yardstick"]

COLUMN_BYTES = 16 * 1024**2
GRAM_COLUMNS = 8192


@dataclass(frozen=True, eq=False)
class WeightYardstick:
    """What the error of any block E[hhᵀ] ⊗ B of one layer is read off.

    `best` is H̄, `input_norm` is ‖E[hhᵀ]‖_F and `floor` the error of E[hhᵀ] ⊗ H̄, all in float64.
    """

    best: Tensor
    input_norm: float
    floor: float

    def error(self, block: Tensor) -> float:
        """‖E[hhᵀ] ⊗ B - E[hhᵀ ⊗ H_i]‖_F for B = `block`."""
        return self._distance(block.to(self.best) - self.best)

    @property
    def norm(self) -> float:
        """‖E[hhᵀ ⊗ H_i]‖_F, the error of B = 0."""
        return self._distance(self.best)

    def _distance(self, difference: Tensor) -> float:
        within = self.input_norm * float(torch.linalg.matrix_norm(difference))
        return float((within**2 + self.floor**2) ** 0.5)


def weight_yardstick(recording: ChainRecording, position: int) -> WeightYardstick:
    """The yardstick of the layer at `position` in the chain."""
    kernel = _kernel(recording, position)
    total = kernel.sum()
    # Where every input is zero so is the weight block, and any mean will do.
    weights = kernel.sum(1) / total if total > 0 else recording.row_weights.to(kernel)
    rows, square = [], 0.0
    for slab in _columns(recording, position, lambda units: hessian_products(recording, position, units)):
        columns = slab.to(kernel)
        mean = torch.einsum("i,sin->sn", weights, columns)
        rows.append(mean)
        square += _square_norm(kernel, columns - mean[:, None, :])
    best = torch.cat(rows)
    return WeightYardstick((best + best.T) / 2, float(total.sqrt()), max(square, 0.0) ** 0.5)


def gauss_newton_error(recording: ChainRecording, position: int) -> float:
    """‖E[hhᵀ ⊗ (C_i - H_i)]‖_F with C_i = J_iᵀ∇²ξ_iJ_i: the error of the exact Gauss-Newton weight block."""
    kernel = _kernel(recording, position)

    def difference(units: Tensor) -> Tensor:
        exact = hessian_products(recording, position, units)
        return _gauss_newton_products(recording, position, units) - exact

    slabs = _columns(recording, position, difference)
    return max(sum(_square_norm(kernel, slab.to(kernel)) for slab in slabs), 0.0) ** 0.5


def _gauss_newton_products(recording: ChainRecording, position: int, vectors: Tensor) -> Tensor:
    """C_i u_i: the Hessian's product without its σ'' terms."""
    layers, slopes = recording.chain.layers, recording.activation_slopes
    for s in range(position + 1, len(layers)):
        vectors = (vectors * slopes[s - 1]) @ layers[s].weight.T
    vectors = recording.criterion.hessian_products(recording.logits, recording.targets, vectors)
    for s in range(len(layers) - 1, position, -1):
        vectors = (vectors @ layers[s].weight) * slopes[s - 1]
    return vectors


def _kernel(recording: ChainRecording, position: int) -> Tensor:
    """κ_ij = c_i c_j (h_i·h_j)², in float64 whatever the inputs are in.

    Inputs that nearly all point the same way make κ nearly of rank one; deviations from a mean see only
    the rest, of which float32 would leave nothing.
    """
    rows = recording.inputs[position]
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for chunk in rows.split(GRAM_COLUMNS, dim=1):
        wide = chunk.to(gram)
        gram.addmm_(wide, wide.T)
    share = recording.row_weights.to(gram)
    return gram.square() * torch.outer(share, share)


def _columns(
    recording: ChainRecording, position: int, product: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """`product` of the unit vectors, a slab (columns, examples, n_t) after the other."""
    size, examples = recording.chain.layers[position].module.out_features, recording.examples
    step = max(1, COLUMN_BYTES // (examples * size * recording.logits.element_size()))
    for start in range(0, size, step):
        stop = min(start + step, size)
        units = recording.logits.new_zeros(stop - start, examples, size)
        units.diagonal(start, 0, 2).fill_(1)
        yield product(units)


def _square_norm(kernel: Tensor, columns: Tensor) -> float:
    """Σ δᵀ κ δ over the entries of a slab (columns, examples, n_t)."""
    return float((torch.einsum("ij,sjn->sin", kernel, columns) * columns).sum())
