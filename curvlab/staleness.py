"""Noticing that what a result was computed from has changed since.

`Versions` watches tensors: torch counts the in-place changes of every tensor, and a tensor given other
storage has another address. A write through `tensor.data` or a numpy view is not counted; for it some
entries of every tensor (`SAMPLED`, evenly spread) are compared on the CPU, so a write that leaves all of
these as they were is not seen, nor one on an accelerator, where looking would take a read back to the host.
What a model is beside its tensors (modules, modes, hooks, settings, what is frozen) is compared as well,
where whoever notes the versions gives a watch of it (`watch_settings`).

`Fingerprint` watches a stream of batches; it is the same however the examples are ordered or batched. Each
example is hashed by itself, with its target, and the hashes are summed in wrapping 64-bit integers:

    digest = Σ_i mix(Σ_j bits_ij + Σ_j∈S key_j bits_ij, target_i)

The plain sum sees a change of any entry; the keyed one, over a few hundred entries S, sees entries that
changed places, as a random flip or crop does to an image.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from curvlab.exceptions import StaleError
from curvlab.linalg.execution import deferring
from curvlab.measure import device

__all__ = [
    "Fingerprint",
    "Members",
    "SettingsWatch",
    "Stamp",
    "Versions",
    "change_message",
    "checked_once",
    "example_hashes",
    "first_check",
    "hooks_of",
    "identities",
    "logical_shift",
    "mix",
    "own_hook",
    "settings_without_modes",
    "structure_key",
    "watch_settings",
]

NAMES_SHOWN = 4
Settings = Mapping[str, Hashable]
SettingsWatch = Callable[[], Settings | None]


class Stamp(NamedTuple):
    """The version and the address a tensor had.

    >>> import torch
    >>> w = torch.zeros(2)
    >>> before = Stamp.of(w)
    >>> Stamp.of(w.add_(1)) == before
    False
    """

    version: int
    address: int

    @classmethod
    def of(cls, tensor: Tensor) -> Stamp:
        """The present version; inference tensors have none, fake ones no address."""
        version = -1 if tensor.is_inference() else tensor._version
        return cls(version, tensor.data_ptr() if _has_memory(tensor) else 0)


@dataclass(frozen=True, eq=False)
class Versions:
    """Which version each of some named tensors had; the tensors themselves are not kept alive.

    >>> import torch
    >>> w = torch.zeros(2)
    >>> seen = Versions.of({"w": w})
    >>> seen.changed()
    []
    >>> _ = w.add_(1)
    >>> seen.changed()
    ['w']
    """

    entries: tuple[tuple[str, weakref.ref[Tensor], Stamp], ...]
    content: tuple[bytes, ...] | None = None
    settings: tuple[tuple[SettingsWatch, Settings | None], ...] = ()

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        settings: SettingsWatch | None = None,
        now: Settings | None = None,
    ) -> Versions:
        """Note the present versions, and what `settings` gives by name (None once there is no model).

        `now` is what it gives, where that is known already.
        """
        entries = tuple([(name, weakref.ref(t), Stamp.of(t)) for name, t in tensors.items()])
        noted = () if settings is None else ((settings, settings() if now is None else now),)
        return cls(entries, _sample(list(tensors.values())), noted)

    def __add__(self, other: Versions) -> Versions:
        """What both noted."""
        known = all(one.content is not None or not one.entries for one in (self, other))
        content = (self.content or ()) + (other.content or ()) if known else None
        return Versions(self.entries + other.entries, content, self.settings + other.settings)

    def _reset(self) -> list[str]:
        """Names of what the model is beside its tensors, where that has changed."""
        found: list[str] = []
        for watch, then in self.settings:
            now = watch()
            if now is not None and then is not None and now != then:
                found += [name for name in {**then, **now} if then.get(name) != now.get(name)]
        return found

    def _rewritten(self) -> list[str]:
        """Names of the tensors whose sampled entries differ though torch has counted no change."""
        tensors = [ref() for _, ref, _ in self.entries]
        held = [tensor for tensor in tensors if tensor is not None]
        if self.content is None or len(held) < len(tensors):
            return []
        now = _sample(held)
        if now is None or now == self.content:
            return []
        pairs = zip(now, self.content, self.entries, strict=True)
        return [name for new, old, (name, _, _) in pairs if new != old]

    def __reduce__(self) -> tuple[type[Versions], tuple[tuple[()]]]:
        """A pickled or deep copy has tensors of its own and nothing to compare with: it is never stale.

        So what is stale already cannot be copied: the copy would not know.
        """
        if changed := self.changed():
            consequence = "so a copy or pickle would be of something else. Copy before the change"
            raise StaleError(
                change_message(changed, "they were read", f"{consequence}, or compute again", in_place=True)
            )
        return Versions, ((),)

    def changed(self) -> list[str]:
        """Names of the tensors that were changed in place, or given other storage, since."""
        counted = [
            name
            for name, ref, stamp in self.entries
            if (tensor := ref()) is not None and Stamp.of(tensor) != stamp
        ]
        return counted or self._rewritten() or self._reset()

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names under which `tensors` holds another tensor, or the same one changed since."""
        counted = [
            name
            for name, ref, stamp in self.entries
            if ref() is not tensors.get(name) or Stamp.of(tensors[name]) != stamp
        ]
        return counted or self._rewritten() or self._reset()


