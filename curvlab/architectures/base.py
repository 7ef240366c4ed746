"""What an architecture is: a frozen configuration that builds networks, and how their weights are drawn.

The weights of layers other than those of an `fcnn`: W ~ N(0, g²/n), n the entries of one output's slice of W
(the fan-in of a Linear or a convolution, the width of an embedding), g = 1 unless the architecture says
otherwise. Behind an activation σ it takes the gain that keeps the variance, g² = 1 / E[σ(z)²] with
z ~ N(0, 1): √2 for ReLU, 1.68 for SiLU. Biases are zero, scales of norms one.

Weights are drawn on the CPU in float32 from a generator of their own, parameter after parameter, so one seed
means one network on every device and in every dtype (up to its rounding), and torch's global random state
stays as it was. Norms draw nothing, so they leave the other weights as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from curvlab.activations import module_of
from curvlab.exceptions import SpecError
from curvlab.measure.device import readable

__all__ = ["Architecture", "InputKind", "OpenEnds", "Sizes", "gain", "initialise"]

InputKind = Literal["rows", "images", "tokens"]
"""What a network takes: (examples, features), (examples, channels, height, width), (examples, length)."""

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm2d)


class Sizes(NamedTuple):
    """The shape of one input, and how many outputs each prediction has."""

    inputs: tuple[int, ...]
    outputs: int


class Architecture(ABC):
    """A network by its settings; subclasses are frozen dataclasses with a field `activation`.

    >>> from curvlab.architectures import architecture
    >>> architecture("resnet8").input_kind, architecture("digits-fcnn").sizes
    ('images', Sizes(inputs=(64,), outputs=10))
    """

    input_kind: ClassVar[InputKind]

    reconstructs: ClassVar[bool] = False
    """Whether the network's targets are its inputs."""

    @property
    @abstractmethod
    def sizes(self) -> Sizes:
        """What `build` takes and gives where it is told nothing else."""

    @property
    def is_open(self) -> bool:
        """Whether an end is left open, to be taken from the data."""
        return False

    def fit(self, inputs: tuple[int, ...], outputs: int) -> Self:
        """The same architecture with the ends that it leaves open taken from the data."""
        return self

    @abstractmethod
    def build(
        self,
        seed: int = 0,
        *,
        inputs: int | tuple[int, ...] | None = None,
        outputs: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> nn.Module:
        """A fresh network with weights drawn by `seed`; on the meta device, and as fake tensors, none are."""


@dataclass(frozen=True)
class OpenEnds(Architecture):
    """An architecture whose ends may be left open, to be taken from the data."""

    inputs_field: ClassVar[str]
    default_sizes: ClassVar[Sizes]

    def __post_init__(self) -> None:
        self._check(self.sizes)

    @property
    def sizes(self) -> Sizes:
        """The ends that are set, and the defaults for those left open."""
        return self._sizes(*self._ends)

    @property
    @abstractmethod
    def _ends(self) -> tuple[tuple[int, ...] | None, int | None]:
        """Inputs and outputs as they are set."""

    @property
    def is_open(self) -> bool:
        """Whether inputs or outputs are not set."""
        return None in self._ends

    def _sizes(self, inputs: tuple[int, ...] | None, outputs: int | None) -> Sizes:
        default = self.default_sizes
        return Sizes(
            default.inputs if inputs is None else inputs, default.outputs if outputs is None else outputs
        )

    def fit(self, inputs: tuple[int, ...], outputs: int) -> Self:
        """The same with its open ends taken from the data, whose inputs must fit those that are set."""
        given, classes = self._ends
        if given is not None and not self._takes(given, inputs):
            raise SpecError(
                f"{type(self).__name__} has {self.inputs_field}={_text(given)} and the data have "
                f"{_text(inputs)}; leave {self.inputs_field} out, and it is taken from the data"
            )
        return self._with_ends(given or inputs, outputs if classes is None else classes)

    def _takes(self, given: tuple[int, ...], inputs: tuple[int, ...]) -> bool:
        return given == inputs

    def build(
        self,
        seed: int = 0,
        *,
        inputs: int | tuple[int, ...] | None = None,
        outputs: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> nn.Module:
        """A fresh network with weights drawn by `seed`; `inputs` (a shape) and `outputs` replace its ends.

        On the meta device, and under a fake tensor mode, nothing is drawn.

        >>> from curvlab.architectures import architecture
        >>> architecture("cnn").build(inputs=(1, 8, 8), device="meta").conv1.weight.shape
        torch.Size([16, 1, 3, 3])
        """
        shape = (inputs,) if isinstance(inputs, int) else inputs
        own = self.sizes
        sizes = Sizes(own.inputs if shape is None else shape, own.outputs if outputs is None else outputs)
        self._check(sizes)
        # On the meta device, as a module's own initialisation would advance the global random state, and
        # outside of any fake mode, where a BatchNorm cannot be made there.
        with unset_fake_temporarily(), torch.device("meta"):
            network = self._network(sizes)
        initialise(network, seed, self._gains, dtype=dtype, device=device)
        return network

    @abstractmethod
    def _with_ends(self, inputs: tuple[int, ...], outputs: int) -> Self:
        """The same with these ends."""

    @abstractmethod
    def _check(self, sizes: Sizes) -> None:
        """Refuse settings and sizes that make no network."""

    @abstractmethod
    def _network(self, sizes: Sizes) -> nn.Module:
        """The network of these sizes; called where tensors are on the meta device."""

    def _gains(self) -> Mapping[str, float]:
        """g by a pattern of the parameter's name (`stage*.conv1.weight`), the first that fits; else 1."""
        return {}


def gain(activation: str) -> float:
    """g with g² E[σ(z)²] = 1 for z ~ N(0, 1): what keeps the variance of a layer behind σ.

    >>> round(gain("relu") ** 2, 6), round(gain("silu"), 2)
    (2.0, 1.68)
    """
    z = torch.linspace(-12, 12, 24_001, dtype=torch.float64, device="cpu")
    density = torch.exp(-(z**2) / 2)
    return float((density.sum() / (density * module_of(activation)(z).square()).sum()).sqrt())


def initialise(
    network: nn.Module,
    seed: int,
    gains: Callable[[], Mapping[str, float]] = dict,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Give the network, made on the meta device, parameters and buffers with values, in place.

    `gains` is a function that returns {pattern of a parameter's name: g}, called where values are drawn.

    >>> with torch.device("meta"):
    ...     network = nn.Linear(3, 2)
    >>> initialise(network, seed=0)
    >>> network.bias
    Parameter containing:
    tensor([0., 0.], requires_grad=True)
    """
    final = torch.empty(0, dtype=dtype, device=device)
    patterns = gains() if readable(final) else {}
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, nn.Parameter] = {}  # a tied parameter is drawn once
    for prefix, module in network.named_modules():
        for name, parameter in _own_tensors(module._parameters):
            if id(parameter) not in made:
                full = f"{prefix}.{name}" if prefix else name
                scale = next((g for pattern, g in patterns.items() if fnmatchcase(full, pattern)), 1.0)
                value = _value(module, name, parameter.shape, scale, generator, final)
                made[id(parameter)] = nn.Parameter(value)
            setattr(module, name, made[id(parameter)])
        for name, buffer in _own_tensors(module._buffers):
            kind = final.dtype if buffer.is_floating_point() else buffer.dtype
            start = 1 if name == "running_var" else 0
            setattr(module, name, torch.full(buffer.shape, start, dtype=kind, device=final.device))


def _own_tensors(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    yield from [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def _value(
    module: nn.Module,
    name: str,
    shape: torch.Size,
    scale: float,
    generator: torch.Generator,
    final: Tensor,
) -> Tensor:
    if isinstance(module, NORMS) and name == "weight":
        return final.new_ones(shape)
    if len(shape) < 2:
        return final.new_zeros(shape)
    if not readable(final):
        return final.new_empty(shape)
    drawn = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
    return (drawn * (scale / drawn[0].numel() ** 0.5)).to(final)


def _text(sizes: tuple[int, ...]) -> str:
    return "-".join(str(size) for size in sizes)
