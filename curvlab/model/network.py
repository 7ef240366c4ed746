"""A model as a problem was made of it: its trainable parameters, what must not change, and how it is called.

What the forward computes is read off each batch as it runs (`curvlab.model.forward`). Here stands what is
known without running it: which parameters have blocks, that their dtype and device agree, that no layer is in
a mode in which its output is random or mixes the examples, and whether the modules and parameters are still
those of the problem.

`ModelCall` calls it with a tensor, several or a dictionary of them, and tells the logits in what it returns.

    inputs a tensor    model(x)              logits: a tensor, `.logits`, `["logits"]`,
    a tuple            model(*x)             or the first tensor of a tuple;
    a dictionary       model(**x)            `output=` names a field, an index or a function

The first dimension of every tensor of the inputs counts the examples. A forward that draws random numbers is
refused; gradients, training modes, random state and the caller's grad mode are left as they were.

Of models in bfloat16 or float16 (`FloatCopy`) the function is taken in float32, at the values that the
parameters have.

    f(x; θ)  with  θ = float32(parameters)

A curvature of the rounded function has no meaning: its derivatives are those of a staircase. curvlab
therefore works with a copy of the model whose parameters and buffers are float32, and which follows the
values and modes of the model it was made of. The model itself is only read; a step is added to it in its own
dtype. What a model keeps outside its parameters and buffers (a closure over a weight, say) is not copied, and
is refused where the copy's outputs depend on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from curvlab.exceptions import ProblemError, StaleError, describe_argument
from curvlab.linalg.execution import LOW_PRECISION, askable, in_float
from curvlab.measure import device
from curvlab.staleness import (
    Members,
    SettingsWatch,
    Versions,
    identities,
    settings_without_modes,
    structure_key,
    watch_settings,
)

__all__ = [
    "DROPOUTS",
    "FloatCopy",
    "Inputs",
    "ModelCall",
    "Network",
    "OutputChoice",
    "example_count",
    "slice_examples",
    "take_examples",
    "tensors_of",
    "uncompiled",
    "unwrap",
    "uses_batch",
]

DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DTYPES = (torch.float32, torch.float64)
NAMES_SHOWN = 6


@dataclass(frozen=True, eq=False)
class Network:
    """A model and those of its parameters that have blocks, by name, in the model's order.

    `left_out` are the trainable parameters that the user's choice of layers leaves without a block. `given`
    is the user's own model, to which steps are added; it is `model` unless it is in bfloat16 or float16, when
    a float32 copy of it is worked with, `copied`. `probed` are the structures on which a recording was
    compared with the model's own gradients, with whether sequences come before examples in them;
    `later_batches` counts those that were not. `known_forward` holds what the last batch showed, if the next
    can be compared with it call by call.

    >>> network = Network.of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), ["0"])
    >>> list(network.parameters), network.left_out
    (['0.weight', '0.bias'], ('2.weight', '2.bias'))
    """

    call: ModelCall
    parameters: Mapping[str, Tensor]
    left_out: tuple[str, ...]
    copied: FloatCopy | None = field(default=None, repr=False)
    given: nn.Module = field(init=False, repr=False)
    tree: tuple[tuple[str, int], ...] = field(init=False, repr=False)
    probed: dict[Hashable, bool] = field(default_factory=dict, init=False, repr=False)
    later_batches: Iterator[int] = field(default_factory=count, init=False, repr=False)
    known_forward: list[object] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", self.model if self.copied is None else self.copied.given)
        object.__setattr__(self, "tree", identities(self.given))

    @classmethod
    def of(
        cls, model: nn.Module, layers: Sequence[str] | None = None, output: OutputChoice = None
    ) -> Network:
        """Look at `model`, with blocks for all that is trainable or for the modules or parameters named."""
        given = unwrap(model)
        _refuse_scripted(given)
        _check_initialised(given)
        copied = FloatCopy.of(given, settings_without_modes)
        model = given if copied is None else copied.model
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        chosen = trainable if layers is None else _choose_parameters(model, trainable, layers)
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
    def example(self) -> Tensor:
        """One of the parameters: knows the dtype and the device."""
        return next(iter(self.parameters.values()))

    @property
    def numel(self) -> int:
        """Number of entries that have blocks."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def check_unchanged(self) -> None:
        """Refuse to go on where modules or parameters were replaced, added, removed, frozen or unfrozen."""
        now = identities(self.given)
        if now == self.tree:
            if self.copied is not None:
                self.copied.follow()
            return
        changed = [name for name, _ in set(now) ^ set(self.tree)]
        shown = ", ".join(f"`{name}`" for name in sorted(set(changed))[:NAMES_SHOWN])
        raise StaleError(
            f"the model has changed since the problem was made: {shown} (modules or parameters replaced, "
            f"added, removed, frozen or unfrozen). Make a new Problem of it, or a new SecondOrder"
        )

    def check_modes(self) -> None:
        """Refuse layers whose output is random, mixes the examples of a batch or changes their buffers."""
        for name, module in Members.of(self.model).modules:
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

    def settings_watch(self) -> SettingsWatch:
        """Gives what a forward may read of its modules beside tensors when called."""
        return watch_settings(self.given)

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
        return structure_key(self.given)


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


