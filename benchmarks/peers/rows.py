"""Kronecker factors from the definition, row by row: what curvlab's and a peer's factors are both held to.

Shares no code with either: a hook keeps what a layer saw and gave, patches are cut by slicing, and the rows
g are vector-Jacobian products of cotangents that are written down here. For example i and position p

    expand   A = E[mean_p h hᵀ]     B = E[Σ_p g gᵀ]
    reduce   A = E[h̄ h̄ᵀ], h̄ = mean_p h     B = E[ḡ ḡᵀ], ḡ = Σ_p g

with E the plain mean over m examples and a sum over the cotangents in B. An example has T loss terms of K
outputs each, ξ_i = (1/T) Σ_j ξ_ij. Cotangents of the logits, each (m, T, K):

- `empirical`: ∇ξ_i, so 1/T at every term;
- `exact`: for one term j at a time, every column of a square root of the labels' covariance of ∇ξ_ij, times
  1/√T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Cotangents = list[Tensor]


@dataclass(frozen=True)
class Factors:
    """The factors of one layer's weight block, B ⊗ A for `weight.flatten()`, and its bias block."""

    inputs: Tensor
    output: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Seen:
    """What one layer saw and gave in a forward pass: h as rows (m, S, n), and z, still in the graph."""

    h: Tensor
    z: Tensor
    channels_first: bool

    def rows(self, gradient: Tensor) -> Tensor:
        """A gradient at z as rows (m, S, o)."""
        if self.channels_first:
            return gradient.flatten(2).transpose(1, 2)
        return gradient.reshape(len(gradient), -1, gradient.shape[-1])


def patches(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    """The patch of every output position, (m, S, channels × kernel), by slicing; one group, zero padding."""
    (k1, k2), (s1, s2), (d1, d2) = convolution.kernel_size, convolution.stride, convolution.dilation
    p1, p2 = convolution.padding
    x = F.pad(x, (p2, p2, p1, p1))
    o1 = (x.shape[2] - d1 * (k1 - 1) - 1) // s1 + 1
    o2 = (x.shape[3] - d2 * (k2 - 1) - 1) // s2 + 1
    cut = torch.stack(
        [
            x[:, :, a * d1 : a * d1 + s1 * (o1 - 1) + 1 : s1, b * d2 : b * d2 + s2 * (o2 - 1) + 1 : s2]
            for a in range(k1)
            for b in range(k2)
        ],
        dim=2,
    )
    return cut.flatten(3).permute(0, 3, 1, 2).flatten(2)


def forward(model: nn.Module, layer: str, x: Tensor) -> tuple[Tensor, Seen]:
    """The logits as (m, T, K), and what the layer saw."""
    module, seen = model.get_submodule(layer), []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        h = inputs[0].detach()
        convolution = isinstance(module, nn.Conv2d)
        rows = patches(module, h) if convolution else h.reshape(len(h), -1, h.shape[-1])
        seen.append(Seen(rows, output, convolution))

    handle = module.register_forward_hook(keep)
    logits = model(x)
    handle.remove()
    # Classes are dimension 1, torch's own layout, which both packages take: (m, K) or (m, K, T).
    return logits.flatten(2).transpose(1, 2) if logits.ndim > 2 else logits.unsqueeze(1), seen[0]


def gradient_of_terms(criterion: str, logits: Tensor, targets: Tensor) -> Tensor:
    """∇ξ_ij at the logits of every term, (m, T, K)."""
    outputs = logits.shape[-1]
    if criterion == "cross-entropy":
        return logits.softmax(-1) - F.one_hot(targets.reshape(logits.shape[:-1]), outputs)
    if criterion == "mse":
        return 2 * (logits - targets.reshape(logits.shape)) / outputs
    return (logits.sigmoid() - targets.reshape(logits.shape)) / outputs


def square_root(criterion: str, logits: Tensor) -> Tensor:
    """L with LLᵀ = the covariance of ∇ξ_ij over the model's own labels, (m, T, K, columns)."""
    outputs = logits.shape[-1]
    identity = torch.eye(outputs, dtype=logits.dtype)
    if criterion == "cross-entropy":
        p = logits.softmax(-1)
        return (p.unsqueeze(-1) - identity) * p.sqrt().unsqueeze(-2)
    if criterion == "mse":  # labels of N(f, K/2 I), the Gaussian whose negative log-likelihood is the mean
        return (identity * (2 / outputs) ** 0.5).expand(*logits.shape, outputs)
    p = logits.sigmoid()
    return torch.diag_embed((p * (1 - p)).sqrt() / outputs)


def empirical(criterion: str, logits: Tensor, targets: Tensor) -> Cotangents:
    """One cotangent, the gradient of every example's loss."""
    return [gradient_of_terms(criterion, logits, targets) / logits.shape[1]]


def exact(criterion: str, logits: Tensor, targets: Tensor) -> Cotangents:
    """One cotangent per term and column."""
    root, terms = square_root(criterion, logits), logits.shape[1]
    found = []
    for term in range(terms):
        alone = torch.zeros_like(root)
        alone[:, term] = root[:, term] / terms**0.5
        found += alone.unbind(-1)
    return found


def exact_terms_together(criterion: str, logits: Tensor, targets: Tensor) -> Cotangents:
    """One cotangent per column, shared by all terms: the cross products of terms do not vanish."""
    return list((square_root(criterion, logits) / logits.shape[1] ** 0.5).unbind(-1))


def factors(
    model: nn.Module,
    layer: str,
    x: Tensor,
    targets: Tensor,
    criterion: str,
    cotangents: Callable[[str, Tensor, Tensor], Cotangents],
    sharing: str,
) -> Factors:
    """The factors of one layer by their definition."""
    logits, seen = forward(model, layer, x)
    m, positions = seen.h.shape[:2]
    g = torch.stack(
        [
            seen.rows(torch.autograd.grad(logits, seen.z, cotangent, retain_graph=True)[0])
            for cotangent in cotangents(criterion, logits.detach(), targets)
        ]
    )
    summed, mean = g.sum(2), seen.h.mean(1)
    bias = torch.einsum("cio,ciq->oq", summed, summed) / m
    if sharing == "reduce":
        return Factors(mean.T @ mean / m, bias, bias)
    rows = seen.h.flatten(0, 1)
    return Factors(rows.T @ rows / (m * positions), torch.einsum("cipo,cipq->oq", g, g) / m, bias)
