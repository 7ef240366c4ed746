"""Blocks: the curvature of one parameter, acting on tensors of the parameter's own shape.

factor block      b ↦ B b                       a bias
Kronecker block   X ↦ B X A,  dense form B ⊗ A  a weight, rows flattened as torch does
viewed block      X_g ↦ B_g X_g A_g for all g   a weight seen as one or several matrices (see `views`)
sum block         X ↦ Σ_k C_k X                 a matrix used in several ways
shifted block     X ↦ C X + λ X                 any of them and a multiple of the identity
scaled block      X ↦ c C X                     a multiple of one that has no factors to scale
operator block    X ↦ f(X)                      matrix-free: exact Hessian, exact Gauss-Newton
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.linalg.execution import FullPrecision, eigvalsh
from curvlab.linalg.factors import Factor, InputFactors, frobenius_norm, inner_product
from curvlab.linalg.stacks import are_stackable, stack_factors
from curvlab.linalg.views import MatrixView

__all__ = [
    "Block",
    "FactorBlock",
    "KroneckerBlock",
    "OperatorBlock",
    "ScaledBlock",
    "ShiftedBlock",
    "SumBlock",
    "ViewedBlock",
    "check_dense_bytes",
    "dense_from",
]

DENSE_BYTES = 2 * 1024**3


def check_dense_bytes(n: int, element_size: int, max_bytes: int, what: str) -> None:
    """Refuse to form an n × n matrix larger than `max_bytes`."""
    needed = n * n * element_size
    if needed > max_bytes:
        raise MemoryError(
            f"{what}: the dense matrix has {n} × {n} entries and would take {needed:,} bytes "
            f"(limit {max_bytes:,}); use `@`, diagonal(), trace() or frobenius_norm(), "
            f"or pass a larger max_bytes"
        )


def dense_from(product: Callable[[Tensor], Tensor], n: int, like: Tensor) -> Tensor:
    """The n × n matrix of a linear map, column by column, in the dtype and on the device of `like`.

    >>> dense_from(lambda x: 2 * x, 2, torch.empty(0)).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    matrix = torch.empty(n, n, dtype=like.dtype, device=like.device)
    for index in range(n):
        unit = torch.zeros(n, dtype=like.dtype, device=like.device)
        unit[index] = 1
        matrix[:, index] = product(unit)
    return matrix


@dataclass(frozen=True, eq=False)
class Block(FullPrecision, ABC):
    """A symmetric linear map on tensors of one parameter's shape; what it returns is the caller's own."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""

    @property
    @abstractmethod
    def example(self) -> Tensor:
        """A tensor that knows the block's dtype and device."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""

    @property
    def form(self) -> str:
        """What the block is held as, in words."""
        return "matrix-free"

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """The block times a tensor of the parameter's shape."""

    @abstractmethod
    def trace(self) -> Tensor:
        """Sum of the diagonal."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal, in the parameter's shape."""

    @abstractmethod
    def frobenius_norm(self) -> Tensor:
        """Root of the sum of squares of all entries."""

    def __matmul__(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"this block acts on tensors of shape {self.shape}; got a {type(x).__name__}")
        if tuple(x.shape) != self.shape or x.dtype != self.example.dtype:
            raise ValueError(
                f"this block acts on tensors of shape {self.shape}, the parameter's own, and "
                f"{self.example.dtype}; got {tuple(x.shape)} and {x.dtype}"
            )
        return self.matmul(x)

    def __repr__(self) -> str:
        dtype = str(self.example.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({self.form}, shape={self.shape}, {dtype}, {self.nbytes:,} bytes)"

    @property
    def numel(self) -> int:
        """Number of parameters the block covers."""
        return int(torch.Size(self.shape).numel())

    def to_dense(self, max_bytes: int = DENSE_BYTES) -> Tensor:
        """The matrix acting on `parameter.flatten()`."""
        check_dense_bytes(self.numel, self.example.element_size(), max_bytes, f"{self.kind} block")
        return self._dense()

    def _dense(self) -> Tensor:
        return dense_from(lambda x: self.matmul(x.reshape(self.shape)).flatten(), self.numel, self.example)

    def eigvalsh(self, max_bytes: int = DENSE_BYTES) -> Tensor:
        """All eigenvalues, ascending."""
        return eigvalsh(self.to_dense(max_bytes))


@dataclass(frozen=True, eq=False, repr=False)
class FactorBlock(Block):
    """The factor B itself: a bias block, or that of a parameter of any shape, flattened.

    >>> from curvlab.linalg import DiagonalFactor
    >>> block = FactorBlock(DiagonalFactor(torch.tensor([1.0, 2.0])), (1, 2))
    >>> (block @ torch.ones(1, 2)).tolist()
    [[1.0, 2.0]]
    """

    kind: ClassVar[str] = "factor"
    factor: Factor
    parameter_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.factor.size,) if self.parameter_shape is None else self.parameter_shape

    @property
    def example(self) -> Tensor:
        return self.factor.example

    @property
    def form(self) -> str:
        return self.factor.kind

    @property
    def nbytes(self) -> int:
        return self.factor.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return self.factor.matmul(x.reshape(-1, 1)).reshape(self.shape)

    # Copies, since a factor hands out what it holds: what a block returns is the caller's own.

    def trace(self) -> Tensor:
        return self.factor.trace().clone()

    def diagonal(self) -> Tensor:
        return self.factor.diagonal().reshape(self.shape).clone()

    def frobenius_norm(self) -> Tensor:
        return self.factor.frobenius_norm()

    def _dense(self) -> Tensor:
        return self.factor.to_dense().clone()

    def eigvalsh(self, max_bytes: int = DENSE_BYTES) -> Tensor:
        return self.factor.eigvalsh().clone()


