"""Element-wise activations: σ, σ' and σ'', the Lipschitz constant sup |σ'|, and how a module is recognised.

Piecewise linear ones have σ'' = 0 almost everywhere; at kinks σ' is what torch's backward gives. Curved ones
are in closed form, which reads h = σ(z) where that is cheaper than z: for the sigmoid σ' = h(1-h) and
σ'' = h(1-h)(1-2h).

Any other element-wise module goes through torch.func: as entry j of σ(z) depends on z_j alone, the gradient
of Σ_j σ(z)_j is σ' at every entry, and the gradient of Σ_j σ'(z)_j is σ''. `elementwise` makes sure of the
premise on a small probe.

An activation is found by module, by the function that a forward calls, or by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn import functional

from curvlab.exceptions import ProblemError, unknown_name
from curvlab.measure.device import readable

__all__ = [
    "CALLS",
    "ELU",
    "FUNCTIONS",
    "GELU",
    "NAMES",
    "Activation",
    "Elementwise",
    "Hardsigmoid",
    "Hardtanh",
    "Identity",
    "LeakyReLU",
    "Mish",
    "PiecewiseLinear",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Tanh",
    "TanhGELU",
    "activation_of",
    "activation_of_call",
    "by_name",
    "elementwise",
    "module_of",
    "register_activation",
]


class Activation(ABC):
    """An element-wise function; subclasses are frozen dataclasses.

    >>> import torch
    >>> from curvlab.activations import Tanh
    >>> sigma, z = Tanh(), torch.tensor([0.0])
    >>> sigma.derivatives(z, sigma.value(z))
    (tensor([1.]), tensor([-0.]))
    """

    name: ClassVar[str]
    piecewise_linear: ClassVar[bool] = False

    @property
    @abstractmethod
    def lipschitz(self) -> float:
        """The supremum of |σ'|."""

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """Give σ(z)."""

    @abstractmethod
    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give σ'(z), where h = σ(z)."""

    @abstractmethod
    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """Give σ'(z) and σ''(z), where h = σ(z); the second is None where σ'' = 0 almost everywhere."""

    def second(self, z: Tensor) -> Tensor | None:
        """Give σ''(z) alone, a tensor of its own."""
        return self.derivatives(z, self.value(z))[1]


class PiecewiseLinear(Activation):
    """σ'' = 0 almost everywhere."""

    piecewise_linear: ClassVar[bool] = True

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, None]:
        """Give σ'(z) and None."""
        return self.first(z, h), None


@dataclass(frozen=True)
class Identity(PiecewiseLinear):
    """σ(z) = z."""

    name: ClassVar[str] = "identity"
    lipschitz: ClassVar[float] = 1.0

    def value(self, z: Tensor) -> Tensor:
        """Give z itself."""
        return z

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1."""
        return torch.ones_like(z)


@dataclass(frozen=True)
class ReLU(PiecewiseLinear):
    """σ(z) = max(z, 0), with σ'(0) = 0."""

    name: ClassVar[str] = "relu"
    lipschitz: ClassVar[float] = 1.0

    def value(self, z: Tensor) -> Tensor:
        """Give max(z, 0)."""
        return z.relu()

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1 where z > 0, else 0."""
        return (z > 0).to(z.dtype)


@dataclass(frozen=True)
class LeakyReLU(PiecewiseLinear):
    """σ(z) = z for z > 0, a z otherwise, with σ'(0) = a = `negative_slope`."""

    name: ClassVar[str] = "leaky-relu"

    negative_slope: float = 0.01

    @property
    def lipschitz(self) -> float:
        """The steeper of the two pieces."""
        return max(1.0, abs(self.negative_slope))

    def value(self, z: Tensor) -> Tensor:
        """Give z or a z."""
        return functional.leaky_relu(z, self.negative_slope)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1 where z > 0, else a."""
        return torch.ones_like(z).masked_fill_(z <= 0, self.negative_slope)


@dataclass(frozen=True)
class Hardtanh(PiecewiseLinear):
    """σ(z) = z between `min_val` and `max_val`, constant outside; ReLU6 is Hardtanh(0, 6)."""

    name: ClassVar[str] = "hardtanh"
    lipschitz: ClassVar[float] = 1.0

    min_val: float = -1.0
    max_val: float = 1.0

    def value(self, z: Tensor) -> Tensor:
        """Give z clipped."""
        return functional.hardtanh(z, self.min_val, self.max_val)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1 strictly inside, else 0."""
        return ((z > self.min_val) & (z < self.max_val)).to(z.dtype)


