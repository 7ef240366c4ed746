"""What must be the same on all ranks before their numbers are mixed, and who differs where it is not.

A rank describes its model (modules, modes, settings, hooks, weights, buffers), criterion and wishes by one
64-bit digest each. The digests travel with a message that is sent anyway; only where some differ do the
ranks exchange more, to say which tensors they are:

    settings    a hash of their text: numbers as they are, functions by name, code and closure
    tensors     a hash of `SAMPLED` evenly spread entries of each; at a model's first joint call of all

So a difference in few entries that arises later can be missed. Tensors that differ by rounding alone, on
ranks of different processors, are let through with a `RankDriftWarning`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain
from types import CodeType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from curvlab.distributed.communicator import Communicator, Failure, failure_of
from curvlab.exceptions import RankError
from curvlab.measure import device
from curvlab.model.network import Network
from curvlab.staleness import INTEGERS, hooks_of, mix

__all__ = [
    "Description",
    "InitialWeightsWarning",
    "Named",
    "RankDriftWarning",
    "adopt_first_rank",
    "agree",
    "any_agreed",
    "check_agreement",
    "describe_model",
    "digest_of",
]

SAMPLED = 256
NAMES_SHOWN = 4
DEPTH = 6
SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None)})
# Relative to the largest entry: what different processors make of the same arithmetic, over many steps.
ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-9}
T = TypeVar("T")
Named = Mapping[str, Tensor]


class RankDriftWarning(UserWarning):
    """The weights of some ranks differ by rounding: they do not compute alike."""


class InitialWeightsWarning(UserWarning):
    """A rank began with other weights than rank 0, whose weights it was given."""


@dataclass(frozen=True, eq=False)
class Description:
    """What a rank says of itself: `settings` by label, `tensors` by label and name.

    `whole` are further tensors of which every entry counts.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    tensors: Mapping[str, Named] = field(default_factory=dict)
    whole: Named = field(default_factory=dict)

    def digests(self) -> dict[str, int]:
        """One number for each label; that of whole tensors only where there are some."""
        found = {label: digest_of(value) for label, value in self.settings.items()}
        found |= {label: _sample_digest(named) for label, named in self.tensors.items()}
        if self.whole:
            found[EVERY_ENTRY] = _whole_digest(self.whole)
        return found

    @torch.no_grad()
    def samples(self, label: str) -> dict[str, Tensor]:
        """The entries that are compared of each tensor under `label`."""
        return {name: _spread_entries(t, SAMPLED).double().cpu() for name, t in self.tensors[label].items()}


EVERY_ENTRY = "the weights or buffers, entry by entry"
_described_whole: WeakKeyDictionary[Network, bool] = WeakKeyDictionary()


def describe_model(network: Network, settings: Mapping[str, object]) -> Description:
    """The description of a model and of further `settings`; its first one reads all entries of the model."""
    parameters, buffers = dict(network.given.named_parameters()), dict(network.given.named_buffers())
    modules = repr([(name, _module(module)) for name, module in network.given.named_modules()])
    first = network not in _described_whole
    _described_whole[network] = True
    return Description(
        {"the modules, their modes, hooks or settings": modules, **settings},
        {"the weights": parameters, "the buffers": buffers},
        {**parameters, **buffers} if first else {},
    )


def agree(
    communicator: Communicator,
    function: Callable[[], T],
    describe: Callable[[T], Description] = lambda _: Description(),
    *,
    on: torch.device,
) -> T:
    """What `function` returns, once all ranks came here with equal descriptions of it; one small message.

    Where it raises on one rank, or the descriptions differ, all ranks raise.
    """
    if communicator.size == 1:
        return function()
    failure: Failure | None = None
    failed: Exception | None = None
    try:
        value = function()
        mine = describe(value)
        digests = mine.digests()
    except Exception as error:
        failed, failure = error, failure_of(error, communicator.rank)
        mine, digests = Description(), {}
    if communicator.all_equal(digest_of(digests), failed is not None, on):
        return value
    told = communicator.gather_objects(digests if failure is None else failure)
    if failed is not None:
        raise failed
    for other in told:
        if isinstance(other, Failure):
            raise other.error()
    check_agreement(communicator, mine, [other for other in told if not isinstance(other, Failure)])
    return value


