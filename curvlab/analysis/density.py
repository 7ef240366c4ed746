"""The spectral density of a curvature: how many of its n eigenvalues lie where.

    φ(t) = 1/n Σ_i δ(t - λ_i) ≈ Σ_j w_j δ(t - θ_j)

Of a Kronecker curvature all eigenvalues are known, products of those of its factors: nodes θ are these and
weights 1/n (0 probes). Any other is estimated by stochastic Lanczos quadrature: each random probe z gives the
nodes and weights of zᵀ f(C) z (Golub and Welsch; Ghorbani, Krishnan, Xiao 2019). The weight of single
eigenvalues far from the others is mostly chance in a few probes. The run of the first probe has found the
largest of them with their eigenvectors u; the share (z·u)² of each is therefore taken out of every probe's
weights, and the eigenvalue counted with 1/n:

    φ(t) = 1/n Σ_top δ(t - λ) + (n - k)/n · mean over probes of Σ_j w_j δ(t - θ_j)

`outliers` are among those that were found. Each is an eigenvalue; where the run found fewer than eight, as
with 20 steps or less, there may be further ones: the gap is then the widest among those that are known.

`density` is φ on `grid`, smoothed by a Gaussian; `band` is two standard errors over the probes around it.

How many eigenvalues are negative is no question for quadrature where many lie about zero: a node stands for
many of them, on either side. `negative_mass` of an estimate therefore counts from twice the Gaussian's own
standard deviation on, a 125th of the range below zero; an exact density counts every negative one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import pi, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.analysis.figures import axes_for
from curvlab.analysis.spectrum import curvature_of
from curvlab.curvature import Curvature
from curvlab.exceptions import SpecError
from curvlab.linalg.eigenbases import Eigenbasis
from curvlab.linalg.estimators import gaussian_rows
from curvlab.linalg.execution import full_precision
from curvlab.linalg.krylov import lanczos, leading_pairs, quadrature
from curvlab.matrix_functions import SymmetricMatrix, check_rows, runs_at_once
from curvlab.problem import Problem
from curvlab.staleness import checked_once

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Density", "density"]

LEADING = 8  # eigenvalues looked for by themselves: outliers are those before a gap among the first seven
LEADING_TOL = 1e-4
PRODUCT_SECONDS = 1e-4  # the least that one takes
POINTS = 1000
EXACT_UP_TO = 4 * 10**6  # nodes times points: beyond, nodes are moved to the points of the grid around them
NARROW = 250  # the Gaussian's standard deviation is this part of the whole range
UNSURE = 2 / NARROW  # of the range: nearer to zero than this, an estimate does not tell a sign


@dataclass(frozen=True, eq=False)
class Density:
    """A spectral density; see `density`.

    `grid` and `density` (points), `band` (2, points), below and above; `nodes` and `weights`, which add up to
    1; `outliers`, the largest eigenvalues up to the widest relative gap behind the second of them; `probes`
    (0: exact) and the number of `parameters`; the standard error of `negative_mass`.
    """

    label: str
    grid: Tensor
    density: Tensor
    band: Tensor
    nodes: Tensor
    weights: Tensor
    outliers: Tensor
    probes: int
    parameters: int
    negative_mass_error: float = 0.0

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest node: with enough steps the extreme eigenvalues."""
        counted = self.nodes[self.weights > 0]
        return float(counted.min()), float(counted.max())

    @property
    def mean(self) -> float:
        """The mean eigenvalue, tr C / n."""
        return float(self.nodes @ self.weights)

    @property
    def negative_from(self) -> float:
        """Eigenvalues below this count as negative: for an exact density below rounding, else see above."""
        rounding = 1e-6 if self.nodes.dtype != torch.float64 else 1e-10
        smallest = rounding * float(self.nodes.abs().max())
        if self.probes == 0:
            return -smallest
        low, high = self.ends
        return -max(smallest, UNSURE * (high - low))

    @property
    def negative_mass(self) -> float:
        """The share of eigenvalues below `negative_from`."""
        return float(self.weights[self.nodes < self.negative_from].sum())

    def frame(self) -> pd.DataFrame:
        """One row per point of the grid: eigenvalue, density, low and high."""
        import pandas as pd

        low, high = self.band.tolist()
        columns = {"eigenvalue": self.grid.tolist(), "density": self.density.tolist()}
        return pd.DataFrame({**columns, "low": low, "high": high})

    def plot(self, ax: Axes | None = None) -> Figure:
        """The density with its band on a logarithmic axis, and the outliers as marks below it."""
        axes = axes_for(ax)
        floor = 0.5 / self.parameters / max(self.ends[1] - self.ends[0], 1e-300)
        grid, (low, high) = self.grid.tolist(), self.band.clamp(min=floor).tolist()
        axes.fill_between(grid, low, high, alpha=0.25, linewidth=0)
        axes.plot(grid, self.density.clamp(min=floor).tolist(), linewidth=1.2)
        axes.plot(self.outliers.tolist(), [floor] * len(self.outliers), "|", color="C3", markersize=10)
        axes.set(yscale="log", xlabel="eigenvalue", ylabel="density", title=f"spectrum of {self.label}")
        return axes.get_figure()  # type: ignore[return-value]

    def __repr__(self) -> str:
        low, high = self.ends
        how = "exact" if self.probes == 0 else f"{self.probes} probes"
        return (
            f"Density({self.label}, {self.parameters:,} eigenvalues from {low:.4g} to {high:.4g}, "
            f"{len(self.outliers)} outliers, {how})"
        )