def _choose_parameters(
    model: nn.Module, trainable: Mapping[str, Tensor], layers: Sequence[str]
) -> dict[str, Tensor]:
    """The trainable parameters of the modules, or under the names, that the user lists."""
    if not isinstance(layers, Sequence) or not all(isinstance(name, str) for name in layers):
        raise ProblemError(f"layers={layers!r}; expected a list of names of modules or parameters")
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
    empty = [f"`{name}` of shape {tuple(p.shape)}" for name, p in chosen.items() if p.numel() == 0]
    if empty:
        raise ProblemError(
            f"{', '.join(empty)} has no entries, and so no curvature: give the layer a width above 0, or "
            f"leave it out with layers=[…]"
        )
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


Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
OutputChoice = str | int | Callable[[Any], Tensor] | None


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The tensors of the inputs, in order.

    >>> [t.shape for t in tensors_of({"ids": torch.zeros(2, 3), "mask": torch.ones(2, 3)})]
    [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    if isinstance(inputs, Tensor):
        return [inputs]
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Any:
    """The inputs with `function` applied to each of their tensors; a mapping becomes a plain dictionary.

    >>> map_tensors(torch.neg, {"ids": torch.tensor([1, 2]), "scale": 3})
    {'ids': tensor([-1, -2]), 'scale': 3}
    """
    if isinstance(inputs, Tensor):
        return function(inputs)
    return pytree.tree_map_only(Tensor, function, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def example_count(inputs: Inputs, what: str = "the batch") -> int:
    """The number of examples: the first dimension, which all tensors of the inputs share."""
    tensors = tensors_of(inputs)
    if not tensors:
        raise ProblemError(f"inputs of {what}: expected a tensor, or a tuple or dictionary of tensors")
    counts = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if len(counts) > 1:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ProblemError(
            f"inputs of {what} have tensors of shapes {shapes}; expected the examples in the first "
            f"dimension of each"
        )
    return counts.pop()


def slice_examples(inputs: Inputs, first: int, last: int) -> Inputs:
    """The examples from `first` up to `last`."""
    sliced: Inputs = map_tensors(lambda tensor: tensor[first:last], inputs)
    return sliced


def take_examples(inputs: Inputs, indices: Tensor) -> Inputs:
    """The examples under these indices, in their order.

    >>> take_examples((torch.arange(3), torch.arange(3, 6)), torch.tensor([2, 2]))
    (tensor([2, 2]), tensor([5, 5]))
    """
    taken: Inputs = map_tensors(lambda tensor: tensor[indices.to(tensor.device)], inputs)
    return taken


class ModelCall:
    """A model with the choice of its logits.

    >>> call = ModelCall(nn.Linear(3, 2))
    >>> call(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    def __init__(self, model: nn.Module, output: OutputChoice = None) -> None:
        self.model, self.output = model, output

    def __call__(self, inputs: Inputs, mode: AbstractContextManager[Any] | None = None) -> Tensor:
        """The logits, with their graph where gradients are enabled; `mode` is entered around the call."""
        given = map_tensors(_prepare_input, inputs)
        with eager_without_autocast(inputs):
            example = tensors_of(inputs)[0]
            before = device.random_states(example)
            with mode or nullcontext():
                picked = self._pick_logits(_call_model(self.model, given))
            logits = self._check_logits(picked)
            if askable(logits) and not before.unchanged():
                _check_randomness(self.model, given, before)
            return logits

    def logits_of(self, returned: Any) -> Tensor:
        """What of the model's return value are the logits."""
        return self._check_logits(self._pick_logits(returned))

    def _check_logits(self, logits: Any) -> Tensor:
        if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim < 2:
            chosen = "" if self.output is None else f" (output={self.output!r})"
            raise ProblemError(
                f"the model returned {describe_argument(logits)}{chosen}; expected logits of shape "
                f"(examples, …, outputs). Name them with output=: a field, an index or a function"
            )
        return logits

    def _pick_logits(self, returned: Any) -> Any:
        if callable(self.output):
            return self.output(returned)
        if self.output is not None:
            return _field(returned, self.output)
        if isinstance(returned, Tensor):
            return returned
        if hasattr(returned, "logits"):
            return returned.logits
        if isinstance(returned, Mapping):
            return returned.get("logits", returned)
        if isinstance(returned, tuple | list):
            return next((entry for entry in returned if isinstance(entry, Tensor)), returned)
        return returned


def _call_model(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def _field(returned: Any, name: str | int) -> Any:
    try:
        if isinstance(name, str) and not isinstance(returned, Mapping):
            return getattr(returned, name)
        return returned[name]
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        known = (
            list(returned)
            if isinstance(returned, Mapping)
            else sorted(vars(returned))
            if hasattr(returned, "__dict__")
            else describe_argument(returned)
        )
        raise ProblemError(
            f"output={name!r}: the model's return value has no such field; it has {known}"
        ) from error


def _prepare_input(tensor: Tensor) -> Tensor:
    """In float32 at least; and autograd cannot save what was made in inference mode, but a copy of it."""
    if not tensor.is_inference() and not torch.is_inference_mode_enabled():
        return in_float(tensor)
    with torch.inference_mode(False):
        return in_float(tensor.clone() if tensor.is_inference() else tensor)


def eager_without_autocast(inputs: Inputs) -> AbstractContextManager[Any]:
    """Outside inference mode and autocast, with modules that were compiled in place run as written."""
    if torch.is_inference_mode_enabled() or torch._C._is_any_autocast_enabled():
        return _eager_without_autocast(tensors_of(inputs)[0].device.type)
    return uncompiled()


@contextmanager
def _eager_without_autocast(device_type: str) -> Iterator[None]:
    with torch.inference_mode(False), torch.autocast(device_type, enabled=False), uncompiled():
        yield


def uncompiled() -> AbstractContextManager[Any]:
    """Runs modules that were compiled in place as written: compiled code calls no hooks."""
    # While dynamo has not been imported nothing is compiled, and importing it takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _SeededOperations(TorchDispatchMode):
    """Notes whether this thread draws random numbers; other threads may, at any time."""

    drawn = False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _check_randomness(model: nn.Module, given: Any, before: device.RandomStates) -> None:
    """Refuse a forward that draws random numbers; called where torch's state was `before` and has changed."""
    with torch.no_grad(), _SeededOperations() as watch:
        _call_model(model, given)
    if watch.drawn:
        before.restore()
        raise ProblemError(
            f"the forward of {type(model).__name__} draws random numbers: the curvature would be that of one "
            f"random draw. Call model.eval() first, or take the randomness out"
        )


@dataclass(eq=False)
class FloatCopy:
    """A float32 copy `model` of the model `given`, which `follow` brings to its values and modes.

    `settings` tells what of a model is neither: a change of it needs a new copy.

    >>> given = nn.Linear(2, 1, dtype=torch.bfloat16)
    >>> copied = FloatCopy.of(given, lambda model: None)
    >>> copied.model.weight.dtype, given.weight.dtype
    (torch.float32, torch.bfloat16)
    """

    given: nn.Module
    model: nn.Module
    settings: Callable[[nn.Module], Hashable] = field(repr=False)
    _versions: Versions | None = field(default=None, init=False, repr=False)
    _noted: Hashable = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, given: nn.Module, settings: Callable[[nn.Module], Hashable]) -> FloatCopy | None:
        """A copy of a model that has parameters or buffers of low precision; None of any other."""
        low = {id(tensor): tensor for tensor in _tensors(given) if tensor.dtype in LOW_PRECISION}
        if not low:
            return None
        try:
            model = deepcopy(given, {key: _float_leaf(tensor) for key, tensor in low.items()})
        except Exception as error:
            dtype = str(next(iter(low.values())).dtype).removeprefix("torch.")
            raise ProblemError(
                f"the model is in {dtype}, whose curvature is that of the float32 function, and no copy of "
                f"it in float32 can be made ({type(error).__name__}: {error}). Call model.float() first"
            ) from error
        copied = cls(given, model, settings)
        copied._noted = settings(given)
        return copied

    @property
    def dtype(self) -> str:
        """The low precision of the given model, in words."""
        low = next(tensor.dtype for tensor in _tensors(self.given) if tensor.dtype in LOW_PRECISION)
        return str(low).removeprefix("torch.")

    def __getstate__(self) -> dict[str, object]:
        """A pickled or deep copy has modules of its own: it reads all values and settings anew."""
        return {**self.__dict__, "_versions": None, "_noted": None}

    def follow(self) -> None:
        """Bring values and modes of the copy to those of the given model."""
        now = self.settings(self.given)
        self._noted = now if self._noted is None else self._noted
        if self._noted != now:
            raise StaleError(
                f"hooks or settings of the model have changed since a float32 copy of it was made, because "
                f"its parameters are {self.dtype}. Make a new Problem (or optimizer) of it"
            )
        for module, twin in zip(self.given.modules(), self.model.modules(), strict=True):
            twin.training = module.training
        pairs = list(zip(_tensors(self.given), _tensors(self.model), strict=True))
        named = {str(index): theirs for index, (theirs, _) in enumerate(pairs)}
        if self._versions is not None and not self._versions.differing(named):
            return
        with torch.no_grad():
            for theirs, own in pairs:
                own.copy_(theirs)
        self._versions = Versions.of(named)

    def check_own(self, leaves: list[Tensor]) -> None:
        """Refuse logits that were computed from parameters of the given model itself."""
        theirs = {id(parameter): name for name, parameter in self.given.named_parameters()}
        found = next((theirs[id(leaf)] for leaf in leaves if id(leaf) in theirs), None)
        if found is not None:
            raise ProblemError(
                f"the forward uses `{found}` from outside the model's modules (a closure or a hook that "
                f"holds it), so that a copy in float32 cannot be made of this {self.dtype} model. Call "
                f"model.float() first"
            )


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _float_leaf(tensor: Tensor) -> Tensor:
    """The same values in float32, as a parameter with the same hooks where it is one."""
    values = tensor.detach().float()
    if not isinstance(tensor, nn.Parameter):
        return values
    own = nn.Parameter(values, tensor.requires_grad)
    for hook in (tensor._backward_hooks or {}).values():
        own.register_hook(hook)
    return own
