"""Which arguments of which torch function are parameters, and what use of each a call is.

`BINDINGS` maps a function to one that takes the same arguments and names those that may be parameters, with
what makes the use of each. A parameter that is used in any other way is not found here: its block is then a
plain one. Another package adds functions of its own, such as an operator of `torch.library`, through the
entry-point group `curvlab.bindings`: each entry point is a dictionary like `BINDINGS`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from curvlab.exceptions import ProblemError, stacklevel_of_caller
from curvlab.model.uses import (
    AddedUse,
    BilinearUse,
    ConvolutionUse,
    EmbeddingBagUse,
    EmbeddingUse,
    LinearUse,
    MultipliedUse,
    ScaleUse,
    ShiftUse,
    TransposedConvolutionUse,
    Use,
    scale_and_shift_uses,
)

__all__ = ["Bound", "bindings"]

Arguments = tuple["Bound", ...]


@dataclass(frozen=True, eq=False)
class Bound:
    """An argument that may be a parameter.

    `make(examples, output, transposed)` is its use in a batch of so many examples, given the function's
    output; `transposed` where the argument is the transpose of a parameter.
    """

    argument: Tensor
    make: Callable[[int, Tensor, bool], Use]


@cache
def bindings() -> Mapping[Callable[..., Any], Callable[..., Arguments]]:
    """The functions that have parameters: torch's, and those that other packages bring."""
    known = dict(BINDINGS)
    for point in entry_points(group="curvlab.bindings"):
        try:
            known |= {function: bind for function, bind in point.load().items() if callable(bind)}
        # Whatever someone else's module raises on import must not break the rest.
        except Exception as error:
            origin = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
            warnings.warn(
                f"layer kinds `{point.name}` of {origin} are left out: `{point.value}` does not load "
                f"({type(error).__name__}: {error}).",
                RuntimeWarning,
                stacklevel=stacklevel_of_caller(),
            )
    return known


def _shape_only(output: Tensor) -> Tensor:
    """A tensor of the output's shape that holds nothing."""
    return torch.empty(output.shape, dtype=output.dtype, device="meta")


def _bind_summand(argument: Tensor | None, coefficient: float = 1.0) -> Arguments:
    """A bias or a summand that is broadcast over the output's last dimensions."""
    if argument is None:
        return ()
    return (Bound(argument, lambda n, out, _: AddedUse(_shape_only(out), n, coefficient)),)


def _channel_bias(bias: Tensor | None) -> Arguments:
    """A bias with one entry per channel, dimension 1 of the output."""
    if bias is None:
        return ()
    return (Bound(bias, lambda n, out, _: ShiftUse(_shape_only(out), n, lambda x: x, True)),)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Arguments:
    use = Bound(weight, lambda n, _, flipped: LinearUse(input.detach(), n, transposed=flipped))
    return (use, *_bind_summand(bias))


def _matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Arguments:
    if other.ndim != 2 or input.ndim < 2 or out is not None:
        return ()
    return (Bound(other, lambda n, _, flipped: LinearUse(input.detach(), n, transposed=not flipped)),)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Arguments:
    if alpha != 1 or out is not None:
        return ()
    return (*_matmul(mat1, mat2), *_bind_summand(input, float(beta)))


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Arguments:
    use = Bound(weight, lambda n, _, __: BilinearUse(input1.detach(), n, input2.detach()))
    return (use, *_bind_summand(bias))


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Arguments:
    if input.ndim != weight.ndim:
        return ()  # a single image without a batch dimension
    settings = (tuple(weight.shape), stride, padding, dilation, groups)
    use = Bound(weight, lambda n, *_: ConvolutionUse.from_call(input.detach(), n, *settings))
    return (use, *_channel_bias(bias))


