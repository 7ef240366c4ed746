"""Matrices that may be held in factors: the steps added to parameters, and the gradients they come from.

    TensorStep     X                            as it is
    RowProduct     X = M H', H' = diag(√c) H    rows in the row space of a Gram factor
    Combination    X = c G + U Z                a multiple of a given matrix and a product of thin ones
    ViewStep       X_g for every matrix of a parameter's view, each a step of its own
    RowGradient    G = Sᵀ diag(c) H             the gradient E[∇ξ] of a weight, by its rows

Of a row product the coefficients M (n × m) are all that is computed with; the wide dimension of H appears in
the m × m Gram matrix K = H'H'ᵀ, which is the metric: ⟨M₁H', M₂H'⟩ = tr(M₁ K M₂ᵀ), and in the one product
that adds X to a parameter. A combination refers to G, which is not copied, and is added in place too. Of a
gradient H are the layer's inputs and S the gradients at its output (one row of each per row of the batch,
with weights c that sum to one). `LazyTensors` is the mapping that gradients and the solvers' directions
share: an entry is formed only when it is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from curvlab.linalg.execution import FullPrecision, in_float64, readable, without_gradients
from curvlab.linalg.factors import COLUMN_CHUNK, GramFactor, frobenius_norm, max_abs
from curvlab.linalg.views import MatrixView

__all__ = [
    "Combination",
    "Gradient",
    "LazyTensors",
    "Matrix",
    "RowFactor",
    "RowGradient",
    "RowProduct",
    "Step",
    "TensorStep",
    "ViewStep",
    "add_decay",
    "add_step",
    "as_step",
    "view_entry",
]


class Step(FullPrecision, ABC):
    """A tensor to be added to a parameter, formed only on demand."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of X."""

    @property
    @abstractmethod
    def borrowed(self) -> Tensor | None:
        """The tensor that the step refers to and has not copied; None where it holds all of its own."""

    @abstractmethod
    def form(self) -> Tensor:
        """X itself."""

    @abstractmethod
    def add_into(self, target: Tensor, scale: float) -> None:
        """target ← target + scale · X, in place; what is not formed is added without being formed."""

    @abstractmethod
    def magnitude(self) -> Tensor:
        """An upper bound of max|X|, with no matrix formed."""

    @abstractmethod
    def checksum(self) -> Tensor:
        """A scalar tensor that is finite only where what was computed of X is.

        The rows of a product, and the matrix and the basis of a combination, were there before.
        """

    def computed(self) -> tuple[Tensor, ...]:
        """Tensors that are finite only where what was computed of X is."""
        return (self.checksum(),)

    def parts(self) -> tuple[Tensor, ...]:
        """Tensors whose norms bound max|X|, and are finite only where what was computed of X is."""
        return (self.magnitude() + 0 * self.checksum(),)

    def bound(self, norms: Sequence[float]) -> float:
        """An upper bound of max|X| from the norms of `parts`."""
        return norms[0]


Matrix = Tensor | Step


def as_step(value: Matrix) -> Step:
    """A step as it is, a tensor as a step.

    >>> as_step(torch.tensor([[1.0, -3.0]])).magnitude().item()
    3.0
    """
    return TensorStep(value) if isinstance(value, Tensor) else value


@without_gradients
def add_step(step: Step, target: Tensor, scale: float) -> None:
    """target ← target + scale · X, in place and in the target's own dtype.

    A target of lower precision than the step has no product of its own dtype: X is formed, and the sum is
    rounded once.

    >>> parameter = torch.ones(2, dtype=torch.bfloat16)
    >>> add_step(TensorStep(torch.ones(2)), parameter, 0.5)
    >>> parameter
    tensor([1.5000, 1.5000], dtype=torch.bfloat16)
    """
    if target.dtype in (torch.bfloat16, torch.float16):
        target.add_(step.form(), alpha=scale)
    else:
        step.add_into(target, scale)


