"""A formed gradient along an orthonormal basis Q and outside of it, in all digits.

G = (GQ) Qᵀ + G⊥      GQ and ‖G⊥‖ are what an iteration needs; G⊥ is never held whole
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlab.linalg.norms import binary_scale, frobenius_norm, trustworthy
from curvlab.measure import device

__all__ = ["split_gradient"]

SPLIT_ELEMENTS = 1 << 18


def split_gradient(gradient: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """GQ and ‖G⊥‖ for an orthonormal basis Q (n × r, or a vector), of a G of any size.

    Where reads are free, a large G is first read for ‖G⊥‖² = ‖G‖² - ‖GQ‖², which will do if little of it
    cancels, and squares are scaled only if they left the range of the dtype.
    """
    interval = device.read_interval(gradient)
    if interval == 1 and gradient.numel() > SPLIT_ELEMENTS:
        x, norm = gradient @ basis, frobenius_norm(gradient)
        perp = _leg(norm, torch.linalg.vector_norm(x))
        if trustworthy(perp) and float(perp) > 0.7 * float(norm):
            return x, perp
    if interval <= 1:
        x, perp = _split(gradient, basis, None)
        if interval == 0 or trustworthy(perp):
            return x, perp
    scale = binary_scale(gradient)
    x, perp = _split(gradient, basis, scale)
    return x * scale, perp * scale


def _leg(hypotenuse: Tensor, other: Tensor) -> Tensor:
    """√(a² - b²)."""
    return ((hypotenuse - other) * (hypotenuse + other)).clamp(min=0).sqrt()


def _split(gradient: Tensor, basis: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both of G over `scale`; G⊥ is orthogonalised twice, so that only rounding of its part along Q is left.

    A few rows at a time: G⊥ is needed for its norm alone and is never held whole. The second time that
    norm is taken without it, ‖G⊥ - RQᵀ‖² = ‖G⊥‖² - ‖R‖² with R = G⊥Q, where next to nothing cancels.
    """
    parts, norms = [], []
    count = min(max(1, SPLIT_ELEMENTS // gradient.shape[1]), len(gradient))
    # One piece of memory for all parts: fresh pages would cost as much as the arithmetic.
    held = gradient.new_empty(count, gradient.shape[1])
    for part in gradient.split(count):
        rows = part if scale is None else part / scale
        x, perp = rows @ basis, held[: len(part)]
        if basis.ndim == 1:
            torch.addcmul(rows, x[:, None], basis, value=-1, out=perp)
        else:
            torch.addmm(rows, x, basis.T, alpha=-1, out=perp)
        again = perp @ basis
        parts.append(x.add_(again))
        norms.append(torch.stack([frobenius_norm(perp), torch.linalg.vector_norm(again)]))
    first, second = torch.linalg.vector_norm(torch.stack(norms), dim=0).unbind()
    return torch.cat(parts), _leg(first, second)
