"""Functions of torch that cannot be differentiated twice, written out with functions that can.

A Hessian product differentiates the backward pass. Fused kernels have no derivative of theirs: attention,
recurrent layers (both in `curvlab.model.decompositions`), and

    embedding_bag       Σ, mean or max of the rows of a table that belong to a bag
    embedding           with sparse=True, whose gradient is sparse
    cdist, pdist        ‖x_i - y_j‖_p, with derivative 0 where the distance is 0, as torch has it
    _weight_norm        g v / ‖v‖, of which torch has a second derivative that is wrong: no symmetric matrix
    silu                x σ(x), whose backward pass keeps five tensors in torch, and two here
    conv1d … 3d, also   torch differentiates the gradient of a weight by a convolution whose kernel is as
    transposed          large as an image: 2 to 4 times as slow as what is written out here

`TwiceDifferentiable` puts these in the place of torch's own while a model runs: it sees modules, methods and
functional calls alike, in the thread that entered it and in no other. It stays on in backward passes too,
since gradient checkpointing runs parts of the forward again there. `refuse_broken_graphs` finds functions of
the user's own whose backward pass leaves no graph, of which torch says nothing.

>>> table = torch.tensor([[1.0], [2.0], [4.0]], requires_grad=True)
>>> with TwiceDifferentiable():
...     bags = F.embedding_bag(torch.tensor([[0, 2]]), table, mode="sum").square()
>>> (slope,) = torch.autograd.grad(bags, table, torch.ones(1, 1), create_graph=True)
>>> torch.autograd.grad(slope, table, torch.ones(3, 1))[0].flatten()
tensor([4., 0., 4.])
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from curvlab.exceptions import ProblemError
from curvlab.measure import device
from curvlab.model.decompositions import DECOMPOSITIONS, NotDecomposedError

__all__ = [
    "TWICE_DIFFERENTIABLE",
    "TwiceDifferentiable",
    "backward_pass",
    "graph_entries",
    "no_second_derivative",
    "refuse_broken_graphs",
    "refuse_reentrant_checkpoint",
]


# ------------------------------------------------------------------------------------------ embeddings


def _refuse_scaled_gradients(scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        raise ProblemError(
            "an embedding has scale_grad_by_freq=True: its backward pass gives another vector than the "
            "gradient of the loss, and the derivative of that is no Hessian. Set scale_grad_by_freq=False"
        )


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """A lookup whose gradient is dense."""
    _refuse_scaled_gradients(scale_grad_by_freq)
    if not sparse:
        raise NotDecomposedError("A lookup with a dense gradient can be differentiated twice as it is.")
    return F.embedding(input, weight, padding_idx, max_norm, norm_type)


def embedding_bag(
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
) -> Tensor:
    """Rows of `weight` summed, averaged or maximised over bags; an empty bag is zero."""
    _refuse_scaled_gradients(scale_grad_by_freq)
    fits = (offsets is None) == (input.dim() == 2) and input.dim() in (1, 2)
    weighed = per_sample_weights is not None
    if not fits or max_norm is not None or not weight.is_floating_point() or (weighed and mode != "sum"):
        raise NotDecomposedError("`embedding_bag` was given arguments that are not written out.")
    tokens = input.flatten().long()
    if offsets is None:
        bags = len(input)
        bag = torch.arange(bags, device=input.device).repeat_interleave(input.shape[1])
    else:
        bags = len(offsets) - int(include_last_offset)
        places = torch.arange(len(tokens), device=input.device, dtype=offsets.dtype)
        bag = torch.searchsorted(offsets[:bags].contiguous(), places, right=True) - 1
    if padding_idx is not None:
        counts = tokens != padding_idx % len(weight)
        tokens, bag = tokens[counts], bag[counts]
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.flatten()[counts]
    rows = F.embedding(tokens, weight)
    if mode == "max":
        return _bag_maxima(rows, bag, bags)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.flatten()[:, None]
    sums = rows.new_zeros(bags, rows.shape[1]).index_add(0, bag, rows)
    return sums if mode == "sum" else sums / torch.bincount(bag, minlength=bags).clamp(min=1)[:, None]


def _bag_maxima(rows: Tensor, bag: Tensor, bags: int) -> Tensor:
    """The largest entry of each column in each bag; of equal ones the first counts, as in torch."""
    with torch.no_grad():
        index = bag[:, None].expand_as(rows)
        largest = rows.new_zeros(bags, rows.shape[1]).scatter_reduce(
            0, index, rows, "amax", include_self=False
        )
        places = torch.arange(len(rows), device=rows.device)[:, None].expand_as(rows)
        none = len(rows)
        places = torch.where(rows == largest[bag], places, none)
        first = torch.full_like(largest, none, dtype=torch.long).scatter_reduce(0, index, places, "amin")
    # One more row, of zeros, is what an empty bag takes.
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).gather(0, first)


# ------------------------------------------------------------------------------------------- distances


def _norms(differences: Tensor, p: float) -> Tensor:
    """‖d‖_p over the last dimension, with derivatives 0 where it is 0."""
    if p == 0:
        raise NotDecomposedError("The number of entries that are not zero has no derivative.")
    if p == inf:
        return differences.abs().amax(-1)
    if p == 1:
        return differences.abs().sum(-1)
    powers = differences.square().sum(-1) if p == 2 else differences.abs().pow(p).sum(-1)
    zero = powers == 0
    return powers.masked_fill(zero, 1.0).pow(1 / p).masked_fill(zero, 0.0)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """‖x1_i - x2_j‖_p for rows of `x1` (…, P, M) and `x2` (…, R, M); all differences are formed."""
    return _norms(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """‖x_i - x_j‖_p for i < j."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _norms(input[first] - input[second], p)


