"""Parameters that are broadcast over the batch: scale and shift of normalisations, sums and products.

They have no Kronecker structure, but the gradient of one example has a closed form. With Σ_p over every
dimension that the parameter θ is broadcast over, except the batch,

    z = x + θ:  ∂ξ_i/∂θ = Σ_p g_ip          z = x ⊙ θ:  ∂ξ_i/∂θ = Σ_p g_ip ⊙ x_ip

A normalisation, z = weight ⊙ x̂ + bias with x̂ the normalised input, is both: its weight has a `ScaleUse`
and its bias a `ShiftUse`, two uses of one call.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from curvlab.exceptions import ProblemError
from curvlab.model.uses.base import Use

__all__ = [
    "AddedUse",
    "BroadcastUse",
    "MultipliedUse",
    "ScaleShiftUse",
    "ScaleUse",
    "ShiftUse",
    "scale_and_shift_uses",
]


@dataclass(frozen=True, eq=False)
class BroadcastUse(Use):
    """A parameter that stands beside a batch; `inputs` have the shape of the function's output."""

    works_on_rows: ClassVar[bool] = True

    @abstractmethod
    def _contributions(self, gradient: Tensor) -> Tensor:
        """g ⊙ ∂z/∂θ, entry by entry of the output: (…, *output)."""

    def _aligned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The parameter's shape as torch's broadcasting reads it, from the last dimension."""
        return shape

    def fits(self, shape: tuple[int, ...]) -> bool:
        aligned = self._aligned(shape)
        missing = self.inputs.ndim - len(aligned)
        return missing > 0 or (missing == 0 and aligned[0] == 1)

    def example_gradients(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        output = self.inputs.shape
        aligned = self._aligned(shape)
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

    def _aligned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
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
