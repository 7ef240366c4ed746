"""Lanczos: eigenpairs, quadrature and functions of a symmetric matrix that is known by its products.

    A Vᵀ = Vᵀ T + β v eᵀ      rows of V orthonormal, T tridiagonal

- `lanczos` runs several starting vectors side by side, each against all of its own earlier vectors
  (twice: once leaves digits behind), since without that converged Ritz values come back as ghosts.
- `quadrature`: zᵀ f(A) z ≈ ‖z‖² Σ_i w_i f(θ_i), with θ the eigenvalues of T and w the squared first
  entries of its eigenvectors.
- `function_times`: f(A) b ≈ ‖b‖ V f(T) e₁, until it no longer changes.
- `eigenpairs`: thick restarts. When V is full, the Ritz vectors nearest to the wanted end are kept as its
  first rows, and the iteration goes on from the last residual (Wu and Simon, SIAM J. Matrix Anal. 2000).

Products take and give rows, (r, n).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.linalg.eigenbases import Which
from curvlab.linalg.estimators import PIECE, gaussian_rows
from curvlab.linalg.execution import eigh, in_pieces

__all__ = [
    "Eigenpairs",
    "Tridiagonal",
    "eigenpairs",
    "function_times",
    "lanczos",
    "leading_pairs",
    "quadrature",
    "search_rows",
]

RowProduct = Callable[[Tensor], Tensor]
SHORTEST = 0.01  # of combinations of a run's unit vectors: shorter ones are mostly rounding
SPACE_BYTES = 256 * 1024**2
SPACE = 100
LOOK_EVERY, LOOK_SOON, NEARLY = 10, 2, 30  # products until convergence is looked for; soon, where it is near
AGAIN_BELOW = 0.5


@dataclass(frozen=True, eq=False)
class Tridiagonal:
    """What r runs of Lanczos found: diagonals (r, k), off-diagonals (r, k) and the vectors (r, k, n).

    The last off-diagonal is the norm of what would come next. A run that ended early has zeros behind it.
    """

    diagonal: Tensor
    off_diagonal: Tensor
    vectors: Tensor | None

    def matrices(self) -> Tensor:
        """T of every run, (r, k, k)."""
        inner = self.off_diagonal[:, :-1]
        matrices = torch.diag_embed(self.diagonal)
        if inner.shape[1]:
            matrices = matrices + torch.diag_embed(inner, 1) + torch.diag_embed(inner, -1)
        return matrices


def lanczos(
    product: RowProduct, starts: Tensor, steps: int, *, keep: bool = True, keep_first: bool = False
) -> Tridiagonal:
    """Up to `steps` products for each of the starting rows; `keep=False` holds no vectors.

    Without its vectors a run is not orthogonalised against them: enough for quadrature, whose weights the
    ghosts share. With `keep_first` those of the first run are held, as they come, for `leading_pairs`.

    >>> a = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    >>> found = lanczos(lambda x: x @ a, torch.ones(1, 3), steps=3)
    >>> torch.linalg.eigvalsh(found.matrices())[0].round(decimals=4).tolist()
    [1.0, 2.0, 3.0]
    """
    runs, size = starts.shape
    steps = min(steps, size)
    current = starts / torch.linalg.vector_norm(starts, dim=1, keepdim=True)
    previous, beta = torch.zeros_like(current), current.new_zeros(runs)
    held = current.new_empty(runs, steps, size) if keep else None
    first = current.new_empty(1, steps + 1, size) if keep_first else None
    vectors = held if first is None else first
    diagonal, off_diagonal = [], []
    largest = current.new_zeros(runs)
    for step in range(steps):
        if vectors is not None:
            vectors[:, step] = current[: len(vectors)]
        # In the memory of the vector before: only the product makes a new one.
        image = torch.addcmul(product(current), beta[:, None], previous, value=-1, out=previous)
        alpha = _inner(image, current)
        image.addcmul_(alpha[:, None], current, value=-1)
        if held is not None:
            _orthogonalise(image, held[:, : step + 1])
        norm = torch.linalg.vector_norm(image, dim=1)
        largest = torch.maximum(largest, alpha.abs() + norm + beta)
        # An invariant subspace: what is left is rounding, and the run stays at zero from here on.
        beta = torch.where(norm <= size**0.5 * torch.finfo(norm.dtype).eps * largest, 0, norm)
        diagonal.append(alpha)
        off_diagonal.append(beta)
        previous = current
        current = image.div_(torch.where(beta > 0, beta, torch.inf)[:, None])
    if first is not None:
        first[:, steps] = current[:1]
    return Tridiagonal(torch.stack(diagonal, 1), torch.stack(off_diagonal, 1), vectors)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """The inner product of each row with its own."""
    if not in_pieces(left):
        return torch.linalg.vecdot(left, right)
    return torch.stack([one @ other for one, other in zip(left, right, strict=True)])  # makes no product


def leading_pairs(found: Tridiagonal, vectors: Tensor, count: int, tol: float) -> tuple[Tensor, Tensor]:
    """Up to `count` of the largest eigenvalues, as far as the first run has found them, and their vectors.

    The vectors are given by their coefficients (k, steps + 1) in the run's `vectors`, V. These are not
    orthogonal, so that T has an eigenvalue twice and, for some steps, another on the way there. Those of A on
    the span of V are not: with G = V Vᵀ, of which directions shorter than `SHORTEST` are left out, and
    A Vᵀ = Vᵀ T + β v eᵀ, which holds to rounding all the same, neither they nor their residuals r need a
    further product. Leading ones whose eigenvalue is known to `tol` of itself count: no eigenvalue is further
    away than r, nor than r²/δ with the next at a distance δ.
    """
    metric = gram_matrix(vectors)
    recurrence = Tridiagonal(found.diagonal[:1].to(metric), found.off_diagonal[:1].to(metric), None)
    last = torch.zeros_like(metric[:1, :-1])
    last[0, -1] = recurrence.off_diagonal[0, -1]
    product = torch.cat([recurrence.matrices()[0], last])
    lengths, directions = eigh(metric[:-1, :-1])
    long = lengths > SHORTEST**2
    basis = directions[:, long] / lengths[long].sqrt()
    images = product @ basis
    projected = basis.T @ metric[:-1] @ images
    values, rotation = eigh((projected + projected.T) / 2)
    values, rotation = values.flip(0), rotation.flip(1)
    coefficients = torch.cat([basis @ rotation, torch.zeros_like(rotation[:1])]).T
    rest = (images @ rotation).T - values[:, None] * coefficients
    residuals = ((rest @ metric) * rest).sum(1).clamp(min=0).sqrt()
    gaps = torch.full_like(values, torch.inf)
    apart = (values[:-1] - values[1:]).abs()
    gaps[:-1], gaps[1:] = apart, torch.minimum(gaps[1:], apart)
    gaps = (gaps - residuals).clamp(min=torch.finfo(gaps.dtype).tiny)
    good = torch.minimum(residuals, residuals.square() / gaps) <= tol * values.abs()
    known = int(good[:count].int().cumprod(0).sum())  # no gap may hide one that was not found
    return values[:known].to(found.diagonal), coefficients[:known].to(found.diagonal)


def gram_matrix(rows: Tensor) -> Tensor:
    """V Vᵀ in double precision, on the host: products of rows that are nearly parallel lose no digits.

    >>> gram_matrix(torch.tensor([[1.0, 2.0], [0.0, 1.0]])).tolist()
    [[5.0, 2.0], [2.0, 1.0]]
    """
    width = max(1, PIECE // len(rows)) if in_pieces(rows) else rows.shape[1]
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for part in rows.split(width, 1):
        wide = part.cpu().double()
        total += wide @ wide.T
    return total


def _orthogonalise(rows: Tensor, vectors: Tensor) -> None:
    """Take from rows (r, n) what lies along the vectors (r, k, n) of each, twice."""
    for _ in range(2):
        inner = vectors @ rows[:, :, None]
        rows[:, None].baddbmm_(inner.mT, vectors, alpha=-1)


def quadrature(found: Tridiagonal) -> tuple[Tensor, Tensor]:
    """Nodes and weights of every run, (r, k) each; the weights of a run add up to 1."""
    nodes, vectors = eigh(found.matrices())
    return nodes, vectors[:, 0].square()


def function_times(
    product: RowProduct,
    rows: Tensor,
    function: Callable[[Tensor], Tensor],
    *,
    tol: float,
    max_steps: int,
    look_every: int = 10,
) -> tuple[Tensor, float]:
    """f(A) b for each row b, and how much the last `look_every` steps changed it, relatively.

    >>> a = torch.diag(torch.tensor([1.0, 4.0]))
    >>> value, _ = function_times(lambda x: x @ a, torch.ones(1, 2), torch.sqrt, tol=1e-5, max_steps=9)
    >>> value.round(decimals=4).tolist()
    [[1.0, 2.0]]
    """
    images, worst = [], 0.0
    for row in rows:
        image, change = _function_times(product, row, function, tol, max_steps, look_every)
        images.append(image)
        worst = max(worst, change)
    return torch.stack(images), worst


def _function_times(
    product: RowProduct,
    row: Tensor,
    function: Callable[[Tensor], Tensor],
    tol: float,
    max_steps: int,
    look_every: int,
) -> tuple[Tensor, float]:
    length = torch.linalg.vector_norm(row)
    if not bool(length > 0):
        return torch.zeros_like(row), 0.0
    run = _Run(row / length)
    before, change = row.new_zeros(0), float("inf")
    for step in range(1, min(max_steps, len(row)) + 1):
        ended = run.advance(product)
        if step % look_every and not ended and step < len(row) and step < max_steps:
            continue
        coefficients = run.coefficients(function)
        difference = coefficients.clone()
        difference[: len(before)] -= before
        norm = torch.linalg.vector_norm(coefficients)
        change = 0.0 if ended else float(torch.linalg.vector_norm(difference) / norm)
        before = coefficients
        if change <= tol:
            break
    return length * (before @ run.basis()), 0.0 if len(before) == len(row) else change


class _Run:
    """One run of Lanczos that is asked for one step after the other."""

    def __init__(self, start: Tensor) -> None:
        self.vectors, self.diagonal, self.off_diagonal = [start], list[Tensor](), list[Tensor]()

    def advance(self, product: RowProduct) -> bool:
        """One product; whether the space is invariant now."""
        current = self.vectors[-1]
        image = product(current[None])[0]
        alpha = image @ current
        basis = torch.stack(self.vectors)
        image = image - alpha * current
        _orthogonalise(image[None], basis[None])
        norm = torch.linalg.vector_norm(image)
        self.diagonal.append(alpha)
        scale = max(float(torch.stack(self.diagonal).abs().max()), float(norm))
        if float(norm) <= len(image) ** 0.5 * torch.finfo(norm.dtype).eps * scale:
            return True
        self.off_diagonal.append(norm)
        self.vectors.append(image / norm)
        return False

    def basis(self) -> Tensor:
        """The vectors that have been multiplied, as rows."""
        return torch.stack(self.vectors[: len(self.diagonal)])

    def coefficients(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """f(T) e₁."""
        matrix = torch.diag(torch.stack(self.diagonal))
        size = len(self.diagonal)
        if size > 1:
            inner = torch.stack(self.off_diagonal[: size - 1])
            matrix = matrix + torch.diag(inner, 1) + torch.diag(inner, -1)
        values, vectors = eigh(matrix)
        return vectors @ (function(values) * vectors[0])


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Eigenvalues, vectors as rows, true residuals ‖Ax - θx‖ of each, and how they were found."""

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int
    converged: bool


