"""Trace, diagonal and Frobenius norm of a symmetric matrix from a few products, with standard errors.

With random vectors z, E[zzᵀ] = I (signs for the first two, normal numbers for the norm):

    tr M = E[zᵀ M z]        diag M = E[z ∘ Mz]        ‖A‖_F² = tr A² = E[‖Az‖²]

- Hutchinson: the mean over the probes.
- Hutch++ (Meyer, Musco, Musco, Woodruff 2021): a quarter of the probes S finds Q = orth(AS), where most of
  the matrix lies. On Q, for another quarter, everything is exact; the rest estimates what is orthogonal to it
  (the paper takes thirds; half of them for the random part make its error bar a better one):

    tr M = tr(QᵀMQ) + E[zᵀ(I - QQᵀ) M (I - QQᵀ)z]

Where few eigenvalues dominate, the spread of a dozen values zᵀMz is a poor guide to their variance: one that
missed them all would look sure of itself. The variances are therefore estimated from what else is known:

    signs     Var(zᵀMz) = 2 Σ_{i≠j} M_ij² = 2 Σ_i Var((z ∘ Mz)_i)
    normal    Var(zᵀA²z) = 2 ‖A²‖_F² = 2 E[((Az)·(Az'))²]      over pairs of probes z ≠ z'

both without bias. No standard error is below the rounding of its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from curvlab.linalg.execution import in_pieces

__all__ = [
    "Estimate",
    "Estimator",
    "estimate_diagonal",
    "estimate_frobenius_norm",
    "estimate_trace",
    "gaussian_rows",
    "mean_with_error",
    "random_signs",
]

Estimator = Literal["hutchinson", "hutch++"]
Product = Callable[[Tensor], Tensor]
FEWEST_PROBES = {"hutchinson": 4, "hutch++": 8}
PIECE = 2**17  # numbers of a piece that stays in a cache
BLOCK = 16  # torch draws so many normal numbers together


@dataclass(frozen=True, eq=False)
class Estimate:
    """A value with its standard error, from so many probes; 0 probes: the value is exact.

    Of a diagonal both are mappings of parameter names to tensors.

    >>> estimate = Estimate(2.0, 0.25, 12)
    >>> float(estimate), estimate
    (2.0, Estimate(2 ± 0.25, 12 probes))
    """

    value: float | Mapping[str, Tensor]
    standard_error: float | Mapping[str, Tensor]
    probes: int

    def __float__(self) -> float:
        if isinstance(self.value, Mapping):
            raise TypeError(
                "an estimated diagonal is a mapping of parameter names to tensors; read .value[name]"
            )
        return float(self.value)

    def __repr__(self) -> str:
        counted = "exact" if self.probes == 0 else f"{self.probes} probes"
        if isinstance(self.value, Mapping) or isinstance(self.standard_error, Mapping):
            return f"Estimate({len(self.value)} parameters, {counted})"  # type: ignore[arg-type]
        return f"Estimate({self.value:.6g} ± {self.standard_error:.2g}, {counted})"


def random_signs(count: int, size: int, like: Tensor, seed: int) -> Tensor:
    """Signs ±1, (count, size): the same on every device and in every dtype.

    >>> bool((random_signs(2, 3, torch.empty(0), seed=0).abs() == 1).all())
    True
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(numbers: int) -> Tensor:
        return torch.randint(0, 2, (numbers,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)

    return _draw_rows(draw, count, size, like)


def gaussian_rows(count: int, size: int, like: Tensor, seed: int) -> Tensor:
    """Standard normal numbers, (count, size): the same on every device and in every dtype.

    >>> gaussian_rows(2, 3, torch.empty(0), seed=0).shape
    torch.Size([2, 3])
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(numbers: int) -> Tensor:
        return torch.randn(numbers, generator=generator, dtype=torch.float64)

    return _draw_rows(draw, count, size, like)


def _draw_rows(draw: Callable[[int], Tensor], count: int, size: int, like: Tensor) -> Tensor:
    """The numbers that one call of `draw` would give, (count, size), with the dtype and device of `like`.

    Drawn on the host, a piece at a time: what has another dtype never leaves the cache.
    """
    total = count * size
    drawn = torch.empty(total, dtype=like.dtype)
    places = [*range(0, max(total - BLOCK, 1), PIECE), total]
    for start, end in pairwise(places):
        drawn[start:end] = draw(end - start)
    return drawn.reshape(count, size).to(like.device)


def mean_with_error(values: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the first dimension and its standard error, not below rounding.

    >>> [float(x) for x in mean_with_error(torch.tensor([1.0, 3.0]))]
    [2.0, 1.0]
    """
    count, mean = len(values), values.mean(0)
    # std(0) takes ten times as long: torch goes down one column after the other.
    error = (values - mean).square_().sum(0).div_(count * (count - 1)).sqrt_()
    return mean, error.clamp(min=8 * torch.finfo(values.dtype).eps * values.abs().amax(0))


def _total(signs: Tensor, images: Tensor) -> tuple[float, float]:
    """The mean over the rows of Σ_i e_i, and Σ_i Var(e_i), of the entries e = signs ∘ images (rows, n)."""
    count, total, spread = len(signs), images.new_zeros(()), images.new_zeros(())
    width = max(1, PIECE // count) if in_pieces(images) else images.shape[1]
    for left, right in zip(signs.split(width, 1), images.split(width, 1), strict=True):
        entries = left * right
        mean = entries.mean(0)
        total = total + mean.sum()
        spread = spread + entries.sub_(mean).square_().sum()
    return float(total), float(spread) / (count - 1)


@dataclass(frozen=True, eq=False)
class _Deflation:
    """The columns Q (as rows) with A Q, and what is left of the probes."""

    basis: Tensor
    images: Tensor
    left: int

    @classmethod
    def of(cls, product: Product, size: int, probes: int, like: Tensor, seed: int) -> _Deflation:
        quarter = min(probes // 4, size)
        sketch = product(random_signs(quarter, size, like, seed))
        basis = torch.linalg.qr(sketch.T).Q.T.contiguous()
        return cls(basis, product(basis), probes - 2 * quarter)

    def outside(self, rows: Tensor) -> Tensor:
        """(I - QQᵀ) x for each row."""
        for _ in range(2):
            rows = rows - (rows @ self.basis.T) @ self.basis
        return rows


def estimate_trace(
    product: Product, size: int, *, like: Tensor, probes: int, estimator: Estimator, seed: int
) -> Estimate:
    """tr A, from `probes` products in all.

    >>> a = torch.diag(torch.arange(4.0))
    >>> estimate_trace(lambda x: x @ a, 4, like=a, probes=6, estimator="hutchinson", seed=0).value
    6.0
    """
    if estimator == "hutchinson":
        signs = random_signs(probes, size, like, seed)
        known, images = 0.0, product(signs)
    else:
        inside = _Deflation.of(product, size, probes, like, seed)
        known = float((inside.basis * inside.images).sum())
        signs = random_signs(inside.left, size, like, seed + 1)
        images = inside.outside(product(inside.outside(signs)))
    rest, spread = _total(signs, images)
    value, error = known + rest, sqrt(2 * spread / len(signs))
    return Estimate(value, max(error, _rounding(like, value)), probes)


def estimate_frobenius_norm(
    product: Product, size: int, *, like: Tensor, probes: int, estimator: Estimator, seed: int
) -> Estimate:
    """‖A‖_F, from `probes` products in all; the error of a root is that of its square over twice the root."""
    if estimator == "hutchinson":
        known, images = 0.0, product(gaussian_rows(probes, size, like, seed))
    else:
        inside = _Deflation.of(product, size, probes, like, seed)
        known = float(inside.images.square().sum())
        images = product(inside.outside(gaussian_rows(inside.left, size, like, seed + 1)))
    inner = images @ images.T
    count = len(images)
    root = sqrt(known + float(inner.trace()) / count)
    pairs = float((inner.square().sum() - inner.diagonal().square().sum()).clamp(min=0)) / (
        count * (count - 1)
    )
    # The variance is itself from few values, and too small where the estimate is: wider than Student's t by
    # one more degree of freedom, with which coverage held on four networks (test_analysis_estimates.py).
    widened = 2 * pairs / count * (count - 1) / max(count - 4, 1)
    error = sqrt(widened) / (2 * root) if root else 0.0
    return Estimate(root, max(error, _rounding(like, root)), probes)


def estimate_diagonal(
    product: Product, size: int, *, like: Tensor, probes: int, estimator: Estimator, seed: int
) -> tuple[Tensor, Tensor]:
    """The diagonal of A and the standard error of each entry, from `probes` products in all."""
    if estimator == "hutchinson":
        signs = random_signs(probes, size, like, seed)
        return mean_with_error(signs * product(signs))
    known = _Deflation.of(product, size, probes, like, seed)
    signs = random_signs(known.left, size, like, seed + 1)
    # diag A = diag(QQᵀA) + diag((I - QQᵀ)A): the first is known, the second has little left to vary.
    mean, error = mean_with_error(signs * known.outside(product(signs)))
    return mean + (known.basis * known.images).sum(0), error


def _rounding(like: Tensor, value: float) -> float:
    return 8 * torch.finfo(like.dtype).eps * abs(value)