@full_precision
def density(
    curvature: Curvature | Problem,
    probes: int = 10,
    steps: int = 80,
    *,
    width: float | None = None,
    points: int = POINTS,
    seed: int = 0,
) -> Density:
    """The spectral density of the whole matrix.

    Args:
        curvature: a curvature, or a Problem, for its whole Hessian.
        probes: random vectors; a Kronecker curvature takes none.
        steps: products for each of them.
        width: standard deviation of the Gaussian that smooths `density`; a 250th of the range by default.
        points: of the grid.
        seed: of the probes.

    >>> import curvlab
    >>> model = torch.nn.Linear(3, 2)
    >>> problem = curvlab.Problem(model, "cross-entropy", torch.randn(8, 3), torch.tensor([0, 1] * 4))
    >>> found = curvlab.density(curvlab.estimate("fisher", problem))
    >>> found.probes, round(float(found.weights.sum()), 4), len(found.nodes)
    (0, 1.0, 8)
    """
    found = curvature_of(curvature, "density")
    if probes < 2 or steps < 2 or points < 2:
        raise SpecError(f"probes={probes}, steps={steps}, points={points}: each must be at least 2")
    matrix = found.matrix
    if matrix.basis is not None:
        nodes, weights = _all_eigenvalues(matrix.basis)
        top = nodes.topk(min(LEADING, len(nodes))).values
        per_probe, used = weights[None], 0
    else:
        top, nodes, per_probe = _estimate_nodes(matrix, probes, steps, seed)
        weights, used = per_probe.mean(0), probes
    grid, smooth = _smoother(nodes, width, points)
    curves = smooth(per_probe)
    middle = curves.mean(0)
    error = curves.std(0) / sqrt(len(curves)) if len(curves) > 1 else torch.zeros_like(middle)
    band = torch.stack([(middle - 2 * error).clamp(min=0), middle + 2 * error])
    outliers = _outliers(top)
    made = Density(found.provider, grid, middle, band, nodes, weights, outliers, used, matrix.size)
    if used == 0:
        return made
    negative = per_probe[:, nodes < made.negative_from].sum(1)
    return replace(made, negative_mass_error=float(negative.std()) / sqrt(used))


def _all_eigenvalues(basis: Eigenbasis) -> tuple[Tensor, Tensor]:
    """Every eigenvalue, one that is repeated at a block's shift once, with its share."""
    values, counts = [], []
    for block in basis.blocks.values():
        own = block.values
        values.append(own)
        counts.append(torch.ones_like(own))
        if block.further:
            values.append(own.new_full((1,), block.shift))
            counts.append(own.new_full((1,), float(block.further)))
    count = torch.cat(counts)
    return torch.cat(values), count / count.sum()


