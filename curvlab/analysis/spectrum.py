"""Eigenpairs of a whole curvature, or of each layer's part of it, with their true residuals.

    C v = λ v,     residual ‖C v - λ v‖     for ‖v‖ = 1, recomputed from a product with C

Of a Kronecker curvature the eigenvalues are products of those of its factors, and the pairs are exact. Any
other is asked for products: thick-restart Lanczos with full reorthogonalisation (`curvlab.linalg.krylov`);
a matrix of up to 512 parameters is formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from curvlab.analysis.figures import axes_for
from curvlab.curvature import Curvature
from curvlab.exceptions import ArgumentError, SpecError, describe_argument
from curvlab.linalg.eigenbases import Which
from curvlab.linalg.execution import full_precision
from curvlab.linalg.krylov import eigenpairs, search_rows
from curvlab.matrix_functions import SymmetricMatrix, check_rows, check_seed, check_whole
from curvlab.problem import Problem
from curvlab.providers.base import estimate
from curvlab.solvers.solution import Status
from curvlab.specs import check_number
from curvlab.staleness import checked_once

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LayerSpectra", "Spectrum", "curvature_of", "spectrum"]

WHICH = ("largest", "smallest", "magnitude")
PRODUCTS_PER_PAIR = 200
FEWEST_PRODUCTS = 1000


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenpairs at one end of a matrix, in the order of `which`.

    `residuals` are ‖C v - λ v‖; `status` says whether all of them are below the tolerance; `products` counts
    the products with the matrix.
    """

    label: str
    which: Which
    eigenvalues: Tensor
    residuals: Tensor
    status: Status
    products: int
    matrix: SymmetricMatrix
    vectors: Tensor

    @property
    def eigenvectors(self) -> list[dict[str, Tensor]]:
        """The eigenvectors of length one, each by parameter name, in the parameters' shapes."""
        return [self.matrix.unflatten(row.clone()) for row in self.vectors]

    def __len__(self) -> int:
        return len(self.eigenvalues)

    def frame(self) -> pd.DataFrame:
        """One row per eigenpair: its number from 1, eigenvalue, residual, status."""
        import pandas as pd

        return pd.DataFrame(
            {
                "number": range(1, len(self) + 1),
                "eigenvalue": self.eigenvalues.tolist(),
                "residual": self.residuals.tolist(),
                "status": self.status.slug,
            }
        )

    def plot(self, ax: Axes | None = None) -> Figure:
        """The eigenvalues by number."""
        axes = axes_for(ax)
        axes.plot(range(1, len(self) + 1), self.eigenvalues.tolist(), "o", markersize=4)
        axes.axhline(0, color="0.7", linewidth=0.8, zorder=0)
        axes.set(xlabel="number", ylabel="eigenvalue", title=f"{self.which} eigenvalues of {self.label}")
        return axes.get_figure()  # type: ignore[return-value]

    def __repr__(self) -> str:
        shown = ", ".join(f"{value:.4g}" for value in self.eigenvalues[:3].tolist())
        more = ", …" if len(self) > 3 else ""
        return (
            f"Spectrum({len(self)} {self.which} of {self.label}: {shown}{more}; largest residual "
            f"{float(self.residuals.max()):.2g}, {self.status.slug})"
        )

    def _repr_html_(self) -> str:
        return self.frame().to_html(index=False)


class LayerSpectra(Mapping[str, Spectrum]):
    """A spectrum for each layer's part of the matrix: {layer name: Spectrum}."""

    def __init__(self, spectra: Mapping[str, Spectrum]) -> None:
        self._spectra = dict(spectra)

    def __getitem__(self, name: str) -> Spectrum:
        return self._spectra[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spectra)

    def __len__(self) -> int:
        return len(self._spectra)

    def frame(self) -> pd.DataFrame:
        """The frames of all layers, one below the other, with a column `layer`."""
        import pandas as pd

        frames = []
        for name, spectrum_of_layer in self.items():
            frame = spectrum_of_layer.frame()
            frame.insert(0, "layer", name)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def plot(self, ax: Axes | None = None) -> Figure:
        """The first eigenvalue of each layer: its sharpness, for which=largest."""
        axes = axes_for(ax)
        tops = [float(one.eigenvalues[0]) for one in self.values()]
        axes.barh(list(self), tops)
        axes.invert_yaxis()
        axes.set(xlabel=f"{next(iter(self.values())).which} eigenvalue of the layer's block")
        return axes.get_figure()  # type: ignore[return-value]

    def __repr__(self) -> str:
        tops = ", ".join(f"{name}: {float(one.eigenvalues[0]):.4g}" for name, one in self.items())
        return f"LayerSpectra({tops})"

    def _repr_html_(self) -> str:
        return self.frame().to_html(index=False)


