"""The exact Hessian of a chain at its pre-activations, example by example.

    H_i^k = ∇²ξ(h^k),   H_i^{t-1} = diag(σ') Wᵀ H_i^t W diag(σ') + diag(σ'' ⊙ (Wᵀ g^t))

`layer_hessians` gives H_i^t as matrices, for a few examples at a time. `hessian_products` gives
H_i^t u_i without forming one, by differentiating the backward pass along u (the R-operator):

    forward    u^{s} = W^s (σ' ⊙ u^{s-1})
    backward   v^k = ∇²ξ u^k,  v^{s-1} = σ' ⊙ (Wᵀ v^s) + σ'' ⊙ (Wᵀ g^s) ⊙ u^{s-1}
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curvlab.linalg.symmetric import symmetric_product
from curvlab.model.recording import ChainRecording

__all__ = ["chunks", "hessian_products", "layer_hessians", "mean_hessians"]

CHUNK_BYTES = 192 * 1024**2


def chunks(recording: ChainRecording, lowest: int = 0) -> Iterator[slice]:
    """Slices of the examples, small enough that one matrix an example fits in `CHUNK_BYTES`."""
    widths = [layer.module.out_features for layer in recording.chain.layers[lowest:]]
    per_example = 3 * max(widths) ** 2 * recording.logits.element_size()
    size = max(1, CHUNK_BYTES // per_example)
    for start in range(0, recording.examples, size):
        yield slice(start, min(start + size, recording.examples))


def layer_hessians(recording: ChainRecording, rows: slice, lowest: int = 0) -> Iterator[tuple[int, Tensor]]:
    """(t, H_i^t for the examples in `rows`) from the output layer down to layer `lowest`."""
    layers = recording.chain.layers
    hessian = recording.criterion.hessians(recording.logits[rows], recording.targets[rows])
    yield len(layers) - 1, hessian
    for index in range(len(layers) - 1, lowest, -1):
        weight, slope = layers[index].weight, recording.slopes[index - 1][rows]
        hessian = weight.T @ (hessian @ weight)
        hessian.mul_(slope[:, :, None]).mul_(slope[:, None, :])
        bend = recording.bends[index - 1]
        if bend is not None:
            hessian.diagonal(dim1=1, dim2=2).add_(bend[rows])
        yield index - 1, hessian


def mean_hessians(recording: ChainRecording) -> list[Tensor]:
    """E[H_i^t] for the layers that have blocks, holding the matrices of one chunk of examples only.

    The lowest layer's matrices are never formed: with Y_i = W diag(σ'_i) its mean is the single product
    Σ_i Y_iᵀ (c_i H_i) Y_i plus the mean diagonal.
    """
    layers = recording.chain.layers
    lowest = min(index for index, layer in enumerate(layers) if layer.selected)
    stop = min(lowest + 1, len(layers) - 1)
    means: dict[int, Tensor] = {}
    for rows in chunks(recording, stop):
        share = recording.share[rows]
        for index, hessian in layer_hessians(recording, rows, stop):
            mean = torch.einsum("i,iab->ab", share, hessian)
            means[index] = mean if index not in means else means[index].add_(mean)
        if lowest < stop:
            mean = _mean_below(recording, rows, lowest, hessian)
            means[lowest] = mean if lowest not in means else means[lowest].add_(mean)
    return [(means[i] + means[i].T) / 2 for i, layer in enumerate(layers) if layer.selected]


def _mean_below(recording: ChainRecording, rows: slice, lowest: int, hessian: Tensor) -> Tensor:
    weight = recording.chain.layers[lowest + 1].weight
    slope, share = recording.slopes[lowest][rows], recording.share[rows]
    scaled = weight * slope[:, None, :]
    curved = (hessian @ weight).mul_((slope * share[:, None])[:, None, :])
    mean = symmetric_product(scaled.flatten(0, 1).T, curved.flatten(0, 1).T)
    bend = recording.bends[lowest]
    if bend is not None:
        mean.diagonal().add_(share @ bend[rows])
    return mean


def hessian_products(recording: ChainRecording, index: int, vectors: Tensor) -> Tensor:
    """H_i^t u_i for layer t = `index`, with u_i the rows of `vectors` (examples × n_t)."""
    layers = recording.chain.layers
    along = [vectors]
    for s in range(index + 1, len(layers)):
        along.append((along[-1] * recording.slopes[s - 1]) @ layers[s].weight.T)
    back = recording.criterion.hessian_products(recording.logits, recording.targets, along[-1])
    for s in range(len(layers) - 1, index, -1):
        back = (back @ layers[s].weight) * recording.slopes[s - 1]
        bend = recording.bends[s - 1]
        if bend is not None:
            back = back + bend * along[s - 1 - index]
    return back
