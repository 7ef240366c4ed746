"""Finding an activation: by module, by the function a traced model calls, or by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from curvlab.activations.base import Activation
from curvlab.activations.elementwise import Elementwise, elementwise
from curvlab.activations.piecewise_linear import Hardsigmoid, Hardtanh, Identity, LeakyReLU, ReLU
from curvlab.activations.smooth import ELU, GELU, Mish, Sigmoid, SiLU, Softplus, Tanh, TanhGELU
from curvlab.measure.device import readable
from curvlab.specs import unknown

__all__ = ["FUNCTIONS", "NAMES", "activation_of", "by_name", "module_of", "register_activation"]


def activation_of(module: nn.Module) -> Activation | None:
    """The activation of a torch module with its settings; None if curvlab does not know its type.

    >>> activation_of(nn.LeakyReLU(0.2, inplace=True))
    LeakyReLU(negative_slope=0.2)
    """
    # The exact type: a subclass may compute something else.
    if type(module) in ELEMENTWISE_TYPES:
        return Elementwise(module)
    find = MODULES.get(type(module))
    return None if find is None else find(module)


def by_name(name: str) -> Activation:
    """The activation called `name`, with torch's default settings.

    >>> by_name("sigmoid").lipschitz
    0.25
    """
    activation = activation_of(module_of(name))
    assert activation is not None, f"{name} is in NAMED but not in MODULES"
    return activation


def module_of(name: str) -> nn.Module:
    """A fresh torch module of the activation called `name`.

    >>> module_of("leaky-relu")
    LeakyReLU(negative_slope=0.01)
    """
    if name not in NAMED:
        raise unknown("activation", name, NAMED)
    return NAMED[name]()


def register_activation(
    name: str, module: type[nn.Module], activation: Callable[[Any], Activation] | None = None
) -> None:
    """Let `name` stand for an element-wise module without parameters, also where a model holds such a module.

    `activation` gives σ, σ' and σ'' for such a module; without it they are differentiated by `torch.func`.

    >>> class Cube(nn.Module):
    ...     def forward(self, z):
    ...         return z**3
    >>> register_activation("cube", Cube)
    >>> z = torch.tensor([2.0])
    >>> by_name("cube").first(z, z**3)
    tensor([12.])
    >>> del NAMED["cube"], MODULES[Cube]
    """
    NAMED[name] = module
    MODULES[module] = activation or elementwise


def _gelu(approximate: str = "none") -> Activation:
    return TanhGELU() if approximate == "tanh" else GELU()


def _frozen_slope(module: nn.PReLU) -> Activation | None:
    """A PReLU that is not trained and has one slope is a LeakyReLU."""
    if module.weight.numel() != 1 or module.weight.requires_grad or not readable(module.weight):
        return None
    return LeakyReLU(float(module.weight))


MODULES: dict[type[nn.Module], Callable[[Any], Activation | None]] = {
    nn.Identity: lambda _: Identity(),
    nn.ReLU: lambda _: ReLU(),
    nn.ReLU6: lambda _: Hardtanh(0.0, 6.0),
    nn.LeakyReLU: lambda module: LeakyReLU(float(module.negative_slope)),
    nn.PReLU: _frozen_slope,
    nn.Hardtanh: lambda module: Hardtanh(float(module.min_val), float(module.max_val)),
    nn.Hardsigmoid: lambda _: Hardsigmoid(),
    nn.Sigmoid: lambda _: Sigmoid(),
    nn.Tanh: lambda _: Tanh(),
    nn.Softplus: lambda module: Softplus(float(module.beta), float(module.threshold)),
    nn.SiLU: lambda _: SiLU(),
    nn.Mish: lambda _: Mish(),
    nn.ELU: lambda module: ELU(float(module.alpha)),
    nn.GELU: lambda module: _gelu(module.approximate),
}

ELEMENTWISE_TYPES = (
    nn.CELU,
    nn.Hardshrink,
    nn.Hardswish,
    nn.LogSigmoid,
    nn.SELU,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanhshrink,
    nn.Threshold,
)

NAMED: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky-relu": nn.LeakyReLU,
    "softplus": nn.Softplus,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "identity": nn.Identity,
}

NAMES = tuple(NAMED)


def _fixed(activation: Activation) -> Callable[..., Activation]:
    def factory(inplace: bool = False) -> Activation:
        return activation

    return factory


def _from_settings(module_type: Callable[..., nn.Module]) -> Callable[..., Activation]:
    """A factory with the module's own settings: torch names and orders them as in the function."""

    def factory(*settings: Any, **named: Any) -> Activation:
        activation = activation_of(module_type(*settings, **named))
        assert activation is not None, f"{module_type} is not in MODULES"
        return activation

    return factory


# A function as a traced model calls it (a tensor method by its name) to the activation that the arguments
# after the first one give: FUNCTIONS[functional.elu](alpha=2.0) is ELU(2.0).
FUNCTIONS: dict[Callable[..., Any] | str, Callable[..., Activation]] = {
    **dict.fromkeys((torch.relu, torch.relu_, functional.relu, "relu", "relu_"), _fixed(ReLU())),
    **dict.fromkeys(
        (torch.sigmoid, torch.sigmoid_, torch.special.expit, functional.sigmoid, "sigmoid", "sigmoid_"),
        _fixed(Sigmoid()),
    ),
    **dict.fromkeys((torch.tanh, torch.tanh_, functional.tanh, "tanh", "tanh_"), _fixed(Tanh())),
    functional.silu: _fixed(SiLU()),
    functional.relu6: _fixed(Hardtanh(0.0, 6.0)),
    functional.softplus: _from_settings(nn.Softplus),
    functional.gelu: _gelu,
    functional.elu: _from_settings(nn.ELU),
    functional.leaky_relu: _from_settings(nn.LeakyReLU),
    functional.hardtanh: _from_settings(nn.Hardtanh),
    functional.celu: _from_settings(nn.CELU),
    functional.selu: _from_settings(nn.SELU),
    functional.softsign: _from_settings(nn.Softsign),
    functional.logsigmoid: _from_settings(nn.LogSigmoid),
    functional.mish: _fixed(Mish()),
    functional.hardsigmoid: _fixed(Hardsigmoid()),
}
