"""Eigenvalues and eigenvectors of blocks from those of their factors, and functions of blocks by them.

    B = U Λ Uᵀ,  A = Q S Qᵀ:     B ⊗ A has the eigenvalues λ_i σ_j and the eigenvectors u_i q_jᵀ
    f(B ⊗ A + cI) X = U [ f(λ_i σ_j + c) ∘ (Uᵀ X Q) ] Qᵀ

Nothing of the block's size squared is formed. A factor that is held as few rows has eigenvectors for these
alone; it is zero on the rest of the space, so that there f(c) takes the place of f. A block that is no
Kronecker product is one with an input factor of size one, the number 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from curvlab.linalg.blocks import (
    Block,
    FactorBlock,
    KroneckerBlock,
    ShiftedBlock,
    SumBlock,
    ViewedBlock,
)
from curvlab.linalg.example_factors import ExampleFactor
from curvlab.linalg.execution import eigh
from curvlab.linalg.factors import DenseFactor, DiagonalFactor, Factor, GramFactor, RankOneFactor
from curvlab.linalg.views import MatrixView

__all__ = ["BlockBasis", "Eigenbasis", "FactorBasis", "Which", "block_basis", "rank_of_which"]

Which = Literal["largest", "smallest", "magnitude"]
# Blocks without closed form are decomposed from their dense matrix up to these sizes: a sum of Kronecker
# products is formed at once, an operator takes one product for each column.
DENSE_SUM_UP_TO = 2048
DENSE_OPERATOR_UP_TO = 512


@dataclass(frozen=True, eq=False)
class FactorBasis:
    """Eigenvalues and eigenvectors (columns) of an n × n factor; without vectors: the unit vectors.

    Where there are fewer vectors than n the factor is zero on what is orthogonal to them.
    """

    size: int
    values: Tensor
    vectors: Tensor | None = None

    @property
    def thin(self) -> bool:
        """Whether some of the space has no vector here."""
        return len(self.values) < self.size

    def coordinates(self, x: Tensor) -> Tensor:
        """Uᵀ x, for x of shape (…, n, columns)."""
        return x if self.vectors is None else self.vectors.T @ x

    def combine(self, x: Tensor) -> Tensor:
        """U x."""
        return x if self.vectors is None else self.vectors @ x

    def vector(self, index: int) -> Tensor:
        """One eigenvector."""
        if self.vectors is not None:
            return self.vectors[:, index]
        unit = torch.zeros(self.size, dtype=self.values.dtype, device=self.values.device)
        unit[index] = 1
        return unit

    def complement(self, count: int) -> Tensor:
        """Up to `count` orthonormal columns that are orthogonal to all eigenvectors."""
        count = min(count, self.size - len(self.values))
        if self.vectors is None or count == 0:
            return self.values.new_zeros(self.size, 0)
        generator = torch.Generator().manual_seed(0)
        columns = torch.randn(self.size, count, generator=generator, dtype=torch.float64).to(self.vectors)
        for _ in range(2):
            columns = columns - self.vectors @ (self.vectors.T @ columns)
        return torch.linalg.qr(columns).Q

    def extreme(self, count: int) -> Tensor:
        """Indices of the `count` largest and the `count` smallest values."""
        order = self.values.argsort()
        return order if len(order) <= 2 * count else torch.cat([order[:count], order[-count:]])


def factor_basis(factor: Factor) -> FactorBasis:
    """The eigenbasis of a factor, kept with it.

    >>> factor_basis(RankOneFactor(torch.tensor([3.0, 4.0]))).values.tolist()
    [25.0]
    """
    if isinstance(factor, DiagonalFactor):
        return FactorBasis(factor.size, factor.values)
    if isinstance(factor, RankOneFactor):
        length = torch.linalg.vector_norm(factor.vector)
        if not bool(length > 0):
            return FactorBasis(
                factor.size, factor.vector.new_zeros(0), factor.vector.new_zeros(factor.size, 0)
            )
        return FactorBasis(factor.size, (length * length)[None], (factor.vector / length)[:, None])
    if isinstance(factor, ExampleFactor) and factor.signs is None:
        return factor_basis(factor.remember("formed", factor.formed))
    if isinstance(factor, GramFactor) and factor.narrow:
        return FactorBasis(factor.size, *factor.remember("svd", lambda: _svd(factor)))
    return FactorBasis(factor.size, *factor.remember("eigh", lambda: _eigh(factor.to_dense())))


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = eigh(matrix)
    return values, vectors


def _svd(factor: GramFactor) -> tuple[Tensor, Tensor]:
    """The eigenvalues of F and their eigenvectors, n × m: squares and right vectors of its scaled rows."""
    _, singular, vectors = torch.linalg.svd(factor.scaled_rows(), full_matrices=False)
    return singular.square(), vectors.T


@dataclass(frozen=True, eq=False)
class _Place:
    """Where an eigenvector of a block is: its value, its part, and what makes its matrix."""

    value: float
    part: int
    matrix: Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class BlockBasis:
    """A block C + cI in the bases of its factors: one pair (output, input) for each matrix of its view.

    >>> from curvlab.linalg import DenseFactor
    >>> block = KroneckerBlock(DenseFactor(torch.eye(2)), DenseFactor(torch.diag(torch.tensor([2.0, 3.0]))))
    >>> basis = block_basis(block)
    >>> sorted(basis.values.tolist())
    [2.0, 2.0, 3.0, 3.0]
    >>> basis.apply(torch.reciprocal, torch.ones(1, 2, 2))[0, 0].tolist()
    [0.5, 0.3333333432674408]
    """

    view: MatrixView
    parts: tuple[tuple[FactorBasis, FactorBasis], ...]
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.view.shape

    @property
    def numel(self) -> int:
        """Number of eigenvalues."""
        return int(torch.Size(self.shape).numel())

    def _products(self, part: int) -> Tensor:
        output, inner = self.parts[part]
        return torch.outer(output.values, inner.values) + self.shift

    @property
    def values(self) -> Tensor:
        """The eigenvalues that belong to eigenvectors of the factors, in no order."""
        return torch.cat([self._products(part).flatten() for part in range(len(self.parts))])

    @property
    def further(self) -> int:
        """How many more eigenvalues there are, all equal to `shift`."""
        return self.numel - sum(len(output.values) * len(inner.values) for output, inner in self.parts)

    def sum(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Σ f(λ) over all eigenvalues."""
        values = self.values
        total = function(values).sum()
        return total + self.further * function(values.new_full((), self.shift)) if self.further else total

    def ends(self) -> tuple[float, float]:
        """The smallest and the largest eigenvalue."""
        found = [self.shift] if self.further else []
        for output, inner in self.parts:
            if len(output.values) and len(inner.values):
                pairs = [torch.stack([side.values.amin(), side.values.amax()]) for side in (output, inner)]
                products = torch.outer(*pairs) + self.shift
                found += [float(products.min()), float(products.max())]
        return min(found), max(found)

    def apply(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """f(C) x for x of shape (…, *shape)."""
        matrices = self.view.matrices(x)
        images = []
        for part, (output, inner) in enumerate(self.parts):
            given = matrices.select(-3, part)
            inside = inner.coordinates(output.coordinates(given).mT).mT
            image = output.combine(inner.combine((function(self._products(part)) * inside).mT).mT)
            if output.thin or inner.thin:
                projected = output.combine(inner.combine(inside.mT).mT)
                rest = function(given.new_full((), self.shift))
                image = image + rest * (given - projected)
            images.append(image)
        return self.view.parameter(torch.stack(images, -3))

    def extreme(self, count: int) -> list[tuple[float, Callable[[], Tensor]]]:
        """Eigenvalues among which are the `count` largest and smallest, with what makes their vectors."""
        places = [place for part in range(len(self.parts)) for place in self._candidates(part, count)]
        places.sort(key=lambda place: place.value)
        kept = places if len(places) <= 2 * count else places[:count] + places[-count:]
        return [(place.value, lambda place=place: self._parameter(place)) for place in kept]  # type: ignore[misc]

    def _parameter(self, place: _Place) -> Tensor:
        _, rows, columns = self.view.matrix_shape
        matrix = place.matrix()
        matrices = matrix.new_zeros(len(self.parts), rows, columns)
        matrices[place.part] = matrix
        return self.view.parameter(matrices)

    def _candidates(self, part: int, count: int) -> list[_Place]:
        """The extreme products are those of extreme values of both factors, whatever their signs."""
        output, inner = self.parts[part]
        rows, columns = output.extreme(count), inner.extreme(count)
        products = torch.outer(output.values[rows], inner.values[columns]) + self.shift
        flat = products.flatten()
        order = flat.argsort()
        chosen = order if len(order) <= 2 * count else torch.cat([order[:count], order[-count:]])
        places = []
        for index in chosen.tolist():
            i, j = int(rows[index // len(columns)]), int(columns[index % len(columns)])
            places.append(_Place(float(flat[index]), part, lambda i=i, j=j: _outer(output, inner, i, j)))  # type: ignore[misc]
        if output.thin or inner.thin:
            free = output.size * inner.size - len(output.values) * len(inner.values)
            null = _NullSpace(output, inner, min(count, free))
            places += [
                _Place(self.shift, part, lambda index=index: null.matrix(index))  # type: ignore[misc]
                for index in range(min(count, free))
            ]
        return places


def _outer(output: FactorBasis, inner: FactorBasis, i: int, j: int) -> Tensor:
    return torch.outer(output.vector(i), inner.vector(j))


@dataclass(frozen=True, eq=False)
class _NullSpace:
    """`count` orthonormal matrices that the product of two factors maps to zero."""

    output: FactorBasis
    inner: FactorBasis
    count: int

    @cached_property
    def _beyond(self) -> tuple[Tensor, Tensor]:
        return self.output.complement(self.count), self.inner.complement(self.count)

    def matrix(self, index: int) -> Tensor:
        """u⊥ eᵀ for any unit vector e, then u q⊥ᵀ."""
        beyond_output, beyond_input = self._beyond
        left = (self.output.size - len(self.output.values)) * self.inner.size
        if index < left:
            column, unit = divmod(index, self.inner.size)
            whole = FactorBasis(self.inner.size, self.inner.values.new_zeros(self.inner.size))
            return torch.outer(beyond_output[:, column], whole.vector(unit))
        i, j = divmod(index - left, beyond_input.shape[1])
        return torch.outer(self.output.vector(i), beyond_input[:, j])


def block_basis(block: Block) -> BlockBasis:
    """The basis of a block: from its factors, or from its dense form where it has none."""
    if isinstance(block, ShiftedBlock):
        inner = block_basis(block.block)
        return BlockBasis(inner.view, inner.parts, inner.shift + block.shift)
    if isinstance(block, KroneckerBlock):
        pair = (factor_basis(block.output), factor_basis(block.input))
        return BlockBasis(MatrixView(block.shape), (pair,))
    if isinstance(block, ViewedBlock):
        pairs = tuple((factor_basis(one.output), factor_basis(one.input)) for one in block.products)
        return BlockBasis(block.view, pairs)
    if isinstance(block, FactorBlock):
        return _plain_basis(block.shape, factor_basis(block.factor))
    dense = block.to_dense()
    return _plain_basis(block.shape, factor_basis(DenseFactor((dense + dense.T) / 2)))


def _is_decomposable(block: Block) -> bool:
    """Whether the basis of a block is cheap: it has factors, or is small."""
    if isinstance(block, ShiftedBlock):
        return _is_decomposable(block.block)
    if isinstance(block, KroneckerBlock | ViewedBlock | FactorBlock):
        return True
    return block.numel <= (DENSE_OPERATOR_UP_TO if _has_operator(block) else DENSE_SUM_UP_TO)


def _has_operator(block: Block) -> bool:
    """Whether to form the block takes a product for each column."""
    if isinstance(block, SumBlock):
        return any(_has_operator(one) for one in block.blocks)
    return not isinstance(block, KroneckerBlock | ViewedBlock | FactorBlock)


def _plain_basis(shape: tuple[int, ...], basis: FactorBasis) -> BlockBasis:
    """The basis of a block on the flattened parameter."""
    return BlockBasis(_FlatView(shape), ((basis, FactorBasis(1, basis.values.new_ones(1))),))


@dataclass(frozen=True)
class _FlatView(MatrixView):
    """A parameter of any shape as one column."""

    def __post_init__(self) -> None:
        """Any shape falls into one part."""

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return (1, int(torch.Size(self.shape).numel()), 1)

    def matrices(self, parameter: Tensor) -> Tensor:
        lead = parameter.shape[: parameter.ndim - len(self.shape)]
        return parameter.reshape(*lead, *self.matrix_shape)

    def parameter(self, matrices: Tensor) -> Tensor:
        return matrices.reshape(*matrices.shape[:-3], *self.shape)


@dataclass(frozen=True, eq=False)
class Eigenbasis:
    """A block-diagonal matrix on flattened and joined parameters, in the bases of its blocks."""

    blocks: Mapping[str, BlockBasis]

    @classmethod
    def of(cls, blocks: Mapping[str, Block]) -> Eigenbasis | None:
        """The bases of all blocks; None where one has none."""
        if not all(_is_decomposable(block) for block in blocks.values()):
            return None
        return cls({name: block_basis(block) for name, block in blocks.items()})

    @classmethod
    def of_dense(cls, matrix: Tensor) -> Eigenbasis:
        """The basis of one matrix."""
        symmetric = DenseFactor((matrix + matrix.T) / 2)
        return cls({"": _plain_basis((len(matrix),), factor_basis(symmetric))})

    @cached_property
    def _sizes(self) -> list[int]:
        return [basis.numel for basis in self.blocks.values()]

    def ends(self) -> tuple[float, float]:
        """The smallest and the largest eigenvalue."""
        pairs = [basis.ends() for basis in self.blocks.values()]
        return min(low for low, _ in pairs), max(high for _, high in pairs)

    def sum(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Σ f(λ) over all eigenvalues."""
        return torch.stack([basis.sum(function) for basis in self.blocks.values()]).sum()

    def apply(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """f(C) x for each row x of the flattened and joined parameters, (r, n)."""
        images = []
        for basis, part in zip(self.blocks.values(), rows.split(self._sizes, dim=1), strict=True):
            image = basis.apply(function, part.reshape(len(rows), *basis.shape))
            images.append(image.reshape(len(rows), -1))
        return torch.cat(images, 1)

    def extreme(self, count: int, which: Which) -> tuple[Tensor, Tensor]:
        """The `count` eigenvalues at one end, with their vectors as rows, in the order of `which`."""
        found = [
            (value, block, make)
            for block, basis in enumerate(self.blocks.values())
            for value, make in basis.extreme(count)
        ]
        found.sort(key=lambda entry: rank_of_which(entry[0], which))
        example = next(iter(self.blocks.values())).parts[0][0].values
        vectors = example.new_zeros(min(count, len(found)), sum(self._sizes))
        for row, (_, block, make) in zip(vectors, found, strict=False):
            first = sum(self._sizes[:block])
            row[first : first + self._sizes[block]] = make().flatten()
        return example.new_tensor([value for value, _, _ in found[:count]]), vectors


def rank_of_which(value: float, which: Which) -> float:
    """A number by which eigenvalues are sorted, the wanted ones first.

    >>> sorted([1.0, -3.0, 2.0], key=lambda value: rank_of_which(value, "magnitude"))
    [-3.0, 2.0, 1.0]
    """
    return {"largest": -value, "smallest": value, "magnitude": -abs(value)}[which]
