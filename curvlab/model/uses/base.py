"""How a weight is used: the rows of its input, the rows of its output gradient, and its matrix.

For example i and position p (a pixel, a token, one of several calls) a weight sees h_ip and gives

    z_ip = W h_ip (+ b),      ∇_W ξ_i = Σ_p g_ip h_ipᵀ,      ∇_b ξ_i = Σ_p g_ip,      g_ip = ∂ξ_i/∂z_ip

One class per function that has a weight says what h_ip, g_ip and W are for it. A weight may fall into parts
with an output side of their own (the groups of a convolution, the three projections of an attention layer):
rows are (examples, positions, parts, features), and the matrix of a parameter is (parts, outputs, inputs).

The first dimension of what a function is given holds the examples. It may be a multiple of their number,
where a model folded further dimensions into it, (B, T, …) → (B·T, …): these count as positions.

Two kinds need no unfolding and stand here: weights that meet the last dimension of their input (linear and
bilinear maps), and parameters that are broadcast over the batch: scale and shift of normalisations, sums and
products.

The latter have no Kronecker structure, but the gradient of one example has a closed form. With Σ_p over every
dimension that the parameter θ is broadcast over, except the batch,

    z = x + θ:  ∂ξ_i/∂θ = Σ_p g_ip          z = x ⊙ θ:  ∂ξ_i/∂θ = Σ_p g_ip ⊙ x_ip

A normalisation, z = weight ⊙ x̂ + bias with x̂ the normalised input, is both: its weight has a `ScaleUse`
and its bias a `ShiftUse`, two uses of one call.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from curvlab.exceptions import ProblemError
from curvlab.linalg.execution import deferring
from curvlab.linalg.views import Layout
from curvlab.measure import device

__all__ = [
    "CHUNK_ENTRIES",
    "AddedUse",
    "BilinearUse",
    "BroadcastUse",
    "LinearUse",
    "MultipliedUse",
    "ScaleShiftUse",
    "ScaleUse",
    "ShiftUse",
    "Use",
    "WeightUse",
    "constant_value",
    "repeats_one",
    "scale_and_shift_uses",
]

# Unfolded inputs are read in pieces of at most this many entries (one example at least). Measured on one
# thread: 4 MiB of float32 are near the caches, and a piece is still long enough for the matrix product.
CHUNK_ENTRIES = 1 << 20


@dataclass(frozen=True, eq=False)
class Use(ABC):
    """One call of a function with a parameter: `inputs` are what the function was given, detached.

    `examples` is the number of examples of the batch.
    """

    kind: ClassVar[str]
    works_on_rows: ClassVar[bool] = False
    """Whether each row of the last dimension is used by itself, wherever the examples stand."""

    inputs: Tensor
    examples: int

    @abstractmethod
    def example_gradients(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        """∂ξ_i/∂θ of every example i, in the parameter's own `shape`: (…, examples, *shape).

        `gradient`, (…, *output), holds the gradients of Σ_i ξ_i at the function's output; leading dimensions
        (several draws of labels, say) are kept.
        """

    def narrow(self, first: int, last: int) -> Self:
        """The same use for the examples from `first` up to `last` only."""
        folds = self.folds
        return replace(self, inputs=self.inputs[first * folds : last * folds], examples=last - first)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape is shared by all examples of the batch."""
        return True

    @property
    def folds(self) -> int:
        """How many entries of the first dimension belong to one example: 1 unless the model folded."""
        return self.inputs.shape[0] // self.examples