def eigenpairs(
    product: RowProduct,
    size: int,
    count: int,
    which: Which,
    *,
    like: Tensor,
    tol: float,
    max_products: int,
    seed: int = 0,
) -> Eigenpairs:
    """The `count` eigenpairs at one end, to residuals of `tol` times the largest |θ| seen.

    >>> a = torch.diag(torch.arange(1.0, 101.0))
    >>> found = eigenpairs(lambda x: x @ a, 100, 2, "largest", like=a, tol=1e-5, max_products=500)
    >>> found.values.round(decimals=3).tolist(), found.converged
    ([100.0, 99.0], True)
    """
    # The fewest products are those without a restart: a space as large as the memory allows.
    roomy = min(count + SPACE, SPACE_BYTES // (size * like.element_size()))
    space = min(size, max(search_rows(size, count), roomy))
    search, ahead = _Search(product, size, space, like, seed), count + LOOK_EVERY
    while True:
        search.fill(max_products, min(space, search.held + ahead))
        values, vectors = eigh(search.projected[: search.held, : search.held])
        order = _order(values, which)
        values, vectors = values[order], vectors[:, order]
        estimates = (search.beta * vectors[-1]).abs()
        enough = tol * values.abs().max()
        converged = bool((estimates[:count] <= enough).all())
        ahead = LOOK_EVERY if float(estimates[:count].max()) > NEARLY * float(enough) else LOOK_SOON
        if converged or search.products >= max_products or search.held == size:
            break
        if search.held == space:
            kept = min(space - 2, count + max(1, (space - count) // 2))
            search.restart(values[:kept], vectors[:, :kept])
    found = vectors[:, :count].T @ search.basis[: search.held]
    found /= torch.linalg.vector_norm(found, dim=1, keepdim=True)
    values = values[:count]
    # In the memory of the basis, which is not needed any more.
    rest = torch.addcmul(product(found), values[:, None], found, value=-1, out=search.basis[:count])
    residuals = torch.linalg.vector_norm(rest, dim=1)
    return Eigenpairs(values, found, residuals, search.products + count, converged or search.held == size)


def search_rows(size: int, count: int) -> int:
    """The fewest vectors that a search for `count` eigenpairs can hold."""
    return min(size, count + max(count, 20))


def _order(values: Tensor, which: Which) -> Tensor:
    key = {"largest": -values, "smallest": values, "magnitude": -values.abs()}[which]
    return key.argsort(stable=True)


class _Search:
    """The growing orthonormal basis of `eigenpairs`, and A projected on it."""

    def __init__(self, product: RowProduct, size: int, space: int, like: Tensor, seed: int) -> None:
        self.product, self.size, self.space, self.seed = product, size, space, seed
        self.basis = like.new_empty(space + 1, size)
        self.projected = like.new_zeros(space, space)
        self.held, self.products = 0, 0
        self.beta = like.new_zeros(())
        start = gaussian_rows(1, size, like, seed)[0]
        self.basis[0] = start / torch.linalg.vector_norm(start)

    def fill(self, max_products: int, up_to: int) -> None:
        """Products until the space holds `up_to` vectors or none may be made any more."""
        while self.held < up_to and self.products < max_products:
            current, basis = self.basis[self.held], self.basis[: self.held + 1]
            image = self.product(current[None])[0]
            self.products += 1
            inner = basis @ image
            before = torch.linalg.vector_norm(image)
            # The next row of the basis: a vector of all parameters takes 15 ms to come by, and 3 to write.
            rest = torch.addmv(image, basis.T, inner, alpha=-1, out=self.basis[self.held + 1])
            # Once leaves rounding of the size of what was taken away: again, where little is left beside it.
            if bool(torch.linalg.vector_norm(rest) < AGAIN_BELOW * before):
                rest.addmv_(basis.T, basis @ rest, alpha=-1)
            self.projected[self.held, : self.held + 1] = inner
            self.projected[: self.held + 1, self.held] = inner
            self.beta = torch.linalg.vector_norm(rest)
            self.held += 1
            scale = torch.linalg.matrix_norm(self.projected[: self.held, : self.held], ord=torch.inf)
            if bool(self.beta <= self.size**0.5 * torch.finfo(rest.dtype).eps * scale):
                # An invariant subspace: another start finds what is orthogonal to it, repeated values too.
                self.beta = torch.zeros_like(self.beta)
                rest.copy_(self._fresh())
            length = torch.linalg.vector_norm(rest)
            rest.div_(length if bool(length > 0) else torch.inf)

    def _fresh(self) -> Tensor:
        """A random vector that is orthogonal to the basis; zero where that is the whole space."""
        image = torch.zeros_like(self.basis[0])
        if self.held < self.size:
            image = gaussian_rows(1, self.size, image, self.seed + self.products + 1)[0]
            for _ in range(2):
                image = image - (self.basis[: self.held] @ image) @ self.basis[: self.held]
        return image

    def restart(self, values: Tensor, vectors: Tensor) -> None:
        """Keep these Ritz pairs, and go on with the residual that they share."""
        kept, residual = len(values), self.basis[self.held].clone()
        width = max(1, PIECE // self.held) if in_pieces(self.basis) else self.size
        for part in self.basis[: self.held].split(width, 1):
            part[:kept] = vectors.T @ part
        self.basis[kept] = residual
        self.projected.zero_()
        self.projected[:kept, :kept] = torch.diag(values)
        self.held = kept
