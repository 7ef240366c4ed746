"""Networks that work on sequences: a vision transformer, an MLP-Mixer and a causal character model.

Images become a sequence of patches, each projected by a convolution of stride `patch`. Every block adds two
branches to its input, each behind a norm N (`layer`, `rms` or `none`):

    h ← h + attention(N(h))      h ← h + W₂ σ(W₁ N(h))

with the ends of the branches drawn with g / sqrt(2 depth), so that depth does not add up variance. In a Mixer
the first branch is W₂ σ(W₁ ·) too, over the positions instead of the channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from curvlab.activations import by_name, module_of
from curvlab.architectures.base import InputKind, OpenEnds, Sizes, gain
from curvlab.architectures.convolutional import ImageNetwork, check_norm
from curvlab.exceptions import SpecError

__all__ = ["GPT", "MLPMixer", "SequenceNorm", "ViT"]

SequenceNorm = Literal["none", "layer", "rms"]
NORMS = ("none", "layer", "rms")


@dataclass(frozen=True)
class ViT(ImageNetwork):
    """A vision transformer: patches and a class token, blocks of attention and MLP, a head on the token.

    >>> net = ViT(width=192, depth=12, heads=3, patch=16, image=(3, 224, 224), outputs=1000)
    >>> sum(parameter.numel() for parameter in net.build(device="meta").parameters())
    5717416
    """

    patch: int = 4
    width: int = 64
    depth: int = 4
    heads: int = 4
    expansion: int = 4
    activation: str = "gelu"
    norm: SequenceNorm = "layer"

    def _check(self, sizes: Sizes) -> None:
        super()._check(sizes)
        _check_fields(self, ("patch", "width", "depth", "heads", "expansion"))
        _check_heads(self.width, self.heads)
        _check_patch(sizes.inputs, self.patch)

    def _network(self, sizes: Sizes) -> nn.Module:
        return _ViT(self, sizes)

    def _gains(self) -> Mapping[str, float]:
        return _branch_gains(self.activation, self.depth)


@dataclass(frozen=True)
class MLPMixer(ImageNetwork):
    """An MLP-Mixer: blocks that mix positions, then channels, the mean over positions, a head.

    >>> net = MLPMixer().build(device="meta")
    >>> net.blocks[0].tokens.fc1.weight.shape, net.blocks[0].channels.fc1.weight.shape
    (torch.Size([32, 64]), torch.Size([256, 64]))
    """

    patch: int = 4
    width: int = 64
    depth: int = 4
    token_width: int = 32
    expansion: int = 4
    activation: str = "gelu"
    norm: SequenceNorm = "layer"

    def _check(self, sizes: Sizes) -> None:
        super()._check(sizes)
        _check_fields(self, ("patch", "width", "depth", "token_width", "expansion"))
        _check_patch(sizes.inputs, self.patch)

    def _network(self, sizes: Sizes) -> nn.Module:
        return _Mixer(self, sizes)

    def _gains(self) -> Mapping[str, float]:
        return _branch_gains(self.activation, self.depth)


@dataclass(frozen=True)
class GPT(OpenEnds):
    """A causal model of tokens: (examples, length) to logits (examples, length, vocabulary).

    Position t sees the tokens up to t and predicts the next one, so an example has a loss for each of its
    tokens. `context` is the longest sequence; left open, it and the vocabulary are those of the data.
    `tied=true` makes the head's weight the embedding's.

    >>> net = GPT(context=16, vocabulary=28).build(seed=0)
    >>> net(torch.zeros(2, 16, dtype=torch.int64)).shape
    torch.Size([2, 16, 28])
    """

    context: int | None = None
    vocabulary: int | None = None
    width: int = 64
    depth: int = 4
    heads: int = 4
    expansion: int = 4
    activation: str = "gelu"
    norm: SequenceNorm = "layer"
    tied: bool = False

    input_kind: ClassVar[InputKind] = "tokens"
    inputs_field: ClassVar[str] = "context"
    default_sizes: ClassVar[Sizes] = Sizes((32,), 28)

    @property
    def _ends(self) -> tuple[tuple[int, ...] | None, int | None]:
        return None if self.context is None else (self.context,), self.vocabulary

    def _with_ends(self, inputs: tuple[int, ...], outputs: int) -> Self:
        self._check(Sizes(inputs, outputs))  # more than one dimension would be lost
        return replace(self, context=inputs[0], vocabulary=outputs)

    def _takes(self, given: tuple[int, ...], inputs: tuple[int, ...]) -> bool:
        return len(inputs) == 1 and inputs <= given

    def _check(self, sizes: Sizes) -> None:
        if len(sizes.inputs) != 1 or sizes.inputs[0] < 1:
            raise SpecError(
                f"GPT takes sequences of tokens, e.g. context=32; given inputs of "
                f"`{'-'.join(map(str, sizes.inputs))}`. Use the data set characters, or a network for images "
                "(cnn, resnet8, vit-tiny)"
            )
        if sizes.outputs < 1:
            raise SpecError(f"vocabulary is {sizes.outputs}; use 1 or more tokens")
        _check_fields(self, ("width", "depth", "heads", "expansion"))
        _check_heads(self.width, self.heads)

    def _network(self, sizes: Sizes) -> nn.Module:
        return _GPT(self, sizes)

    def _gains(self) -> Mapping[str, float]:
        return _branch_gains(self.activation, self.depth)


class _ViT(nn.Module):
    def __init__(self, plan: ViT, sizes: Sizes) -> None:
        super().__init__()
        channels, height, width = sizes.inputs
        positions = (height // plan.patch) * (width // plan.patch)
        self.patch = nn.Conv2d(channels, plan.width, plan.patch, plan.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, plan.width))
        self.position = nn.Parameter(torch.empty(1 + positions, plan.width))
        self.blocks = nn.Sequential(*(_AttentionBlock(plan, causal=False) for _ in range(plan.depth)))
        self.norm = _norm_of(plan.norm, plan.width)
        self.head = nn.Linear(plan.width, sizes.outputs)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).transpose(1, 2)
        token = self.class_token.expand(len(images), -1, -1)
        hidden = self.blocks(torch.cat([token, patches], dim=1) + self.position)
        logits: Tensor = self.head(self.norm(hidden[:, 0]))
        return logits


class _Mixer(nn.Module):
    def __init__(self, plan: MLPMixer, sizes: Sizes) -> None:
        super().__init__()
        channels, height, width = sizes.inputs
        positions = (height // plan.patch) * (width // plan.patch)
        self.patch = nn.Conv2d(channels, plan.width, plan.patch, plan.patch)
        self.blocks = nn.Sequential(*(_MixerBlock(plan, positions) for _ in range(plan.depth)))
        self.norm = _norm_of(plan.norm, plan.width)
        self.head = nn.Linear(plan.width, sizes.outputs)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks(self.patch(images).flatten(2).transpose(1, 2))
        logits: Tensor = self.head(self.norm(hidden).mean(1))
        return logits


class _GPT(nn.Module):
    def __init__(self, plan: GPT, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.outputs, plan.width)
        self.position = nn.Parameter(torch.empty(sizes.inputs[0], plan.width))
        self.blocks = nn.Sequential(*(_AttentionBlock(plan, causal=True) for _ in range(plan.depth)))
        self.norm = _norm_of(plan.norm, plan.width)
        self.head = nn.Linear(plan.width, sizes.outputs, bias=False)
        if plan.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.token(tokens) + self.position[: tokens.shape[1]])
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class _AttentionBlock(nn.Module):
    def __init__(self, plan: ViT | GPT, causal: bool) -> None:
        super().__init__()
        self.norm1 = _norm_of(plan.norm, plan.width)
        self.attention = _Attention(plan.width, plan.heads, causal)
        self.norm2 = _norm_of(plan.norm, plan.width)
        self.mlp = _MLP(plan.width, plan.expansion * plan.width, plan.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        result: Tensor = hidden + self.mlp(self.norm2(hidden))
        return result


class _MixerBlock(nn.Module):
    def __init__(self, plan: MLPMixer, positions: int) -> None:
        super().__init__()
        self.norm1 = _norm_of(plan.norm, plan.width)
        self.tokens = _MLP(positions, plan.token_width, plan.activation)
        self.norm2 = _norm_of(plan.norm, plan.width)
        self.channels = _MLP(plan.width, plan.expansion * plan.width, plan.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.tokens(self.norm1(hidden).transpose(1, 2)).transpose(1, 2)
        result: Tensor = hidden + self.channels(self.norm2(hidden))
        return result


class _Attention(nn.Module):
    """softmax(Q Kᵀ / √d) V in each head, with queries, keys and values from one Linear layer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        examples, length, width = hidden.shape
        split = self.qkv(hidden).reshape(examples, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        result: Tensor = self.projection(mixed.transpose(1, 2).reshape(examples, length, width))
        return result


class _MLP(nn.Module):
    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.activation = module_of(activation)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.fc2(self.activation(self.fc1(hidden)))
        return result


def _norm_of(kind: SequenceNorm, width: int) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(width)
    return nn.RMSNorm(width) if kind == "rms" else nn.Identity()


def _branch_gains(activation: str, depth: int) -> Mapping[str, float]:
    share = sqrt(1 / (2 * depth))
    return {"*.fc2.weight": gain(activation) * share, "*.projection.weight": share}


def _check_fields(plan: ViT | MLPMixer | GPT, names: tuple[str, ...]) -> None:
    by_name(plan.activation)
    check_norm(plan.norm, NORMS)
    for name in names:
        value = getattr(plan, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError(f"{name} is {value}; use 1 or more")


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise SpecError(f"width {width} does not divide into {heads} heads; use e.g. width={heads * 16}")


def _check_patch(image: tuple[int, ...], patch: int) -> None:
    _, height, width = image
    if height % patch or width % patch:
        raise SpecError(
            f"an image of {height}×{width} does not divide into patches of {patch}×{patch}; set patch= to a "
            "divisor of both"
        )
