"""Second moments of rows that are never formed: F = Σ_a s_a e_a e_aᵀ, and differences of such factors.

A row r_i is what an example (in one backward pass) has for a group of parameters: its gradient R_i, flattened
and joined. It may have as many entries as the network has parameters, so that rows are known by what can be
computed of them without forming one (`ParameterRows`):

    kernel    K_ij = ⟨R_i, R_j⟩         inner    ⟨R_i, X⟩         combination    Σ_i y_i R_i

With the roots √c_i of the rows' weights and a `mixing` T, e = Tᵀ diag(√c) r; without one e_i = √c_i r_i.
`signs` are s_a = ±1; without them F is positive semi-definite. Everything but products happens among k rows:

    (F + τI)⁻¹ x = (x - eᵀ (e eᵀ + τI)⁻¹ e x) / τ
    PosEig(plus - minus) = Qᵀ PosEig(Λ^½ Uᵀ Σ U Λ^½) Q      VVᵀ = U Λ Uᵀ, Q = Λ^-½ Uᵀ V, V the rows of both
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import ClassVar, Self

import torch
from torch import Tensor

from curvlab.linalg.execution import eigh, eigvalsh
from curvlab.linalg.factors import (
    DenseFactor,
    DiagonalFactor,
    Factor,
    GramFactor,
    frobenius_norm,
    gram,
    poseig,
    poseig_diagonal,
)

__all__ = [
    "ExampleFactor",
    "FormedRows",
    "ParameterRows",
    "example_factor_from",
    "poseig_difference",
    "signed_difference",
]


@dataclass(frozen=True, eq=False)
class ParameterRows(ABC):
    """Rows R_1 … R_k of one parameter, each of the parameter's own shape."""

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Entries of a row."""
        return prod(self.shape)

    @property
    @abstractmethod
    def count(self) -> int:
        """k."""

    @abstractmethod
    def kernel(self) -> Tensor:
        """⟨R_i, R_j⟩, (k, k)."""

    @abstractmethod
    def inner(self, x: Tensor) -> Tensor:
        """⟨R_i, X⟩, (k,), for X of the parameter's shape."""

    @abstractmethod
    def combination(self, y: Tensor) -> Tensor:
        """Σ_i y_i R_i, in the parameter's shape, for y of (k,)."""

    @abstractmethod
    def squares(self, weights: Tensor) -> Tensor:
        """Σ_i w_i R_i², entry by entry, in the parameter's shape."""

    @abstractmethod
    def form(self) -> Tensor:
        """The rows, flattened: (k, size)."""

    @abstractmethod
    def join(self, other: Self) -> ParameterRows:
        """These rows and then those of `other`."""

    @abstractmethod
    def held(self) -> dict[str, Tensor]:
        """The tensors that the rows are made from."""


@dataclass(frozen=True, eq=False)
class FormedRows(ParameterRows):
    """Rows as they are, (k, size).

    >>> FormedRows((2,), torch.tensor([[3.0, 4.0]])).kernel().item()
    25.0
    """

    rows: Tensor

    @property
    def count(self) -> int:
        return len(self.rows)

    def kernel(self) -> Tensor:
        return gram(self.rows)

    def inner(self, x: Tensor) -> Tensor:
        return self.rows @ x.reshape(-1)

    def combination(self, y: Tensor) -> Tensor:
        return (y @ self.rows).reshape(self.shape)

    def squares(self, weights: Tensor) -> Tensor:
        return (weights @ self.rows.square()).reshape(self.shape)

    def form(self) -> Tensor:
        return self.rows

    def join(self, other: ParameterRows) -> FormedRows:
        return replace(self, rows=torch.cat([self.rows, other.form()]))

    def held(self) -> dict[str, Tensor]:
        return {"rows": self.rows}


