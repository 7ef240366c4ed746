"""The data of a problem: one batch, or a re-iterable of batches that shows the same examples in every pass.

A batch is (inputs, targets), inputs being a tensor, a tuple or a dictionary of tensors, whose first dimension
counts the examples; or a dictionary with `labels`, as loaders of language models give it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from curvlab.exceptions import NoRowsError, ProblemError, StaleError
from curvlab.model.network import Inputs, example_count, tensors_of
from curvlab.staleness import Fingerprint

__all__ = ["Batch", "EmptySource", "Single", "Source", "Stream", "keep_batches", "source_of"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets of some examples."""

    inputs: Inputs
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, eq=False)
class Single:
    """One batch, held by reference."""

    batch: Batch

    def __str__(self) -> str:
        return f"{len(self.batch)} examples"

    def examples(self) -> int:
        """How many examples there are."""
        return len(self.batch)


@dataclass(eq=False)
class Stream:
    """A re-iterable of batches; every pass must show the same examples, in any order."""

    data: Iterable[Any]
    first: Fingerprint | None = field(default=None, init=False)
    _begun: tuple[Batch, Iterator[Batch]] | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles begin their passes anew."""
        return {**self.__dict__, "_begun": None}

    def __str__(self) -> str:
        return "a stream of batches"

    def examples(self) -> int:
        """How many examples a pass has; none for a stream that gives no batch."""
        if self.first is None:
            with suppress(NoRowsError):
                for _ in self.batches():
                    pass
        return 0 if self.first is None else self.first.examples

    def begin(self) -> Batch | None:
        """The first batch of the next pass, which then goes on behind it; None where there is none."""
        if self._begun is None:
            items = self._items()
            found = next(items, None)
            if found is None:
                return None
            self._begun = found, items
        return self._begun[0]

    def batches(self) -> Iterator[Batch]:
        """One pass."""
        begun, self._begun = self._begun, None
        items = self._items() if begun is None else chain([begun[0]], begun[1])
        del begun
        seen = Fingerprint()
        for batch in items:
            seen += Fingerprint.of(tensors_of(batch.inputs), batch.targets)
            yield batch
        self._compare(seen)

    def _items(self) -> Iterator[Batch]:
        """The batches as `data` gives them.

        A DataLoader draws its order from torch's random state: it goes on with a state of its own, so that
        the caller's is what it was between any two batches.
        """
        items: Iterator[Any] | None = None
        own = torch.get_rng_state()
        for index in count():
            outer = torch.get_rng_state()
            torch.set_rng_state(own)
            try:
                items = iter(self.data) if items is None else items
                item = next(items, _END)
            finally:
                own = torch.get_rng_state()
                torch.set_rng_state(outer)
            if item is _END:
                return
            yield _pair(item, f"batch {index}")

    def _compare(self, seen: Fingerprint) -> None:
        if not seen.examples:
            raise NoRowsError(
                "the re-iterable gave no batch: it is empty, or its first pass used it up. Pass "
                "a list of batches or a DataLoader"
            )
        self.first = self.first or seen
        if seen != self.first:
            what = (
                "their contents differ"
                if seen.examples == self.first.examples
                else f"the first pass had {self.first.examples} examples, this one {seen.examples}"
            )
            raise StaleError(
                f"the batches changed between two passes: {what}. Curvature needs the same data in every "
                f"pass, and random augmentation, random sampling, or drop_last together with shuffling give "
                f"others: turn them off, or keep the batches of one pass, "
                f"Problem(model, criterion, curvlab.keep_batches(loader))"
            )


@dataclass(frozen=True, eq=False)
class EmptySource:
    """No rows at all: what a rank of a process group has that got none."""

    def __str__(self) -> str:
        return "no rows"

    def examples(self) -> int:
        """None."""
        return 0

    def batches(self) -> Iterator[Batch]:
        """None."""
        return iter(())


_END = object()

Source = Single | Stream | EmptySource


def keep_batches(loader: Iterable[Any]) -> list[Any]:
    """The batches of one pass over `loader`, as copies, so that every further pass shows the same.

    For loaders whose passes differ, such as those with random augmentation: curvature, gradient and products
    are then all of the same draw. The next call makes another pass, with draws of its own. All batches are
    held in memory.

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> data = TensorDataset(torch.arange(4.0)[:, None], torch.tensor([0, 1, 0, 1]))
    >>> def augmented(items):
    ...     inputs, targets = torch.utils.data.default_collate(items)
    ...     return inputs + torch.randn_like(inputs), targets
    >>> batches = keep_batches(DataLoader(data, batch_size=2, collate_fn=augmented))
    >>> [tuple(inputs.shape) for inputs, _ in batches]
    [(2, 1), (2, 1)]
    """
    if not isinstance(loader, Iterable) or isinstance(loader, Tensor | str | bytes):
        raise ProblemError(f"keep_batches takes batches, such as a DataLoader; got a {_kind(loader)}")
    return [pytree.tree_map_only(Tensor, Tensor.clone, batch) for batch in loader]


def source_of(inputs: Inputs | Iterable[Any], targets: Tensor | None) -> Source:
    """The data as `Problem` is given them, told apart."""
    if targets is not None:
        if isinstance(inputs, Tensor | tuple | Mapping):
            return Single(_pair((inputs, targets), "the batch"))
        raise ProblemError(
            f"inputs is a {type(inputs).__name__} where targets are given: expected a tensor, or a tuple or "
            f"dictionary of tensors. (A re-iterable of batches brings its own targets)"
        )
    if isinstance(inputs, Mapping) and "labels" in inputs:
        return Single(_pair(inputs, "the batch"))
    if isinstance(inputs, Tensor | Mapping):
        raise ProblemError("targets are missing: Problem(model, criterion, inputs, targets) needs both")
    if not isinstance(inputs, Iterable):
        raise ProblemError(
            f"inputs is a {type(inputs).__name__}; expected a tensor, a tuple or dictionary of tensors, or a "
            f"re-iterable of (inputs, targets) batches, such as a DataLoader"
        )
    if isinstance(inputs, Iterator):
        raise ProblemError(
            f"inputs is a one-shot {type(inputs).__name__}: curvature may need several passes. Pass a list "
            f"of batches or a DataLoader"
        )
    return Stream(inputs)


def _pair(item: Any, what: str) -> Batch:
    if isinstance(item, Mapping) and "labels" in item:
        item = ({key: value for key, value in item.items() if key != "labels"}, item["labels"])
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ProblemError(
            f"{what} is a {type(item).__name__}; expected a pair (inputs, targets), or a dictionary with "
            f"`labels`"
        )
    inputs, targets = item
    inputs = tuple(inputs) if isinstance(inputs, list) else inputs
    parts: list[Any] = [*tensors_of(inputs)] or [inputs]
    tensors = [("inputs", value) for value in parts] + [("targets", targets)]
    for name, value in tensors:
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
            raise ProblemError(f"{name} of {what}: expected a dense tensor, got {_kind(value)}")
        if is_functorch_wrapped_tensor(value):
            raise ProblemError(f"{name} of {what} belong to a torch.func transform: make the problem outside")
        if value.ndim == 0:
            raise ProblemError(f"{name} of {what} is a single number; expected one entry for each example")
    count = example_count(inputs, what)
    if count == 0:
        raise ProblemError(
            f"inputs of {what} have shape {tuple(tensors[0][1].shape)}: at least one example is needed. (A "
            f"rank of a process group that has none passes [] instead)"
        )
    if len(targets) != count:
        raise ProblemError(
            f"{what} has {count} inputs but targets of shape {tuple(targets.shape)}; expected one "
            f"target for each example"
        )
    return Batch(inputs, targets)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor) and value.is_nested:
        return "a nested tensor"
    return f"a tensor of layout {value.layout}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
