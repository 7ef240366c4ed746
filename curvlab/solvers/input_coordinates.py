"""The input side of a layer: coordinates in which the wide dimension n_{t-1} does not appear.

A solver's direction is D = X Z + L G⊥, where the rows of Z span what the input factor A sees, G⊥ is the
part of the gradient outside it, and L acts on G⊥ from the left (a scalar in CG, a matrix in the
factored inverse). The solver computes with X alone; the right action of A on X is a small matrix.

    coordinates   Z                       X               A acts as       G⊥
    sample        H' = diag(√c) H         n_t × m         K = H'H'ᵀ       0
    eigen         Λ^-½ Vᵀ H', K = VΛVᵀ    n_t × m         Λ               where Λ is rounding
    row           Qᵀ from QR of H'ᵀ       n_t × m         R Rᵀ            G - (GQ)Qᵀ
    Woodbury      I                       n_t × n_{t-1}   A, as H'        0
    dense         I                       n_t × n_{t-1}   A               0
    diagonal      I                       n_t × n_{t-1}   diag(a)         0
    mean          qᵀ = E[h]ᵀ/‖E[h]‖       n_t × 1         ‖E[h]‖²         G - (Gq)qᵀ

All but the first are orthonormal: inner products are those of X, and nothing cancels in them. The first
is for solvers that take none; the second keeps the same route, `sample`, for those that do. The route `row`
goes by `Woodbury` where all that a solver needs is (A + τI)⁻¹ = (I - H'ᵀ(K + τI)⁻¹H')/τ. The last is for
the mean input factor E[h]E[h]ᵀ; it takes a gradient in factors, where G⊥ stays in the sample space too, or a
formed one. In a stack of equal systems (`linalg.stacks`) dense and mean coordinates have a leading dimension.
Of a formed gradient G = (GQ) Qᵀ + G⊥ an iteration needs GQ and ‖G⊥‖, in all digits; G⊥ is never held whole.

Which to take, a stated cost model says, or what the user forces. Costs are floating-point operations at the
speed of a matrix product. Memory traffic counts `FLOPS_PER_BYTE` operations per byte (about what one core
does while it waits for a byte), and a factorisation of order k what it takes at that speed (`_cholesky`,
`_eigh`, `_qr`). For m rows, n = n_{t-1} inputs and o = n_t outputs:

    sample   K            m²n + solve(m)                  and the update  2 o m n
    row      QR, G, D     qr(m, n) + 10 o m n + solve(m)      + traffic of G and D
             K, G, D      m²n + 6 o m n + solve(m)            + traffic of G and D, by `Woodbury`
    dense    E[hhᵀ], G    m n² + 2 o m n + solve(n)           + traffic of G and D

where solve(k) is the work on coordinates of k columns (see `Work`). The mean input factor has nothing of
n × n: it chooses between the sample space (to iterate: ‖G⊥‖ by the Gram matrix, m²n) and forming G.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from curvlab.curvature import LayerCurvature
from curvlab.exceptions import PairError
from curvlab.linalg import Combination, DiagonalFactor, Factor, GramFactor, Matrix, RowProduct, eigh
from curvlab.linalg.factors import (
    InputFactors,
    InputKind,
    binary_scale,
    frobenius_norm,
    nonzero_or_one,
    squares_in_range,
)
from curvlab.linalg.inverse import (
    DenseInverse,
    DiagonalInverse,
    GramInverse,
    ShiftedInverse,
    cholesky_shifted,
    diagonal_inverse,
)
from curvlab.linalg.steps import RowGradient
from curvlab.measure import device

__all__ = [
    "DenseCoordinates",
    "DiagonalCoordinates",
    "Eigen",
    "EigenCoordinates",
    "GradientCoordinates",
    "InputCoordinates",
    "Inverse",
    "Iteration",
    "Left",
    "MeanCoordinates",
    "Route",
    "RowCoordinates",
    "SampleCoordinates",
    "Scalar",
    "WeightGradient",
    "WoodburyCoordinates",
    "Work",
    "choose_coordinates",
    "costs",
    "form_gradient",
    "input_factors",
    "input_rank",
    "mean_costs",
    "output_factor",
    "require_own_gradient",
    "split_gradient",
]


T = TypeVar("T")
Left = Callable[[Tensor], Tensor]
WeightGradient = Tensor | RowGradient


@dataclass(frozen=True, eq=False)
class Scalar:
    """An L that is a number: L G⊥ need not be formed."""

    value: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.value * x


@dataclass(frozen=True, eq=False)
class GradientCoordinates:
    """A weight gradient in some coordinates: X_G (n_t × r), ‖G⊥‖ (None: zero), and what makes D of an X.

    `assemble(X, L)` is D = X Z + L G⊥, where L returns a new tensor. `rows` is set where X_G is the
    transpose of these rows, scaled by the roots of their weights.
    """

    x: Tensor
    assemble: Callable[[Tensor, Left], Matrix]
    perp_norm: Tensor | None = None
    rows: GramFactor | None = None


class InputCoordinates(ABC):
    """One choice of coordinates for the input side of a layer."""

    route: str

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of coordinates: columns of X."""

    @property
    @abstractmethod
    def trace(self) -> Tensor:
        """tr A."""

    @property
    @abstractmethod
    def matrix(self) -> Tensor:
        """The small symmetric matrix by which A acts on X from the right."""

    @property
    def diagonal(self) -> Tensor | None:
        """The diagonal of `matrix` where it has nothing else."""
        return None

    @abstractmethod
    def of(self, gradient: WeightGradient) -> GradientCoordinates:
        """The gradient in these coordinates."""

    @abstractmethod
    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """A factorisation kept for all solvers that ask for the same one."""

    def inverse(self, shift: Tensor | float, check: bool) -> ShiftedInverse:
        """(A + τI)⁻¹ in these coordinates."""
        return DenseInverse(cholesky_shifted(self.matrix, shift, check))


