"""How near two curvatures are: relative distance, cosine, and the overlap of their leading eigenspaces.

    distance   ‖a - b‖_F / ‖b‖_F        cosine   ⟨a, b⟩ / (‖a‖_F ‖b‖_F),   ⟨a, b⟩ = tr(a b)
    overlap    1/k ‖U_aᵀ U_b‖_F²        U the k leading eigenvectors: 1 where they span the same space

for every parameter's diagonal block and for the whole matrix. Blocks of factors have all three inner
products in closed form, ⟨B₁ ⊗ A₁, B₂ ⊗ A₂⟩ = tr(B₁B₂) tr(A₁A₂), and small ones from their dense matrices. Any
other pair is estimated from the images a z and b z of random signs z, E[(az)·(bz)] = ⟨a, b⟩, with standard
errors; those of ratios by the jackknife, leaving out one probe after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import nan, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.analysis.figures import axes_for
from curvlab.analysis.spectrum import spectrum
from curvlab.curvature import Curvature
from curvlab.exceptions import ArgumentError, describe_argument
from curvlab.linalg import Block, DiagonalFactor, FactorBlock, KroneckerBlock, ViewedBlock
from curvlab.linalg.blocks import ShiftedBlock
from curvlab.linalg.estimators import Estimate, random_signs
from curvlab.linalg.execution import full_precision
from curvlab.linalg.factors import inner_product
from curvlab.matrix_functions import check_seed, check_whole, kind_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Similarity", "similarity"]

DENSE_UP_TO = 512  # parameters of a block whose inner products are taken from its dense matrix


@dataclass(frozen=True)
class _Pair:
    """Distance and cosine of one pair of matrices, with their standard errors."""

    distance: float
    distance_error: float
    cosine: float
    cosine_error: float
    probes: int


@dataclass(frozen=True, eq=False)
class Similarity:
    """How near curvature a is to b.

    `distance` and `cosine` are of the whole matrices; they are estimates with standard errors, exact (0
    probes) where both are known. `overlap` is that of the `k` leading eigenspaces, from 0 to 1.
    """

    labels: tuple[str, str]
    distance: Estimate
    cosine: Estimate
    overlap: float
    k: int
    by_parameter: dict[str, _Pair]

    def frame(self) -> pd.DataFrame:
        """One row per parameter and one for the whole: distance, cosine, their errors, and the overlap."""
        import pandas as pd

        rows = [
            {
                "parameter": name,
                "distance": pair.distance,
                "distance_error": pair.distance_error,
                "cosine": pair.cosine,
                "cosine_error": pair.cosine_error,
                "overlap": nan,
                "probes": pair.probes,
            }
            for name, pair in self.by_parameter.items()
        ]
        whole = {
            "parameter": "whole",
            "distance": float(self.distance),
            "distance_error": self.distance.standard_error,
            "cosine": float(self.cosine),
            "cosine_error": self.cosine.standard_error,
            "overlap": self.overlap,
            "probes": self.distance.probes,
        }
        return pd.DataFrame([*rows, whole])

    def plot(self, ax: Axes | None = None) -> Figure:
        """The relative distance of each parameter's blocks and of the whole."""
        axes, frame = axes_for(ax), self.frame()
        axes.barh(frame["parameter"], frame["distance"], xerr=frame["distance_error"])
        axes.invert_yaxis()
        axes.set(xlabel=f"distance of {self.labels[0]} from {self.labels[1]}, relative")
        return axes.get_figure()  # type: ignore[return-value]

    def __repr__(self) -> str:
        a, b = self.labels
        return (
            f"Similarity({a} to {b}: distance {float(self.distance):.4g}, cosine {float(self.cosine):.4g}, "
            f"overlap of {self.k} {self.overlap:.4g})"
        )

    def _repr_html_(self) -> str:
        return self.frame().to_html(index=False)


