"""A model as a problem was made of it: its trainable parameters, what must not change, and how it is called.

What the forward computes is read off each batch as it runs (`curvlab.model.forward`). Here stands what is
known without running it: which parameters have blocks, that their dtype and device agree, that no layer is in
a mode in which its output is random or mixes the examples, and whether the modules and parameters are still
those of the problem.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn

from curvlab.exceptions import ProblemError, StaleError
from curvlab.model.calling import ModelCall, OutputChoice
from curvlab.model.float_copy import FloatCopy

__all__ = ["DROPOUTS", "Network", "unwrap", "uses_batch"]

DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DTYPES = (torch.float32, torch.float64)
NAMES_SHOWN = 6


@dataclass(frozen=True, eq=False)
class Network:
    """A model and those of its parameters that have blocks, by name, in the model's order.

    `left_out` are the trainable parameters that the user's choice of layers leaves without a block. A model
    in bfloat16 or float16 is worked with in a float32 copy of it, `copied`. `probed` are the structures on
    which a recording was compared with the model's own gradients, with whether sequences come before examples
    in them; `later_batches` counts those that were not.

    >>> network = Network.of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), ["0"])
    >>> list(network.parameters), network.left_out
    (['0.weight', '0.bias'], ('2.weight', '2.bias'))
    """

    call: ModelCall
    parameters: Mapping[str, Tensor]
    left_out: tuple[str, ...]
    copied: FloatCopy | None = field(default=None, repr=False)
    tree: tuple[tuple[str, int], ...] = field(init=False, repr=False)
    probed: dict[Hashable, bool] = field(default_factory=dict, init=False, repr=False)
    later_batches: Iterator[int] = field(default_factory=count, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", _tree(self.given))

    @classmethod
    def of(
        cls, model: nn.Module, layers: Sequence[str] | None = None, output: OutputChoice = None
    ) -> Network:
        """Look at `model`, with blocks for all that is trainable or for the modules or parameters named."""
        given = unwrap(model)
        _refuse_scripted(given)
        _check_initialised(given)
        copied = FloatCopy.of(given, _settings_without_modes)
        model = given if copied is None else copied.model
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        chosen = trainable if layers is None else _chosen(model, trainable, layers)
        _check_trainable(model, chosen, layers)
        _check_alike(chosen)
        left_out = tuple(name for name in trainable if name not in chosen)
        network = cls(ModelCall(model, output), chosen, left_out, copied)
        network.check_modes()
        return network

    def __reduce__(self) -> tuple[type[Network], tuple[object, ...]]:
        """A copy has modules and parameters of its own, which are noted and probed anew."""
        self.check_unchanged()
        return Network, (self.call, self.parameters, self.left_out, self.copied)

    @property
    def model(self) -> nn.Module:
        """The model that is worked with, out of any compile or data-parallel wrapper."""
        return self.call.model

    @property
    def given(self) -> nn.Module:
        """The user's own model, to which steps are added; `model` unless that is a copy in float32."""
        return self.model if self.copied is None else self.copied.given

    @property
    def example(self) -> Tensor:
        """One of the parameters: knows the dtype and the device."""
        return next(iter(self.parameters.values()))

    @property
    def numel(self) -> int:
        """Number of entries that have blocks."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def check_unchanged(self) -> None:
        """Refuse to go on where modules or parameters were replaced, added, removed, frozen or unfrozen."""
        now = _tree(self.given)
        if now == self.tree:
            if self.copied is not None:
                self.copied.follow()
            return
        changed = [name for name, _ in set(now) ^ set(self.tree)]
        shown = ", ".join(f"`{name}`" for name in sorted(set(changed))[:NAMES_SHOWN])
        raise StaleError(
            f"the model has changed since the problem was made: {shown} (modules or parameters replaced, "
            f"added, removed, frozen or unfrozen). Make a new Problem of it"
        )

    def check_modes(self) -> None:
        """Refuse layers whose output is random, mixes the examples of a batch or changes their buffers."""
        for name, module in self.model.named_modules():
            if module.training and (isinstance(module, nn.RReLU) or _drops(module)):
                raise ProblemError(
                    f"layer `{name}` ({type(module).__name__}) is in training mode: its output is random, so "
                    f"the curvature would be that of one random draw. Call model.eval() first"
                )
            if isinstance(module, nn.modules.batchnorm._NormBase) and uses_batch(module):
                raise ProblemError(
                    f"layer `{name}` ({type(module).__name__}) uses the statistics of the batch: examples "
                    f"depend on each other, or its running statistics would change. Call model.eval() first "
                    f"(with track_running_stats=True); to train with batch statistics, "
                    f'SecondOrder(…, batchnorm="running") takes the curvature with the running ones'
                )

    def settings_key(self) -> Hashable:
        """What a module's forward may read of itself beside tensors: its modes, hooks and settings.

        Numbers, texts and the identities of functions are compared, so that a changed slope, stride, flag or
        forward is seen; what a module keeps in lists or objects of its own is not looked into.
        """
        found: list[Hashable] = []
        for module in self.given.modules():
            found.extend(module.__dict__)
            found.extend(map(_setting, module.__dict__.values()))
        return tuple(found), self.structure_key()

    def has_backward_hooks(self) -> bool:
        """Whether anything may change gradients on their way: what a hook does may change at any time."""
        shared = torch.nn.modules.module
        return (
            bool(shared._global_backward_hooks or shared._global_backward_pre_hooks)
            or any(module._backward_hooks or module._backward_pre_hooks for module in self.model.modules())
            or any(parameter._backward_hooks for parameter in self.model.parameters())
        )

    def structure_key(self) -> Hashable:
        """What a forward's code may ask beside its inputs: modules, modes, hooks and dtypes."""
        modules = tuple(
            (id(module), module.training, *(tuple(hooks) for hooks in _hooks_of(module)))
            for module in self.given.modules()
        )
        dtypes = tuple((id(p), p.dtype, p.device, p.requires_grad) for p in self.given.parameters())
        return modules, dtypes, tuple(tuple(hooks) for hooks in _global_hooks())


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