class GramCoordinates(InputCoordinates):
    """Those of the m rows that a Gram factor holds."""

    def __init__(self, gram: GramFactor) -> None:
        self.gram = gram

    @property
    def size(self) -> int:
        return self.gram.rows.shape[0]

    @property
    def trace(self) -> Tensor:
        return self.gram.gram.trace()

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        return self.gram.remember(key, make)


class SampleCoordinates(GramCoordinates):
    """D = X H': for a gradient of the very batch whose rows the input factor holds."""

    route = "sample"

    @property
    def matrix(self) -> Tensor:
        return self.gram.gram

    def of(self, gradient: WeightGradient) -> GradientCoordinates:
        own = require_own_gradient(gradient, self.gram)
        return GradientCoordinates(own.gradients.scaled_rows().T, self._assemble, rows=own.gradients)

    def _assemble(self, x: Tensor, left: Left) -> RowProduct:
        return RowProduct(x, self.gram)


class EigenCoordinates(GramCoordinates):
    """D = X Λ^-½ Vᵀ H' + L G⊥, with K = V Λ Vᵀ: the sample space in orthonormal coordinates.

    An eigenvalue within rounding of zero says nothing of its direction. What the gradient has there, of no
    size to speak of, is G⊥: kept in coefficients, where it is exact.
    """

    route = "sample"

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        return self.gram.remember((self.route, "eigh"), lambda: eigh(self.gram.gram))

    @cached_property
    def _significant(self) -> Tensor:
        values = self._eigen[0]
        return values > len(values) * torch.finfo(values.dtype).eps * values[-1]

    @cached_property
    def diagonal(self) -> Tensor:
        return torch.where(self._significant, self._eigen[0], 0)

    @property
    def matrix(self) -> Tensor:
        return torch.diag(self.diagonal)

    def of(self, gradient: WeightGradient) -> GradientCoordinates:
        values, vectors = self._eigen
        along = require_own_gradient(gradient, self.gram).gradients.scaled_rows().T @ vectors
        scaled = along * values.clamp(min=0).sqrt()
        rest = torch.where(self._significant, 0, along)
        size = binary_scale(along)
        perp = frobenius_norm(torch.where(self._significant, 0, scaled) / size)
        # Its size is known up to rounding only; with none at all CG would leave it out of the step.
        rounding = torch.finfo(values.dtype).eps * values[-1].clamp(min=0).sqrt()
        perp = torch.maximum(perp, rounding * frobenius_norm(rest / size)) * size
        return GradientCoordinates(
            torch.where(self._significant, scaled, 0), partial(self._assemble, rest), perp
        )

    def _assemble(self, rest: Tensor, x: Tensor, left: Left) -> RowProduct:
        values, vectors = self._eigen
        inverse = torch.where(self._significant, values, 1).rsqrt()
        along = torch.where(self._significant, x * inverse, left(rest))
        return RowProduct(along @ vectors.T, self.gram)