@full_precision
def similarity(a: Curvature, b: Curvature, *, k: int = 10, probes: int = 30, seed: int = 0) -> Similarity:
    """How near the curvature `a` is to `b`, as a whole and by parameter.

    Args:
        a: a curvature.
        b: what it is compared with, of the same parameters.
        k: leading eigenvectors, of largest magnitude, whose spaces are compared.
        probes: products with each, where a matrix is not known by its factors.
        seed: of the probes.

    >>> import curvlab
    >>> model = torch.nn.Linear(3, 2)
    >>> problem = curvlab.Problem(model, "cross-entropy", torch.randn(8, 3), torch.tensor([0, 1] * 4))
    >>> fisher = curvlab.estimate("fisher", problem)
    >>> found = curvlab.similarity(2 * fisher, fisher)
    >>> round(float(found.distance), 5), round(float(found.cosine), 5), round(found.overlap, 4)
    (1.0, 1.0, 1.0)
    """
    for given in (a, b):
        if not isinstance(given, Curvature):
            raise ArgumentError(
                f"similarity takes two curvatures, as curvlab.estimate gives them; got a "
                f"{describe_argument(given)}"
            )
    k, probes, seed = check_whole("k", k), check_whole("probes", probes, 4), check_seed(seed)
    blocks = {name: (block, b.blocks.get(name)) for name, block in a.blocks.items()}
    unlike = [n for n, (x, y) in blocks.items() if y is None or kind_of(x) != kind_of(y)] + [
        n for n in b.blocks if n not in blocks
    ]
    if unlike:
        raise ArgumentError(
            f"similarity: `{unlike[0]}` is not a parameter of the same shape, dtype and device in both. "
            f"Take .select([…]) of each with the names that they share, or .to(…)"
        )
    pairs = {name: _compare_blocks(a.select([name]), b.select([name]), probes, seed) for name in blocks}
    whole = _compare_whole(a, b, _known_products(a, b), probes, seed)
    tops = [spectrum(one, min(k, a.numel), which="magnitude", tol=1e-6).vectors for one in (a, b)]
    count = min(len(tops[0]), len(tops[1]))
    overlap = float((tops[0][:count] @ tops[1][:count].T).square().sum()) / count
    return Similarity(
        (a.provider, b.provider),
        Estimate(whole.distance, whole.distance_error, whole.probes),
        Estimate(whole.cosine, whole.cosine_error, whole.probes),
        overlap,
        count,
        pairs,
    )


def _known_products(a: Curvature, b: Curvature) -> list[tuple[Tensor, Tensor, Tensor]] | None:
    """(⟨a,a⟩, ⟨a,b⟩, ⟨b,b⟩) of every block, where all are known and no cross-layer block adds to them."""
    if a.full_product is not None or b.full_product is not None:
        return None
    found = []
    for name, block in a.blocks.items():
        products = _inner_products(block, b.blocks[name])
        if products is None:
            return None
        found.append(products)
    return found


def _compare_blocks(a: Curvature, b: Curvature, probes: int, seed: int) -> _Pair:
    """The one block of each."""
    ((x,), (y,)) = (one.blocks.values() for one in (a, b))
    found = _inner_products(x, y)
    return _compare_whole(a, b, None if found is None else [found], probes, seed)


def _compare_whole(
    a: Curvature,
    b: Curvature,
    known: list[tuple[Tensor, Tensor, Tensor]] | None,
    probes: int,
    seed: int,
) -> _Pair:
    if known is not None:
        return _exact_pair(*(float(torch.stack(one).sum()) for one in zip(*known, strict=True)))
    if a.numel <= DENSE_UP_TO:
        x, y = _dense(a), _dense(b)
        return _exact_pair(float((x * x).sum()), float((x * y).sum()), float((y * y).sum()))
    signs = random_signs(probes, a.numel, a.matrix.like, seed)
    return _estimated_pair(a.rows_product(signs), b.rows_product(signs))


def _dense(curvature: Curvature) -> Tensor:
    """The matrix, from products that are taken several at once where that is possible."""
    like = curvature.matrix.like
    if not curvature.matrix_free:
        return curvature.to_dense()
    return curvature.rows_product(torch.eye(curvature.numel, dtype=like.dtype, device=like.device))