def _transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Arguments:
    if input.ndim != weight.ndim:
        return ()
    settings = (tuple(weight.shape), stride, padding, dilation, groups, output_padding)
    use = Bound(weight, lambda n, *_: TransposedConvolutionUse.from_call(input.detach(), n, *settings))
    return (use, *_channel_bias(bias))


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Arguments:
    _refuse_embedding_options(max_norm, scale_grad_by_freq)
    size = len(weight)
    padding = None if padding_idx is None or padding_idx == -1 else padding_idx % size
    return (Bound(weight, lambda n, *_: EmbeddingUse(input, n, size, weight.dtype, padding)),)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Arguments:
    _refuse_embedding_options(max_norm, scale_grad_by_freq)
    if input.ndim != 2 or per_sample_weights is not None or mode == "max":
        return ()
    size = len(weight)
    padding = None if padding_idx is None else padding_idx % size
    return (
        Bound(weight, lambda n, *_: EmbeddingBagUse(input, n, size, weight.dtype, padding, mode == "mean")),
    )


def _refuse_embedding_options(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    if max_norm is not None:
        raise ProblemError(
            "an embedding has max_norm set: its forward changes the weight, which curvlab leaves as it is. "
            "Make the embedding without max_norm"
        )
    if scale_grad_by_freq:
        raise ProblemError(
            "an embedding has scale_grad_by_freq=True: examples of a batch then depend on each other. Make "
            "the embedding without it"
        )


def _normalisation(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Arguments:
    given = dict(zip(NORMALISATIONS[function], args, strict=False)) | kwargs

    def use(which: int, examples: int, output: Tensor, transposed: bool) -> Use:
        return scale_and_shift_uses(function, args, kwargs, examples)[which]

    return tuple(
        Bound(argument, partial(use, which))
        for which, name in enumerate(("weight", "bias"))
        if isinstance(argument := given.get(name), Tensor)
    )


def _sum(input: Any, other: Any, *, alpha: float = 1, out: Tensor | None = None) -> Arguments:
    if out is not None:
        return ()
    first = _bind_summand(input) if isinstance(input, Tensor) else ()
    return (*first, *(_bind_summand(other, float(alpha)) if isinstance(other, Tensor) else ()))


def _difference(input: Any, other: Any, *, alpha: float = 1, out: Tensor | None = None) -> Arguments:
    return _sum(input, other, alpha=-alpha, out=out)


def _product(input: Any, other: Any, *, out: Tensor | None = None) -> Arguments:
    if out is not None:
        return ()

    def multiplied(argument: Any, beside: Any) -> Arguments:
        if not isinstance(argument, Tensor):
            return ()

        def make(examples: int, output: Tensor, _: bool) -> Use:
            values = torch.as_tensor(beside, dtype=output.dtype, device=output.device).detach()
            return MultipliedUse(values.expand(output.shape), examples)

        return (Bound(argument, make),)

    return (*multiplied(input, other), *multiplied(other, input))


def _expansion(input: Tensor, *sizes: Any, **kwargs: Any) -> Arguments:
    return _bind_summand(input)


def _prelu(input: Tensor, weight: Tensor) -> Arguments:
    """z = max(x, 0) + a min(x, 0), with one a for all channels or one for each."""

    def make(examples: int, output: Tensor, _: bool) -> Use:
        negative = input.detach().clamp(max=0)
        if weight.numel() == 1:
            return MultipliedUse(negative, examples)
        return ScaleUse(negative, examples, lambda x: x, True)

    return (Bound(weight, make),)


NORMALISATIONS: dict[Callable[..., Any], tuple[str, ...]] = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats"),
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
}

BINDINGS: dict[Callable[..., Any], Callable[..., Arguments]] = {
    F.linear: _linear,
    F.bilinear: _bilinear,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _transposed_convolution),
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _sum),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__), _difference),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _product),
    **dict.fromkeys((Tensor.expand, Tensor.expand_as, Tensor.repeat), _expansion),
    **dict.fromkeys((F.prelu, torch.prelu, Tensor.prelu), _prelu),
    **{function: partial(_normalisation, function) for function in NORMALISATIONS},
}
