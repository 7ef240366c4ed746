"""Fully-connected networks by their widths.

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

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from curvlab.activations import by_name, module_of
from curvlab.architectures.base import Architecture, InputKind, Sizes
from curvlab.exceptions import SpecError
from curvlab.measure.device import physical_memory, readable

__all__ = ["FCNN", "INITIALISERS", "Autoencoder"]

INITIALISERS = {"xavier-uniform": nn.init.xavier_uniform_, "xavier-normal": nn.init.xavier_normal_}
LARGEST_MATRIX = 2**58
"""Weights of a matrix whose bytes still count in 64 bits, also in sums over layers."""


@dataclass(frozen=True)
class FCNN(Architecture):
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

    input_kind: ClassVar[InputKind] = "rows"

    def __post_init__(self) -> None:
        _check_widths(self.widths)
        by_name(self.activation)
        if self.init not in INITIALISERS:
            raise SpecError(f"init is `{self.init}`; use one of {', '.join(INITIALISERS)}")

    @property
    def sizes(self) -> Sizes:
        """The widths at both ends."""
        return Sizes((self.widths[0],), self.widths[-1])

    def build(
        self,
        seed: int = 0,
        *,
        inputs: int | tuple[int, ...] | None = None,
        outputs: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> nn.Sequential:
        """A fresh network with weights drawn by `seed`; `inputs` and `outputs` replace the end widths.

        A shape as `inputs` counts with all its features, as the network takes it flattened. On the meta
        device, and under a fake tensor mode, nothing is drawn.

        >>> FCNN(widths=(64, 8, 10)).build(inputs=20, device="meta")[0].weight.shape
        torch.Size([8, 20])
        """
        features = prod(inputs) if isinstance(inputs, tuple) else inputs
        widths = self._fit_widths(features, outputs)
        if readable(torch.empty(0, dtype=dtype, device=device)):
            _check_memory(widths)
        generator = torch.Generator().manual_seed(seed)
        modules: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            weight = self._weight(fan_in, fan_out, generator, dtype, device)
            modules += [_linear(weight, self.bias), module_of(self.activation)]
        return nn.Sequential(*modules[:-1])

    def _fit_widths(self, inputs: int | None, outputs: int | None) -> tuple[int, ...]:
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

    def _fit_widths(self, inputs: int | None, outputs: int | None) -> tuple[int, ...]:
        ends = {width for width in (inputs, outputs) if width is not None}
        if len(ends) > 1:
            raise SpecError(
                f"an autoencoder has as many outputs as inputs; {inputs} inputs and {outputs} outputs "
                "were asked for: use the inputs as targets, or an `fcnn`"
            )
        end = ends.pop() if ends else None
        return super()._fit_widths(end, end)


def _linear(weight: Tensor, bias: bool) -> nn.Linear:
    # made on the meta device: nn.Linear's own initialisation would advance the global random state
    fan_out, fan_in = weight.shape
    linear = nn.Linear(fan_in, fan_out, bias=bias, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias:
        linear.bias = nn.Parameter(weight.new_zeros(fan_out))
    return linear


def _check_widths(widths: tuple[int, ...]) -> None:
    if len(widths) < 2:
        raise SpecError(
            f"a network needs at least two widths, inputs and outputs; given `{_text(widths)}`. "
            "Write e.g. widths=64-32-10"
        )
    if any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in widths):
        raise SpecError(f"widths are positive integers; given `{_text(widths)}`. Write e.g. widths=64-32-10")

    largest = max(fan_in * fan_out for fan_in, fan_out in pairwise(widths))
    if largest > LARGEST_MATRIX:
        raise SpecError(
            f"widths `{_text(widths)}` have a matrix of {largest:.3g} weights, {4 * largest:.3g} bytes: no "
            f"computer holds it. Use smaller widths"
        )


def _check_memory(widths: tuple[int, ...]) -> None:
    """Refuse weights that do not fit this machine: the system may grant them, and then end the process."""
    needed, there = 4 * sum(fan_in * fan_out for fan_in, fan_out in pairwise(widths)), physical_memory()
    if there is not None and needed > there:
        raise SpecError(
            f"widths `{_text(widths)}` take {needed / 1e9:.1f} GB of weights, and this machine has "
            f"{there / 1e9:.1f} GB. Use smaller widths; `curvlab plan` says what would fit"
        )


def _text(widths: tuple[int, ...]) -> str:
    return "-".join(str(width) for width in widths)
