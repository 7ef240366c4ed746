"""Fully-connected networks by name and by widths.

`fcnn[widths=n₀-n₁-…-n_k,activation=σ]` is the network h⁰ = x, zᵗ = Wᵗ hᵗ⁻¹ + bᵗ, hᵗ = σ(zᵗ) for
t < k, with output zᵏ: an `nn.Sequential` of Linear, activation, …, Linear, whose parameters are
called `0.weight`, `0.bias`, `2.weight`, … It starts with a Linear, so inputs come flattened,
(examples, n₀), as the data sets of `curvlab.data` give them.

Xavier initialisation, gain 1: W ~ U(-a, a) with a = sqrt(6 / (n_{t-1} + n_t)), or
W ~ N(0, 2 / (n_{t-1} + n_t)); biases zero. Weights are drawn on the CPU in float32 from a generator
of their own, so one seed means one network on every device and in every dtype (up to its
rounding), and torch's global random state stays as it was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from curvlab import specs
from curvlab.activations import by_name, module_of
from curvlab.exceptions import SpecError
from curvlab.measure.device import readable
from curvlab.registry import Registry

__all__ = ["FCNN", "Architecture", "Autoencoder", "architecture", "architectures"]

INITIALISERS = {"xavier-uniform": nn.init.xavier_uniform_, "xavier-normal": nn.init.xavier_normal_}


@dataclass(frozen=True)
class FCNN:
    """A fully-connected network, by the widths of its layers, the input's first.

    >>> FCNN(widths=(4, 3, 2), activation="tanh").build(seed=0)
    Sequential(
      (0): Linear(in_features=4, out_features=3, bias=True)
      (1): Tanh()
      (2): Linear(in_features=3, out_features=2, bias=True)
    )
    """

    widths: tuple[int, ...] = (64, 32, 16, 10)
    activation: str = "sigmoid"
    bias: bool = True
    init: Literal["xavier-uniform", "xavier-normal"] = "xavier-uniform"

    reconstructs: ClassVar[bool] = False
    """Whether the network's targets are its inputs."""

    def __post_init__(self) -> None:
        _check_widths(self.widths)
        by_name(self.activation)
        if self.init not in INITIALISERS:
            raise SpecError(f"init is `{self.init}`; use one of {', '.join(INITIALISERS)}")

    def build(
        self,
        seed: int = 0,
        *,
        inputs: int | None = None,
        outputs: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> nn.Sequential:
        """A fresh network with weights drawn by `seed`; `inputs` and `outputs` replace the end widths.

        On the meta device, and under a fake tensor mode, nothing is drawn.

        >>> FCNN(widths=(64, 8, 10)).build(inputs=20, device="meta")[0].weight.shape
        torch.Size([8, 20])
        """
        widths = self._fitted(inputs, outputs)
        generator = torch.Generator().manual_seed(seed)
        modules: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            weight = self._weight(fan_in, fan_out, generator, dtype, device)
            modules += [_linear(weight, self.bias), module_of(self.activation)]
        return nn.Sequential(*modules[:-1])

    def _fitted(self, inputs: int | None, outputs: int | None) -> tuple[int, ...]:
        first = self.widths[0] if inputs is None else inputs
        last = self.widths[-1] if outputs is None else outputs
        widths = (first, *self.widths[1:-1], last)
        _check_widths(widths)
        return widths

    def _weight(
        self,
        fan_in: int,
        fan_out: int,
        generator: torch.Generator,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> Tensor:
        final = torch.empty(0, dtype=dtype, device=device)
        if not readable(final):
            return final.new_empty(fan_out, fan_in)
        drawn = torch.empty(fan_out, fan_in, dtype=torch.float32, device="cpu")
        return INITIALISERS[self.init](drawn, generator=generator).to(final)


@dataclass(frozen=True)
class Autoencoder(FCNN):
    """A network that reconstructs its input (train it with `mse`); its widths are symmetric.

    >>> Autoencoder(widths=(6, 3, 6)).build(inputs=9)[-1].out_features
    9
    """

    widths: tuple[int, ...] = (64, 32, 16, 8, 16, 32, 64)

    reconstructs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.widths != self.widths[::-1]:
            mirrored = self.widths + self.widths[-2::-1]
            raise SpecError(
                f"widths of an autoencoder read the same from both ends, {_text(self.widths)} do not; "
                f"for that encoder write widths={_text(mirrored)}"
            )

    def _fitted(self, inputs: int | None, outputs: int | None) -> tuple[int, ...]:
        ends = {width for width in (inputs, outputs) if width is not None}
        if len(ends) > 1:
            raise SpecError(
                f"an autoencoder has as many outputs as inputs; {inputs} inputs and {outputs} outputs "
                "were asked for: use the inputs as targets, or an `fcnn`"
            )
        end = ends.pop() if ends else None
        return super()._fitted(end, end)


Architecture = FCNN

architectures: Registry[FCNN] = Registry("architecture")
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


def architecture(spec: str | FCNN) -> FCNN:
    """The architecture of a spec: a name, `name[key=value,…]`, or bare widths for an `fcnn`.

    >>> architecture("20-10-5").widths
    (20, 10, 5)
    """
    if isinstance(spec, str) and re.fullmatch(r"[\d-]+", spec.strip()):
        return FCNN(widths=_parse_widths(spec.strip()))
    if isinstance(spec, str) and (name := specs.parse(spec).name) not in architectures.names():
        known = specs.unknown("architecture", name, architectures.names())
        raise SpecError(f"{known} Widths joined by dashes, such as 64-32-10, are an architecture too.")
    return architectures.make(spec)


def _linear(weight: Tensor, bias: bool) -> nn.Linear:
    # made on the meta device: nn.Linear's own initialisation would advance the global random state
    fan_out, fan_in = weight.shape
    linear = nn.Linear(fan_in, fan_out, bias=bias, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias:
        linear.bias = nn.Parameter(weight.new_zeros(fan_out))
    return linear


def _parse_widths(text: str) -> tuple[int, ...]:
    parts = text.split("-")
    if "" in parts:
        raise SpecError(f"widths `{text}` are not positive integers joined by dashes; write e.g. 64-32-10")
    return tuple(int(part) for part in parts)


def _check_widths(widths: tuple[int, ...]) -> None:
    if len(widths) < 2:
        raise SpecError(
            f"a network needs at least two widths, inputs and outputs; given `{_text(widths)}`. "
            "Write e.g. widths=64-32-10"
        )
    if any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in widths):
        raise SpecError(f"widths are positive integers; given `{_text(widths)}`. Write e.g. widths=64-32-10")


def _text(widths: tuple[int, ...]) -> str:
    return "-".join(str(width) for width in widths)
