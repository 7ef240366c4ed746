"""The data of a problem: a single batch, or a re-iterable of batches that is never held whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvlab.criteria import Criterion
from curvlab.exceptions import NoRowsError, ProblemError, StaleError
from curvlab.fingerprint import Fingerprint
from curvlab.network import Network

__all__ = ["Batch", "Nothing", "Single", "Stream", "checked", "source"]

DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets of some examples."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, eq=False)
class Single:
    """One batch, held by reference."""

    batch: Batch

    def __str__(self) -> str:
        return f"{len(self.batch.inputs)} examples"

    def examples(self) -> int:
        """How many examples there are."""
        return len(self.batch.inputs)


@dataclass(eq=False)
class Stream:
    """A re-iterable of batches; every pass must show the same examples, in any order."""

    data: Iterable[Any]
    first: Fingerprint | None = field(default=None, init=False)

    def __str__(self) -> str:
        return "a stream of batches"

    def examples(self) -> int:
        """How many examples a pass has; none for a stream that gives no batch."""
        if self.first is None:
            with suppress(NoRowsError):
                for _ in self.batches():
                    pass
        return 0 if self.first is None else self.first.examples

    def batches(self) -> Iterator[Batch]:
        """One pass; torch's random state, from which a DataLoader draws its order, is put back after it."""
        seen = Fingerprint()
        state = torch.get_rng_state()
        try:
            for index, item in enumerate(self.data):
                batch = _pair(item, f"batch {index}")
                seen += Fingerprint.of(batch.inputs, batch.targets)
                yield batch
        finally:
            torch.set_rng_state(state)
        self._compare(seen)

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
                f"pass: turn off random augmentation, random sampling, and drop_last together with shuffling"
            )


@dataclass(frozen=True, eq=False)
class Nothing:
    """No rows at all: the part of a rank that has none."""

    def __str__(self) -> str:
        return "no rows"

    def examples(self) -> int:
        """None."""
        return 0

    def batches(self) -> Iterator[Batch]:
        """None."""
        return iter(())


def source(inputs: Tensor | Iterable[Any], targets: Tensor | None) -> Single | Stream:
    """The data as `Problem` is given them, told apart."""
    if isinstance(inputs, Tensor):
        if targets is None:
            raise ProblemError("targets are missing: Problem(model, criterion, inputs, targets) needs both")
        return Single(_pair((inputs, targets), "the batch"))
    if targets is not None:
        raise ProblemError(
            f"inputs is a {type(inputs).__name__} where targets are given: expected a tensor. (A re-iterable "
            f"of batches brings its own targets)"
        )
    if not isinstance(inputs, Iterable):
        raise ProblemError(
            f"inputs is a {type(inputs).__name__}; expected a tensor or a re-iterable of (inputs, targets) "
            f"batches, such as a DataLoader"
        )
    if isinstance(inputs, Iterator):
        raise ProblemError(
            f"inputs is a one-shot {type(inputs).__name__}: curvature may need several passes. Pass a list "
            f"of batches or a DataLoader"
        )
    return Stream(inputs)


def _pair(item: Any, what: str) -> Batch:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ProblemError(f"{what} is a {type(item).__name__}; expected a pair (inputs, targets)")
    for name, value in zip(("inputs", "targets"), item, strict=True):
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise ProblemError(f"{name} of {what}: expected a dense tensor, got {_kind(value)}")
        if value.ndim == 0:
            raise ProblemError(f"{name} of {what} is a single number; expected one entry for each example")
    inputs, targets = item
    if len(inputs) == 0:
        raise ProblemError(
            f"inputs of {what} have shape {tuple(inputs.shape)}: at least one example is needed. (A rank of "
            f"a process group that has none passes [] instead)"
        )
    if len(targets) != len(inputs):
        raise ProblemError(
            f"{what} has {len(inputs)} inputs but targets of shape {tuple(targets.shape)}; expected one "
            f"target for each example"
        )
    return Batch(inputs, targets)


def _kind(value: Any) -> str:
    return f"a tensor of layout {value.layout}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def checked(batch: Batch, what: str, network: Network, criterion: Criterion) -> Batch:
    """The batch, if it goes with the model and the criterion; cheaply, from shapes and targets."""
    weight = network.layers[0].weight
    if weight.dtype not in DTYPES:
        raise ProblemError(
            f"the model is in {weight.dtype}; curvature needs float32 or float64 (model.float() or .double())"
        )
    for name, value in (("inputs", batch.inputs), ("targets", batch.targets)):
        if value.device != weight.device:
            raise ProblemError(
                f"{name} of {what} are on {value.device} but the model is on {weight.device}: move one "
                f"with .to()"
            )
    # Only a model that is no chain may begin with something that takes integers, as an embedding does.
    chain, dtype = network.chain, batch.inputs.dtype
    if dtype != weight.dtype and (chain is not None or dtype.is_floating_point or dtype.is_complex):
        raise ProblemError(
            f"inputs of {what} are {dtype} but the model is {weight.dtype}: convert one with .to()"
        )
    if chain is not None:
        features = chain.features(batch.inputs)
        outputs = chain.layers[-1].module.out_features
        # Criteria check targets against logits; of these only shape, dtype and device are known yet.
        criterion.check(weight.new_zeros(len(features), outputs), batch.targets)
    return batch
