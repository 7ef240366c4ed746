"""The Linear layers of a model: found, checked and named as the model names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils import parametrize

from curvlab.exceptions import ProblemError

__all__ = ["Layer", "linear_layers", "unwrap"]


@dataclass(frozen=True, eq=False)
class Layer:
    """One nn.Linear, and the names of its parameters that have a block.

    A name is None where the parameter is missing, frozen or not asked for.
    """

    name: str
    module: nn.Linear
    weight_name: str | None
    bias_name: str | None

    @property
    def selected(self) -> bool:
        """Whether any parameter of the layer has a block."""
        return self.weight_name is not None or self.bias_name is not None

    @property
    def weight(self) -> Tensor:
        """W^t, detached."""
        return self.module.weight.detach()

    @property
    def label(self) -> str:
        """The name as error messages show it."""
        return _label(self.name)

    def used_twice(self) -> ProblemError:
        """What to raise where one forward pass uses the layer a second time."""
        return ProblemError(
            f"{self.label} is used twice in one forward pass: curvature of shared weights is not supported. "
            f"Give each use its own layer"
        )

    def unused(self, used: list[str]) -> ProblemError:
        """What to raise where the forward pass does not use the layer."""
        return ProblemError(
            f"{self.label} takes no part in the forward pass; leave it out with layers=[…], some of {used}"
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel and DistributedDataParallel wrappers.

    >>> unwrap(nn.DataParallel(nn.Linear(2, 1)))
    Linear(in_features=2, out_features=1, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise ProblemError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def linear_layers(model: nn.Module, wanted: Sequence[str] | None) -> tuple[Layer, ...]:
    """All Linear layers of `model`, those called `wanted` (None: all) with blocks for what is trainable."""
    modules = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    if not modules:
        raise ProblemError(
            f"the model ({type(model).__name__}) has no torch.nn.Linear layer, which is what curvlab analyses"
        )
    for name, module in modules.items():
        _check_linear(name, module)
    _check_unshared(modules)
    _check_alike(modules)
    _check_wanted(wanted, list(modules))
    layers = tuple(_layer(name, m, wanted is None or name in wanted) for name, m in modules.items())
    if not any(layer.selected for layer in layers):
        which = "all Linear layers" if wanted is None else f"layers={list(wanted)}"
        raise ProblemError(
            f"no parameter to analyse: {which} are frozen. Set requires_grad=True for at least one"
        )
    return layers


def _label(name: str) -> str:
    return f"layer `{name}`" if name else "the model's only layer"


def _layer(name: str, module: nn.Linear, wanted: bool) -> Layer:
    prefix = f"{name}." if name else ""
    weight = f"{prefix}weight" if wanted and module.weight.requires_grad else None
    has_bias = module.bias is not None and module.bias.requires_grad
    return Layer(name, module, weight, f"{prefix}bias" if wanted and has_bias else None)


def _check_linear(name: str, module: nn.Linear) -> None:
    label, kind = _label(name), type(module).__name__
    if parametrize.is_parametrized(module) or not isinstance(module.weight, nn.Parameter):
        raise ProblemError(
            f"{label} is parametrised: its weight is computed from other parameters, which curvlab does not "
            f"differentiate. Analyse a copy with torch.nn.utils.parametrize.remove_parametrizations(layer, "
            f"'weight') applied (remove_weight_norm and the like for the older kind)"
        )
    if type(module).forward is not nn.Linear.forward:
        raise ProblemError(f"{label} ({kind}) has a forward of its own; expected nn.Linear's")
    if isinstance(module.weight, nn.parameter.UninitializedParameter):
        raise ProblemError(f"{label} ({kind}) is lazy and has no weight yet: run the model on a batch first")


def _check_unshared(modules: dict[str, nn.Linear]) -> None:
    owners: dict[int, str] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owner = owners.setdefault(id(parameter), name)
            if owner != name:
                raise ProblemError(
                    f"layers `{owner}` and `{name}` share a parameter: curvature of shared weights is not "
                    f"supported. Give each layer its own"
                )


def _check_alike(modules: dict[str, nn.Linear]) -> None:
    """All layers in one dtype and on one device."""
    (first_name, first), *_ = modules.items()
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            if (parameter.dtype, parameter.device) != (first.weight.dtype, first.weight.device):
                raise ProblemError(
                    f"{_label(name)} is {parameter.dtype} on {parameter.device}, but {_label(first_name)} "
                    f"{first.weight.dtype} on {first.weight.device}: bring the model to one with model.to()"
                )


def _check_wanted(wanted: Sequence[str] | None, known: list[str]) -> None:
    if isinstance(wanted, str):
        raise ProblemError(f"layers is the text {wanted!r}; expected a list of names: layers=[{wanted!r}]")
    missing = [name for name in wanted or () if name not in known]
    if missing:
        raise ProblemError(f"layers names {missing}, which are no Linear layers; the model has {known}")