@dataclass(frozen=True, eq=False, repr=False)
class KroneckerBlock(Block):
    """A weight block B ⊗ A: X ↦ B X A, with B the output factor and A the input factor.

    `source` is A, or the input factors that form it when it is first asked for.

    >>> from curvlab.linalg import DenseFactor
    >>> block = KroneckerBlock(DenseFactor(2 * torch.eye(1)), DenseFactor(3 * torch.eye(2)))
    >>> (block @ torch.ones(1, 2)).tolist()
    [[6.0, 6.0]]
    """

    kind: ClassVar[str] = "kronecker"
    output: Factor
    source: Factor | InputFactors

    @property
    def input(self) -> Factor:
        """A, formed now where it was not yet."""
        return self.source if isinstance(self.source, Factor) else self.source.full

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.output.size, self.source.size)

    @property
    def example(self) -> Tensor:
        return self.output.example

    @property
    def form(self) -> str:
        return f"{self.output.kind} ⊗ {self.input.kind}"

    @property
    def nbytes(self) -> int:
        return self.output.nbytes + self.input.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return self.input.matmul(self.output.matmul(x).mT).mT

    def trace(self) -> Tensor:
        return self.output.trace() * self.input.trace()

    def diagonal(self) -> Tensor:
        return torch.outer(self.output.diagonal(), self.input.diagonal())

    def frobenius_norm(self) -> Tensor:
        return self.output.frobenius_norm() * self.input.frobenius_norm()

    def _dense(self) -> Tensor:
        return torch.kron(self.output.to_dense().contiguous(), self.input.to_dense().contiguous())

    def eigvalsh(self, max_bytes: int = DENSE_BYTES) -> Tensor:
        return torch.outer(self.output.eigvalsh(), self.input.eigvalsh()).flatten().sort().values