class RowCoordinates(GramCoordinates):
    """D = X Qᵀ + L G⊥ with Q an orthonormal basis of the rows of H' (which may be rank deficient)."""

    route = "row"

    @cached_property
    def _qr(self) -> tuple[Tensor, Tensor]:
        return self.gram.remember("qr", lambda: tuple(torch.linalg.qr(self.gram.scaled_rows().T)))

    @property
    def basis(self) -> Tensor:
        """Q, n_{t-1} × m."""
        return self._qr[0]

    @property
    def size(self) -> int:
        return self.gram.rank_bound

    @property
    def trace(self) -> Tensor:
        return self.gram.trace()

    @cached_property
    def matrix(self) -> Tensor:
        return self._qr[1] @ self._qr[1].T

    def of(self, gradient: WeightGradient) -> GradientCoordinates:
        whole = form_gradient(gradient)
        x, norm = split_gradient(whole, self.basis)
        return GradientCoordinates(x, partial(_combine, whole, x, self.basis.T), norm)


class DenseCoordinates(InputCoordinates):
    """D = X: the input factor as an n_{t-1} × n_{t-1} matrix."""

    route = "dense"

    def __init__(self, factor: Factor) -> None:
        self.factor = factor

    @property
    def size(self) -> int:
        return self.factor.size

    @property
    def trace(self) -> Tensor:
        return self.factor.trace()

    @property
    def matrix(self) -> Tensor:
        return self.factor.to_dense()

    def of(self, gradient: WeightGradient) -> GradientCoordinates:
        return GradientCoordinates(form_gradient(gradient), lambda x, left: x)

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        return self.factor.remember(key, make)


class WoodburyCoordinates(DenseCoordinates):
    """D = X, for an input factor of few rows whose damped inverse is all that is asked for."""

    route = "row"
    factor: GramFactor

    def __init__(self, factor: GramFactor) -> None:
        super().__init__(factor)

    def inverse(self, shift: Tensor | float, check: bool) -> GramInverse:
        return GramInverse(self.factor, cholesky_shifted(self.factor.gram, shift, check), shift)


class DiagonalCoordinates(DenseCoordinates):
    """D = X, for an input factor that is diagonal: nothing of n_{t-1} × n_{t-1} is formed."""

    route = "diagonal"
    factor: DiagonalFactor

    def __init__(self, factor: DiagonalFactor) -> None:
        super().__init__(factor)

    @property
    def diagonal(self) -> Tensor:
        return self.factor.values

    @property
    def matrix(self) -> Tensor:
        raise NotImplementedError("a diagonal input factor is used by its `diagonal`, and never formed")

    def inverse(self, shift: Tensor | float, check: bool) -> DiagonalInverse:
        return diagonal_inverse(self.factor.values, shift, check)