@dataclass(frozen=True, eq=False)
class WeightUse(Use):
    """A use whose output is linear in the weight, row by row: z_ip = W h_ip.

    `unfolds` where the rows take more memory than the inputs: they are then read in pieces. `lookup` where
    the rows are one-hot, so that the input factor is diagonal.
    """

    unfolds: ClassVar[bool] = False
    lookup: ClassVar[bool] = False

    @property
    @abstractmethod
    def parts(self) -> int:
        """G: into how many parts with an output side of their own the weight falls."""

    @property
    def layout(self) -> Layout:
        """How the weight's own shape is seen as matrices, as `curvlab.linalg.MatrixView` names it."""
        return "rows"

    @property
    @abstractmethod
    def positions(self) -> int:
        """S: how many positions an example has."""

    @property
    @abstractmethod
    def positions_shape(self) -> tuple[int, ...] | None:
        """The dimensions between batch and features; None where the model folded them into the batch."""

    @property
    @abstractmethod
    def input_size(self) -> int:
        """n: entries of h_ip."""

    @abstractmethod
    def input_rows(self, first: int = 0, last: int | None = None) -> Tensor:
        """h_ip of the examples from `first` up to `last`: (examples, S, G, n)."""

    @abstractmethod
    def sampled_rows(self, index: Tensor) -> Tensor:
        """h_ip of some positions only: (examples, q, G, n) for positions `index`, (examples, q).

        Equal to `input_rows()` at these positions; the others are never formed.
        """

    @abstractmethod
    def output_rows(self, gradient: Tensor) -> Tensor:
        """g_ip from gradients at the function's output, (…, *output): (…, examples, S, G, o)."""

    @abstractmethod
    def matrix(self, parameter: Tensor) -> Tensor:
        """W of a tensor of the weight's own shape, (…, *shape): (…, G, o, n)."""

    @abstractmethod
    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tensor of the weight's own `shape`, (…, *shape), whose matrix is (…, G, o, n)."""

    def mean_input(self, weights: Tensor) -> Tensor:
        """Σ_ip w_ip h_ip, (G, n), for weights (examples, S) of the positions."""
        total = self.inputs.new_zeros(self.parts, self.input_size)
        for first, last in self.chunks():
            total += torch.einsum("bs,bsgn->gn", weights[first:last], self.input_rows(first, last))
        return total

    def example_mean_inputs(self, weights: Tensor) -> Tensor:
        """Σ_p w_ip h_ip of every example, (examples, G, n), for weights (examples, S)."""
        pieces = [
            torch.einsum("bs,bsgn->bgn", weights[first:last], self.input_rows(first, last))
            for first, last in self.chunks()
        ]
        return torch.cat(pieces)

    def input_second_moment(self, weights: Tensor) -> Tensor:
        """Σ_ip w_ip h_ip h_ipᵀ, (G, n, n), for weights (examples, S), in bounded memory."""
        total = self.inputs.new_zeros(self.parts, self.input_size, self.input_size)
        common = constant_value(weights)
        for first, last in self.ranges(self.positions * self.parts * self.input_size):
            rows = self.input_rows(first, last).flatten(0, 1)
            scaled = rows if common is not None else rows * weights[first:last].reshape(-1, 1, 1)
            total.baddbmm_(scaled.permute(1, 2, 0), rows.transpose(0, 1))
        return total if common is None else total.mul_(common)

    def gradient(self, rows: Tensor, shape: tuple[int, ...], weights: Tensor | None = None) -> Tensor:
        """Σ_i w_i Σ_p g_ip h_ipᵀ in the weight's own shape, for rows g (examples, S, G, o)."""
        scaled = rows if weights is None else rows * weights[:, None, None, None]
        total = rows.new_zeros(self.parts, rows.shape[-1], self.input_size)
        for first, last in self.chunks():
            total += torch.einsum("bsgo,bsgn->gon", scaled[first:last], self.input_rows(first, last))
        return self.from_matrix(total, shape)

    def image(self, parameter: Tensor) -> Tensor:
        """W h_ip of every row for a W in the weight's own shape: (examples, S, G, o)."""
        matrix = self.matrix(parameter)
        pieces = [
            torch.einsum("gon,bsgn->bsgo", matrix, self.input_rows(first, last).to(matrix))
            for first, last in self.chunks()
        ]
        return torch.cat(pieces)

    def example_gradients(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        """R_i = Σ_p g_ip h_ipᵀ of every example i, in the weight's own `shape`: (…, examples, *shape)."""
        rows = self.output_rows(gradient)
        pieces = []
        for first, last in self.chunks():
            left, right = rows[..., first:last, :, :, :], self.input_rows(first, last)
            pieces.append(torch.einsum("...bsgo,bsgn->...bgon", left, right))
        return self.from_matrix(torch.cat(pieces, -4), shape)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of examples whose rows fit into `CHUNK_ENTRIES`; one range where rows cost no memory."""
        entries = self.positions * self.parts * self.input_size
        return self.ranges(entries) if self.unfolds else iter([(0, self.examples)])

    def ranges(self, entries: int) -> Iterator[tuple[int, int]]:
        """Ranges of examples that need at most `CHUNK_ENTRIES` where one example needs `entries`."""
        step = max(1, CHUNK_ENTRIES // max(1, entries))
        return ((first, min(first + step, self.examples)) for first in range(0, self.examples, step))


def repeats_one(values: Tensor) -> bool:
    """Whether all `values` are one number in memory, known without a look at it.

    >>> repeats_one(torch.ones(1, 1).expand(2, 3)), repeats_one(torch.ones(2, 3))
    (True, False)
    """
    return values.numel() > 0 and not any(values.stride())


def constant_value(values: Tensor) -> Tensor | float | None:
    """The number that all `values` are, None where they differ, or may not be looked at.

    Without values they are taken for equal.

    >>> constant_value(torch.full((2, 3), 0.5)), constant_value(torch.arange(3.0))
    (0.5, None)
    """
    if not device.readable(values):
        return 1.0  # as those of a batch without class weights or masks are
    if repeats_one(values):
        return values[(0,) * values.ndim]
    if deferring():
        return None
    low, high = torch.stack(values.aminmax()).tolist()
    return float(low) if low == high else None


@dataclass(frozen=True, eq=False)
class LinearUse(WeightUse):
    """z = W h for the last dimension of the input, whatever dimensions lie before it.

    `transposed` where the weight is Wᵀ, as in `x @ weight`. `parts` where the outputs fall into parts of
    equal size that are to have an output factor each, as the packed in-projection of self-attention, whose
    `in_proj_weight` is (3·d, d): all parts see the same h.

    >>> import torch
    >>> use = LinearUse(torch.ones(5, 7, 3), examples=5)
    >>> use.input_rows().shape, use.output_rows(torch.ones(5, 7, 2)).shape
    (torch.Size([5, 7, 1, 3]), torch.Size([5, 7, 1, 2]))
    >>> use.example_gradients(torch.ones(5, 7, 2), shape=(2, 3))[0]
    tensor([[7., 7., 7.],
            [7., 7., 7.]])
    """

    kind: ClassVar[str] = "linear"
    works_on_rows: ClassVar[bool] = True
    transposed: bool = False
    parts: int = 1

    @property
    def layout(self) -> Layout:
        return "transposed" if self.transposed else "rows"

    @cached_property
    def positions(self) -> int:
        return prod(self.inputs.shape[:-1]) // self.examples

    @property
    def positions_shape(self) -> tuple[int, ...] | None:
        return tuple(self.inputs.shape[1:-1]) if self.folds == 1 else None

    @property
    def input_size(self) -> int:
        return self.inputs.shape[-1]

    @property
    def _rows(self) -> Tensor:
        """The rows without the dimension of parts: (examples, S, n)."""
        return self.inputs.reshape(self.examples, self.positions, self.input_size)

    def input_rows(self, first: int = 0, last: int | None = None) -> Tensor:
        return self._rows[first:last, :, None].expand(-1, -1, self.parts, -1)

    def sampled_rows(self, index: Tensor) -> Tensor:
        rows = self._rows.take_along_dim(index[..., None], 1)
        return rows[:, :, None].expand(-1, -1, self.parts, -1)

    def output_rows(self, gradient: Tensor) -> Tensor:
        # The input's dimensions but the last stand in the output too; what precedes them are draws.
        draws = gradient.shape[: gradient.ndim - self.inputs.ndim]
        outputs = gradient.shape[-1] // self.parts
        return gradient.reshape(*draws, self.examples, self.positions, self.parts, outputs)

    def matrix(self, parameter: Tensor) -> Tensor:
        stacked = parameter.mT if self.transposed else parameter
        return stacked.unflatten(-2, (self.parts, -1))

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        stacked = matrix.flatten(-3, -2)
        return stacked.mT if self.transposed else stacked

    def input_second_moment(self, weights: Tensor) -> Tensor:
        if self.parts == 1:
            return super().input_second_moment(weights)
        return replace(self, parts=1).input_second_moment(weights).expand(self.parts, -1, -1)


@dataclass(frozen=True, eq=False)
class BilinearUse(WeightUse):
    """z_o = xᵀ W_o y: linear in W with h = x ⊗ y; `inputs` are x and `second` are y.

    >>> import torch
    >>> use = BilinearUse(torch.ones(5, 2), 5, second=torch.ones(5, 3))
    >>> use.input_rows().shape, use.matrix(torch.ones(4, 2, 3)).shape
    (torch.Size([5, 1, 1, 6]), torch.Size([1, 4, 6]))
    """

    kind: ClassVar[str] = "bilinear"
    unfolds: ClassVar[bool] = True
    second: Tensor

    @property
    def parts(self) -> int:
        return 1

    def narrow(self, first: int, last: int) -> Self:
        second = self.second[first * self.folds : last * self.folds]
        return replace(super().narrow(first, last), second=second)

    @property
    def _sides(self) -> tuple[LinearUse, LinearUse]:
        return LinearUse(self.inputs, self.examples), LinearUse(self.second, self.examples)

    @property
    def positions(self) -> int:
        return self._sides[0].positions

    @property
    def positions_shape(self) -> tuple[int, ...] | None:
        return self._sides[0].positions_shape

    @property
    def input_size(self) -> int:
        return self.inputs.shape[-1] * self.second.shape[-1]

    def input_rows(self, first: int = 0, last: int | None = None) -> Tensor:
        return _row_products(*(side.input_rows(first, last) for side in self._sides))

    def sampled_rows(self, index: Tensor) -> Tensor:
        return _row_products(*(side.sampled_rows(index) for side in self._sides))

    def output_rows(self, gradient: Tensor) -> Tensor:
        return self._sides[0].output_rows(gradient)

    def matrix(self, parameter: Tensor) -> Tensor:
        return parameter.flatten(-2).unsqueeze(-3)

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        return matrix.squeeze(-3).unflatten(-1, shape[1:])


def _row_products(x: Tensor, y: Tensor) -> Tensor:
    """x ⊗ y along the last dimension."""
    return (x[..., :, None] * y[..., None, :]).flatten(-2)


@dataclass(frozen=True, eq=False)
class BroadcastUse(Use):
    """A parameter that stands beside a batch; `inputs` have the shape of the function's output."""

    works_on_rows: ClassVar[bool] = True

    @abstractmethod
    def _contributions(self, gradient: Tensor) -> Tensor:
        """g ⊙ ∂z/∂θ, entry by entry of the output: (…, *output)."""

    def _broadcast_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The parameter's shape as torch's broadcasting reads it, from the last dimension."""
        return shape

    def fits(self, shape: tuple[int, ...]) -> bool:
        aligned = self._broadcast_shape(shape)
        missing = self.inputs.ndim - len(aligned)
        return missing > 0 or (missing == 0 and aligned[0] == 1)

    def example_gradients(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        output = self.inputs.shape
        aligned = self._broadcast_shape(shape)
        missing = len(output) - len(aligned)
        if not self.fits(shape):
            raise ProblemError(
                f"A parameter of shape {shape} meets a batch of shape {tuple(output)}: it has entries of its "
                f"own for every example, or more dimensions than the batch. Expected one that all examples "
                f"share, of at most {len(output) - 1} dimensions, or {len(output)} with a first one of 1."
            )
        draws = gradient.shape[: gradient.ndim - len(output)]
        values = self._contributions(gradient).reshape(*draws, self.examples, self.folds, *output[1:])
        # Dimension k of the output is dimension k - len(output) of every tensor here.
        summed = [
            axis - len(output)
            for axis in range(1, len(output))
            if axis < missing or (aligned[axis - missing] == 1 and output[axis] != 1)
        ]
        return values.sum((-len(output), *summed)).reshape(*draws, self.examples, *shape)


@dataclass(frozen=True, eq=False)
class AddedUse(BroadcastUse):
    """z = x + coefficient · θ, or θ alone, expanded over the batch: ∂ξ_i/∂θ = coefficient · Σ_p g_ip.

    Of `inputs` only the shape is read, that of the function's output.

    >>> import torch
    >>> use = AddedUse(torch.ones(5, 7, 3), examples=5)
    >>> use.example_gradients(torch.ones(5, 7, 3), shape=(3,))[0]
    tensor([7., 7., 7.])
    """

    kind: ClassVar[str] = "addition"
    coefficient: float = 1.0

    def _contributions(self, gradient: Tensor) -> Tensor:
        return gradient if self.coefficient == 1 else gradient * self.coefficient


@dataclass(frozen=True, eq=False)
class MultipliedUse(BroadcastUse):
    """z = x ⊙ θ: ∂ξ_i/∂θ = Σ_p g_ip ⊙ x_ip; `inputs` are x, expanded to the shape of the output.

    >>> import torch
    >>> use = MultipliedUse(torch.full((5, 3), 2.0), examples=5)
    >>> use.example_gradients(torch.ones(5, 3), shape=())
    tensor([6., 6., 6., 6., 6.])
    """

    kind: ClassVar[str] = "product"

    def _contributions(self, gradient: Tensor) -> Tensor:
        return gradient * self.inputs


@dataclass(frozen=True, eq=False)
class ScaleShiftUse(BroadcastUse):
    """The weight or the bias of a normalisation, z = weight ⊙ x̂ + bias.

    `normalise` gives x̂ of the inputs: the same function without weight and bias. `channels_first` where the
    parameter has one entry per channel, dimension 1; otherwise its dimensions are the last ones.
    """

    normalise: Callable[[Tensor], Tensor]
    channels_first: bool

    @property
    def works_on_rows(self) -> bool:  # type: ignore[override]
        """Not where a channel is a dimension of its own behind the examples."""
        return not self.channels_first

    def _broadcast_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape, *(1,) * (self.inputs.ndim - 2)) if self.channels_first else shape


@dataclass(frozen=True, eq=False)
class ScaleUse(ScaleShiftUse):
    """The weight of a normalisation: ∂ξ_i/∂weight = Σ_p g_ip ⊙ x̂_ip. x̂ is recomputed when it is needed."""

    kind: ClassVar[str] = "scale"

    def _contributions(self, gradient: Tensor) -> Tensor:
        return gradient * self.normalise(self.inputs)


@dataclass(frozen=True, eq=False)
class ShiftUse(ScaleShiftUse):
    """The bias of a normalisation: ∂ξ_i/∂bias = Σ_p g_ip."""

    kind: ClassVar[str] = "shift"

    def _contributions(self, gradient: Tensor) -> Tensor:
        return gradient


# torch's functions, and whether their parameters are one entry per channel.
_CHANNELS_FIRST: dict[Callable[..., Tensor], bool] = {
    F.layer_norm: False,
    F.rms_norm: False,
    F.group_norm: True,
    F.instance_norm: True,
    F.batch_norm: True,
}


def scale_and_shift_uses(
    function: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], examples: int
) -> tuple[ScaleUse, ShiftUse]:
    """The uses of the weight and of the bias of one call of a normalisation, `function(*args, **kwargs)`.

    Known are `layer_norm`, `rms_norm`, `group_norm`, `instance_norm` and `batch_norm` of
    `torch.nn.functional`. With the statistics of the batch, examples depend on each other: that is an error.

    >>> import torch
    >>> x = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
    >>> scale, shift = scale_and_shift_uses(F.layer_norm, (x, (2,)), {"eps": 0.0001}, examples=2)
    >>> scale.example_gradients(torch.ones(2, 2), shape=(2,)).round()
    tensor([[-1.,  1.],
            [ 0.,  0.]])
    """
    if function not in _CHANNELS_FIRST:
        known = ", ".join(f"`{each.__name__}`" for each in _CHANNELS_FIRST)
        raise ProblemError(
            f"`{getattr(function, '__name__', function)}` is no normalisation: known are {known}."
        )
    call = inspect.signature(function).bind(*args, **kwargs).arguments
    inputs = call.pop("input").detach()
    options = {name: value for name, value in call.items() if name not in ("weight", "bias")}
    if function is F.batch_norm and options.get("training", False):
        raise ProblemError(
            "`batch_norm` takes the statistics of the batch here, so examples depend on each other and have "
            "no gradients of their own. Put the model into eval mode, which uses the running statistics."
        )
    if function is F.instance_norm and options.get("use_input_stats", True):
        # Calling it once more with them would update the running statistics.
        options |= {"running_mean": None, "running_var": None}

    def normalise(values: Tensor) -> Tensor:
        return function(values, **options)

    first = _CHANNELS_FIRST[function]
    return ScaleUse(inputs, examples, normalise, first), ShiftUse(inputs, examples, normalise, first)