@dataclass(frozen=True, eq=False)
class TensorStep(Step):
    """A tensor as it is.

    >>> parameter = torch.ones(2)
    >>> TensorStep(torch.ones(2)).add_into(parameter, 0.5)
    >>> parameter.tolist()
    [1.5, 1.5]
    """

    tensor: Tensor

    def computed(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def parts(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def borrowed(self) -> Tensor | None:
        return None

    def form(self) -> Tensor:
        return self.tensor

    @without_gradients
    def add_into(self, target: Tensor, scale: float) -> None:
        target.add_(self.tensor, alpha=scale)

    def magnitude(self) -> Tensor:
        return max_abs(self.tensor)

    def checksum(self) -> Tensor:
        return self.tensor.sum()


@dataclass(frozen=True, eq=False)
class RowProduct(Step):
    """X = M diag(√c) H, formed only on demand.

    >>> x = RowProduct(torch.ones(2, 1), GramFactor(torch.ones(1, 3), torch.ones(1)))
    >>> x.shape, x.form().sum().item()
    ((2, 3), 6.0)
    """

    coefficients: Tensor
    gram: GramFactor

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.coefficients.shape[0], self.gram.size)

    @property
    def borrowed(self) -> Tensor | None:
        return self.gram.rows

    @property
    def left(self) -> Tensor:
        """M diag(√c), so that X = left @ H."""
        return self.coefficients * self.gram.root

    def form(self) -> Tensor:
        return self.left @ self.gram.rows

    @without_gradients
    def add_into(self, target: Tensor, scale: float) -> None:
        target.addmm_(self.left, self.gram.rows, alpha=scale)

    def magnitude(self) -> Tensor:
        """‖M‖ √tr K."""
        return frobenius_norm(self.coefficients) * self.gram.trace().clamp(min=0).sqrt()

    def parts(self) -> tuple[Tensor, ...]:
        return self.coefficients, self.gram.root, self.gram.rows

    def computed(self) -> tuple[Tensor, ...]:
        return (self.coefficients,)

    def bound(self, norms: Sequence[float]) -> float:
        """‖M‖ ‖√c‖ ‖H‖."""
        return norms[0] * norms[1] * norms[2]

    def checksum(self) -> Tensor:
        return self.coefficients.sum()

    def square_norm(self) -> Tensor:
        """‖X‖², a chunk of columns at a time.

        tr(M K Mᵀ) would be cheaper, but loses half of the digits where M is large in the null space
        of K: it sees the difference of what cancels, not what is left.
        """
        left = self.left
        chunks = self.gram.rows.split(COLUMN_CHUNK, dim=1)
        return torch.stack([(left @ chunk).square().sum() for chunk in chunks]).sum()

    def dot(self, other: RowProduct) -> Tensor:
        """⟨X, Y⟩ for two matrices over the same rows."""
        return (self.coefficients * (other.coefficients @ self.gram.gram)).sum()


@dataclass(frozen=True, eq=False)
class Combination(Step):
    """X = c G + U Z, with c a scalar tensor, U of few columns and Z of as many rows; formed on demand.

    >>> x = Combination(torch.tensor(2.0), torch.ones(2, 3), torch.ones(2, 1), torch.ones(1, 3))
    >>> x.shape, x.form().sum().item()
    ((2, 3), 18.0)
    """

    scale: Tensor
    matrix: Tensor
    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    @property
    def borrowed(self) -> Tensor | None:
        return self.matrix

    def form(self) -> Tensor:
        return (self.scale * self.matrix).addmm_(self.left, self.right)

    @without_gradients
    def add_into(self, target: Tensor, scale: float) -> None:
        target.addcmul_(self.scale, self.matrix, value=scale)
        target.addmm_(self.left, self.right, alpha=scale)

    def magnitude(self) -> Tensor:
        """|c| max|G| + ‖U‖ ‖Z‖."""
        thin = frobenius_norm(self.left) * frobenius_norm(self.right)
        return self.scale.abs() * max_abs(self.matrix) + thin

    def parts(self) -> tuple[Tensor, ...]:
        return self.scale, self.left, self.matrix, self.right

    def computed(self) -> tuple[Tensor, ...]:
        return self.scale, self.left

    def bound(self, norms: Sequence[float]) -> float:
        """|c| ‖G‖ + ‖U‖ ‖Z‖."""
        return norms[0] * norms[2] + norms[1] * norms[3]

    def checksum(self) -> Tensor:
        return self.scale + self.left.sum()


@dataclass(frozen=True, eq=False)
class ViewStep(Step):
    """The steps of the matrices that a parameter is seen as; each is added in place where strides allow it.

    >>> kernel = torch.zeros(1, 1, 2, 2)
    >>> ViewStep(MatrixView((1, 1, 2, 2)), (TensorStep(torch.ones(1, 4)),)).add_into(kernel, 0.5)
    >>> kernel.flatten().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """

    view: MatrixView
    steps: tuple[Step, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def borrowed(self) -> Tensor | None:
        """That of the first part: all parts see the same gradient."""
        return next((part.borrowed for part in self.steps if part.borrowed is not None), None)

    def form(self) -> Tensor:
        return self.view.parameter(torch.stack([part.form() for part in self.steps]))

    @without_gradients
    def add_into(self, target: Tensor, scale: float) -> None:
        matrices = self.view.matrices_in_place(target)
        if matrices is None:
            target.add_(self.form(), alpha=scale)
            return
        for part, matrix in zip(self.steps, matrices, strict=True):
            part.add_into(matrix, scale)

    def magnitude(self) -> Tensor:
        return torch.stack([part.magnitude() for part in self.steps]).amax()

    def parts(self) -> tuple[Tensor, ...]:
        return tuple(tensor for step in self.steps for tensor in step.parts())

    def computed(self) -> tuple[Tensor, ...]:
        return tuple(tensor for step in self.steps for tensor in step.computed())

    def bound(self, norms: Sequence[float]) -> float:
        """The largest of the steps' own."""
        bounds, place = [], 0
        for step in self.steps:
            count = len(step.parts())
            bounds.append(step.bound(norms[place : place + count]))
            place += count
        return nan if any(isnan(bound) for bound in bounds) else max(bounds)

    def checksum(self) -> Tensor:
        return torch.stack([part.checksum() for part in self.steps]).sum()


class Shaped(Protocol):
    """A tensor, or what forms one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""


E = TypeVar("E", bound=Shaped)


class LazyTensors(FullPrecision, Mapping[str, Tensor], Generic[E]):
    """{parameter name: tensor}; an entry is formed or copied each time it is read: keep one you need twice.

    What is read is the caller's own: to change it changes nothing here.
    """

    def __init__(self, entries: Mapping[str, E]) -> None:
        self._entries = dict(entries)

    def factored(self, name: str) -> E:
        """The entry as it is held: a tensor, or what forms one."""
        return self._entries[name]

    @staticmethod
    @abstractmethod
    def _form(entry: E) -> Tensor:
        """The entry as a tensor."""

    def __getitem__(self, name: str) -> Tensor:
        held = self.factored(name)
        return held.clone() if isinstance(held, Tensor) else self._form(held)

    def view(self, name: str) -> Tensor:
        """The entry as a tensor, for who changes nothing: it may be the one that is held."""
        return self._form(self.factored(name))

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # a Mapping's own would form the entry to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(entry.shape)}" for name, entry in self._entries.items())
        return f"{type(self).__name__}({shapes})"


def view_entry(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """An entry of any mapping, not copied, for who changes nothing."""
    return tensors.view(name) if isinstance(tensors, LazyTensors) else tensors[name]


# Sums that are this many roundings small are computed again: three digits are right above it.
CANCELLED = 1e4
RowFactor = Literal["gradients", "inputs"]


@dataclass(frozen=True, eq=False)
class RowGradient(FullPrecision):
    """G = Sᵀ diag(c) H for one weight, with S the output gradients' rows and H the inputs'."""

    gradients: GramFactor
    inputs: GramFactor

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's shape."""
        return (self.gradients.size, self.inputs.size)

    def form(self) -> Tensor:
        """G itself."""
        return (self.gradients.rows * self.gradients.root.square()[:, None]).T @ self.inputs.rows

    def map(self, function: Callable[[Tensor], Tensor]) -> RowGradient:
        """The same gradient with `function`, a conversion or a copy, applied to each of its tensors."""
        return RowGradient(self.gradients.map(function), self.inputs.map(function))

    def square_norm(self) -> Tensor:
        """‖G‖² = Σ (S Sᵀ ⊙ H Hᵀ), weighted, with no G.

        Near a stationary point the terms of the sum cancel, but their rounding does not: where too little is
        left of (Σ ‖s_i‖ ‖h_i‖)² to be trusted, G is formed in float64, a chunk of columns at a time.
        """
        (total,) = square_norms([self])
        return total

    def gram_square_norm(self) -> tuple[Tensor, Tensor]:
        """That sum, and whether too little is left of it (nothing is read)."""
        left, right = self.gradients.gram, self.inputs.gram
        total = (left * right).sum()
        bound = (left.diagonal() * right.diagonal()).clamp(min=0).sqrt().sum().square()
        return total.clamp(min=0), total < CANCELLED * torch.finfo(total.dtype).eps * bound

    def formed_square_norm(self) -> Tensor:
        weighted = in_float64((self.gradients.rows * self.gradients.root.square()[:, None]).T)
        chunks = self.inputs.rows.split(COLUMN_CHUNK, dim=1)
        total = torch.stack([(weighted @ in_float64(chunk)).square().sum() for chunk in chunks]).sum()
        return total.to(self.inputs.rows)


def square_norms(gradients: Sequence[RowGradient]) -> list[Tensor]:
    """‖G‖² of each: one read tells of all which have to be formed."""
    found = [gradient.gram_square_norm() for gradient in gradients]
    totals = [total for total, _ in found]
    if not found or not readable(totals[0]):
        return totals
    cancelled = torch.stack([flag for _, flag in found]).tolist()
    pairs = zip(gradients, totals, cancelled, strict=True)
    return [gradient.formed_square_norm() if formed else total for gradient, total, formed in pairs]


class Gradient(LazyTensors[Tensor | RowGradient]):
    """{parameter name: E[gradient]}; a weight's entry is formed each time it is read.

    Keep a tensor you need twice; `factored(name)` gives the entry as it is held, not to be changed.
    """

    @staticmethod
    def _form(entry: Tensor | RowGradient) -> Tensor:
        return entry.form() if isinstance(entry, RowGradient) else entry

    def to(self, *args: torch.device | torch.dtype | str, **kwargs: object) -> Gradient:
        """The same gradient on another device or in another dtype, entries in factors kept so."""

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(*args, **kwargs)  # type: ignore[call-overload]

        held = self._entries.items()
        return Gradient({n: e.map(convert) if isinstance(e, RowGradient) else convert(e) for n, e in held})

    def norm(self) -> Tensor:
        """‖E[∇ξ]‖ over all parameters, with no weight gradient formed."""
        entries = self._entries.values()
        in_factors = iter(square_norms([e for e in entries if isinstance(e, RowGradient)]))
        squares = [next(in_factors) if isinstance(e, RowGradient) else e.square().sum() for e in entries]
        return torch.stack(squares).sum().sqrt()


def add_decay(gradient: Gradient, parameters: Mapping[str, Tensor], decay: float) -> Gradient:
    """g + λθ, formed.

    >>> add_decay(Gradient({"w": torch.ones(2)}), {"w": torch.full((2,), 4.0)}, 0.5)["w"]
    tensor([3., 3.])
    """
    return Gradient({name: gradient.view(name) + decay * parameters[name].detach() for name in gradient})