class MeanCoordinates(InputCoordinates):
    """D = X qᵀ + L G⊥ with q = E[h]/‖E[h]‖ (zero where E[h] is): the rank-one input factor."""

    def __init__(self, inputs: InputFactors, route: str, norm: bool = True) -> None:
        self.inputs, self.route, self.norm = inputs, route, norm

    @property
    def size(self) -> int:
        return 1

    @cached_property
    def trace(self) -> Tensor:
        return self.inputs.mean.square().sum(-1)

    @property
    def diagonal(self) -> Tensor:
        return self.trace[..., None]

    @property
    def matrix(self) -> Tensor:
        return self.trace[..., None, None]

    @cached_property
    def _norm(self) -> Tensor:
        """‖E[h]‖, one where it is zero."""
        return nonzero_or_one(self.trace.sqrt())

    @cached_property
    def basis(self) -> Tensor:
        """q, a vector."""
        return self.inputs.mean / self._norm[..., None]

    def of(self, gradient: WeightGradient) -> GradientCoordinates:
        if (
            self.route == "sample"
            and isinstance(gradient, RowGradient)
            and gradient.inputs.shares_rows_with(self.inputs.full)
        ):
            return self._of_rows(gradient)
        whole, norm = form_gradient(gradient), None
        if not self.norm:
            column = whole @ self.basis[..., None]
        elif whole.ndim == 3:
            column, norm = _split_stack(whole, self.basis)
        else:
            x, norm = split_gradient(whole, self.basis)
            column = x[:, None]
        row = self.basis[..., None, :]
        return GradientCoordinates(column, partial(_combine, whole, column, row), norm)

    def _of_rows(self, gradient: RowGradient) -> GradientCoordinates:
        """Gq = S'ᵀ(H'q), and ‖G⊥‖ where it is wanted."""
        h, s = gradient.inputs, gradient.gradients
        along = h.rows @ self.basis
        x = (s.rows.T @ (along * h.root.square()))[:, None]
        perp = self._perp_norm(gradient, along) if self.norm else None
        return GradientCoordinates(x, partial(self._assemble_rows, gradient, x), perp)

    def _assemble_rows(self, gradient: RowGradient, along: Tensor, x: Tensor, left: Left) -> RowProduct:
        # qᵀ = (√c / ‖E[h]‖)ᵀ H': the correction stays in the sample space.
        coefficients = left(gradient.gradients.scaled_rows().T)
        coefficients.addmm_(x - left(along), (gradient.inputs.root / self._norm)[None])
        return RowProduct(coefficients, gradient.inputs)

    def _perp_norm(self, gradient: RowGradient, along: Tensor) -> Tensor:
        """‖G⊥‖² = Σ S'S'ᵀ ⊙ K̃, with K̃ from the centred inputs: no digits are lost."""
        h, s = gradient.inputs, gradient.gradients
        off_centre = h.root * (along - self.inputs.mean @ self.basis)
        centred = h.centred_gram - torch.outer(off_centre, off_centre)
        norm = (s.gram * centred).sum().clamp(min=0).sqrt()
        interval = device.read_interval(norm)
        if interval == 0 or (device.in_pieces(norm) and squares_in_range(norm)):
            return norm
        # The squares may have left the range of the dtype: those of S over its largest entry do not.
        scale = binary_scale(s.rows)
        return (GramFactor(s.rows / scale, s.root).gram * centred).sum().clamp(min=0).sqrt() * scale

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        return self.inputs.mean_factor.remember(key, make)


def require_own_gradient(gradient: WeightGradient, rows: GramFactor) -> RowGradient:
    """The gradient, where it is one of the very `rows` that the coordinates are made of."""
    if isinstance(gradient, RowGradient) and gradient.inputs.shares_rows_with(rows):
        return gradient
    given = "one of another batch" if isinstance(gradient, RowGradient) else "a tensor"
    raise PairError(
        f"the solver was prepared for a gradient of the curvature's own batch, in factors, and is applied to "
        f"{given}: prepare it for that gradient, or for any with route `row` or `dense`"
    )