# ------------------------------------------------------------------------------------------- weight_norm


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """G v / ‖v‖, the norm taken over all dimensions but `dim`."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


# -------------------------------------------------------------------------------------------------- SiLU


class _Silu(torch.autograd.Function):
    """f(x) = x σ(x), with the backward pass g ↦ g f'(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.aten.silu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            slope: Tensor = _SiluSlope.apply(gradients[0], x)
            return slope
        return torch.ops.aten.silu_backward(gradients[0], x)


class _SiluSlope(torch.autograd.Function):
    """g f'(x), with derivatives f'(x) and g f''(x), where f'' = σ (1 - σ) (2 + x (1 - 2σ))."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
        sigma = x.sigmoid()
        bend = (1 - 2 * sigma).mul_(x).add_(2).mul_(sigma).mul_(1 - sigma).mul_(gradient)
        ctx.save_for_backward(x, bend)
        return torch.ops.aten.silu_backward(gradient, x)

    @staticmethod
    def backward(ctx: Any, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        x, bend = ctx.saved_tensors
        return torch.ops.aten.silu_backward(vectors[0], x), vectors[0] * bend


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """X σ(x); the graphs of a residual network with it hold half of what they hold with torch's own."""
    if inplace or not torch.is_grad_enabled():
        raise NotDecomposedError("`silu` in place, or without gradients, runs as it is.")
    result: Tensor = _Silu.apply(input)
    return result


# ---------------------------------------------------------------------------------------- convolutions

# stride, padding, dilation, transposed, output padding, groups: as torch.convolution takes them.
ConvolutionOptions = tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int]


