"""Calling a model: with a tensor, several or a dictionary of them, and what it returns as logits.

    inputs a tensor    model(x)              logits: a tensor, `.logits`, `["logits"]`,
    a tuple            model(*x)             or the first tensor of a tuple;
    a dictionary       model(**x)            `output=` names a field, an index or a function

The first dimension of every tensor of the inputs counts the examples. A forward that draws random numbers is
refused; gradients, training modes, random state and the caller's grad mode are left as they were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from curvlab.exceptions import ProblemError, describe_argument
from curvlab.measure import device
from curvlab.model.float_copy import in_float

__all__ = [
    "Inputs",
    "ModelCall",
    "OutputChoice",
    "example_count",
    "slice_examples",
    "take_examples",
    "tensors_of",
    "uncompiled",
]

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
OutputChoice = str | int | Callable[[Any], Tensor] | None


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The tensors of the inputs, in order.

    >>> [t.shape for t in tensors_of({"ids": torch.zeros(2, 3), "mask": torch.ones(2, 3)})]
    [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


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
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    sliced: Inputs = pytree.tree_map_only(Tensor, lambda tensor: tensor[first:last], inputs)
    return sliced


def take_examples(inputs: Inputs, indices: Tensor) -> Inputs:
    """The examples under these indices, in their order.

    >>> take_examples((torch.arange(3), torch.arange(3, 6)), torch.tensor([2, 2]))
    (tensor([2, 2]), tensor([5, 5]))
    """
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    taken: Inputs = pytree.tree_map_only(Tensor, lambda t: t[indices.to(t.device)], inputs)
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
        given = pytree.tree_map_only(Tensor, _usable, dict(inputs) if isinstance(inputs, Mapping) else inputs)
        with eager_without_autocast(inputs):
            example = tensors_of(inputs)[0]
            before = device.random_states(example)
            with mode or nullcontext():
                logits = self.logits_of(_called(self.model, given))
            if device.readable(logits) and not before.unchanged():
                _check_randomness(self.model, given, before)
            return logits

    def logits_of(self, returned: Any) -> Tensor:
        """What of the model's return value are the logits."""
        logits = self._picked(returned)
        if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim < 2:
            chosen = "" if self.output is None else f" (output={self.output!r})"
            raise ProblemError(
                f"the model returned {describe_argument(logits)}{chosen}; expected logits of shape "
                f"(examples, …, outputs). Name them with output=: a field, an index or a function"
            )
        return logits

    def _picked(self, returned: Any) -> Any:
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


def _called(model: nn.Module, inputs: Any) -> Any:
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


def _usable(tensor: Tensor) -> Tensor:
    """In float32 at least; and autograd cannot save what was made in inference mode, but a copy of it."""
    with torch.inference_mode(False):
        return in_float(tensor.clone() if tensor.is_inference() else tensor)


@contextmanager
def eager_without_autocast(inputs: Inputs) -> Iterator[None]:
    """Outside inference mode and autocast, with modules that were compiled in place run as written."""
    kind = tensors_of(inputs)[0].device.type
    with torch.inference_mode(False), torch.autocast(kind, enabled=False), uncompiled():
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
        _called(model, given)
    if watch.drawn:
        before.restore()
        raise ProblemError(
            f"the forward of {type(model).__name__} draws random numbers: the curvature would be that of one "
            f"random draw. Call model.eval() first, or take the randomness out"
        )
