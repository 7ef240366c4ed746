"""Convolutional networks for images: LeNet-5, a plain CNN and residual networks.

All are batch first, (examples, channels, height, width), and end in a Linear layer called `head`. A norm
stands behind each convolution, which then has no bias of its own:

    none     no norm; convolutions have biases
    group    GroupNorm of (at most) 8 groups
    layer    LayerNorm over the channels of each position, as in ConvNeXt
    batch    BatchNorm; curvature needs it in eval mode, where it is an affine map
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from typing import ClassVar, Literal, Self

from torch import Tensor, nn

from curvlab.activations import by_name, module_of
from curvlab.architectures.base import InputKind, OpenEnds, Sizes, gain
from curvlab.exceptions import SpecError

__all__ = ["CNN", "ImageNetwork", "LeNet", "Norm", "ResNet"]

Norm = Literal["none", "group", "layer", "batch"]
NORMS = ("none", "group", "layer", "batch")
GROUPS = 8


@dataclass(frozen=True)
class ImageNetwork(OpenEnds):
    """What networks for images share: the image (channels, height, width) and the outputs.

    Left open, both are those of the data, or 3×32×32 and 10 where there are none.
    """

    image: tuple[int, ...] | None = None
    outputs: int | None = None

    input_kind: ClassVar[InputKind] = "images"
    inputs_field: ClassVar[str] = "image"
    default_sizes: ClassVar[Sizes] = Sizes((3, 32, 32), 10)

    @property
    def _ends(self) -> tuple[tuple[int, ...] | None, int | None]:
        return self.image, self.outputs

    def _with_ends(self, inputs: tuple[int, ...], outputs: int) -> Self:
        return replace(self, image=inputs, outputs=outputs)

    def _check(self, sizes: Sizes) -> None:
        if len(sizes.inputs) != 3 or not _all_positive(sizes.inputs):
            raise SpecError(
                f"{type(self).__name__} takes images of channels, height and width, e.g. 3-32-32; given "
                f"inputs of `{'-'.join(map(str, sizes.inputs))}`. Use a data set of images (digits, cifar10, "
                "synthetic-images), or an fcnn for rows of features"
            )
        if not _all_positive((sizes.outputs,)):
            raise SpecError(f"outputs is {sizes.outputs}; use 1 or more")


@dataclass(frozen=True)
class LeNet(ImageNetwork):
    """LeNet-5: two 5×5 convolutions with average pooling, then three Linear layers.

    `padding=same` keeps the height and width, so that 8×8 images pass; LeCun's own is `padding=valid`.

    >>> net = LeNet(image=(1, 32, 32), padding="valid").build(device="meta")
    >>> sum(parameter.numel() for parameter in net.parameters())
    61706
    """

    widths: tuple[int, ...] = (6, 16, 120, 84)
    activation: str = "tanh"
    norm: Norm = "none"
    padding: Literal["same", "valid"] = "same"

    def _check(self, sizes: Sizes) -> None:
        super()._check(sizes)
        by_name(self.activation)
        check_widths(self.widths, "6-16-120-84", length=4)
        check_norm(self.norm, NORMS)
        if self.padding not in ("same", "valid"):
            raise SpecError(f"padding is `{self.padding}`; use same or valid")
        height, width = (self._side_behind_pooling(side) for side in sizes.inputs[1:])
        if height < 1 or width < 1:
            raise SpecError(
                f"an image of {sizes.inputs[1]}×{sizes.inputs[2]} is too small for two poolings"
                f"{' and padding=valid; use padding=same' if self.padding == 'valid' else ''}"
            )

    def _side_behind_pooling(self, side: int) -> int:
        """The side of the image behind both convolutions and both poolings."""
        lost = 4 if self.padding == "valid" else 0
        return ((side - lost) // 2 - lost) // 2

    def _network(self, sizes: Sizes) -> nn.Module:
        height, width = (self._side_behind_pooling(side) for side in sizes.inputs[1:])
        return _LeNet(self, sizes, height * width)

    def _gains(self) -> Mapping[str, float]:
        return dict.fromkeys(("conv2.weight", "fc?.weight", "head.weight"), gain(self.activation))


@dataclass(frozen=True)
class CNN(ImageNetwork):
    """3×3 convolutions, all but the first with stride 2, the mean over positions, and a Linear head.

    >>> CNN(widths=(4, 8)).build(device="meta")
    Sequential(
      (conv1): Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
      (norm1): Identity()
      (act1): SiLU()
      (conv2): Conv2d(4, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1))
      (norm2): Identity()
      (act2): SiLU()
      (pool): AdaptiveAvgPool2d(output_size=1)
      (flatten): Flatten(start_dim=1, end_dim=-1)
      (head): Linear(in_features=8, out_features=10, bias=True)
    )
    """

    widths: tuple[int, ...] = (16, 32, 64)
    activation: str = "silu"
    norm: Norm = "none"

    def _check(self, sizes: Sizes) -> None:
        super()._check(sizes)
        by_name(self.activation)
        check_widths(self.widths, "16-32-64")
        check_norm(self.norm, NORMS)

    def _network(self, sizes: Sizes) -> nn.Module:
        layers: dict[str, nn.Module] = {}
        for index, (before, after) in enumerate(pairwise((sizes.inputs[0], *self.widths)), start=1):
            layers[f"conv{index}"] = _conv3(before, after, 1 if index == 1 else 2, self.norm)
            layers[f"norm{index}"] = norm_of(self.norm, after)
            layers[f"act{index}"] = module_of(self.activation)
        layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        return nn.Sequential(OrderedDict(layers, head=nn.Linear(self.widths[-1], sizes.outputs)))

    def _gains(self) -> Mapping[str, float]:
        behind = gain(self.activation)
        return {"conv1.weight": 1.0, "conv*.weight": behind, "head.weight": behind}


@dataclass(frozen=True)
class ResNet(ImageNetwork):
    """A residual network in its CIFAR form: a 3×3 convolution, stages of basic blocks, a Linear head.

    A block is h ↦ σ(N(W₂ ∗ σ(N(W₁ ∗ h))) + s(h)), N the norm and s the identity, or a 1×1 convolution with
    its norm where the shape changes; every stage but the first halves height and width.

    >>> net = ResNet(widths=(64, 128, 256, 512), blocks=(2, 2, 2, 2), norm="batch").build(device="meta")
    >>> sum(parameter.numel() for parameter in net.parameters())
    11173962
    """

    widths: tuple[int, ...] = (16, 32, 64)
    blocks: tuple[int, ...] = (1, 1, 1)
    activation: str = "silu"
    norm: Norm = "none"

    def _check(self, sizes: Sizes) -> None:
        super()._check(sizes)
        by_name(self.activation)
        check_widths(self.widths, "16-32-64")
        check_norm(self.norm, NORMS)
        if len(self.blocks) != len(self.widths) or not _all_positive(self.blocks):
            raise SpecError(
                f"blocks are {'-'.join(map(str, self.blocks))} for {len(self.widths)} stages of widths "
                f"{'-'.join(map(str, self.widths))}; give a positive number for each, e.g. blocks="
                f"{'-'.join(['2'] * len(self.widths))}"
            )

    def _network(self, sizes: Sizes) -> nn.Module:
        return _ResNet(self, sizes)

    def _gains(self) -> Mapping[str, float]:
        # With g² - 1 at its end a branch adds to the shortcut's 1/g² what makes the sum's variance 1.
        behind = gain(self.activation)
        end = max(behind**2 - 1, 1.0) ** 0.5
        return {"stage*.conv1.weight": behind, "stage*.conv2.weight": end, "head.weight": behind}


class _LeNet(nn.Module):
    def __init__(self, plan: LeNet, sizes: Sizes, positions: int) -> None:
        super().__init__()
        first, second, third, fourth = plan.widths
        bias, padding = plan.norm == "none", 2 if plan.padding == "same" else 0
        self.conv1 = nn.Conv2d(sizes.inputs[0], first, 5, padding=padding, bias=bias)
        self.norm1 = norm_of(plan.norm, first)
        self.conv2 = nn.Conv2d(first, second, 5, padding=padding, bias=bias)
        self.norm2 = norm_of(plan.norm, second)
        self.pool = nn.AvgPool2d(2)
        self.fc1 = nn.Linear(second * positions, third)
        self.fc2 = nn.Linear(third, fourth)
        self.head = nn.Linear(fourth, sizes.outputs)
        self.activation = module_of(plan.activation)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.pool(self.activation(self.norm1(self.conv1(images))))
        hidden = self.pool(self.activation(self.norm2(self.conv2(hidden))))
        hidden = self.activation(self.fc1(hidden.flatten(1)))
        logits: Tensor = self.head(self.activation(self.fc2(hidden)))
        return logits


class _ResNet(nn.Module):
    def __init__(self, plan: ResNet, sizes: Sizes) -> None:
        super().__init__()
        self.conv1 = _conv3(sizes.inputs[0], plan.widths[0], 1, plan.norm)
        self.norm1 = norm_of(plan.norm, plan.widths[0])
        self.activation = module_of(plan.activation)
        before, self.depth = plan.widths[0], len(plan.widths)
        for index, (after, count) in enumerate(zip(plan.widths, plan.blocks, strict=True), start=1):
            first = _BasicBlock(before, after, 1 if index == 1 else 2, plan)
            rest = (_BasicBlock(after, after, 1, plan) for _ in range(count - 1))
            self.add_module(f"stage{index}", nn.Sequential(first, *rest))
            before = after
        self.head = nn.Linear(before, sizes.outputs)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.activation(self.norm1(self.conv1(images)))
        for index in range(1, self.depth + 1):
            hidden = self.get_submodule(f"stage{index}")(hidden)
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class _BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int, plan: ResNet) -> None:
        super().__init__()
        self.conv1 = _conv3(before, after, stride, plan.norm)
        self.norm1 = norm_of(plan.norm, after)
        self.conv2 = _conv3(after, after, 1, plan.norm)
        self.norm2 = norm_of(plan.norm, after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            conv = nn.Conv2d(before, after, 1, stride, bias=plan.norm == "none")
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=norm_of(plan.norm, after)))
        self.activation = module_of(plan.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(self.activation(self.norm1(self.conv1(hidden)))))
        result: Tensor = self.activation(branch + self.shortcut(hidden))
        return result


class _ChannelNorm(nn.Module):
    """LayerNorm over the channels of each position of (examples, channels, height, width)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.norm(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return result


def norm_of(kind: Norm, channels: int) -> nn.Module:
    """A norm for images of so many channels; nothing for `none`."""
    if kind == "group":
        return nn.GroupNorm(gcd(GROUPS, channels), channels)
    if kind == "layer":
        return _ChannelNorm(channels)
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.Identity()


def _conv3(before: int, after: int, stride: int, norm: Norm) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride, padding=1, bias=norm == "none")


def check_norm(norm: str, known: tuple[str, ...]) -> None:
    """Refuse a norm that the architecture does not have."""
    if norm not in known:
        raise SpecError(f"norm is `{norm}`; use one of {', '.join(known)}")


def check_widths(widths: tuple[int, ...], example: str, length: int | None = None) -> None:
    """Refuse widths that are no positive integers, or not as many as `length`."""
    if not widths or not _all_positive(widths) or (length is not None and len(widths) != length):
        wanted = "positive integers" if length is None else f"{length} positive integers"
        raise SpecError(f"widths are {wanted}; given `{'-'.join(map(str, widths))}`. Write e.g. {example}")


def _all_positive(values: tuple[int, ...]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values)