@dataclass(frozen=True, eq=False)
class Members:
    """The modules, parameters and buffers of a model by name, each once and in torch's order.

    Found in one walk: the model is looked at several times in each step, and torch's own generators take a
    microsecond for every name.

    >>> import torch
    >>> found = Members.of(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU()))
    >>> [name for name, _ in found.modules], [name for name, _ in found.parameters]
    (['', '0', '1'], ['0.weight', '0.bias'])
    """

    modules: list[tuple[str, nn.Module]]
    parameters: list[tuple[str, nn.Parameter]]
    buffers: list[tuple[str, Tensor]]

    @classmethod
    def of(cls, model: nn.Module) -> Members:
        """Walk through a model."""
        found = cls([], [], [])
        found._visit("", model, set())
        return found

    def _visit(self, prefix: str, module: nn.Module, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        self.modules.append((prefix[:-1], module))
        for name, parameter in module._parameters.items():
            if parameter is not None and (key := id(parameter)) not in seen:
                seen.add(key)
                self.parameters.append((prefix + name, parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and (key := id(buffer)) not in seen:
                seen.add(key)
                self.buffers.append((prefix + name, buffer))
        for name, child in module._modules.items():
            if child is not None:
                self._visit(f"{prefix}{name}.", child, seen)


_CHECKED: ContextVar[set[object] | None] = ContextVar("what has been checked", default=None)


@contextmanager
def checked_once() -> Iterator[None]:
    """Inside, what `first_check` is asked about is checked once: one analysis takes hundreds of products."""
    token = _CHECKED.set(set())
    try:
        yield
    finally:
        _CHECKED.reset(token)


def first_check(of: object) -> bool:
    """Whether `of` is to be checked: always outside of `checked_once`, the first time inside.

    >>> with checked_once():
    ...     first_check("a"), first_check("a"), first_check("b")
    (True, False, True)
    """
    checked = _CHECKED.get()
    if checked is None:
        return True
    if of in checked:
        return False
    checked.add(of)
    return True


SAMPLED = 16
OWN_BITS = frozenset({torch.float32, torch.float64, torch.int64})
_OWN_MEMORY = frozenset({Tensor, nn.Parameter})


def _has_memory(tensor: Tensor) -> bool:
    """The same as `device.readable`, which is asked only of the kinds of tensors that may have none."""
    return not tensor.is_meta if type(tensor) in _OWN_MEMORY else device.readable(tensor)


def _sample(tensors: Sequence[Tensor]) -> tuple[bytes, ...] | None:
    """Some entries of each tensor, as bytes; None where one cannot be looked at from the host for free.

    Read through numpy's view of the same memory: nothing is allocated by torch, so that what this costs is
    in no measured column.
    """
    if deferring():
        return None
    pieces = []
    for tensor in tensors:
        if not _has_memory(tensor) or not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
        array = _array_of(tensor.detach() if tensor.requires_grad else tensor)
        step = array.size // SAMPLED or 1
        pieces.append(array.flat[: SAMPLED * step : step].tobytes())
    return tuple(pieces) or None


def _array_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bits of a tensor as numpy sees them, in its own memory where they are those of numbers."""
    if tensor.dtype in OWN_BITS and not tensor.is_neg():
        found: np.ndarray[Any, Any] = tensor.numpy()
        return found
    plain = tensor.resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    # As integers: numpy has no bfloat16.
    return plain.view(INTEGERS[plain.element_size()]).numpy()


def change_message(changed: Sequence[str], since: str, consequence: str, *, in_place: bool = False) -> str:
    """The sentence on what has changed, since when, and what follows from it.

    >>> change_message(["0.weight", "0.bias"], "`pch-1` was estimated", "so call estimate() again")
    '0.weight, 0.bias changed since `pch-1` was estimated, so call estimate() again'
    >>> change_message(["the batch"], "the solve", "so solve again", in_place=True)
    'the batch changed in place since the solve, so solve again'
    """
    names = ", ".join(changed[:NAMES_SHOWN]) + (" and others" if len(changed) > NAMES_SHOWN else "")
    return f"{names} changed{' in place' if in_place else ''} since {since}, {consequence}"


def watch_settings(model: nn.Module) -> SettingsWatch:
    """Gives what a forward may read of a model beside tensors when called: modes, hooks and settings.

    Numbers, texts and the identities of functions are in it, so that a changed slope, stride, flag or
    forward is seen, under the module's name; what a module keeps in lists or objects of its own is not
    looked into. The model is not kept alive: None once it is gone.
    """
    held = weakref.ref(model)

    def settings() -> Settings | None:
        still = held()
        return None if still is None else model_settings(Members.of(still))

    return settings


def model_settings(members: Members) -> dict[str, Hashable]:
    """What a model is beside the values of its tensors, by the names that messages have for it."""
    settings: dict[str, Hashable] = {
        name: (id(p), p.dtype, p.device, p.requires_grad) for name, p in members.parameters
    }
    for name, module in members.modules:
        own = module.__dict__.copy()  # at once, as other threads may set attributes meanwhile
        kinds = tuple(map(type, own.values()))
        # Here and not in `_setting` is what most attributes are: plain values, and tables without entries.
        found = [
            value if kind in _PLAIN else () if kind in _TABLES and not value else _setting(value)
            for kind, value in zip(kinds, own.values(), strict=True)
        ]
        settings[f"module `{name}`" if name else "the model"] = (id(module), tuple(own), kinds, tuple(found))
    settings["global hooks of modules"] = _hook_keys(_global_hooks())
    return settings


def structure_key(model: nn.Module) -> Hashable:
    """Modules, modes, hooks and the kinds of parameters: what a recorded forward depends on."""
    members = Members.of(model)
    modules = [(id(module), module.training, _hook_keys(hooks_of(module))) for _, module in members.modules]
    kinds = [(id(p), p.dtype, p.device, p.requires_grad) for _, p in members.parameters]
    return tuple(modules), tuple(kinds), _hook_keys(_global_hooks())


def own_hook(function: Callable[..., None]) -> Callable[..., None]:
    """A hook of curvlab's own, which listens to the forwards of the thread that made it, and changes nothing.

    Other threads that use the model at the same time do not hear of it, nor take it for a change of the
    model.
    """
    thread = threading.get_ident()

    def hook(*args: Any) -> None:
        if threading.get_ident() == thread:
            function(*args)

    hook.curvlab_own = True  # type: ignore[attr-defined]
    return hook


def _hook_keys(tables: Sequence[Mapping[int, object]]) -> Hashable:
    # Copied at once, as other threads may add hooks meanwhile.
    return tuple(
        [tuple([key for key, hook in list(t.items()) if not _own(hook)]) if t else () for t in tables]
    )


def _own(hook: object) -> bool:
    return hasattr(hook, "curvlab_own")


def identities(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """The modules and the parameters with their identities; a frozen parameter counts as another one."""
    found: list[tuple[str, int]] = []
    _add_identities(model, "", found)
    return tuple(found)


def _add_identities(module: nn.Module, prefix: str, found: list[tuple[str, int]]) -> None:
    found.append((prefix[:-1], id(module)))
    for name, p in module._parameters.items():
        if p is not None:
            found.append((prefix + name, id(p) if p.requires_grad else -id(p)))
    for name, child in module._modules.items():
        if child is not None:
            _add_identities(child, f"{prefix}{name}.", found)


# Read at every step, thousands of times in a large model: no isinstance, and no text is made of numbers.
_PLAIN = frozenset({int, float, str, bool, complex, type(None), torch.Size})
_TABLES = frozenset({dict, OrderedDict})


def settings_without_modes(model: nn.Module) -> Hashable:
    """What a copy of the model cannot follow: the attributes of all modules but their modes."""
    tables = (module.__dict__.items() for module in model.modules())
    return tuple((key, _setting(value)) for table in tables for key, value in table if key != "training")


def _setting(value: object) -> Hashable:
    """A setting by its value where it is simple, by its identity where it is a function, else by its type."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in _TABLES:
        # Copied at once, as other threads may add hooks meanwhile.
        return tuple([(key, id(x)) for key, x in list(value.items()) if not _own(x)]) if value else ()  # type: ignore[attr-defined]
    if kind is tuple:
        return repr(value)
    return id(value) if callable(value) else kind.__qualname__


def hooks_of(module: nn.Module) -> tuple[Mapping[int, object], ...]:
    """The hooks of a module, forward and backward."""
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


KEYED_ENTRIES = 512
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """How many examples a pass had, and the sum of their hashes.

    >>> x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 1])
    >>> Fingerprint.of(x, y) == Fingerprint.of(x[:1], y[:1]) + Fingerprint.of(x[1:], y[1:])
    True
    >>> Fingerprint.of(x, y) == Fingerprint.of(x, y.flip(0))
    False
    """

    examples: int = 0
    digest: int = 0

    @classmethod
    def of(cls, inputs: Tensor | Sequence[Tensor], targets: Tensor) -> Fingerprint:
        """The fingerprint of one batch; without values (fake tensors) only the count."""
        tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if not all(device.readable(tensor) for tensor in (*tensors, targets)):
            return cls(len(targets))
        return cls(len(targets), int(example_hashes(tensors, targets).sum()) % (1 << 64))

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.examples + other.examples, (self.digest + other.digest) % (1 << 64))


def example_hashes(inputs: Sequence[Tensor], targets: Tensor) -> Tensor:
    """A hash of each example with its target, int64: the same wherever the example stands in the data.

    >>> x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 1])
    >>> bool((example_hashes([x], y).flip(0) == example_hashes([x.flip(0)], y.flip(0))).all())
    True
    """
    total = mix(_row_hashes(targets))
    for tensor in inputs:
        total = mix(_row_hashes(tensor) + total)
    return total


def _row_hashes(tensor: Tensor) -> Tensor:
    bits = _bits(tensor.detach()).reshape(len(tensor), -1)
    few = bits[:, :: bits.shape[1] // KEYED_ENTRIES + 1].long()
    keys = mix(torch.arange(few.shape[1], device=bits.device))
    return mix(bits.sum(1, dtype=torch.int64)) + mix((few * keys).sum(1))


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor).flatten(1).contiguous().view(INTEGERS[tensor.element_size() // 2])
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_FACTOR_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_FACTOR_2 = -7723592293110705685  # 0x94D049BB133111EB


def logical_shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros: torch's own shift of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """A hash of each entry of an int64 tensor.

    >>> import torch
    >>> mix(torch.tensor([0, 1])).tolist()
    [-2152535657050944081, -7995527694508729151]
    """
    x = x + _GOLDEN
    x = (x ^ logical_shift(x, 30)) * _FACTOR_1
    x = (x ^ logical_shift(x, 27)) * _FACTOR_2
    return x ^ logical_shift(x, 31)