def any_agreed(communicator: Communicator, function: Callable[[], bool], *, on: torch.device) -> bool:
    """Whether `function` is true on any rank; where it raises on one, all raise. One small message."""
    if communicator.size == 1:
        return function()
    failed: Exception | None = None
    flag = False
    try:
        flag = function()
    except Exception as error:
        failed = error
    sent = torch.tensor([int(flag), int(failed is not None)], device=on)
    flags, failures = communicator.sum(sent).tolist()
    if failures:
        told = communicator.gather_objects(None if failed is None else failure_of(failed, communicator.rank))
        raise failed or next(failure for failure in told if failure is not None).error()
    return flags > 0


def adopt_first_rank(communicator: Communicator, network: Network) -> None:
    """Give all ranks the parameters and buffers of rank 0, as DDP does; those that had others are warned."""
    if communicator.size == 1:
        return
    mine = describe_model(network, {})
    told = communicator.gather_objects(mine.digests())
    structure = [{label: d[label] for label in mine.settings} for d in told]
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in mine.whole.items()}
    settings = {"the shapes or dtypes of the parameters": shapes}
    agree(communicator, lambda: None, lambda _: Description(settings), on=network.example.device)
    check_agreement(communicator, Description(mine.settings), structure)
    if all(d == told[0] for d in told):
        return
    tensors = list(mine.whole.values())
    like = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    sent = communicator.broadcast([t.detach() for t in tensors], like, 0, network.example.device)
    if communicator.rank and told[communicator.rank] != told[0]:
        with torch.no_grad():
            for tensor, value in zip(tensors, sent, strict=True):
                tensor.copy_(value)
        warnings.warn(
            f"rank {communicator.rank} had other weights or buffers than rank 0 and goes on with rank 0's",
            InitialWeightsWarning,
            stacklevel=5,
        )


def check_agreement(
    communicator: Communicator, mine: Description, digests: Sequence[Mapping[str, int]]
) -> None:
    """Raise `RankError` unless the `digests` of all ranks are equal; every rank must make this call."""
    labels = list(dict.fromkeys(chain.from_iterable(digests)))
    differing = [label for label in labels if len({d[label] for d in digests if label in d}) > 1]
    if not differing:
        return
    drifted = [label for label in differing if label in mine.tensors and _drift(communicator, mine, label)]
    if drifted and set(differing) <= {*drifted, EVERY_ENTRY}:
        warnings.warn(
            f"{' and '.join(drifted)} of the ranks differ by rounding: they do not compute alike (other "
            f"processors, libraries or numbers of threads), and drift apart. Broadcast rank 0's from time to "
            f"time",
            RankDriftWarning,
            stacklevel=4,
        )
        return
    label = next(label for label in differing if label not in drifted)
    ranks = _ranks_apart([d.get(label) for d in digests])
    named = _names_apart(communicator, mine, label) if label in mine.tensors else ""
    tensors = label in mine.tensors or label == EVERY_ENTRY
    advice = ". Broadcast rank 0's tensors, as SecondOrder does when it is made" if tensors else ""
    raise RankError(
        f"{_ranks_text(ranks)} of the process group came with other values of {label}{named} than the others"
        f"{_also(differing, label)}: every rank must make the same calls with the same model, criterion and "
        f"settings{advice}"
    )


def _also(differing: Sequence[str], shown: str) -> str:
    others = [label for label in differing if label not in (shown, EVERY_ENTRY)]
    return f" (also of {', '.join(others)})" if others else ""


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _ranks_apart(values: Sequence[Hashable]) -> list[int]:
    """The ranks that do not have what most have; of equally many, what the first of them has counts."""
    counts = Counter(value for value in values if value is not None)
    most = max(counts.values())
    common = next(value for value in values if value is not None and counts[value] == most)
    return [rank for rank, value in enumerate(values) if value is not None and value != common]


def _names_apart(communicator: Communicator, mine: Description, label: str) -> str:
    own = {name: _sample_digest({name: tensor}) for name, tensor in mine.tensors[label].items()}
    told = communicator.gather_objects(own)
    names = [name for name in told[0] if len({other.get(name) for other in told}) > 1]
    if not names:
        return ""
    more = " and others" if len(names) > NAMES_SHOWN else ""
    return f" ({', '.join(f'`{name}`' for name in names[:NAMES_SHOWN])}{more})"