@dataclass(frozen=True)
class Hardsigmoid(PiecewiseLinear):
    """σ(z) = z/6 + ½ between -3 and 3, constant outside."""

    name: ClassVar[str] = "hardsigmoid"
    lipschitz: ClassVar[float] = 1 / 6

    def value(self, z: Tensor) -> Tensor:
        """Give z/6 + ½ clipped to [0, 1]."""
        return functional.hardsigmoid(z)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1/6 strictly inside, else 0."""
        return (z.abs() < 3).to(z.dtype) / 6


@dataclass(frozen=True)
class Sigmoid(Activation):
    """σ(z) = 1 / (1 + e⁻ᶻ)."""

    name: ClassVar[str] = "sigmoid"
    lipschitz: ClassVar[float] = 0.25

    def value(self, z: Tensor) -> Tensor:
        """Give 1 / (1 + e⁻ᶻ)."""
        return z.sigmoid()

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give h - h²."""
        return torch.addcmul(h, h, h, value=-1)

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = h - h² and σ'' = σ' (1 - 2h)."""
        slope = self.first(z, h)
        return slope, torch.addcmul(slope, slope, h, value=-2)


@dataclass(frozen=True)
class Tanh(Activation):
    """σ(z) = tanh z."""

    name: ClassVar[str] = "tanh"
    lipschitz: ClassVar[float] = 1.0

    def value(self, z: Tensor) -> Tensor:
        """Give tanh z."""
        return z.tanh()

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1 - h²."""
        return 1 - h.square()

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = 1 - h² and σ'' = -2 h σ'."""
        slope = self.first(z, h)
        return slope, (slope * h).mul_(-2)


@dataclass(frozen=True)
class Softplus(Activation):
    """σ(z) = log(1 + e^{βz}) / β, linear where βz > `threshold`, as in torch."""

    name: ClassVar[str] = "softplus"
    lipschitz: ClassVar[float] = 1.0

    beta: float = 1.0
    threshold: float = 20.0

    def value(self, z: Tensor) -> Tensor:
        """Give log(1 + e^{βz}) / β."""
        return functional.softplus(z, self.beta, self.threshold)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give sigmoid(βz)."""
        scaled = self.beta * z
        return scaled.sigmoid().masked_fill_(scaled > self.threshold, 1.0)

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = sigmoid(βz) and σ'' = β σ' (1 - σ')."""
        slope = self.first(z, h)
        # At the threshold itself torch's first derivative is still curved, its second is not.
        second = (slope - slope.square()).mul_(self.beta)
        return slope, second.masked_fill_(self.beta * z >= self.threshold, 0.0)


@dataclass(frozen=True)
class SiLU(Activation):
    """σ(z) = z s with s = sigmoid(z); σ' is largest at z = 2.39935728."""

    name: ClassVar[str] = "silu"
    lipschitz: ClassVar[float] = 1.0998393201288669

    def value(self, z: Tensor) -> Tensor:
        """Give z sigmoid(z)."""
        return functional.silu(z)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give s + h (1 - s)."""
        s = z.sigmoid()
        return s + h * (1 - s)

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = s + h (1 - s) and σ'' = s (1 - s) (2 + z (1 - 2s))."""
        s = z.sigmoid()
        rest = 1 - s
        return s + h * rest, s * rest * (2 + z * (rest - s))

    def second(self, z: Tensor) -> Tensor:
        """Give s (1 - s) (2 + z (1 - 2s))."""
        s = z.sigmoid()
        rest = 1 - s
        bracket = (rest - s).mul_(z).add_(2)
        return s.mul_(rest).mul_(bracket)