@dataclass(frozen=True, eq=False, repr=False)
class ExampleFactor(Factor):
    """F = eᵀ diag(s) e with e = Tᵀ diag(√c) r, for rows r over the parameters of `parts`, joined.

    >>> one = ExampleFactor((FormedRows((2,), torch.eye(2)),), torch.tensor([1.0, 2.0]))
    >>> one.to_dense().diagonal(), one.matmul(torch.ones(2, 1)).flatten()
    (tensor([1., 4.]), tensor([1., 4.]))
    """

    kind: ClassVar[str] = "examples"
    parts: tuple[ParameterRows, ...]
    root: Tensor
    mixing: Tensor | None = None
    signs: Tensor | None = None

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def count(self) -> int:
        """Number of rows e."""
        return len(self.root) if self.mixing is None else self.mixing.shape[1]

    @property
    def narrow(self) -> bool:
        """Whether there are fewer rows than columns."""
        return self.count < self.size

    @property
    def rank_bound(self) -> int:
        return min(self.count, self.size)

    @property
    def sizes(self) -> list[int]:
        """Entries of each part."""
        return [part.size for part in self.parts]

    @cached_property
    def gram(self) -> Tensor:
        """e eᵀ."""
        total = self.parts[0].kernel()
        for part in self.parts[1:]:
            total = total + part.kernel()
        scaled = total * torch.outer(self.root, self.root)
        return scaled if self.mixing is None else self.mixing.T @ scaled @ self.mixing

    def inner(self, x: Tensor) -> Tensor:
        """E x for one vector x, (size,)."""
        pieces = zip(self.parts, x.split(self.sizes), strict=True)
        total = torch.stack([part.inner(piece.reshape(part.shape)) for part, piece in pieces]).sum(0)
        scaled = self.root * total
        return scaled if self.mixing is None else self.mixing.T @ scaled

    def combination(self, y: Tensor) -> Tensor:
        """Eᵀ y for one y, (count,)."""
        weights = self.root * (y if self.mixing is None else self.mixing @ y)
        return torch.cat([part.combination(weights).reshape(-1) for part in self.parts])

    def _apply_signs(self, y: Tensor) -> Tensor:
        return y if self.signs is None else self.signs * y

    def matmul(self, x: Tensor) -> Tensor:
        if x.ndim == 1:
            return self.combination(self._apply_signs(self.inner(x)))
        return torch.stack([self.matmul(column) for column in x.unbind(1)], 1)

    def form(self) -> Tensor:
        """The rows e themselves, (count, size)."""
        rows = torch.cat([part.form() for part in self.parts], 1) * self.root[:, None]
        return rows if self.mixing is None else self.mixing.T @ rows

    def to_dense(self) -> Tensor:
        rows = self.form()
        return gram(rows.T) if self.signs is None else rows.T @ (self.signs[:, None] * rows)

    def trace(self) -> Tensor:
        return self._apply_signs(self.gram.diagonal()).sum()

    def diagonal(self) -> Tensor:
        if self.mixing is not None:
            return (self._apply_signs(self.form().T).T * self.form()).sum(0)
        weights = self._apply_signs(self.root.square())
        return torch.cat([part.squares(weights).reshape(-1) for part in self.parts])

    def frobenius_norm(self) -> Tensor:
        """‖F‖² = Σ_ab s_a s_b K_ab²."""
        if self.signs is None:
            return frobenius_norm(self.gram)
        return (self.signs @ self.gram.square() @ self.signs).clamp(min=0).sqrt()

    def eigvalsh(self) -> Tensor:
        return self.remember("eigvalsh", self._eigvalsh)

    def _eigvalsh(self) -> Tensor:
        if not self.narrow:
            return eigvalsh(self.to_dense())
        values, vectors = eigh(self.gram)
        root = vectors * values.clamp(min=0).sqrt()
        nonzero = eigvalsh(root.T @ self._apply_signs(root.T).T) if self.signs is not None else values
        return torch.cat([nonzero.new_zeros(self.size - len(nonzero)), nonzero]).sort().values

    def diagonal_block(self, start: int, stop: int) -> Factor:
        return self.select([(start, stop)])

    def select(self, ranges: Sequence[tuple[int, int]]) -> ExampleFactor:
        """The factor over some of its entries, from `start` to `stop` in each of the ranges."""
        ends = [sum(self.sizes[: index + 1]) for index in range(len(self.parts))]
        spans = {(end - part.size, end): part for end, part in zip(ends, self.parts, strict=True)}
        chosen: list[ParameterRows] = []
        for span in ranges:
            if span in spans:
                chosen.append(spans[span])
            else:
                rows = torch.cat([part.form() for part in self.parts], 1)[:, span[0] : span[1]]
                chosen.append(FormedRows((span[1] - span[0],), rows))
        return ExampleFactor(tuple(chosen), self.root, self.mixing, self.signs)

    def tensors(self) -> dict[str, Tensor]:
        """What is held; `formed` gives a factor of tensors that a file can hold."""
        found = {f"{i}/{key}": t for i, part in enumerate(self.parts) for key, t in part.held().items()}
        own = {"root": self.root, "mixing": self.mixing, "signs": self.signs}
        return found | {key: tensor for key, tensor in own.items() if tensor is not None}

    @property
    def example(self) -> Tensor:
        return self.root

    def formed(self) -> Factor:
        if not self.narrow:
            return DenseFactor(self.to_dense())
        rows = self.form()
        ones = torch.ones_like(rows[:, 0])
        if self.signs is None:
            return GramFactor(rows, ones)
        return ExampleFactor((FormedRows((self.size,), rows),), ones, None, self.signs)

    def map(self, function: Callable[[Tensor], Tensor]) -> Factor:  # type: ignore[override]
        """The formed factor with `function` applied to each of its tensors."""
        formed = self.formed()
        if not isinstance(formed, ExampleFactor):
            return formed.map(function)
        signs = None if formed.signs is None else function(formed.signs)
        parts = tuple(FormedRows(part.shape, function(part.form())) for part in formed.parts)
        return ExampleFactor(parts, function(formed.root), None, signs)