def _drift(communicator: Communicator, mine: Description, label: str) -> bool:
    """Whether what all ranks have under `label` is the same up to rounding."""
    own = mine.samples(label)
    dtypes = [tensor.dtype for tensor in mine.tensors[label].values()]
    slack = max((ROUNDING.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    told = communicator.gather_objects(own)
    first = told[0]
    return all(
        other.keys() == first.keys() and all(_close(other[name], first[name], slack) for name in first)
        for other in told
    )


def _close(left: Tensor, right: Tensor, slack: float) -> bool:
    if left.shape != right.shape:
        return False
    if not left.numel():
        return True
    return bool((left - right).abs().max() <= slack * right.abs().max())


# Digests.


def digest_of(value: object) -> int:
    """A 64-bit hash of a value's text that is the same in every process.

    >>> digest_of({"alpha": 0.1}) == digest_of({"alpha": 0.1}), digest_of(nn.Tanh()) == digest_of(nn.ReLU())
    (True, False)
    """
    text = repr(_text(value, DEPTH)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def _text(value: object, depth: int) -> Any:
    """What tells a value from another one, free of addresses."""
    if type(value) in SIMPLE:
        return value
    if isinstance(value, int | float | complex | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), _sample_digest({"": value})
    if isinstance(value, Mapping):
        return tuple((_text(k, depth - 1), _text(v, depth - 1)) for k, v in value.items())
    if isinstance(value, tuple | list):
        return tuple(_text(entry, depth - 1) for entry in value)
    if isinstance(value, nn.Module):
        return tuple((name, _module(module)) for name, module in value.named_modules())
    if isinstance(value, partial):
        return "partial", _text([value.func, value.args, value.keywords], depth - 1)
    if is_dataclass(value) and not isinstance(value, type):
        named = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return type(value).__qualname__, _text(named, depth - 1)
    if callable(value):
        return _function_text(value, depth - 1)
    return type(value).__qualname__


def _function_text(function: Callable[..., Any], depth: int) -> Any:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return name
    constants = [c for c in code.co_consts if not isinstance(c, CodeType)]
    cells = [_cell(cell) for cell in getattr(function, "__closure__", None) or ()]
    defaults = getattr(function, "__defaults__", None)
    return name, code.co_code, code.co_names, _text([constants, cells, defaults], depth)


def _cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _module(module: nn.Module) -> Any:
    """A module's class, and of its own attributes those that a forward may read as they are."""
    own = [
        (key, value if type(value) in SIMPLE else _text(value, 2))
        for key, value in module.__dict__.items()
        if key[0] != "_" and not isinstance(value, Tensor | nn.Module)
    ]
    hooks = [_text(list(hooks.values()), 3) for hooks in hooks_of(module) if hooks]
    return type(module).__qualname__, own, hooks


@torch.no_grad()
def _sample_digest(tensors: Named) -> int:
    values = [t for t in tensors.values() if device.readable(t) and t.layout is torch.strided and t.numel()]
    shapes = repr([(name, t.shape, t.dtype) for name, t in tensors.items()])
    if not values:
        return digest_of(shapes)
    entries = torch.cat([_spread_entries(t, SAMPLED).double() for t in values])
    return digest_of(shapes) ^ _hash(entries.view(torch.int64))


def _spread_entries(tensor: Tensor, count: int) -> Tensor:
    """Up to `count` entries of a tensor, evenly spread, as real numbers; to be called without gradients."""
    held = tensor.numel()
    step = max(1, held // count)
    if tensor.is_contiguous():
        picked = tensor.as_strided((min(held, count),), (step,))
    else:
        picked = tensor.reshape(-1)[::step][:count]
    return torch.view_as_real(picked).flatten() if picked.is_complex() else picked


def _whole_digest(tensors: Named) -> int:
    """Sums of all entries' bits, a number for each tensor; what changed places is for the sample to see."""
    values = [t for t in tensors.values() if device.readable(t) and t.layout is torch.strided and t.numel()]
    if not values:
        return 0
    return _hash(torch.stack([_bit_sum(t.detach()) for t in values]))


def _bit_sum(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.element_size() < 8 and flat.is_floating_point():
        # Wide integers are summed seven times as fast as narrow ones.
        per_word = 8 // flat.element_size()
        flat = flat.clone() if flat.storage_offset() % per_word else flat
        words = len(flat) // per_word * per_word
        rest = flat[words:].view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
        return flat[:words].view(torch.int64).sum() + rest
    return (flat.view(torch.int64) if flat.is_floating_point() else flat).sum(dtype=torch.int64)


def _hash(bits: Tensor) -> int:
    places = torch.arange(len(bits), device=bits.device)
    return int(mix(bits + mix(places)).sum()) % (1 << 64)