@dataclass(frozen=True)
class ELU(Activation):
    """σ(z) = z for z > 0, α (eᶻ - 1) otherwise, with σ'(0) = α and, as torch has it, σ''(0) = 0."""

    name: ClassVar[str] = "elu"

    alpha: float = 1.0

    @property
    def lipschitz(self) -> float:
        """The steeper side at zero."""
        return max(1.0, abs(self.alpha))

    def value(self, z: Tensor) -> Tensor:
        """Give z or α (eᶻ - 1)."""
        return functional.elu(z, self.alpha)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give 1 where z > 0, else α eᶻ = h + α."""
        return (h + self.alpha).masked_fill_(z > 0, 1.0)

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ', and σ'' = α eᶻ where z < 0, else 0."""
        slope = self.first(z, h)
        return slope, slope.masked_fill(z >= 0, 0.0)


@dataclass(frozen=True)
class GELU(Activation):
    """σ(z) = z Φ(z), Φ the normal distribution function; σ' is largest at z = √2."""

    name: ClassVar[str] = "gelu"
    lipschitz: ClassVar[float] = 1.1289041451851548

    def value(self, z: Tensor) -> Tensor:
        """Give z Φ(z)."""
        return functional.gelu(z)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give Φ + z φ."""
        return torch.special.ndtr(z) + z * _density(z)

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = Φ + z φ and σ'' = (2 - z²) φ."""
        density = _density(z)
        return torch.special.ndtr(z) + z * density, self.second(z)

    def second(self, z: Tensor) -> Tensor:
        """Give (2 - z²) φ."""
        # Beyond 40 the density is zero in every dtype, and z² may be infinite.
        square = z.clamp(-40, 40).square_()
        density = (-0.5 * square).exp_().div_(math.sqrt(2 * math.pi))
        return square.neg_().add_(2).mul_(density)


@dataclass(frozen=True)
class TanhGELU(Activation):
    """σ(z) = ½ z (1 + t), t = tanh u, u = √(2/π) (z + 0.044715 z³); σ' is largest at z = 1.41850401."""

    name: ClassVar[str] = "gelu-tanh"
    lipschitz: ClassVar[float] = 1.1289930686587718

    def value(self, z: Tensor) -> Tensor:
        """Give ½ z (1 + tanh u)."""
        return functional.gelu(z, approximate="tanh")

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give ½ (1 + t) + ½ z (1 - t²) u'."""
        return self.derivatives(z, h)[0]

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = p + ½ z s u' and σ'' = s u' + ½ z s (u'' - 2 t u'²), where p = ½ (1 + t), s = 1 - t²."""
        z = z.clamp(-10, 10)  # beyond, s vanishes in every dtype while u may be infinite
        square, scale = z.square(), math.sqrt(2 / math.pi)
        p, t, s = _tanh_parts(scale * z * (1 + 0.044715 * square))
        u1, u2 = scale * (1 + 3 * 0.044715 * square), scale * 6 * 0.044715 * z
        return p + z / 2 * s * u1, s * (u1 + z / 2 * (u2 - 2 * t * u1.square()))


@dataclass(frozen=True)
class Mish(Activation):
    """σ(z) = z t, t = tanh u, u = log(1 + eᶻ); σ' is largest at z = 1.49057118."""

    name: ClassVar[str] = "mish"
    lipschitz: ClassVar[float] = 1.088498161251728

    def value(self, z: Tensor) -> Tensor:
        """Give z tanh(log(1 + eᶻ))."""
        return functional.mish(z)

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give t + z s u'."""
        return self.derivatives(z, h)[0]

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ' = t + z s u' and σ'' = s (2 u' + z (u'' - 2 t u'²)), where s = 1 - t², u' = sigmoid(z)."""
        _, t, s = _tanh_parts(-functional.logsigmoid(-z))
        u1 = z.sigmoid()
        return t + z * s * u1, s * (2 * u1 + z * (u1 * (1 - u1) - 2 * t * u1.square()))


