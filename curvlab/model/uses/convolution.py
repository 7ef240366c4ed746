"""Convolutions in any number of dimensions, and transposed ones: the row h_ip is a patch of the input.

What can be had without unfolding the input is computed without: the mean patch, the weight's gradient and
the patches of few positions. The second moment of all patches unfolds one dimension less (see `Patches`).

`Patches` are what a convolution sees of images, and their second moment in less work than unfolding takes.

Patches overlap: unfolded, an image has as many times its entries as the kernel has taps. Their second moment
need not unfold all dimensions. Write tap κ of one dimension, of stride 1 and dilation d, apart from the rest:
h_y[κ] = v[y + dκ], where v[r] is what a patch sees of row r of the padded image. With R rows of the output

    Σ_y h_y[κ] h_y[κ+δ]ᵀ = Σ_r v[r] v[r+dδ]ᵀ     over dκ ≤ r < dκ + R

depends on κ through a few rows at both ends only. The rows that all κ have in common are summed once per δ,
those at the ends are added: k products in place of k², and 1/k of the entries to copy. Nothing is subtracted,
so nothing cancels. On one thread it takes about half the time of the matrix product of unfolded patches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from curvlab.exceptions import ProblemError
from curvlab.linalg.execution import Limits, deferring, require
from curvlab.linalg.views import Layout
from curvlab.measure import device
from curvlab.model.uses.base import WeightUse, constant_value, repeats_one

__all__ = ["ConvolutionUse", "Patches", "TransposedConvolutionUse"]

Setting = int | Sequence[int]


@dataclass(frozen=True, eq=False)
class ConvolutionUse(WeightUse):
    """A convolution in any number of dimensions: h_ip is the patch of the (padded) input that z_ip sees.

    `padding` is a pair of numbers per dimension, for both ends; `from_call` takes torch's own arguments. The
    parts are the groups: each sees its own channels. h_ip holds (channel, tap), as the weight does.

    >>> use = ConvolutionUse.from_call(torch.ones(5, 4, 8, 8), 5, (6, 4, 3, 3), padding="same")
    >>> use.input_rows().shape, use.output_rows(torch.ones(5, 6, 8, 8)).shape
    (torch.Size([5, 64, 1, 36]), torch.Size([5, 64, 1, 6]))
    """

    kind: ClassVar[str] = "convolution"
    unfolds: ClassVar[bool] = True
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def from_call(
        cls,
        inputs: Tensor,
        examples: int,
        weight_shape: Sequence[int],
        stride: Setting = 1,
        padding: Setting | str = 0,
        dilation: Setting = 1,
        groups: int = 1,
    ) -> Self:
        """The use of a weight of this shape in `F.conv1d`, `F.conv2d` or `F.conv3d` with these arguments."""
        kernel = _kernel(inputs, weight_shape)
        dims = len(kernel)
        steps = _per_dimension(dilation, dims)
        if padding == "same":
            # As torch does: an odd total has its larger half at the end.
            reach = [d * (k - 1) for d, k in zip(steps, kernel, strict=True)]
            sides = tuple((r // 2, r - r // 2) for r in reach)
        elif isinstance(padding, str):  # "valid"
            sides = ((0, 0),) * dims
        else:
            sides = tuple((p, p) for p in _per_dimension(padding, dims))
        return cls(inputs, examples, kernel, _per_dimension(stride, dims), sides, steps, groups)

    @property
    def parts(self) -> int:
        return self.groups

    @cached_property
    def _patches(self) -> Patches:
        return Patches(self.kernel, self.stride, self.padding, self.dilation, self.groups)

    @cached_property
    def output_sizes(self) -> tuple[int, ...]:
        """The output's dimensions behind batch and channels."""
        return self._patches.output_sizes(self.inputs.shape[2:])

    @property
    def positions_shape(self) -> tuple[int, ...] | None:
        return self.output_sizes if self.folds == 1 else None

    @cached_property
    def positions(self) -> int:
        return self.folds * prod(self.output_sizes)

    @property
    def input_size(self) -> int:
        return self.inputs.shape[1] // self.groups * prod(self.kernel)

    def _columns(self, first: int, last: int | None) -> Tensor:
        """All patches of these examples: (G, n, images, positions of one)."""
        patches = self._patches.columns(self._patch_source(self._images(first, last)))
        return self._in_order_of_taps(patches, 1)

    def _images(self, first: int, last: int | None) -> Tensor:
        """The inputs of the examples from `first` up to `last`."""
        return self.inputs[first * self.folds : None if last is None else last * self.folds]

    def input_rows(self, first: int = 0, last: int | None = None) -> Tensor:
        rows = self._columns(first, last).permute(2, 3, 0, 1)
        return rows.unflatten(0, (-1, self.folds)).flatten(1, 2)

    def sampled_rows(self, index: Tensor) -> Tensor:
        per_image = prod(self.output_sizes)
        image = torch.arange(self.examples, device=index.device)[:, None] * self.folds + index // per_image
        places = _unravel(index % per_image, self.output_sizes)
        # Which entry of the unpadded, flattened image each tap reads, if it reads one: (examples, q, taps).
        source = torch.zeros_like(index)[..., None]
        reads = torch.ones_like(source, dtype=torch.bool)
        for axis, size in enumerate(self.inputs.shape[2:]):
            read, valid = self._source(axis, places[axis])
            valid = valid & (read >= 0) & (read < size)
            source = (source[..., None] * size + read.clamp(0, size - 1)[..., None, :]).flatten(-2)
            reads = (reads[..., None] & valid[..., None, :]).flatten(-2)
        patches = self.inputs.flatten(2)[image[..., None], :, source] * reads[..., None]
        return patches.transpose(-1, -2).reshape(*index.shape, self.groups, self.input_size)

    def _source(self, axis: int, place: Tensor) -> tuple[Tensor, Tensor]:
        """For output places (…): which index of the input every tap reads, and if there is one, (…, taps)."""
        taps = torch.arange(self.kernel[axis], device=place.device) * self.dilation[axis]
        read = place[..., None] * self.stride[axis] + taps - self.padding[axis][0]
        return read, torch.ones_like(read, dtype=torch.bool)

    def output_rows(self, gradient: Tensor) -> Tensor:
        draws = gradient.shape[: gradient.ndim - self.inputs.ndim]
        outputs = gradient.shape[len(draws) + 1] // self.groups
        per_image = prod(self.output_sizes)
        flat = gradient.reshape(*draws, self.examples, self.folds, self.groups, outputs, per_image)
        return flat.movedim(-1, -3).flatten(-4, -3)

    def matrix(self, parameter: Tensor) -> Tensor:
        draws = parameter.shape[: parameter.ndim - self.inputs.ndim]
        return parameter.reshape(*draws, self.groups, -1, self.input_size)

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        return matrix.reshape(*matrix.shape[:-3], *shape)

    def mean_input(self, weights: Tensor) -> Tensor:
        """The patch mean of the weighted mean image: nothing of the batch is unfolded.

        Where positions of one image differ in weight, the images cannot be averaged first.
        """
        images, per_image = self.inputs, weights.reshape(len(self.inputs), -1)
        if _equal_along_rows(per_image):
            images = torch.tensordot(per_image[:, 0], images, 1)[None]
            per_image = torch.ones_like(per_image[:1])
        # Σ_ip w_ip h_ip is the gradient of a weight with one output channel whose output gradient is w.
        sums = self._weight_gradient(images, per_image.reshape(-1, 1, *self.output_sizes), groups=1)
        return sums.reshape(self.groups, self.input_size)

    def gradient(self, rows: Tensor, shape: tuple[int, ...], weights: Tensor | None = None) -> Tensor:
        scaled = rows if weights is None else rows * weights[:, None, None, None]
        # (examples, folds · positions, G, o) → (images, G · o, *out)
        images = scaled.unflatten(1, (self.folds, -1)).movedim(2, -1).flatten(0, 1).flatten(1, 2)
        return self._weight_gradient(self.inputs, images.unflatten(-1, self.output_sizes), self.groups)

    def image(self, parameter: Tensor) -> Tensor:
        images, padding = self._with_equal_sides(self.inputs.to(parameter))
        none = (0,) * len(self.kernel)
        options = self.stride, padding, self.dilation, False, none, self.groups
        return self.output_rows(torch.convolution(images, parameter, None, *options))

    def _with_equal_sides(self, images: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The images and the padding that is still to be made: torch's own has equal sides."""
        if all(first == last >= 0 for first, last in self.padding):
            return images, tuple(first for first, _ in self.padding)
        return self._patches.padded(images), (0,) * len(self.kernel)

    def _weight_gradient(self, images: Tensor, gradient: Tensor, groups: int) -> Tensor:
        """The gradient of a weight with so many groups, from that at the output, as autograd computes it."""
        shape = (gradient.shape[1], images.shape[1] // groups, *self.kernel)
        none = (0,) * len(self.kernel)
        images, padding = self._with_equal_sides(images)
        return _convolution_backward(
            gradient, images, shape, self.stride, padding, self.dilation, False, none, groups
        )

    def input_second_moment(self, weights: Tensor) -> Tensor:
        """Σ_ip w_ip h_ip h_ipᵀ, (G, n, n), for weights (examples, S), in bounded memory.

        Weights that differ between images only are given to the images before anything is unfolded.
        """
        per_image = weights.reshape(len(self.inputs), -1)
        sample = self._patch_source(self.inputs[:1])
        axis = self._patches.shared_axis(sample.shape[2:])
        if axis is None or not _equal_along_rows(per_image) or _any_negative(per_image):
            return self._unfolded_second_moment(per_image)
        roots = per_image[:, 0].abs().sqrt().reshape(-1, *(1,) * (self.inputs.ndim - 1))
        chunks = (
            self._patch_source(self._images(first, last) * roots[first * self.folds : last * self.folds])
            for first, last in self.ranges(self.folds * self._patches.strip_entries(sample, axis))
        )
        found = self._patches.second_moment(chunks, axis)
        # Of one number for all it is not read whether it is negative.
        found = found * per_image[0, 0].sign() if repeats_one(per_image) else found
        return self._in_order_of_taps(found, 1, 2)

    def _patch_source(self, images: Tensor) -> Tensor:
        """The images whose patches the rows are."""
        return images

    def _in_order_of_taps(self, values: Tensor, *axes: int) -> Tensor:
        """Entries of patches along these dimensions, in the order of the weight's taps."""
        return values

    def _unfolded_second_moment(self, per_image: Tensor) -> Tensor:
        total = self.inputs.new_zeros(self.groups, self.input_size, self.input_size)
        common = constant_value(per_image)
        for first, last in self.chunks():
            columns = self._columns(first, last)
            w = per_image[first * self.folds : last * self.folds]
            scaled = columns if common is not None else columns * w
            total.baddbmm_(scaled.flatten(2), columns.flatten(2).mT)
        return total if common is None else total.mul_(common)


@dataclass(frozen=True, eq=False)
class TransposedConvolutionUse(ConvolutionUse):
    """A transposed convolution: h_ip is the patch of the zero-stuffed input that reaches output position p.

    W[o, (c, κ)] = weight[c, o, κ]; `padding` and `stride` are those of the transposed convolution.

    >>> use = TransposedConvolutionUse.from_call(torch.ones(5, 4, 3, 3), 5, (4, 6, 2, 2), stride=2)
    >>> use.input_rows().shape, use.output_rows(torch.ones(5, 6, 6, 6)).shape
    (torch.Size([5, 36, 1, 16]), torch.Size([5, 36, 1, 6]))
    """

    kind: ClassVar[str] = "transposed convolution"
    output_padding: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        return "transposed-convolution"

    @classmethod
    def from_call(
        cls,
        inputs: Tensor,
        examples: int,
        weight_shape: Sequence[int],
        stride: Setting = 1,
        padding: Setting | str = 0,
        dilation: Setting = 1,
        groups: int = 1,
        output_padding: Setting = 0,
    ) -> Self:
        """The use of a weight of this shape in `F.conv_transpose1d`, `2d` or `3d` with these arguments."""
        if isinstance(padding, str):
            raise ProblemError(
                f"A transposed convolution takes numbers as padding, as torch's do: given {padding!r}."
            )
        dims = len(_kernel(inputs, weight_shape))
        return cls(
            inputs,
            examples,
            _kernel(inputs, weight_shape),
            _per_dimension(stride, dims),
            tuple((p, p) for p in _per_dimension(padding, dims)),
            _per_dimension(dilation, dims),
            groups,
            _per_dimension(output_padding, dims),
        )

    @cached_property
    def _patches(self) -> Patches:
        ones = (1,) * len(self.kernel)
        settings = zip(self.padding, self.dilation, self.kernel, self.output_padding, strict=True)
        margins = tuple((d * (k - 1) - a, d * (k - 1) - b + extra) for (a, b), d, k, extra in settings)
        return Patches(self.kernel, ones, margins, self.dilation, self.groups)

    @cached_property
    def output_sizes(self) -> tuple[int, ...]:
        return self._patches.output_sizes(
            [(n - 1) * s + 1 for n, s in zip(self.inputs.shape[2:], self.stride, strict=True)]
        )

    def _patch_source(self, images: Tensor) -> Tensor:
        """The images with stride - 1 zeros between neighbours."""
        sizes = [(n - 1) * s + 1 for n, s in zip(images.shape[2:], self.stride, strict=True)]
        stuffed = images.new_zeros(*images.shape[:2], *sizes)
        stuffed[(slice(None), slice(None), *(slice(None, None, s) for s in self.stride))] = images
        return stuffed

    def _in_order_of_taps(self, values: Tensor, *axes: int) -> Tensor:
        """Tap κ of a transposed convolution reads what tap k-1-κ of the patch holds."""
        dims = len(self.kernel)
        for axis in axes:
            taps = values.unflatten(axis, (-1, *self.kernel))
            values = taps.flip(tuple(range(axis + 1, axis + 1 + dims))).flatten(axis, axis + dims)
        return values

    def _source(self, axis: int, place: Tensor) -> tuple[Tensor, Tensor]:
        taps = torch.arange(self.kernel[axis], device=place.device) * self.dilation[axis]
        stuffed = place[..., None] + self.padding[axis][0] - taps
        stride = self.stride[axis]
        return stuffed.div(stride, rounding_mode="floor"), stuffed % stride == 0

    def matrix(self, parameter: Tensor) -> Tensor:
        # (…, G · c, o, *kernel) → (…, G, o, c · taps)
        split = parameter.flatten(2 - self.inputs.ndim).unflatten(-3, (self.groups, -1))
        return split.transpose(-3, -2).flatten(-2)

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        split = matrix.unflatten(-1, (shape[0] // self.groups, -1)).transpose(-3, -2)
        return split.reshape(*matrix.shape[:-3], *shape)

    def image(self, parameter: Tensor) -> Tensor:
        padding = [first for first, _ in self.padding]
        options = self.stride, padding, self.dilation, True, self.output_padding, self.groups
        return self.output_rows(torch.convolution(self.inputs.to(parameter), parameter, None, *options))

    def _weight_gradient(self, images: Tensor, gradient: Tensor, groups: int) -> Tensor:
        shape = (images.shape[1], gradient.shape[1] // groups, *self.kernel)
        padding = [first for first, _ in self.padding]
        return _convolution_backward(
            gradient, images, shape, self.stride, padding, self.dilation, True, self.output_padding, groups
        )


def _convolution_backward(
    gradient: Tensor,
    images: Tensor,
    shape: tuple[int, ...],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of a weight of this shape; the weight's values have no part in it."""
    weight = images.new_empty(1).expand(shape)
    options = stride, padding, dilation, transposed, output_padding, groups
    mask = [False, True, False]  # of the gradients of images, weight and bias, the second
    return torch.ops.aten.convolution_backward(gradient, images, weight, None, *options, mask)[1]


def _equal_along_rows(values: Tensor) -> bool:
    """Whether every row of (rows, columns) repeats one number; without values, as most do, they are."""
    if values.stride(1) == 0 or not device.readable(values):
        return True
    return not deferring() and bool((values == values[:, :1]).all())


def _any_negative(values: Tensor) -> bool:
    if repeats_one(values):
        return False
    if deferring():
        require([values.amin()], lambda _: None, Limits("a weight of an example is negative", low=0))
        return False
    return device.readable(values) and bool((values < 0).any())


def _unravel(index: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The place of each index along every dimension; torch's own brings the sizes to the device each time."""
    places = []
    for size in reversed(sizes):
        places.append(index % size)
        index = index // size
    return places[::-1]


def _kernel(inputs: Tensor, weight_shape: Sequence[int]) -> tuple[int, ...]:
    kernel = tuple(weight_shape[2:])
    if inputs.ndim != 2 + len(kernel):
        raise ProblemError(
            f"A convolution with a weight of shape {tuple(weight_shape)} was given an input of shape "
            f"{tuple(inputs.shape)}: expected (batch, channels) and {len(kernel)} more dimensions."
        )
    return kernel


def _per_dimension(value: Setting, count: int) -> tuple[int, ...]:
    """A setting that may be one number or one per dimension, as one per dimension."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * count if len(numbers) == 1 else numbers


@dataclass(frozen=True)
class Patches:
    """Which entries of an image (channels, *sizes) a patch holds; `padding` is a pair per dimension.

    >>> patches = Patches(kernel=(3,), stride=(1,), padding=((1, 1),), dilation=(1,), groups=1)
    >>> patches.columns(torch.tensor([[[1.0, 2.0, 3.0]]])).squeeze()
    tensor([[0., 1., 2.],
            [1., 2., 3.],
            [2., 3., 0.]])
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def output_sizes(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """How many patches there are along every dimension of an image of these sizes."""
        settings = zip(sizes, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        return tuple((n + sum(pad) - d * (k - 1) - 1) // s + 1 for n, pad, d, k, s in settings)

    def padded(self, images: Tensor) -> Tensor:
        """The images with zeros around them, or without their margin where the padding is negative."""
        if not any(side for pad in self.padding for side in pad):
            return images
        return F.pad(images, [side for pad in reversed(self.padding) for side in pad])

    def columns(self, images: Tensor) -> Tensor:
        """All patches: (groups, channels of a group · taps, images, positions)."""
        dims = len(self.kernel)
        view = self._windows(self.padded(images), range(dims))
        # (b, C, *out, *kernel) → (C, *kernel, b, *out): long runs along the last dimension copy fast.
        order = (1, *range(2 + dims, 2 + 2 * dims), 0, *range(2, 2 + dims))
        size = images.shape[1] // self.groups * prod(self.kernel)
        return view.permute(order).reshape(self.groups, size, len(images), prod(view.shape[2 : 2 + dims]))

    def shared_axis(self, sizes: Iterable[int]) -> int | None:
        """The dimension whose products the taps can share: of those that allow it, the one with most taps."""
        outputs = self.output_sizes(sizes)
        axes = [
            axis
            for axis, (k, d, s) in enumerate(zip(self.kernel, self.dilation, self.stride, strict=True))
            if s == 1 and k > 1 and outputs[axis] > d * (k - 1)
        ]
        return max(axes, key=lambda axis: self.kernel[axis], default=None)

    def strip_entries(self, images: Tensor, axis: int) -> int:
        """How many entries `second_moment` unfolds of one image."""
        sizes = images.shape[2:]
        rows = sizes[axis] + sum(self.padding[axis])
        others = [n for other, n in enumerate(self.output_sizes(sizes)) if other != axis]
        return images.shape[1] * prod(self.kernel) // self.kernel[axis] * rows * prod(others)

    def second_moment(self, chunks: Iterable[Tensor], axis: int) -> Tensor:
        """Σ h hᵀ over all patches of all images, (groups, n, n), sharing the products along `axis`.

        `chunks` are batches of images; no more than one of them is unfolded at a time.
        """
        taps, dilation = self.kernel[axis], self.dilation[axis]
        # Sums by tap and δ; the rows that all taps have in common are filed under tap 0.
        common: dict[tuple[int, int], Tensor] = {}
        ends: dict[tuple[int, int], Tensor] = {}
        for images in chunks:
            strips = self._strips(images, axis)
            rows = strips.shape[2] - dilation * (taps - 1)
            for delta in range(taps):
                shift, last_start = dilation * delta, dilation * (taps - 1 - delta)
                _add_product(common, (0, delta), strips, last_start, rows, shift)
                for tap in range(taps - delta):
                    start = dilation * tap
                    _add_product(ends, (tap, delta), strips, start, last_start, shift)
                    _add_product(ends, (tap, delta), strips, rows, rows + start, shift)
        blocks = [[common[0, abs(b - a)] for b in range(taps)] for a in range(taps)]
        for (tap, delta), end in ends.items():
            blocks[tap][tap + delta] = common[0, delta] + end
        for a in range(taps):
            for b in range(a):
                blocks[a][b] = blocks[b][a].mT
        return self._with_taps_in_place(torch.stack([torch.stack(row) for row in blocks]), axis)

    def _strips(self, images: Tensor, axis: int) -> Tensor:
        """v[r] of all rows r along `axis`: (groups, channels of a group · other taps, rows, the rest)."""
        dims = len(self.kernel)
        others = [other for other in range(dims) if other != axis]
        view = self._windows(self.padded(images), others)
        # (b, C, *out, *other taps) → (C, *other taps, rows, b, *other out)
        order = (1, *range(2 + dims, 1 + 2 * dims), 2 + axis, 0, *(2 + other for other in others))
        size = images.shape[1] // self.groups * prod(self.kernel) // self.kernel[axis]
        return view.permute(order).reshape(self.groups, size, view.shape[2 + axis], -1)

    def _windows(self, padded: Tensor, axes: Iterable[int]) -> Tensor:
        """A view of (b, C, *sizes) with these dimensions cut into windows: (b, C, *positions, *taps)."""
        for axis in axes:
            d, k = self.dilation[axis], self.kernel[axis]
            padded = padded.unfold(2 + axis, d * (k - 1) + 1, self.stride[axis])[..., ::d]
        return padded

    def _with_taps_in_place(self, blocks: Tensor, axis: int) -> Tensor:
        """(k, k, groups, m, m) → (groups, n, n), the taps of `axis` where the kernel has them."""
        taps, groups, size = self.kernel[axis], blocks.shape[2], blocks.shape[3]
        after = prod(self.kernel[axis + 1 :])
        split = blocks.reshape(taps, taps, groups, size // after, after, size // after, after)
        return split.permute(2, 3, 0, 4, 5, 1, 6).reshape(groups, size * taps, size * taps)


def _add_product(
    totals: dict[tuple[int, int], Tensor],
    key: tuple[int, int],
    strips: Tensor,
    first: int,
    last: int,
    shift: int,
) -> None:
    """Add Σ_r v[r] v[r+shift]ᵀ over first ≤ r < last to `totals[key]`."""
    if first >= last:
        return
    left, right = strips[:, :, first:last].flatten(2), strips[:, :, first + shift : last + shift].flatten(2)
    if key in totals:
        totals[key].baddbmm_(left, right.mT)
    else:
        totals[key] = torch.bmm(left, right.mT)
