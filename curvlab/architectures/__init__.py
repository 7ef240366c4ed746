"""Networks by name: fully-connected, convolutional, residual, transformers and a character model.

A name is a frozen dataclass whose fields are the choices, `resnet8[norm=group,activation=relu]`; `build`
makes a network of it, from torch alone. `input_kind` says what it takes: rows (examples, features), images
(examples, channels, height, width) or tokens (examples, length); the batch is always the first dimension.

>>> network = architecture("resnet8[norm=group]").build(seed=0)
>>> import torch
>>> network(torch.zeros(2, 3, 32, 32)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

import re

from curvlab import specs
from curvlab.architectures.base import Architecture, InputKind, Sizes
from curvlab.architectures.convolutional import CNN, LeNet, ResNet
from curvlab.architectures.fcnn import FCNN, INITIALISERS, Autoencoder
from curvlab.architectures.sequences import GPT, MLPMixer, ViT
from curvlab.exceptions import SpecError, unknown_name
from curvlab.specs import Registry

__all__ = [
    "CNN",
    "FCNN",
    "GPT",
    "INITIALISERS",
    "Architecture",
    "Autoencoder",
    "InputKind",
    "LeNet",
    "MLPMixer",
    "ResNet",
    "Sizes",
    "ViT",
    "architecture",
    "architectures",
]

architectures: Registry[Architecture] = Registry("architecture")
_HIDDEN = (1024, 512, 256, 128, 64, 32, 16)
architectures.register("fcnn", FCNN, "any fully-connected network, by its widths")
architectures.register(
    "cifar10-fcnn", FCNN, "the paper's network for 32×32×3 images", widths=(3072, *_HIDDEN, 10)
)
architectures.register(
    "imagenet10-fcnn", FCNN, "the paper's network for 224×224×3 images", widths=(150_528, *_HIDDEN, 10)
)
architectures.register("digits-fcnn", FCNN, "a small network for the digits", widths=(64, 32, 16, 10))
architectures.register("autoencoder", Autoencoder, "symmetric widths, its targets are its inputs")
architectures.register("lenet", LeNet, "LeNet-5: two convolutions, three Linear layers")
architectures.register("cnn", CNN, "3×3 convolutions with strides, no residuals")
architectures.register("resnet", ResNet, "any residual network of basic blocks, by its widths and blocks")
architectures.register(
    "resnet8",
    ResNet,
    "a small residual network for 32×32 images, 78 thousand parameters",
    widths=(16, 32, 64),
    blocks=(1, 1, 1),
)
architectures.register(
    "resnet18",
    ResNet,
    "ResNet-18 in its form for CIFAR-10, 11.2 million parameters",
    widths=(64, 128, 256, 512),
    blocks=(2, 2, 2, 2),
    activation="relu",
    norm="batch",
)
architectures.register("vit-tiny", ViT, "a small vision transformer")
architectures.register("mlp-mixer", MLPMixer, "a small MLP-Mixer")
architectures.register("gpt-nano", GPT, "a causal character model, a prediction for every token")


def architecture(spec: str | Architecture) -> Architecture:
    """The architecture of a spec: a name, `name[key=value,…]`, or bare widths for an `fcnn`.

    >>> architecture("20-10-5").widths
    (20, 10, 5)
    """
    if isinstance(spec, str) and re.fullmatch(r"[\d-]+", spec.strip()):
        return FCNN(widths=_parse_widths(spec.strip()))
    if isinstance(spec, str) and (name := specs.parse(spec).name) not in architectures.names():
        known = unknown_name("architecture", name, architectures.names())
        raise SpecError(f"{known} Widths joined by dashes, such as 64-32-10, are an architecture too.")
    return architectures.make(spec)


def _parse_widths(text: str) -> tuple[int, ...]:
    parts = text.split("-")
    if "" in parts:
        raise SpecError(f"widths `{text}` are not positive integers joined by dashes; write e.g. 64-32-10")
    return tuple(int(part) for part in parts)
