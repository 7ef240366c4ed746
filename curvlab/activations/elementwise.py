"""Any other element-wise module, through torch.func.

As entry j of σ(z) depends on z_j alone, the gradient of Σ_j σ(z)_j is σ' at every entry, and the gradient of
Σ_j σ'(z)_j is σ''. `elementwise` makes sure of the premise on a small probe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import grad

from curvlab.activations.base import Activation
from curvlab.exceptions import ProblemError
from curvlab.measure.device import readable

__all__ = ["Elementwise", "elementwise"]

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
