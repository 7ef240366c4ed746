"""Symmetric matrices: the factors of a Kronecker block, norms, symmetric products, and PosEig.

A factor is a symmetric n × n matrix held in the form that is cheapest for it:

    dense       F
    Gram        F = Hᵀ diag(c) H     rows h_i (m × n) with their weights c_i ≥ 0 in the mean
    rank one    F = v vᵀ
    diagonal    F = diag(f)          token frequencies, sides of a vocabulary's size

One set of rules serves all: products, traces, norms and spectra never leave the smaller side. `InputFactors`
holds the two input factors of a layer: full, E[hhᵀ], and mean, E[h]E[h]ᵀ.

    gram(X) = X Xᵀ          congruence(W, B) = Wᵀ B W  with B symmetric

take about half the multiplications of a plain product. torch has no symmetric rank-k update, so both compute
block rows of the lower triangle and mirror them. Blocks are large enough that each product still runs at the
speed of a plain one. PosEig_γ multiplies the negative eigenvalues by γ ≤ 0:

    PosEig_γ(U Λ Uᵀ) = U f(Λ) Uᵀ,   f(λ) = λ where λ ≥ 0, γλ where λ < 0

γ = -1 takes absolute values, γ = 0 clips. It is not linear: take means first.

Norms are taken to the last digits of their dtype, also where squares would leave its range. torch's own norm
adds all squares in a few running sums: of 3 million float32 entries it is off by 6e-5. Sums of rows, then of
the rows' norms, are good to rounding. max|x| takes no square, and ‖x‖ = max|x| ‖x / max|x|‖ neither under-
nor overflows on the way.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import count
from typing import Any, ClassVar, Literal, Self, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from curvlab.linalg.execution import FullPrecision, eigh, eigvalsh, in_full_precision, in_pieces

__all__ = [
    "DenseFactor",
    "DiagonalFactor",
    "Factor",
    "GramFactor",
    "InputFactors",
    "InputKind",
    "RankOneFactor",
    "binary_scale",
    "congruence",
    "diagonal_beyond",
    "frobenius_norm",
    "gram",
    "inner_product",
    "max_abs",
    "nonzero_or_one",
    "poseig",
    "poseig_diagonal",
    "squares_in_range",
    "symmetric_product",
]


def frobenius_norm(matrix: Tensor) -> Tensor:
    """‖X‖_F as a scalar tensor, row by row.

    >>> frobenius_norm(torch.tensor([[3.0, 0.0], [0.0, 4.0]])).item()
    5.0
    """
    return torch.linalg.vector_norm(torch.linalg.vector_norm(matrix, dim=1))


def max_abs(x: Tensor) -> Tensor:
    """max|x| as a scalar tensor; NaN where there is one.

    >>> max_abs(torch.tensor([1.0, -3.0])).item()
    3.0
    """
    if not in_pieces(x):
        return torch.linalg.vector_norm(x, float("inf"))  # one launch, which a CPU takes longer for
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)


def nonzero_or_one(x: Tensor) -> Tensor:
    """x, one where it is zero: something to divide by.

    >>> nonzero_or_one(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    return x + (x == 0)


def binary_scale(x: Tensor) -> Tensor:
    """A power of two about max|x| (1 where x is zero): to divide by it and multiply again changes no digit.

    >>> binary_scale(torch.tensor([1.0, -3.0])).item()
    4.0
    """
    peak = nonzero_or_one(max_abs(x))
    return peak / torch.frexp(peak).mantissa


def squares_in_range(norm: Tensor) -> bool:
    """Whether a norm is so far from the ends of its dtype's range that its square lost nothing (reads it).

    >>> [squares_in_range(torch.tensor(norm)) for norm in (1e-8, 1e-30, torch.inf)]
    [True, False, False]
    """
    limits = torch.finfo(norm.dtype)
    return (limits.tiny / limits.eps) ** 0.5 < float(norm) < float("inf")


BLOCK = 192
COLUMN_CHUNK = 8192


def gram(rows: Tensor, centre: Tensor | None = None) -> Tensor:
    """X Xᵀ for X = rows, or (X - 1cᵀ)(X - 1cᵀ)ᵀ where a `centre` c is given.

    The centred copy is made a chunk of columns at a time, so it stays in the cache and the
    subtraction costs neither memory nor, in float32, the digits that centring a finished
    X Xᵀ would lose.

    >>> gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    if centre is None:
        return symmetric_product(rows, rows)
    if not in_pieces(rows):
        centred = rows - centre
        return centred @ centred.T
    total = rows.new_zeros(rows.shape[0], rows.shape[0])
    for chunk, offset in zip(rows.split(COLUMN_CHUNK, dim=1), centre.split(COLUMN_CHUNK), strict=True):
        centred = chunk - offset
        total += symmetric_product(centred, centred)
    return total


def congruence(weight: Tensor, matrix: Tensor) -> Tensor:
    """Wᵀ B W for a symmetric B.

    >>> congruence(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])).tolist()
    [[3.0, 6.0], [6.0, 12.0]]
    """
    return symmetric_product(weight.T, (matrix @ weight).T)


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """left rightᵀ, known to be symmetric, from its lower triangle of blocks.

    >>> symmetric_product(torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [4.0]])).tolist()
    [[2.0, 4.0], [4.0, 8.0]]
    """
    n = left.shape[0]
    if n <= 2 * BLOCK or not in_pieces(left):
        return left @ right.T
    out = left.new_empty(n, n)
    # At most 32 block rows: more would save next to nothing and cost a call each.
    block = max(BLOCK, -(-n // 32))
    for start in range(0, n, block):
        stop = min(start + block, n)
        block_row = left[start:stop] @ right[:stop].T
        out[start:stop, :stop] = block_row
        out[:start, start:stop] = block_row[:, :start].T
    return out


def poseig_diagonal(values: Tensor, gamma: float) -> Tensor:
    """PosEig of a diagonal matrix, entry by entry.

    >>> poseig_diagonal(torch.tensor([2.0, -3.0]), gamma=-1.0)
    tensor([2., 3.])
    """
    return torch.where(values < 0, gamma * values, values)


def poseig(matrix: Tensor, gamma: float) -> Tensor:
    """PosEig of a symmetric matrix.

    >>> poseig(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), gamma=-1.0).round(decimals=4).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    eigenvalues, vectors = eigh(matrix)
    scaled = vectors * poseig_diagonal(eigenvalues, gamma)
    result = scaled @ vectors.T
    return (result + result.T) / 2