def _tree(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """The modules and the parameters with their identities; a frozen parameter counts as another one."""
    modules = tuple((name, id(module)) for name, module in model.named_modules(remove_duplicate=False))
    parameters = tuple(
        (name, id(p) if p.requires_grad else -id(p))
        for name, p in model.named_parameters(remove_duplicate=False)
    )
    return modules + parameters


# Read at every step, thousands of times in a large model: no isinstance, and no text is made of numbers.
_PLAIN = frozenset({int, float, str, bool, complex, type(None), torch.Size})
_TABLES = frozenset({dict, OrderedDict})


def _settings_without_modes(model: nn.Module) -> Hashable:
    """What a copy of the model cannot follow: the attributes of all modules but their modes."""
    tables = (module.__dict__.items() for module in model.modules())
    return tuple((key, _setting(value)) for table in tables for key, value in table if key != "training")


def _setting(value: object) -> Hashable:
    """A setting by its value where it is simple, by its identity where it is a function, else by its type."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in _TABLES:
        return tuple([(key, id(entry)) for key, entry in value.items()]) if value else ()  # type: ignore[attr-defined]
    if kind is tuple:
        return repr(value)
    return id(value) if callable(value) else kind.__qualname__


def _hooks_of(module: nn.Module) -> tuple[Mapping[int, object], ...]:
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def _global_hooks() -> tuple[Mapping[int, object], ...]:
    shared = torch.nn.modules.module
    return (
        shared._global_forward_hooks,
        shared._global_forward_pre_hooks,
        shared._global_backward_hooks,
        shared._global_backward_pre_hooks,
    )


def _chosen(model: nn.Module, trainable: Mapping[str, Tensor], layers: Sequence[str]) -> dict[str, Tensor]:
    """The trainable parameters of the modules, or under the names, that the user lists."""
    if isinstance(layers, str):
        raise ProblemError(f"layers is the text {layers!r}; expected a list of names: layers=[{layers!r}]")
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    missing = [name for name in layers if name not in modules and name not in parameters]
    if missing:
        owners = dict.fromkeys(name.rpartition(".")[0] for name in trainable)
        raise ProblemError(
            f"layers names {missing}, which the model does not have; modules with trainable parameters: "
            f"{list(owners)}"
        )
    prefixes = {f"{name}." if name else "" for name in layers if name in modules}
    return {
        name: parameter
        for name, parameter in trainable.items()
        if name in layers or any(name.startswith(prefix) for prefix in prefixes)
    }


def _refuse_scripted(model: nn.Module) -> None:
    scripted = next((n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        what = f"module `{scripted}`" if scripted else "the model"
        raise ProblemError(
            f"{what} is TorchScript (torch.jit), which shows none of the functions that it calls. Give the "
            f"module that it was made of"
        )


def _check_initialised(model: nn.Module) -> None:
    lazy = [
        name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)
    ]
    if lazy:
        raise ProblemError(f"{lazy} are lazy and have no values yet: run the model on a batch first")


def _check_trainable(model: nn.Module, chosen: Mapping[str, Tensor], layers: Sequence[str] | None) -> None:
    if not chosen:
        which = f"all of {type(model).__name__}" if layers is None else f"layers={list(layers)}"
        raise ProblemError(
            f"no parameter to analyse: {which} is frozen or has none. Set requires_grad=True for at least one"
        )


def _check_alike(parameters: Mapping[str, Tensor]) -> None:
    """All parameters in one dtype, that curvature can be computed in, and on one device."""
    (first_name, first), *_ = parameters.items()
    for name, parameter in parameters.items():
        if (parameter.dtype, parameter.device) != (first.dtype, first.device):
            raise ProblemError(
                f"`{name}` is {parameter.dtype} on {parameter.device}, but `{first_name}` {first.dtype} on "
                f"{first.device}: bring the model to one with model.to()"
            )
    if first.dtype not in DTYPES:
        raise ProblemError(
            f"the model is in {first.dtype}; curvature needs float32 or float64 (model.float() or "
            f".double()), or bfloat16 or float16, which are read as float32"
        )


def _drops(module: nn.Module) -> bool:
    return isinstance(module, DROPOUTS) and module.p > 0


def uses_batch(module: nn.modules.batchnorm._NormBase) -> bool:
    """Batch normalisation without running statistics always does; instance normalisation then does not."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module.training or not module.track_running_stats
    return module.training and module.track_running_stats