def _estimate_nodes(
    matrix: SymmetricMatrix, probes: int, steps: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest eigenvalues, all nodes, and the weights of the nodes for each probe, (probes, nodes)."""
    size, like = matrix.size, matrix.like
    check_rows(matrix, probes, f"density(probes={probes:,})")
    days = probes * min(steps, size) * PRODUCT_SECONDS / 86_400
    if days > 1:
        raise SpecError(
            f"density(probes={probes:,}, steps={steps:,}) takes a product for each of them, at least "
            f"{days:,.1f} days in all; 10 probes of 80 steps are usual"
        )
    matrix.begin("a density", probes, steps, seed)
    starts = gaussian_rows(probes, size, like, seed + 1)
    starts /= torch.linalg.vector_norm(starts, dim=1, keepdim=True)
    steps = min(steps, size)
    at_once, hold = runs_at_once(matrix, steps)
    # Without reorthogonalisation, which took most of the time: ghosts share the weight of their value.
    with checked_once():
        runs = [
            lanczos(matrix.product, part, steps, keep=False, keep_first=hold and number == 0)
            for number, part in enumerate(starts.split(at_once))
        ]
    pairs = [quadrature(run) for run in runs]
    nodes, weights = (torch.cat(one) for one in zip(*pairs, strict=True))
    count, top, along = min(LEADING, size // 4), like.new_zeros(0), like.new_zeros(0, probes)
    vectors = runs[0].vectors
    if vectors is not None and count:
        top, coefficients = leading_pairs(runs[0], vectors[0], count, LEADING_TOL)
        along = coefficients @ (vectors[0] @ starts.T)
    rest = weights
    for value, shares in zip(top, along.square(), strict=True):
        rest = _without(nodes, rest, value, shares)
    # Where the first probe's run has ended, its vectors may span all of the probe: it stays as it was.
    some = rest.sum(1, keepdim=True) > 1e3 * torch.finfo(rest.dtype).eps
    weights = torch.where(some, rest, weights)
    # Each probe has nodes of its own: row i holds the weights of probe i's, and zeros elsewhere.
    share = (size - len(top)) / size
    own = share * torch.block_diag(*(weights / weights.sum(1, keepdim=True)))
    heads = like.new_full((probes, len(top)), 1 / size)
    return top, torch.cat([top, nodes.flatten()]), torch.cat([heads, own], 1)


def _without(nodes: Tensor, weights: Tensor, value: Tensor, shares: Tensor) -> Tensor:
    """The weights of each probe (row) less its share of one eigenvalue, taken from the nearest nodes."""
    order = (nodes - value).abs().argsort(1)
    near = weights.gather(1, order)
    taken = near.cumsum(1).minimum(shares[:, None]).diff(dim=1, prepend=torch.zeros_like(near[:, :1]))
    return torch.empty_like(weights).scatter_(1, order, (near - taken).clamp(min=0))


def _outliers(top: Tensor) -> Tensor:
    """The values before the widest relative gap behind the second one."""
    ordered = top.sort(descending=True).values
    if len(ordered) < 3 or float(ordered[1]) <= 0:
        return ordered[:1]
    values = ordered[ordered > 0]
    gaps = (values[1:-1] - values[2:]) / values[1:-1]
    return values[: 2 + int(gaps.argmax())] if len(gaps) else values


def _smoother(nodes: Tensor, width: float | None, points: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The grid, and what turns rows of weights of the nodes into smooth densities on it."""
    low, high = float(nodes.min()), float(nodes.max())
    spread = high - low or max(abs(high), 1.0)
    sigma = spread / NARROW if width is None else width
    grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, points, dtype=nodes.dtype, device=nodes.device)
    scale = sigma * sqrt(2 * pi)
    if len(nodes) * points <= EXACT_UP_TO:
        bumps = torch.exp(-0.5 * ((nodes[:, None] - grid) / sigma).square()) / scale
        return grid, lambda weights: weights @ bumps
    step = float(grid[1] - grid[0])
    # Each node is shared by the two points around it, so that millions of them cost one pass.
    place = ((nodes - grid[0]) / step).clamp(0, points - 1.001)
    left = place.floor().long()
    right_share = place - left
    kernel = torch.exp(-0.5 * ((grid[:, None] - grid) / sigma).square()) / scale

    def smooth(weights: Tensor) -> Tensor:
        counts = weights.new_zeros(len(weights), points)
        counts.index_add_(1, left, weights * (1 - right_share))
        counts.index_add_(1, left + 1, weights * right_share)
        return counts @ kernel

    return grid, smooth