def form_gradient(gradient: WeightGradient) -> Tensor:
    """The gradient as a matrix."""
    return gradient.form() if isinstance(gradient, RowGradient) else gradient


def _combine(whole: Tensor, along: Tensor, z: Tensor, x: Tensor, left: Left) -> Tensor | Combination:
    """X Z + L G⊥ = L G + (X - L X_G) Z, with X_G = `along`; not formed where L is a number."""
    correction = x - left(along)
    if whole.ndim == 3:
        return torch.baddbmm(left(whole), correction, z)
    if isinstance(left, Scalar):
        return Combination(left.value, whole, correction, z)
    return left(whole).addmm_(correction, z)


SPLIT_ELEMENTS = 1 << 18


def split_gradient(gradient: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """GQ and ‖G⊥‖ for an orthonormal basis Q (n × r, or a vector), of a G of any size.

    Where reads are free, a large G is first read for ‖G⊥‖² = ‖G‖² - ‖GQ‖², which will do if little of it
    cancels, and squares are scaled only if they left the range of the dtype.
    """
    interval = device.read_interval(gradient)
    pieces = device.in_pieces(gradient)
    if interval == 1 and pieces and gradient.numel() > SPLIT_ELEMENTS:
        x, norm = gradient @ basis, frobenius_norm(gradient)
        perp = _leg(norm, torch.linalg.vector_norm(x))
        if squares_in_range(perp) and float(perp) > 0.7 * float(norm):
            return x, perp
    if interval == 0 or pieces:
        x, perp = _split(gradient, basis, None)
        if interval == 0 or squares_in_range(perp):
            return x, perp
    scale = binary_scale(gradient)
    x, perp = _split(gradient, basis, scale)
    return x * scale, perp * scale


def _split_stack(gradient: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Gq, (G, o, 1), and ‖G⊥‖, (G,), for a stack of matrices (G, o, n) and one q, (G, n), for each."""
    scale = binary_scale(gradient)
    rows, column = gradient / scale, basis[..., None]
    x = rows @ column
    perp = torch.baddbmm(rows, x, column.mT, alpha=-1)
    again = perp @ column
    norms = [torch.linalg.vector_norm(part, dim=(1, 2)) for part in (perp, again)]
    return (x + again) * scale, _leg(*norms) * scale


def _leg(hypotenuse: Tensor, other: Tensor) -> Tensor:
    """√(a² - b²)."""
    return ((hypotenuse - other) * (hypotenuse + other)).clamp(min=0).sqrt()


def _split(gradient: Tensor, basis: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both of G over `scale`; G⊥ is orthogonalised twice, so that only rounding of its part along Q is left.

    A few rows at a time: G⊥ is needed for its norm alone and is never held whole. The second time that
    norm is taken without it, ‖G⊥ - RQᵀ‖² = ‖G⊥‖² - ‖R‖² with R = G⊥Q, where next to nothing cancels.
    """
    parts, norms = [], []
    count = len(gradient)
    if device.in_pieces(gradient):
        count = min(max(1, SPLIT_ELEMENTS // gradient.shape[1]), count)
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
        norms.append((frobenius_norm(perp), torch.linalg.vector_norm(again)))
    if len(parts) == 1:
        return parts[0], _leg(*norms[0])
    first, second = (torch.linalg.vector_norm(torch.stack(one)) for one in zip(*norms, strict=True))
    return torch.cat(parts), _leg(first, second)


def output_factor(layer: LayerCurvature) -> Factor:
    """B of a layer; refused where the layer has none."""
    if layer.output is None:
        raise PairError(_no_factors(layer))
    return layer.output


def input_factors(layer: LayerCurvature) -> InputFactors:
    """E[hhᵀ] and E[h] of a layer; refused where the layer has none."""
    if layer.inputs is None:
        raise PairError(_no_factors(layer))
    return layer.inputs


def input_rank(layer: LayerCurvature, kind: InputKind) -> int:
    """What the rank of the input factor in use cannot exceed; over all systems of a stack."""
    return output_factor(layer).count if kind == "mean" else input_factors(layer).full.rank_bound


def _no_factors(layer: LayerCurvature) -> str:
    return f"layer `{layer.name}` has no Kronecker factors to solve by: use `cg`, which needs products only"


Route = Literal["auto", "sample", "row", "dense"]
FLOPS_PER_BYTE = 6.0
SYMMETRIC = 0.65  # share of a full product that a symmetric one costs
PASSES = 30.0  # operations per byte of a vector that the vector operations of an iteration take


def _cholesky(k: int) -> float:
    return k**3 / 3 + 200.0 * k * k


def _eigh(k: int) -> float:
    return 9.0 * k**3 + 3000.0 * k * k


def _qr(k: int, n: int) -> float:
    return 5.0 * k * k * n + 4000.0 * k * k


class Work(ABC):
    """What a solver does in coordinates of k columns."""

    @abstractmethod
    def solve(self, k: int, o: int, diagonal: bool = False) -> float:
        """Operations; `diagonal` where an iteration may take the eigenvectors of the k × k matrix."""

    def row(self, m: int, n: int, o: int, update: float, traffic: float) -> float:
        """Operations of the route `row` beside the solve: QR, G, GQ twice, ‖G⊥‖ and D."""
        return _qr(m, n) + 5 * update + 6 * traffic


@dataclass(frozen=True)
class Inverse(Work):
    """The factored inverse: a Cholesky factorisation, its inverse or its solves, and products with B⁻¹."""

    def solve(self, k: int, o: int, diagonal: bool = False) -> float:
        inverse = 2.0 * k * k * o if o < k else 2.0 * k * k * o + 1.3 * k**3 + 300.0 * k * k
        return _cholesky(k) + inverse + 2.0 * o * o * k

    def row(self, m: int, n: int, o: int, update: float, traffic: float) -> float:
        """By Woodbury's identity: K, G, its product with the rows, B⁻¹ on the left of G, and D."""
        return 2 * SYMMETRIC * m * m * n + 3 * update + 2.0 * o * o * n + 5 * traffic


@dataclass(frozen=True)
class Eigen(Work):
    """The exact solution: eigenvectors, and products with them and with those of B."""

    def solve(self, k: int, o: int, diagonal: bool = False) -> float:
        return _eigh(k) + 4.0 * k * k * o + 4.0 * o * o * k


@dataclass(frozen=True)
class Iteration(Work):
    """CG: products with B and, unless its eigenvectors are the basis, with the k × k matrix."""

    count: int
    element_size: int = 4

    def solve(self, k: int, o: int, diagonal: bool = False) -> float:
        once = _eigh(k) + 4.0 * k * k * o if diagonal else 0.0
        product = 2.0 * o * o * k + (0.0 if diagonal else 2.0 * o * k * k)
        return once + self.count * (product + PASSES * self.element_size * o * k)


def costs(m: int, n: int, o: int, work: Work, element_size: int) -> dict[str, float]:
    """Operations of each route with the full input factor.

    >>> c = costs(m=100, n=150528, o=1024, work=Inverse(), element_size=4)
    >>> min(c, key=c.get)
    'sample'
    """
    traffic = FLOPS_PER_BYTE * element_size * o * n
    update = 2.0 * o * m * n
    return {
        "sample": 2 * SYMMETRIC * m * m * n + update + work.solve(m, o, diagonal=True),
        "row": work.row(m, n, o, update, traffic) + work.solve(m, o),
        "dense": 2 * SYMMETRIC * m * n * n + update + 4 * traffic + work.solve(n, o),
    }


def mean_costs(m: int, n: int, o: int, element_size: int, iterative: bool) -> dict[str, float]:
    """Operations of each route with the mean input factor.

    An iteration needs ‖G⊥‖ and multiplies G⊥ by a number; the factored inverse needs no norm and
    multiplies G⊥, in coefficients or formed, by an o × o matrix.

    >>> c = mean_costs(m=1000, n=3072, o=16, element_size=4, iterative=True)
    >>> min(c, key=c.get)
    'dense'
    """
    traffic = FLOPS_PER_BYTE * element_size * o * n
    update = 2.0 * o * m * n
    if iterative:
        grams = 2 * SYMMETRIC * m * m * (n + o)
        return {"sample": grams + update, "dense": update + 4 * traffic}
    left = 2.0 * o * o
    return {"sample": left * m + update, "dense": left * n + update + 6 * traffic}


def choose_coordinates(
    layer: LayerCurvature,
    gradient: WeightGradient,
    kind: InputKind,
    route: Route,
    work: Work,
) -> InputCoordinates:
    """The coordinates to solve `layer` in, by the cost model or as `route` forces them.

    An iteration takes inner products of coordinates: these are then orthonormal, and the norm of G⊥ is known.
    """
    inputs = input_factors(layer)
    own = isinstance(gradient, RowGradient) and gradient.inputs.shares_rows_with(inputs.full)
    iterative = isinstance(work, Iteration)
    if kind == "mean" and not own and route != "sample":
        return MeanCoordinates(inputs, "dense", norm=iterative)  # E[hhᵀ] is not even formed
    if route == "auto":
        chosen = _cheapest_route(inputs.full, gradient.shape, kind, work, own)
    else:
        chosen = _check_route(layer.name, inputs.full, kind, route, own)
    if kind == "mean":
        return MeanCoordinates(inputs, chosen, norm=iterative)
    if isinstance(inputs.full, DiagonalFactor):
        return DiagonalCoordinates(inputs.full)
    if chosen == "dense" or not isinstance(inputs.full, GramFactor):
        return DenseCoordinates(inputs.full)
    if chosen == "row":
        return WoodburyCoordinates(inputs.full) if isinstance(work, Inverse) else RowCoordinates(inputs.full)
    return EigenCoordinates(inputs.full) if iterative else SampleCoordinates(inputs.full)


def _cheapest_route(full: Factor, shape: Sequence[int], kind: InputKind, work: Work, own: bool) -> str:
    """The cheapest route for a weight of this shape; `own`: its gradient has the rows of `full`."""
    if not isinstance(full, GramFactor) or (kind == "mean" and not own):
        return "dense"
    (m, n), o, size = full.rows.shape, shape[0], full.rows.element_size()
    if kind == "mean":
        options = mean_costs(m, n, o, size, isinstance(work, Iteration))
    else:
        options = costs(m, n, o, work, size)
        possible = {"dense"} | ({"sample"} if own else set()) | ({"row"} if full.narrow else set())
        options = {name: cost for name, cost in options.items() if name in possible}
    return min(options, key=lambda name: options[name])


def _check_route(layer: str, full: Factor, kind: InputKind, route: Route, own: bool) -> str:
    """The route that a forced one runs as; refused where there is none."""
    if route == "sample" and not own:
        raise PairError(
            f"layer `{layer}`: route `sample` needs the gradient of the very batch the curvature was "
            f"estimated on, as problem.gradient() gives it; use route `row`, `dense` or `auto` for any other"
        )
    if kind == "mean":
        # The row space of the mean factor is one vector: both routes form G and are one and the same.
        return "dense" if route == "row" else route
    if route == "row" and not (isinstance(full, GramFactor) and full.narrow):
        raise PairError(
            f"layer `{layer}`: route `row` needs an input factor kept as fewer rows than it has "
            f"columns; use route `dense` or `auto`"
        )
    return route