class _Convolution(torch.autograd.Function):
    """z = x * w + b, linear in x and in w, whose gradients have second derivatives of the same kind."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: ConvolutionOptions
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = options
        return torch.convolution(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        mask = tuple(ctx.needs_input_grad[:3])
        run = _ConvolutionGradients.apply if torch.is_grad_enabled() else _convolution_gradients
        return (*run(gradients[0], x, weight, ctx.options, mask), None)


class _ConvolutionGradients(torch.autograd.Function):
    """The gradients ∂(g·z) at x, w and b, and their derivatives along (u, v, c).

    at g    u * w + x * v + c
    at x    ∂(g·(x * v))/∂x,    at w    ∂(g·(u * w))/∂w
    """

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor,
        options: ConvolutionOptions,
        mask: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(gradient, x, weight)
        ctx.set_materialize_grads(False)
        ctx.options = options
        return _convolution_gradients(gradient, x, weight, options, mask)

    @staticmethod
    def backward(ctx: Any, *vectors: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient, x, weight = ctx.saved_tensors
        along_x, along_weight, along_bias = vectors
        options = ctx.options
        found: list[Tensor | None] = [None] * 5
        if _goes_on(ctx, 0):
            parts = [
                torch.convolution(image, kernel, None, *options)
                for image, kernel in ((along_x, weight), (x, along_weight))
                if image is not None and kernel is not None
            ]
            if along_bias is not None:
                parts.append(along_bias.reshape(-1, *[1] * (gradient.ndim - 2)).expand_as(gradient))
            found[0] = sum(parts[1:], parts[0]) if parts else None
        if along_weight is not None and _goes_on(ctx, 1):
            found[1] = _convolution_gradients(gradient, x, along_weight, options, (True, False, False))[0]
        if along_x is not None and _goes_on(ctx, 2):
            found[2] = _convolution_gradients(gradient, along_x, weight, options, (False, True, False))[1]
        return tuple(found)


def _convolution_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, options: ConvolutionOptions, mask: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """Of g·(x * w + b) those at x, w and b that the mask names."""
    biases = [gradient.shape[1]] if mask[2] else None
    found = torch.ops.aten.convolution_backward(gradient, x, weight, biases, *options, list(mask))
    return tuple(one if wanted else None for one, wanted in zip(found, mask, strict=True))


def _goes_on(ctx: Any, index: int) -> bool:
    """Whether the backward pass that runs now goes on behind this tensor.

    `needs_input_grad` is of the forward; a Gauss-Newton product goes on behind the cotangent alone.
    """
    if not ctx.needs_input_grad[index]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[index][0]))
    except RuntimeError:  # a leaf: one of those that the pass is asked for
        return True


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """What `conv1d`, `conv2d` and `conv3d` compute."""
    dims = weight.ndim - 2
    if isinstance(padding, str):
        reach = [d * (k - 1) for d, k in zip(_each(dilation, dims), weight.shape[2:], strict=True)]
        if padding == "same" and any(size % 2 for size in reach):
            raise NotDecomposedError("Padding of two sizes is added by torch.")
        padding = [size // 2 for size in reach] if padding == "same" else 0
    return _convolve(input, weight, bias, dims, stride, padding, dilation, False, 0, groups)


def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """What `conv_transpose1d`, `2d` and `3d` compute."""
    dims = weight.ndim - 2
    return _convolve(input, weight, bias, dims, stride, padding, dilation, True, output_padding, groups)


def _convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dims: int,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    transposed: bool,
    output_padding: int | Sequence[int],
    groups: int,
) -> Tensor:
    if input.ndim != dims + 2 or not torch.is_grad_enabled() or input.is_complex():
        raise NotDecomposedError("One image, complex ones, or no gradients: torch's own convolution.")
    settings = [_each(setting, dims) for setting in (stride, padding, dilation, output_padding)]
    options = *settings[:3], transposed, settings[3], groups
    found: Tensor = _Convolution.apply(input, weight, bias, options)
    return found


def _each(setting: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """A setting for every dimension, as torch takes one for all."""
    numbers = (setting,) if isinstance(setting, int) else tuple(setting)
    return numbers * dims if len(numbers) == 1 else numbers


# ---------------------------------------------------------------------------------------------- the mode

# From a function of torch to one that computes the same and can be differentiated twice.
TWICE_DIFFERENTIABLE: dict[Callable[..., Any], Callable[..., Any]] = {
    **DECOMPOSITIONS,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    torch.cdist: cdist,
    torch.pdist: pdist,
    torch._weight_norm: weight_norm,
    F.silu: silu,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), transposed_convolution),
}


class TwiceDifferentiable(TorchFunctionMode):
    """Runs a model with functions that can be differentiated twice.

    What is not written out runs as it is: where torch has no second derivative of it, the product fails. A
    part under reentrant gradient checkpointing is refused: its gradient is out of reach of `autograd.grad`.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            refuse_reentrant_checkpoint(args, kwargs)
        written_out = TWICE_DIFFERENTIABLE.get(func)
        if written_out is None:
            return func(*args, **kwargs)
        try:
            with self:
                return written_out(*args, **kwargs)
        except NotDecomposedError:
            return func(*args, **kwargs)