def example_factor_from(**tensors: Tensor) -> ExampleFactor:
    """The factor that `ExampleFactor.formed` gave, from its tensors."""
    rows = tensors["0/rows"]
    return ExampleFactor((FormedRows((rows.shape[1],), rows),), tensors["root"], None, tensors.get("signs"))


DROPPED = 1e-12  # of the largest eigenvalue of a Gram matrix: directions that are rounding


def poseig_difference(plus: Factor, minus: Factor, gamma: float) -> Factor:
    """PosEig of plus - minus, two factors of one size; entry by entry where one of them is diagonal.

    Of factors with k rows in all, fewer than columns, it is a factor of rows, by two k × k problems.

    >>> one = GramFactor(torch.tensor([[2.0, 0.0, 0.0]]), torch.ones(1))
    >>> two = GramFactor(torch.tensor([[0.0, 1.0, 0.0]]), torch.ones(1))
    >>> poseig_difference(one, two, gamma=-1.0).to_dense().diagonal()
    tensor([4., 1., 0.])
    """
    if isinstance(plus, DiagonalFactor) or isinstance(minus, DiagonalFactor):
        return DiagonalFactor(poseig_diagonal(plus.diagonal() - minus.diagonal(), gamma))
    if isinstance(plus, ExampleFactor) and isinstance(minus, ExampleFactor):
        both = _join(plus, minus)
        if both.narrow and both.signs is not None:
            basis, values = _signed_eigenvectors(both.gram, both.signs)
            return replace(both, mixing=basis * poseig_diagonal(values, gamma).sqrt(), signs=None, _memo={})
    elif isinstance(plus, GramFactor) and isinstance(minus, GramFactor):
        rows = torch.cat([plus.scaled_rows(), minus.scaled_rows()])
        if len(rows) < plus.size:
            basis, values = _signed_eigenvectors(gram(rows), _signs(len(plus.rows), len(minus.rows), rows))
            return GramFactor(basis.T @ rows, poseig_diagonal(values, gamma).sqrt())
    return DenseFactor(poseig(plus.to_dense() - minus.to_dense(), gamma))


def signed_difference(plus: Factor, minus: Factor) -> Factor:
    """plus - minus as it is: of rows with signs while they are fewer than columns, else dense.

    >>> one = GramFactor(torch.tensor([[2.0, 0.0, 0.0]]), torch.ones(1))
    >>> two = GramFactor(torch.tensor([[0.0, 1.0, 0.0]]), torch.ones(1))
    >>> signed_difference(one, two).diagonal()
    tensor([ 4., -1.,  0.])
    """
    if isinstance(plus, GramFactor) and isinstance(minus, GramFactor):
        plus, minus = (ExampleFactor((FormedRows((one.size,), one.rows),), one.root) for one in (plus, minus))
    if isinstance(plus, ExampleFactor) and isinstance(minus, ExampleFactor):
        both = _join(plus, minus)
        return both if both.narrow else DenseFactor(both.to_dense())
    return DenseFactor(plus.to_dense() - minus.to_dense())


def _signs(plus: int, minus: int, like: Tensor) -> Tensor:
    return torch.cat([like.new_ones(plus), -like.new_ones(minus)])


def _join(plus: ExampleFactor, minus: ExampleFactor) -> ExampleFactor:
    """The rows of both, those of `minus` with the sign -1."""
    pairs = zip(plus.parts, minus.parts, strict=True)
    parts = tuple(one.join(other) for one, other in pairs)
    signs = _signs(plus.count, minus.count, plus.root)
    return ExampleFactor(parts, torch.cat([plus.root, minus.root]), None, signs)


def _signed_eigenvectors(kernel: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """T and λ with Vᵀ diag(s) V = Σ_a λ_a q_a q_aᵀ, the q_a = Vᵀ T_a orthonormal, for rows with VVᵀ = K."""
    squares, vectors = eigh(kernel)
    # A dropped direction has root 0 and stays, with λ = 0: which ones these are is not read.
    held = squares > DROPPED * squares[-1]
    roots = torch.where(held, squares, 0).sqrt()
    inverse = torch.where(held, 1 / torch.where(held, roots, 1), 0)
    inner = (vectors * signs[:, None]).T @ vectors * torch.outer(roots, roots)
    values, turn = eigh((inner + inner.T) / 2)
    return (vectors * inverse) @ turn, values