def curvature_of(given: Curvature | Problem, who: str) -> Curvature:
    """The curvature, or the whole Hessian of a problem."""
    if isinstance(given, Problem):
        return estimate("hessian[structure=full]", given)
    if not isinstance(given, Curvature):
        raise ArgumentError(
            f"{who} takes a curvature, as curvlab.estimate gives it, or a Problem, for its whole Hessian; "
            f"got a {describe_argument(given)}. curvlab.curvature_from(…) takes any other operator"
        )
    return given


@overload
def spectrum(
    curvature: Curvature | Problem,
    k: int = ...,
    *,
    which: Which = ...,
    by: Literal["matrix"] = ...,
    tol: float | None = ...,
    max_products: int | None = ...,
    seed: int = ...,
) -> Spectrum: ...
@overload
def spectrum(
    curvature: Curvature | Problem,
    k: int = ...,
    *,
    which: Which = ...,
    by: Literal["layer"],
    tol: float | None = ...,
    max_products: int | None = ...,
    seed: int = ...,
) -> LayerSpectra: ...
@full_precision
def spectrum(
    curvature: Curvature | Problem,
    k: int = 20,
    *,
    which: Which = "largest",
    by: Literal["matrix", "layer"] = "matrix",
    tol: float | None = None,
    max_products: int | None = None,
    seed: int = 0,
) -> Spectrum | LayerSpectra:
    """The `k` eigenpairs at one end of the whole matrix, or of each layer's part of it.

    Args:
        curvature: a curvature, or a Problem, for its whole Hessian (`hessian[full=true]`).
        k: how many; fewer where the matrix is smaller.
        which: `largest` (algebraically, the largest first), `smallest`, or `magnitude`, largest |λ| first.
        by: `matrix`, or `layer`: the diagonal block of each layer's parameters together.
        tol: residuals are to be below it times the largest |λ|; by default 1e-10, in float32 1e-5. A loose
            one may end at a neighbour: an eigenvalue that is larger by a share g is missed now and then where
            g is not large beside `tol` (with 1e-3 once in 228 searches, by 1.3 %).
        max_products: the search ends there, with the status `iteration-limit`.
        seed: of the starting vector.

    >>> import curvlab
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> inputs = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> problem = curvlab.Problem(model, "mse", inputs, torch.zeros(2, 1).double())
    >>> curvlab.spectrum(problem, k=2).frame()["eigenvalue"].round(6).tolist()
    [4.0, 1.0]
    """
    found = curvature_of(curvature, "spectrum")
    if which not in WHICH:
        raise SpecError(f"which={which!r}: expected one of {', '.join(WHICH)}")
    k, seed = check_whole("k", k), check_seed(seed)
    if tol is not None:
        tol = check_number("tol", tol, "a finite number that is not negative", lambda x: 0 <= x < inf)
    if max_products is not None:
        max_products = check_whole("max_products", max_products)
    if by == "layer":
        parts = {layer.name: found.select([layer.name]) for layer in found.layers}
        return LayerSpectra(
            {name: _spectrum(part, k, which, tol, max_products, seed) for name, part in parts.items()}
        )
    if by != "matrix":
        raise SpecError(f"by={by!r}: expected matrix or layer")
    return _spectrum(found, k, which, tol, max_products, seed)


def _spectrum(
    curvature: Curvature, k: int, which: Which, tol: float | None, max_products: int | None, seed: int
) -> Spectrum:
    matrix = curvature.matrix
    count = min(k, matrix.size)
    limit = default_tolerance(matrix.like) if tol is None else tol
    check_rows(
        matrix, count if matrix.basis is not None else search_rows(matrix.size, count), f"spectrum(k={k:,})"
    )
    matrix.begin("a spectrum", count, which, limit, max_products, seed)
    if matrix.basis is not None:
        values, vectors = matrix.basis.extreme(count, which)
        images = matrix.product(vectors)
        residuals = torch.linalg.vector_norm(images - values[:, None] * vectors, dim=1)
        return Spectrum(
            curvature.provider, which, values, residuals, Status.CONVERGED, count, matrix, vectors
        )
    allowed = max(FEWEST_PRODUCTS, PRODUCTS_PER_PAIR * count) if max_products is None else max_products
    with checked_once():
        found = eigenpairs(
            matrix.product,
            matrix.size,
            count,
            which,
            like=matrix.like,
            tol=limit,
            max_products=allowed,
            seed=seed,
        )
    status = Status.CONVERGED if found.converged else Status.ITERATION_LIMIT
    # The recursion's own estimate may be small where rounding keeps the true residual large.
    if found.converged and float(found.residuals.max()) > 10 * limit * float(found.values.abs().max()):
        status = Status.STAGNATED
    return Spectrum(
        curvature.provider,
        which,
        found.values,
        found.residuals,
        status,
        found.products,
        matrix,
        found.vectors,
    )


def default_tolerance(like: Tensor) -> float:
    """What residuals are to be below, relative to the largest eigenvalue."""
    return 1e-10 if like.dtype == torch.float64 else 1e-5