T = TypeVar("T")
RECENT = 6  # of one factor: the three factorisations of a factored inverse, for two dampings


@dataclass(frozen=True, eq=False)
class Factor(FullPrecision, ABC):
    """A symmetric n × n matrix in one of several forms; its tensors are the positional fields."""

    kind: ClassVar[str]
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False, kw_only=True)

    @property
    @abstractmethod
    def size(self) -> int:
        """n, the number of rows."""

    @property
    @abstractmethod
    def rank_bound(self) -> int:
        """The rank cannot exceed this."""

    @property
    def count(self) -> int:
        """How many matrices it stands for: one, but for a stack."""
        return 1

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """F x for x of n rows."""

    def add_product_(self, target: Tensor, rows: Tensor, scale: float) -> None:
        """target ← target + scale · rows F, in place, for rows of n columns.

        Few contiguous rows at the left of F are several times as fast as as many columns at its right.
        """
        target.add_(self.matmul(rows.T).T, alpha=scale)

    @abstractmethod
    def to_dense(self) -> Tensor:
        """F as a matrix (kept once formed)."""

    @abstractmethod
    def trace(self) -> Tensor:
        """tr F."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of F."""

    @abstractmethod
    def frobenius_norm(self) -> Tensor:
        """‖F‖_F."""

    @abstractmethod
    def eigvalsh(self) -> Tensor:
        """All n eigenvalues, ascending."""

    def remember(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` returns, computed once for each `key`: solvers share factorisations here."""
        if key not in self._memo:
            self._memo[key] = in_full_precision(make)
        return self._memo[key]

    def remember_recent(self, key: Any, make: Callable[[], T]) -> T:
        """The same for keys without end, such as dampings: of these only the last few are held."""
        recent = self.remember("recent", OrderedDict[Any, Any])
        if key not in recent:
            recent[key] = in_full_precision(make)
        recent.move_to_end(key)
        while len(recent) > RECENT:
            recent.popitem(last=False)
        return recent[key]

    @abstractmethod
    def diagonal_block(self, start: int, stop: int) -> Factor:
        """The factor of the rows and columns from `start` to `stop`, in the same form."""

    def quadratic(self, rows: Tensor) -> Tensor:
        """xᵀ F x for each row x."""
        return (self.matmul(rows.T).T * rows).sum(1)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that define the factor, by field name."""
        return {name: getattr(self, name) for name in _tensor_fields(type(self))}

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same factor with `function`, a conversion or a copy, applied to each of its tensors."""
        tensors: dict[str, Any] = {name: function(value) for name, value in self.tensors().items()}
        return replace(self, **tensors, **self._nothing_computed())

    def _nothing_computed(self) -> dict[str, Any]:
        """The fields that hold what was computed from the others, empty."""
        return {"_memo": {}}

    def unfactorised(self) -> Self:
        """The same factor with nothing remembered: what solvers then factorise is freed with this one."""
        other = object.__new__(type(self))
        other.__dict__.update({name: getattr(self, name) for name in _all_fields(type(self))}, _memo={})
        return other

    def formed(self) -> Factor:
        """The same factor made of tensors that a file can hold: itself, unless its rows are not formed."""
        return self

    def shares_rows_with(self, other: Factor) -> bool:
        """Whether both are made of the same rows; see `GramFactor`."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the fields, and nothing that was computed from them."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | self._nothing_computed()

    def __repr__(self) -> str:
        dtype = str(self.example.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({self.size} × {self.size}, rank ≤ {self.rank_bound}, {dtype})"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that define the factor."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def example(self) -> Tensor:
        """One of its tensors: knows the dtype and the device."""
        found: Tensor = getattr(self, _tensor_fields(type(self))[0])
        return found


@cache
def _all_fields(kind: type[Factor]) -> tuple[str, ...]:
    """All fields of a kind of factor, for a copy at every step, for every layer."""
    return tuple(f.name for f in fields(kind))


@cache
def _tensor_fields(kind: type[Factor]) -> tuple[str, ...]:
    """The fields of a kind of factor that define it: asked for at every step, for every layer."""
    return tuple(f.name for f in fields(kind) if not f.kw_only)


@dataclass(frozen=True, eq=False, repr=False)
class DenseFactor(Factor):
    """A symmetric matrix as it is.

    >>> DenseFactor(torch.eye(3)).trace().item()
    3.0
    """

    kind: ClassVar[str] = "dense"
    matrix: Tensor

    @property
    def size(self) -> int:
        return self.matrix.shape[0]

    @property
    def rank_bound(self) -> int:
        return self.size

    def matmul(self, x: Tensor) -> Tensor:
        return self.matrix @ x

    def add_product_(self, target: Tensor, rows: Tensor, scale: float) -> None:
        target.addmm_(rows, self.matrix, alpha=scale)

    def to_dense(self) -> Tensor:
        return self.matrix

    def trace(self) -> Tensor:
        return self.matrix.trace()

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def frobenius_norm(self) -> Tensor:
        return frobenius_norm(self.matrix)

    def diagonal_block(self, start: int, stop: int) -> DenseFactor:
        return DenseFactor(self.matrix[start:stop, start:stop])

    def eigvalsh(self) -> Tensor:
        return self.remember("eigvalsh", lambda: eigvalsh(self.matrix))


class _RowsIds:
    """Names that no other rows have: this process's own and a number, at a tenth of the time of a UUID.

    >>> names = _RowsIds()
    >>> names() == names()
    False
    """

    def __init__(self) -> None:
        self._begin()
        if hasattr(os, "register_at_fork"):  # not on Windows, where no process is forked
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._process, self._numbers = uuid4().hex, count()

    def __call__(self) -> str:
        return f"{self._process}-{next(self._numbers)}"


@dataclass(frozen=True, eq=False, repr=False)
class GramFactor(Factor):
    """F = Hᵀ diag(c) H, with `rows` = H (m × n) and `root` = √c (m).

    The rows are not copied: the wide dimension n appears only in the m × m Gram matrix
    K = diag(√c) H Hᵀ diag(√c), which is computed when first asked for.

    `rows_id` says which rows they are. Every new factor has one of its own; conversions (`map`), copies
    and pickles keep it. By it a solver knows that a gradient comes from the very batch of a curvature.

    >>> f = GramFactor(torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([0.5]))
    >>> f.size, f.gram.item(), f.trace().item()
    (3, 2.25, 2.25)
    >>> f.shares_rows_with(f.map(torch.Tensor.double)), f.shares_rows_with(GramFactor(2 * f.rows, f.root))
    (True, False)
    """

    kind: ClassVar[str] = "gram"
    rows: Tensor
    root: Tensor
    rows_id: str = field(default_factory=_RowsIds(), repr=False, kw_only=True)
    _of_rows: dict[str, Tensor] = field(default_factory=dict, repr=False, kw_only=True)

    def _nothing_computed(self) -> dict[str, Any]:
        return super()._nothing_computed() | {"_of_rows": {}}

    def shares_rows_with(self, other: Factor) -> bool:
        return isinstance(other, GramFactor) and self.rows_id == other.rows_id

    @property
    def size(self) -> int:
        return self.rows.shape[1]

    @property
    def rank_bound(self) -> int:
        return min(self.rows.shape)

    @cached_property
    def mean(self) -> Tensor:
        """Σ c_i h_i: the weighted mean of the rows where the weights sum to one."""
        return self._once("mean", lambda: self.root.square() @ self.rows)

    @cached_property
    def centred_gram(self) -> Tensor:
        """√c_i √c_j (h_i - h̄)·(h_j - h̄), with h̄ the weighted mean."""
        return self._once("centred", lambda: self._scale(gram(self.rows, self.mean)))

    @cached_property
    def gram(self) -> Tensor:
        """K = √c_i √c_j h_i·h_j."""
        return self._once("gram", lambda: self._scale(gram(self.rows)))

    def _once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A product of the rows alone, made once for all factors that share them: gradient and curvatures."""
        if name not in self._of_rows:
            self._of_rows[name] = make()
        return self._of_rows[name]

    def _scale(self, matrix: Tensor) -> Tensor:
        return matrix.mul_(self.root[:, None]).mul_(self.root)

    def scaled_rows(self) -> Tensor:
        """diag(√c) H, a copy."""
        return self.rows * self.root[:, None]

    @property
    def narrow(self) -> bool:
        """Whether there are fewer rows than columns, so that K is the smaller side."""
        return self.rows.shape[0] < self.rows.shape[1]

    def matmul(self, x: Tensor) -> Tensor:
        return self.rows.T @ (self.root.square()[:, None] * (self.rows @ x))

    def add_product_(self, target: Tensor, rows: Tensor, scale: float) -> None:
        along = in_full_precision(lambda: rows @ self.rows.T)
        target.addmm_(along.mul_(self.root.square()), self.rows, alpha=scale)

    def to_dense(self) -> Tensor:
        return self.remember("dense", lambda: gram(self.scaled_rows().T))

    def trace(self) -> Tensor:
        return self.remember("trace", self._trace)

    def _trace(self) -> Tensor:
        if "gram" in self._of_rows:
            return self.gram.trace()
        return self.root.square() @ row_square_norms(self.rows)

    def diagonal(self) -> Tensor:
        return self.root.square() @ self.rows.square()

    def frobenius_norm(self) -> Tensor:
        return frobenius_norm(self.gram if self.narrow else self.to_dense())

    def diagonal_block(self, start: int, stop: int) -> GramFactor:
        return GramFactor(self.rows[:, start:stop], self.root)

    def eigvalsh(self) -> Tensor:
        return self.remember("eigvalsh", self._eigvalsh)

    def _eigvalsh(self) -> Tensor:
        if not self.narrow:
            return eigvalsh(self.to_dense())
        nonzero = eigvalsh(self.gram)
        return torch.cat([nonzero.new_zeros(self.size - len(nonzero)), nonzero]).sort().values


@dataclass(frozen=True, eq=False, repr=False)
class RankOneFactor(Factor):
    """F = v vᵀ.

    >>> RankOneFactor(torch.tensor([3.0, 4.0])).frobenius_norm().item()
    25.0
    """

    kind: ClassVar[str] = "rank-one"
    vector: Tensor

    @property
    def size(self) -> int:
        return len(self.vector)

    @property
    def rank_bound(self) -> int:
        return 1

    def matmul(self, x: Tensor) -> Tensor:
        projection = self.vector @ x
        return torch.outer(self.vector, projection) if x.ndim == 2 else self.vector * projection

    def to_dense(self) -> Tensor:
        return torch.outer(self.vector, self.vector)

    def trace(self) -> Tensor:
        return self.vector @ self.vector

    def diagonal(self) -> Tensor:
        return self.vector.square()

    def frobenius_norm(self) -> Tensor:
        return self.trace()

    def diagonal_block(self, start: int, stop: int) -> RankOneFactor:
        return RankOneFactor(self.vector[start:stop])

    def eigvalsh(self) -> Tensor:
        eigenvalues = self.vector.new_zeros(self.size)
        eigenvalues[-1] = self.trace()
        return eigenvalues


@dataclass(frozen=True, eq=False, repr=False)
class DiagonalFactor(Factor):
    """F = diag(f): nothing of n × n is formed but by `to_dense`.

    >>> DiagonalFactor(torch.tensor([3.0, 4.0])).matmul(torch.ones(2, 1)).flatten().tolist()
    [3.0, 4.0]
    """

    kind: ClassVar[str] = "diagonal"
    values: Tensor

    @property
    def size(self) -> int:
        return len(self.values)

    @property
    def rank_bound(self) -> int:
        return self.size

    def matmul(self, x: Tensor) -> Tensor:
        return self.values.reshape(-1, *(1,) * (x.ndim - 1)) * x

    def add_product_(self, target: Tensor, rows: Tensor, scale: float) -> None:
        target.addcmul_(rows, self.values, value=scale)

    def to_dense(self) -> Tensor:
        return torch.diag(self.values)

    def trace(self) -> Tensor:
        return self.values.sum()

    def diagonal(self) -> Tensor:
        return self.values

    def frobenius_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.values)

    def eigvalsh(self) -> Tensor:
        return self.values.sort().values

    def diagonal_block(self, start: int, stop: int) -> DiagonalFactor:
        return DiagonalFactor(self.values[start:stop])


def diagonal_beyond(factor: GramFactor, limit: int) -> Factor:
    """The factor, or its diagonal where both its columns and its rows are more than `limit`.

    >>> diagonal_beyond(GramFactor(torch.ones(3, 4), torch.ones(3)), limit=2).kind
    'diagonal'
    """
    beyond = factor.size > limit and len(factor.rows) > limit
    return DiagonalFactor(factor.diagonal()) if beyond else factor


def inner_product(left: Factor, right: Factor) -> Tensor:
    """tr(F₁ F₂), on the smaller side of either.

    >>> diagonal = DiagonalFactor(torch.tensor([1.0, 2.0]))
    >>> inner_product(diagonal, RankOneFactor(torch.tensor([1.0, 3.0]))).item()
    19.0
    """
    for one, other in ((left, right), (right, left)):
        if isinstance(one, DiagonalFactor):
            return one.values @ other.diagonal()
        if isinstance(one, RankOneFactor):
            return other.quadratic(one.vector[None]).sum()
    for one, other in ((left, right), (right, left)):
        if isinstance(one, GramFactor):
            return one.root.square() @ other.quadratic(one.rows)
    return (left.to_dense() * right.to_dense()).sum()


def row_square_norms(rows: Tensor) -> Tensor:
    """‖h_i‖² for each row, with no temporary of the rows' size."""
    return torch.linalg.vector_norm(rows, dim=1).square()


InputKind = Literal["full", "mean"]


@dataclass(frozen=True, eq=False)
class InputFactors(FullPrecision):
    """E[hhᵀ] as a factor and E[h] as a vector; a Gram factor brings its own mean.

    `source` is the factor, or what forms it when it is first asked for: who reads E[h] alone never does.

    >>> from curvlab.linalg import GramFactor
    >>> h = GramFactor(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.5, 0.5]).sqrt())
    >>> [round(x, 4) for x in InputFactors(h).mean.tolist()]
    [0.5, 0.5]
    """

    source: Factor | Callable[[], Factor]
    given_mean: Tensor | None = None

    @cached_property
    def full(self) -> Factor:
        """E[hhᵀ]; formed now where `source` is what forms it."""
        return self.source if isinstance(self.source, Factor) else self.source()

    @property
    def formed(self) -> bool:
        """Whether E[hhᵀ] is there already."""
        return isinstance(self.source, Factor) or "full" in self.__dict__

    @property
    def size(self) -> int:
        """n, the number of inputs."""
        return self.full.size if self.given_mean is None else self.given_mean.shape[-1]

    @property
    def mean(self) -> Tensor:
        """E[h]."""
        if self.given_mean is not None:
            return self.given_mean
        if isinstance(self.full, GramFactor):
            return self.full.mean
        raise ValueError(f"{self.full} does not hold the rows whose mean E[h] is: give the mean beside it")

    def unfactorised(self) -> InputFactors:
        """The same with nothing remembered by a factor that is there already."""
        return InputFactors(self.full.unfactorised(), self.given_mean) if self.formed else self

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the formed factor and the mean."""
        return {"source": self.full, "given_mean": self.given_mean}

    @cached_property
    def mean_factor(self) -> RankOneFactor:
        """E[h] E[h]ᵀ."""
        return RankOneFactor(self.mean)

    def factor(self, kind: InputKind) -> Factor:
        """The full or the mean input factor."""
        return self.full if kind == "full" else self.mean_factor

    @property
    def nbytes(self) -> int:
        """Bytes held; E[hhᵀ] counts once it is formed."""
        mean = 0 if self.given_mean is None else self.given_mean.nbytes
        return mean + (self.full.nbytes if self.formed else 0)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that define both."""
        mean = {} if self.given_mean is None else {"mean": self.given_mean}
        return self.full.tensors() | mean

    def map(self, function: Callable[[Tensor], Tensor]) -> InputFactors:
        """The same with `function` applied to each tensor."""
        mean = None if self.given_mean is None else function(self.given_mean)
        return InputFactors(self.full.map(function), mean)