def refuse_reentrant_checkpoint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call without gradients that is given a trainable tensor inside a reentrant checkpoint.

    Such a part would be left out of the gradient without a word where its input needs none.
    """
    if not any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs))
    ):
        return
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise ProblemError(
                "the model checkpoints a part with use_reentrant=True, through which torch.autograd.grad "
                "cannot go. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint (for Hugging Face "
                'models gradient_checkpointing_enable({"use_reentrant": False})), or switch it off'
            )
        frame = frame.f_back  # type: ignore[assignment]


def backward_pass(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    retain_graph: bool = True,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Jᵀ v at the inputs, None where an input takes no part, as `torch.autograd.grad` gives it.

    A mode sees that function and is off while it runs: a checkpointed part would run again with other
    functions than in the forward. This is what it calls.
    """
    return _engine_run_backward(
        tuple(outputs),
        tuple(cotangents),
        retain_graph,
        create_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def graph_nodes(output: Tensor) -> list[Any]:
    """The nodes of the graph behind `output`."""
    nodes: list[Any] = [] if output.grad_fn is None else [output.grad_fn]
    seen = set(nodes)
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes


def graph_entries(output: Tensor) -> int:
    """How many numbers a backward pass from `output` makes: what it takes in time and memory.

    >>> layer = torch.nn.Linear(3, 2)
    >>> graph_entries(layer(torch.ones(5, 3)).tanh())  # two times 5 × 2, the weight, its transpose, the bias
    34
    """
    return sum(prod(entry.shape) for node in graph_nodes(output) for entry in node._input_metadata)


# ----------------------------------------------------------------------------- functions of the user's own


def no_second_derivative(operation: str) -> ProblemError:
    """The error for an operation that cannot be differentiated twice."""
    return ProblemError(
        f"the forward uses {operation}, which cannot be differentiated twice, as products with the Hessian "
        f"and the exact Gauss-Newton matrix need. Write that part of the forward with functions that can, or "
        f"take a curvature of one backward pass: fisher, or gauss-newton[kind=rows]"
    )


def refuse_broken_graphs(output: Tensor) -> None:
    """Have the next backward passes from `output` refuse an autograd.Function that leaves no graph behind.

    A backward under `once_differentiable`, or in numpy, gives gradients that depend on nothing: their
    derivative would be taken for zero. torch raises where it meets one, but not on its way to parameters.
    """
    for node in graph_nodes(output):
        if isinstance(node, BackwardCFunction):
            node.register_hook(partial(_refuse_lost_graph, type(node).__name__.removesuffix("Backward")))


def _refuse_lost_graph(
    name: str, given: tuple[Tensor | None, ...], arrived: tuple[Tensor | None, ...]
) -> None:
    """Refuse gradients that do not depend on those that arrived, from which they are made; zeros may."""
    if not any(gradient is not None and gradient.requires_grad for gradient in arrived):
        return
    for gradient in given:
        if gradient is None:
            continue
        once = gradient.grad_fn is not None and gradient.grad_fn.name().endswith("::Error")
        if once or (not gradient.requires_grad and device.readable(gradient) and bool(gradient.any())):
            raise no_second_derivative(f"the autograd.Function `{name}`")
