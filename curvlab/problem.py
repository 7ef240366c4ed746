"""A problem: a model, a criterion and the data its curvature is taken on.

    E[f] = Σ c_i f_i / Σ c_i   over the rows of a batch, or of a re-iterable of batches

The model, the criterion and the batch are validated once, when the problem is made. One recording of the
batch serves the gradient and every provider; a stream of batches is recorded batch by batch and never
held whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from curvlab.criteria import Criterion
from curvlab.criteria.registry import criterion_named
from curvlab.distributed.communicator import Communicator, communicator_of
from curvlab.distributed.statistics import (
    Accumulator,
    JoinedStatistics,
    LocalMeans,
    Statistic,
    join_statistics,
)
from curvlab.exceptions import NoRowsError, ProblemError, StaleError
from curvlab.gradient import Gradient, GradientMean, gradient_of, mean_gradient
from curvlab.model.graph import Network
from curvlab.model.recording import AllWeightsZeroError, Recording, call, criterion_weights, record
from curvlab.staleness import Fingerprint, Versions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Batch", "EmptySource", "Problem", "Single", "Stream", "checked", "source"]

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


class Problem:
    """A model, a criterion and a batch (or a re-iterable of batches).

    Args:
        model: any module that contains Linear layers; the recursions need them in a chain.
        criterion: a name (`"cross-entropy"`), a torch loss, a `Criterion`, or a function of
            (logits, target) of one example.
        inputs: a tensor (examples, …), or a re-iterable of (inputs, targets) batches.
        targets: the targets of the batch; None for a re-iterable.
        layers: names of the Linear layers to analyse; all that are trainable by default.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2))
    >>> problem = Problem(model, "cross-entropy", torch.zeros(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    >>> list(problem.gradient())
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    network: Network
    criterion: Criterion

    def __init__(
        self,
        model: nn.Module,
        criterion: str | Criterion | Any,
        inputs: Tensor | Iterable[Any],
        targets: Tensor | None = None,
        *,
        layers: Sequence[str] | None = None,
    ) -> None:
        self.network = Network.of(model, layers)
        self.criterion = criterion_named(criterion)
        self._bind(inputs, targets)

    def with_data(self, inputs: Tensor | Iterable[Any], targets: Tensor | None = None) -> Problem:
        """The same model and criterion on other data, without analysing the model again."""
        other = object.__new__(Problem)
        other.network, other.criterion = self.network, self.criterion
        self.network.check_modes()
        other._bind(inputs, targets)
        return other

    def empty_like(self) -> Problem:
        """The same model and criterion on no rows: what a rank of a process group has that got none."""
        other = self.with_data([])
        other._source = EmptySource()
        return other

    def on(self, inputs: Tensor | Iterable[Any], targets: Tensor | None = None) -> Problem:
        """The old name of `with_data`, for one release."""
        _warn_renamed("on", "with_data")
        return self.with_data(inputs, targets)

    def without_rows(self) -> Problem:
        """The old name of `empty_like`, for one release."""
        _warn_renamed("without_rows", "empty_like")
        return self.empty_like()

    @property
    def joint(self) -> JoinedStatistics | None:
        """The old name of what `join` last returned, for one release."""
        _warn_renamed("joint", "join")
        return self._joined

    def _bind(self, inputs: Tensor | Iterable[Any], targets: Tensor | None) -> None:
        self._source: Single | Stream | EmptySource = source(inputs, targets)
        self._recording: tuple[Versions, Recording] | None = None
        self._joined: JoinedStatistics | None = None
        if isinstance(self._source, Single):
            self._source = Single(self._checked(self._source.batch, "the batch"))

    @property
    def model(self) -> nn.Module:
        """The model, out of any compile or data-parallel wrapper."""
        return self.network.model

    @property
    def streamed(self) -> bool:
        """Whether the data come as a re-iterable of batches."""
        return not isinstance(self._source, Single)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that results depend on: the parameters and, for a single batch, its tensors."""
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        if isinstance(self._source, Single):
            batch = self._source.batch
            tensors |= {"the inputs": batch.inputs, "the targets": batch.targets}
        return tensors

    @property
    def versions(self) -> Versions:
        """The present versions of `tensors`."""
        return Versions.of(self.tensors)

    def batches(self) -> Iterator[Batch]:
        """The batches, validated; a stream that differs from its first pass is an error."""
        if isinstance(self._source, Single):
            yield self._source.batch
            return
        for index, batch in enumerate(self._source.batches()):
            yield self._checked(batch, f"batch {index}")

    def _checked(self, batch: Batch, what: str) -> Batch:
        return checked(batch, what, self.network, self.criterion)

    def recordings(self) -> Iterator[Recording]:
        """One recording a batch; that of a single batch is kept while nothing it depends on changes."""
        if not self.streamed:
            yield self.recording()
            return
        first_row, counted = 0, isinstance(self._source, EmptySource)
        for batch in self.batches():
            with suppress(AllWeightsZeroError):
                yield record(self.network, self.criterion, batch.inputs, batch.targets, first_row)
                counted = True
            first_row += len(batch.inputs)
        if not counted:
            raise AllWeightsZeroError

    def recording(self) -> Recording:
        """The recording of a single batch."""
        if not isinstance(self._source, Single):
            raise ProblemError("a streamed problem has one recording for each batch: use recordings()")
        if self._recording is None or self._recording[0].differing(self.tensors):
            batch, versions = self._source.batch, self.versions
            self._recording = (versions, record(self.network, self.criterion, batch.inputs, batch.targets))
        return self._recording[1]

    def examples(self) -> int:
        """Number of examples; a stream is counted in a pass of its own unless one has been made."""
        return self._source.examples()

    def total_weight(self) -> Tensor:
        """Σ c_i over all rows, their logits and targets checked on the way; no layer is recorded."""
        weights = []
        for batch in self.batches():
            logits = call(self.model, batch.inputs).detach()
            self.criterion.check(logits, batch.targets)
            with suppress(AllWeightsZeroError):
                weights.append(criterion_weights(self.criterion, logits, batch.targets).sum())
        if not weights:
            if isinstance(self._source, EmptySource):
                return self.network.layers[0].weight.new_zeros(())
            raise AllWeightsZeroError
        return torch.stack(weights).sum()

    def gradient(self, *, process_group: ProcessGroup | None = None) -> Gradient:
        """E[∇ξ], by parameter name; a weight's gradient is formed only when it is asked for.

        With a `process_group` E is over the rows of all its ranks, each of which must make this call.
        """
        if process_group is not None:
            return self.join(communicator_of(process_group), gradient=True).gradient
        return mean_gradient(self.recordings()) if self.streamed else gradient_of(self.recording())

    def loss(self, *, process_group: ProcessGroup | None = None) -> Tensor:
        """E[ξ], as torch's mean-reduced loss gives it; with a `process_group` over the rows of all ranks."""
        if process_group is not None:
            return self.join(communicator_of(process_group), loss=True).loss
        means = [(recording.loss, recording.total_weight) for recording in self.recordings()]
        return _mean_loss(*zip(*means, strict=True))

    def local_means(
        self, statistics: Accumulator | None = None, *, gradient: bool = False, loss: bool = False
    ) -> LocalMeans:
        """Means over the rows of this process, with Σ c_i, from one pass; `NoRowsError` if no row counts."""
        if statistics is None and not gradient and not loss:
            # A model that cannot be recorded, which `hessian` alone accepts, still has a weight.
            return LocalMeans(float(self.total_weight()), {})
        gradients = GradientMean()
        weights: list[Tensor] = []
        losses: list[Tensor] = []
        for recording in self.recordings():
            if statistics is not None:
                statistics.add(recording)
            if gradient and self.streamed:
                gradients.add(recording)
            if loss:
                losses.append(recording.loss)
            weights.append(recording.total_weight)
        if not weights:
            raise NoRowsError("no row of this process counts")
        found: Gradient | None = None
        if gradient:
            found = gradients.value() if self.streamed else gradient_of(self.recording())
        return LocalMeans(
            sum(float(weight) for weight in weights),
            {} if statistics is None else statistics.values(),
            found,
            _mean_loss(losses, weights) if loss else None,
        )

    def join(
        self,
        communicator: Communicator,
        statistics: Sequence[Statistic] = (),
        accumulator: Callable[[Sequence[Any], int], Accumulator] | None = None,
        *,
        gradient: bool = False,
        loss: bool = False,
    ) -> JoinedStatistics:
        """Means over the rows of all ranks, each of which must make this call with a problem of its own rows.

        What was joined is kept with the problem, so that a later call joins only what is lacking, while no
        rank's data change. See `curvlab.distributed.statistics.join_statistics`.
        """
        self._joined = join_statistics(
            self, communicator, self._joined, statistics, accumulator, gradient=gradient, loss=loss
        )
        return self._joined

    def __getstate__(self) -> dict[str, Any]:
        """What pickles and copies hold: the model, the criterion and the data, which are recorded again."""
        return {**self.__dict__, "_recording": None, "_joined": None}

    def __repr__(self) -> str:
        chain = self.network.chain
        layers = (self.network if chain is None else chain).layers
        widths = [layers[0].module.in_features, *(layer.module.out_features for layer in layers)]
        structure = (
            "-".join(map(str, widths)) if chain is not None else f"{len(layers)} Linear layers, no chain"
        )
        return f"Problem({structure}, criterion={self.criterion.name}, {self._source})"


def _mean_loss(losses: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """E[ξ] from the loss and the weight of each batch."""
    weight = torch.stack(list(weights))
    return torch.stack(list(losses)) @ (weight / weight.sum())


def _warn_renamed(old: str, new: str) -> None:
    warnings.warn(
        f"Problem.{old} is now called Problem.{new}; the old name will be gone in the next release",
        DeprecationWarning,
        stacklevel=3,
    )