def _exact_pair(aa: float, ab: float, bb: float) -> _Pair:
    return _Pair(_distance(aa, ab, bb), 0.0, _cosine(aa, ab, bb), 0.0, 0)


def _distance(aa: float, ab: float, bb: float) -> float:
    return sqrt(max(aa - 2 * ab + bb, 0.0) / bb) if bb > 0 else nan


def _cosine(aa: float, ab: float, bb: float) -> float:
    return ab / sqrt(aa * bb) if aa > 0 and bb > 0 else nan


def _estimated_pair(left: Tensor, right: Tensor) -> _Pair:
    """From the images of the same probes; ‖a - b‖ from their difference, which does not cancel."""
    count = len(left)
    aa, ab = left.square().sum(1).double(), (left * right).sum(1).double()
    bb, dd = right.square().sum(1).double(), (left - right).square().sum(1).double()

    def measures(rows: Tensor) -> Tensor:
        distance = (dd[rows].sum() / bb[rows].sum()).sqrt()
        cosine = ab[rows].sum() / (aa[rows].sum() * bb[rows].sum()).sqrt()
        return torch.stack([distance, cosine])

    everything = torch.arange(count)
    value = measures(everything)
    others = torch.stack([measures(everything[everything != index]) for index in range(count)])
    error = ((count - 1) / count * (others - others.mean(0)).square().sum(0)).sqrt()
    return _Pair(float(value[0]), float(error[0]), float(value[1]), float(error[1]), count)


def _inner_products(x: Block, y: Block) -> tuple[Tensor, Tensor, Tensor] | None:
    """⟨x,x⟩, ⟨x,y⟩ and ⟨y,y⟩ where they are known exactly."""
    found = [_inner_product(*pair) for pair in ((x, x), (x, y), (y, y))]
    known = [one for one in found if one is not None]
    return (known[0], known[1], known[2]) if len(known) == 3 else None


def _inner_product(x: Block, y: Block) -> Tensor | None:
    """tr(x y) from factors: ⟨C + cI, D + dI⟩ = ⟨C, D⟩ + c tr D + d tr C + cdn."""
    (left, c), (right, d) = _without_shift(x), _without_shift(y)
    diagonals = [_diagonal_of(one) for one in (left, right)]
    rule = _RULES.get((type(left), type(right)))
    if diagonals[0] is not None:
        data: Tensor | None = diagonals[0] @ right.diagonal().flatten()
    elif diagonals[1] is not None:
        data = diagonals[1] @ left.diagonal().flatten()
    else:
        data = None if rule is None else rule(left, right)
    return None if data is None else data + c * right.trace() + d * left.trace() + c * d * x.numel


def _without_shift(block: Block) -> tuple[Block, float]:
    return (block.block, block.shift) if isinstance(block, ShiftedBlock) else (block, 0.0)


def _diagonal_of(block: Block) -> Tensor | None:
    """The entries of a block that is diagonal."""
    found = isinstance(block, FactorBlock) and isinstance(block.factor, DiagonalFactor)
    return block.diagonal().flatten() if found else None


def _of_factors(x: Block, y: Block) -> Tensor | None:
    assert isinstance(x, FactorBlock)
    assert isinstance(y, FactorBlock)
    return inner_product(x.factor, y.factor)


def _of_products(x: Block, y: Block) -> Tensor | None:
    assert isinstance(x, KroneckerBlock)
    assert isinstance(y, KroneckerBlock)
    return inner_product(x.output, y.output) * inner_product(x.input, y.input)


def _of_views(x: Block, y: Block) -> Tensor | None:
    assert isinstance(x, ViewedBlock)
    assert isinstance(y, ViewedBlock)
    if x.view != y.view:
        return None
    products = [_of_products(p, q) for p, q in zip(x.products, y.products, strict=True)]
    return torch.stack([one for one in products if one is not None]).sum()


_RULES: dict[tuple[type[Block], type[Block]], Callable[[Block, Block], Tensor | None]] = {
    (FactorBlock, FactorBlock): _of_factors,
    (KroneckerBlock, KroneckerBlock): _of_products,
    (ViewedBlock, ViewedBlock): _of_views,
}
