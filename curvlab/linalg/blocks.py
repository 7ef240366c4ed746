"""Blocks: the curvature of one parameter, acting on tensors of the parameter's own shape.

factor block      b ↦ B b                       a bias
Kronecker block   X ↦ B X A,  dense form B ⊗ A  a weight, rows flattened as torch does
operator block    X ↦ f(X)                      matrix-free: exact Hessian, exact Gauss-Newton
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.linalg.factors import Factor, frobenius_norm

__all__ = ["Block", "FactorBlock", "KroneckerBlock", "OperatorBlock", "check_dense_bytes", "dense_from"]

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
class Block(ABC):
    """A symmetric linear map on tensors of one parameter's shape."""

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
        if tuple(x.shape) != self.shape:
            raise ValueError(
                f"this block acts on tensors of shape {self.shape}, the parameter's own; got {tuple(x.shape)}"
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
        return torch.linalg.eigvalsh(self.to_dense(max_bytes))


@dataclass(frozen=True, eq=False, repr=False)
class FactorBlock(Block):
    """A bias block: the factor B itself."""

    kind: ClassVar[str] = "factor"
    factor: Factor

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.factor.size,)

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
        return self.factor.matmul(x[:, None])[:, 0]

    def trace(self) -> Tensor:
        return self.factor.trace()

    def diagonal(self) -> Tensor:
        return self.factor.diagonal()

    def frobenius_norm(self) -> Tensor:
        return self.factor.frobenius_norm()

    def _dense(self) -> Tensor:
        return self.factor.to_dense()

    def eigvalsh(self, max_bytes: int = DENSE_BYTES) -> Tensor:
        return self.factor.eigvalsh()


@dataclass(frozen=True, eq=False, repr=False)
class KroneckerBlock(Block):
    """A weight block B ⊗ A: X ↦ B X A, with B the output factor and A the input factor.

    >>> from curvlab.linalg import DenseFactor
    >>> block = KroneckerBlock(DenseFactor(2 * torch.eye(1)), DenseFactor(3 * torch.eye(2)))
    >>> (block @ torch.ones(1, 2)).tolist()
    [[6.0, 6.0]]
    """

    kind: ClassVar[str] = "kronecker"
    output: Factor
    input: Factor

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.output.size, self.input.size)

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
        return self.input.matmul(self.output.matmul(x).T).T

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
        if self.diagonal_of is not None:
            return self.diagonal_of()
        return self.to_dense().diagonal().reshape(self.shape)

    def trace(self) -> Tensor:
        return self.trace_of() if self.trace_of is not None else self.diagonal().sum()

    def frobenius_norm(self) -> Tensor:
        if self.square_norm_of is not None:
            return self.square_norm_of().clamp(min=0).sqrt()
        return frobenius_norm(self.to_dense())