@dataclass(frozen=True, eq=False, repr=False)
class ViewedBlock(Block):
    """A weight block that is one Kronecker product for each matrix of the weight's view.

    >>> from curvlab.linalg import DenseFactor
    >>> product = KroneckerBlock(DenseFactor(2 * torch.eye(1)), DenseFactor(3 * torch.eye(4)))
    >>> block = ViewedBlock(MatrixView((1, 1, 2, 2)), (product,))
    >>> (block @ torch.ones(1, 1, 2, 2)).flatten().tolist()
    [6.0, 6.0, 6.0, 6.0]
    """

    kind: ClassVar[str] = "viewed"
    view: MatrixView
    products: tuple[KroneckerBlock, ...]

    @cached_property
    def stackable(self) -> bool:
        """Whether there are several products of small factors: `stack` then has all of them."""
        return are_stackable([product.output for product in self.products]) and are_stackable(
            [product.source for product in self.products]
        )

    @cached_property
    def stack(self) -> KroneckerBlock:
        """All products as one on stacks of matrices, B (G, o, o) and A (G, n, n)."""
        outputs = stack_factors([product.output for product in self.products])
        return KroneckerBlock(outputs, stack_factors([product.input for product in self.products]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def example(self) -> Tensor:
        return self.products[0].example

    @property
    def form(self) -> str:
        forms = dict.fromkeys(product.form for product in self.products)
        several = f"{len(self.products)} × " if len(self.products) > 1 else ""
        return several + ", ".join(forms)

    @property
    def nbytes(self) -> int:
        return sum(product.nbytes for product in self.products)

    def matmul(self, x: Tensor) -> Tensor:
        matrices = self.view.matrices(x)
        if self.stackable:
            return self.view.parameter(self.stack.matmul(matrices))
        images = [product.matmul(matrix) for product, matrix in zip(self.products, matrices, strict=True)]
        return self.view.parameter(torch.stack(images))

    def trace(self) -> Tensor:
        if self.stackable:
            return self.stack.trace().sum()
        return torch.stack([product.trace() for product in self.products]).sum()

    def diagonal(self) -> Tensor:
        return self.view.parameter(torch.stack([product.diagonal() for product in self.products]))

    def frobenius_norm(self) -> Tensor:
        return torch.linalg.vector_norm(torch.stack([p.frobenius_norm() for p in self.products]))

    def _dense(self) -> Tensor:
        dense = torch.block_diag(*[product._dense() for product in self.products])
        # Where each entry of the parameter lies among those of the matrices.
        places = torch.arange(self.numel, device=dense.device).reshape(self.view.matrix_shape)
        order = self.view.parameter(places).flatten()
        return dense[order][:, order]

    def eigvalsh(self, max_bytes: int = DENSE_BYTES) -> Tensor:
        return torch.cat([product.eigvalsh() for product in self.products]).sort().values

    def sides(self) -> tuple[Factor, Factor] | None:
        """L and R with X ↦ L X R for a parameter that is a matrix itself; None for any other."""
        if len(self.products) > 1 or len(self.shape) != 2 or self.view.layout == "transposed-convolution":
            return None
        (product,) = self.products
        sides = (product.output, product.input)
        return sides if self.view.layout == "rows" else (sides[1], sides[0])


def _sides(block: Block) -> tuple[Factor, Factor] | None:
    """L and R with X ↦ L X R, where the block is such a product."""
    if isinstance(block, KroneckerBlock):
        return block.output, block.input
    return block.sides() if isinstance(block, ViewedBlock) else None


@dataclass(frozen=True, eq=False, repr=False)
class SumBlock(Block):
    """A sum of blocks of one parameter: a matrix that is used as a lookup and as a head.

    >>> from curvlab.linalg import DenseFactor
    >>> block = SumBlock((FactorBlock(DenseFactor(torch.eye(2))), FactorBlock(DenseFactor(2 * torch.eye(2)))))
    >>> block.trace().item()
    6.0
    """

    kind: ClassVar[str] = "sum"
    blocks: tuple[Block, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blocks[0].shape

    @property
    def example(self) -> Tensor:
        return self.blocks[0].example

    @property
    def form(self) -> str:
        return " + ".join(block.form for block in self.blocks)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def matmul(self, x: Tensor) -> Tensor:
        total = self.blocks[0].matmul(x)
        for block in self.blocks[1:]:
            total = total + block.matmul(x)
        return total

    def trace(self) -> Tensor:
        return torch.stack([block.trace() for block in self.blocks]).sum()

    def diagonal(self) -> Tensor:
        return torch.stack([block.diagonal() for block in self.blocks]).sum(0)

    def frobenius_norm(self) -> Tensor:
        """By ⟨L₁ ⊗ R₁, L₂ ⊗ R₂⟩ = tr(L₁L₂) tr(R₁R₂) where all are such products; else from the dense form."""
        found = [_sides(block) for block in self.blocks]
        sides = [pair for pair in found if pair is not None]
        if len(sides) < len(found):
            return frobenius_norm(self.to_dense())
        squares = [inner_product(a[0], b[0]) * inner_product(a[1], b[1]) for a in sides for b in sides]
        return torch.stack(squares).sum().clamp(min=0).sqrt()

    def _dense(self) -> Tensor:
        return torch.stack([block._dense() for block in self.blocks]).sum(0)


@dataclass(frozen=True, eq=False, repr=False)
class BlockOfBlock(Block):
    """A function of one other block, which has its shape and its storage."""

    block: Block

    @property
    def shape(self) -> tuple[int, ...]:
        return self.block.shape

    @property
    def example(self) -> Tensor:
        return self.block.example

    @property
    def nbytes(self) -> int:
        return self.block.nbytes


@dataclass(frozen=True, eq=False, repr=False)
class ShiftedBlock(BlockOfBlock):
    """C + λI.

    >>> from curvlab.linalg import DenseFactor
    >>> ShiftedBlock(FactorBlock(DenseFactor(torch.eye(2))), 0.5).diagonal().tolist()
    [1.5, 1.5]
    """

    kind: ClassVar[str] = "shifted"
    shift: float

    @property
    def form(self) -> str:
        return f"{self.block.form} + {self.shift:g} I"

    def matmul(self, x: Tensor) -> Tensor:
        return self.block.matmul(x) + self.shift * x

    def trace(self) -> Tensor:
        return self.block.trace() + self.shift * self.numel

    def diagonal(self) -> Tensor:
        return self.block.diagonal() + self.shift

    def frobenius_norm(self) -> Tensor:
        """‖C + λI‖² = ‖C‖² + 2λ tr C + λ² n."""
        square = self.block.frobenius_norm().square()
        cross = 2 * self.shift * self.block.trace()
        return (square + cross + self.shift**2 * self.numel).clamp(min=0).sqrt()

    def _dense(self) -> Tensor:
        dense = self.block._dense()
        dense.diagonal().add_(self.shift)
        return dense

    def eigvalsh(self, max_bytes: int = DENSE_BYTES) -> Tensor:
        return self.block.eigvalsh(max_bytes) + self.shift


@dataclass(frozen=True, eq=False, repr=False)
class ScaledBlock(BlockOfBlock):
    """c C.

    >>> from curvlab.linalg import DenseFactor
    >>> ScaledBlock(FactorBlock(DenseFactor(torch.eye(2))), -3.0).frobenius_norm().square().round().item()
    18.0
    """

    kind: ClassVar[str] = "scaled"
    factor: float

    @property
    def form(self) -> str:
        return f"{self.factor:g} × {self.block.form}"

    def matmul(self, x: Tensor) -> Tensor:
        return self.factor * self.block.matmul(x)

    def trace(self) -> Tensor:
        return self.factor * self.block.trace()

    def diagonal(self) -> Tensor:
        return self.factor * self.block.diagonal()

    def frobenius_norm(self) -> Tensor:
        return abs(self.factor) * self.block.frobenius_norm()

    def _dense(self) -> Tensor:
        return self.factor * self.block._dense()


@dataclass(frozen=True, eq=False, repr=False)
class OperatorBlock(Block):
    """A matrix-free block: a product, with closed forms for what has one.

    `product` maps tensors of the parameter's shape to the same; `diagonal_of`, `trace_of` and
    `square_norm_of` are computed when asked for, and from the dense form where there are none.
    """

    kind: ClassVar[str] = "operator"
    parameter_shape: tuple[int, ...]
    product: Callable[[Tensor], Tensor] = field(repr=False)
    like: Tensor = field(repr=False)
    held_bytes: int = 0
    diagonal_of: Callable[[], Tensor] | None = field(default=None, repr=False)
    trace_of: Callable[[], Tensor] | None = field(default=None, repr=False)
    square_norm_of: Callable[[], Tensor] | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter_shape

    @property
    def example(self) -> Tensor:
        return self.like

    @property
    def nbytes(self) -> int:
        return self.held_bytes

    def matmul(self, x: Tensor) -> Tensor:
        return self.product(x)

    def diagonal(self) -> Tensor:
        """From one product for each entry, where there is no closed form; no matrix is formed."""
        if self.diagonal_of is not None:
            return self.diagonal_of()
        values = torch.empty(self.numel, dtype=self.like.dtype, device=self.like.device)
        for index in range(self.numel):
            unit = torch.zeros_like(values)
            unit[index] = 1
            values[index] = self.product(unit.reshape(self.shape)).flatten()[index]
        return values.reshape(self.shape)

    def trace(self) -> Tensor:
        return self.trace_of() if self.trace_of is not None else self.diagonal().sum()

    def frobenius_norm(self) -> Tensor:
        if self.square_norm_of is not None:
            return self.square_norm_of().clamp(min=0).sqrt()
        return frobenius_norm(self.to_dense())