def _tanh_parts(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give ½ (1 + t), t = tanh u and 1 - t², the last without the cancellation of its formula."""
    p, q = (2 * u).sigmoid(), (-2 * u).sigmoid()
    return p, u.tanh(), 4 * p * q


def _density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)


PROBE_SHAPE = (3, 5)


@dataclass(frozen=True)
class Elementwise(Activation):
    """Any element-wise module without parameters, differentiated by torch.func."""

    module: nn.Module

    @property
    def name(self) -> str:  # type: ignore[override]
        """The module's own type."""
        return type(self.module).__name__.lower()

    @cached_property
    def lipschitz(self) -> float:
        """The largest |σ'| on [-40, 40], measured in float64: a lower bound of the supremum."""
        grid = torch.arange(-40_000, 40_001, dtype=torch.float64) / 1000
        largest = 0.0
        for radius in (1e-3, 1e-6, 1e-9):
            slopes = self.first(grid, grid).abs()
            largest = max(largest, float(slopes.max()))
            grid = grid[slopes.argmax()] + torch.linspace(-radius, radius, 2001, dtype=torch.float64)
        return largest

    def value(self, z: Tensor) -> Tensor:
        """Give σ(z); a copy goes in, as the module may work in place."""
        return self.module.forward(z.clone())

    def first(self, z: Tensor, h: Tensor) -> Tensor:
        """Give σ'(z) as the gradient of Σ σ(z)."""
        return grad(self._total)(z)

    def derivatives(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Give σ'(z) and σ''(z), the second as the gradient of Σ σ'(z)."""

        def slopes(entries: Tensor) -> tuple[Tensor, Tensor]:
            slope = grad(self._total)(entries)
            return slope.sum(), slope

        second, slope = grad(slopes, has_aux=True)(z)
        return slope, second

    def _total(self, z: Tensor) -> Tensor:
        return self.value(z).sum()


def elementwise(module: nn.Module) -> Elementwise:
    """The activation of a module that is element-wise and has no parameters; anything else is refused.

    >>> elementwise(nn.Mish()).name
    'mish'
    """
    name = type(module).__name__
    if [*module.parameters(), *module.buffers()]:
        raise ProblemError(
            f"activation `{name}` has parameters or buffers; expected a fixed element-wise function between "
            "Linear layers. Use one without parameters (a PReLU works if frozen and with a single slope)"
        )
    activation = Elementwise(module)
    try:
        with torch.random.fork_rng(devices=[]):
            _check_probe(activation)
    except ProblemError:
        raise
    except Exception as error:
        raise ProblemError(
            f"module `{name}` fails on a {PROBE_SHAPE} float64 tensor ({error}); expected an element-wise "
            "function that torch.func can differentiate twice"
        ) from error
    return activation


def _check_probe(activation: Elementwise) -> None:
    """Compare σ of a batch with σ entry by entry, and differentiate twice."""
    order = torch.tensor([7, 2, 11, 0, 14, 5, 9, 1, 13, 3, 12, 6, 10, 4, 8])
    probe = (order.double() / 2.5 - 2.8).reshape(PROBE_SHAPE)
    whole = activation.value(probe)
    if not isinstance(whole, Tensor) or whole.shape != probe.shape:
        raise ProblemError(
            f"module `{activation.name}` changes the shape of its input; expected an element-wise function"
        )
    if not readable(whole):
        return
    entries = torch.cat([activation.value(entry.reshape(1, 1)).reshape(1) for entry in probe.flatten()])
    if not torch.allclose(whole.flatten(), entries, rtol=1e-5, atol=1e-6, equal_nan=True):
        raise ProblemError(
            f"module `{activation.name}` is not element-wise: an output depends on other inputs, on its "
            "position or on chance. Expected an element-wise function (put random layers in eval mode)"
        )
    activation.derivatives(probe, whole)


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


def activation_of_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Activation | None:
    """The activation that a call of a function is, with its settings; None where there is none.

    >>> activation_of_call(functional.elu, (torch.ones(1), 2.0), {})
    ELU(alpha=2.0)
    """
    settings = (*args[1:], *kwargs.values())
    if func not in CALLS or any(isinstance(setting, Tensor) for setting in settings):
        return None
    try:
        return CALLS[func](*args[1:], **{key: value for key, value in kwargs.items() if key != "input"})
    except (TypeError, ValueError):
        return None


def by_name(name: str) -> Activation:
    """The activation called `name`, with torch's default settings.

    >>> by_name("sigmoid").lipschitz
    0.25
    """
    return _known_activation(module_of(name))


def _known_activation(module: nn.Module) -> Activation:
    found = activation_of(module)
    if found is None:
        raise LookupError(f"{type(module).__name__} is an activation by name, but has no entry in MODULES")
    return found


def module_of(name: str) -> nn.Module:
    """A fresh torch module of the activation called `name`.

    >>> module_of("leaky-relu")
    LeakyReLU(negative_slope=0.01)
    """
    if name not in NAMED:
        raise unknown_name("activation", name, NAMED)
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


def _always(activation: Activation) -> Callable[..., Activation]:
    def factory(inplace: bool = False) -> Activation:
        return activation

    return factory


def _from_settings(module_type: Callable[..., nn.Module]) -> Callable[..., Activation]:
    """A factory with the module's own settings: torch names and orders them as in the function."""

    def factory(*settings: Any, **named: Any) -> Activation:
        return _known_activation(module_type(*settings, **named))

    return factory


# A function as a traced model calls it (a tensor method by its name) to the activation that the arguments
# after the first one give: FUNCTIONS[functional.elu](alpha=2.0) is ELU(2.0).
FUNCTIONS: dict[Callable[..., Any] | str, Callable[..., Activation]] = {
    **dict.fromkeys((torch.relu, torch.relu_, functional.relu, "relu", "relu_"), _always(ReLU())),
    **dict.fromkeys(
        (torch.sigmoid, torch.sigmoid_, torch.special.expit, functional.sigmoid, "sigmoid", "sigmoid_"),
        _always(Sigmoid()),
    ),
    **dict.fromkeys((torch.tanh, torch.tanh_, functional.tanh, "tanh", "tanh_"), _always(Tanh())),
    functional.silu: _always(SiLU()),
    functional.relu6: _always(Hardtanh(0.0, 6.0)),
    functional.softplus: _from_settings(nn.Softplus),
    functional.gelu: _gelu,
    functional.elu: _from_settings(nn.ELU),
    functional.leaky_relu: _from_settings(nn.LeakyReLU),
    functional.hardtanh: _from_settings(nn.Hardtanh),
    functional.celu: _from_settings(nn.CELU),
    functional.selu: _from_settings(nn.SELU),
    functional.softsign: _from_settings(nn.Softsign),
    functional.logsigmoid: _from_settings(nn.LogSigmoid),
    functional.mish: _always(Mish()),
    functional.hardsigmoid: _always(Hardsigmoid()),
}

# The same by what a watched forward calls: methods in the place of their names.
CALLS: dict[Callable[..., Any], Callable[..., Activation]] = {
    getattr(Tensor, function) if isinstance(function, str) else function: factory
    for function, factory in FUNCTIONS.items()
}
