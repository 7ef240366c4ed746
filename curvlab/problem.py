"""A problem: a model, a criterion and the data its curvature is taken on.

    E[f] = Σ c_i f_i / Σ c_i   over the examples of a batch, or of a re-iterable of batches

The model, the criterion and the batch are validated once, when the problem is made. One recording of the
batch serves the gradient and every provider; a stream of batches is recorded batch by batch and never
held whole. With `l2` = λ the loss is E[ξ] + λ/2 ‖θ‖², the gradient has λθ and the curvature λI more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from curvlab.batches import Batch, EmptySource, Single, Source, Stream, source_of
from curvlab.criteria import Criterion
from curvlab.criteria.base import LossTerms
from curvlab.criteria.registry import criterion_named
from curvlab.distributed.agreement import Description, describe_model
from curvlab.distributed.communicator import Communicator, communicator_of
from curvlab.distributed.statistics import (
    Accumulator,
    JoinedStatistics,
    LocalMeans,
    Statistic,
    join_statistics,
)
from curvlab.exceptions import NoRowsError, ProblemError, SpecError, named_briefly, stacklevel_of_caller
from curvlab.linalg.execution import FullPrecision, in_float
from curvlab.linalg.steps import Gradient, add_decay
from curvlab.model.example_gradients import example_gradients
from curvlab.model.layers import Chain, Layer, check_same_layers
from curvlab.model.network import Inputs, Network, OutputChoice, tensors_of
from curvlab.model.probe import record_and_probe
from curvlab.model.recording import (
    AllWeightsZeroError,
    ChainRecording,
    GradientMean,
    GraphRecording,
    Recording,
    gradient_of,
    record,
)
from curvlab.specs import check_number
from curvlab.staleness import Members, Versions, model_settings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Batch", "Problem", "Reading"]


@dataclass(frozen=True, eq=False)
class Reading:
    """What the first batch has shown of the model: its layers with blocks, and its chain where it is one.

    `output_layers` names the layers whose output is the logits, `left_out` functions whose own curvature is
    left out of mean curvatures (`curvlab.model.nodes`), `unknown` those whose local Hessians are not known
    either, and `reused` the layers whose weight is used more than once.
    """

    layers: tuple[Layer, ...]
    chain: Chain | None
    no_chain: str
    output_layers: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()

    @classmethod
    def of(cls, recording: Recording) -> Reading:
        """What one recording shows."""
        outputs = frozenset(layer.name for layer in recording.output_layers)
        chain = recording.chain if isinstance(recording, ChainRecording) else None
        reused = tuple(layer.name for layer in recording.reused_layers)
        named = (recording.left_out, recording.unknown_functions, reused)
        return cls(recording.layout, chain, recording.no_chain, outputs, *named)


class Problem(FullPrecision):
    """A model, a criterion and a batch (or a re-iterable of batches).

    Args:
        model: any module; every trainable parameter has a block. Recursions need a chain of Linear layers.
        criterion: a name (`"cross-entropy"`), a torch loss, a `Criterion`, or a function of
            (logits, target) of one example.
        inputs: a tensor (examples, …), a tuple of them, for model(*x), or a dictionary, for model(**x); or a
            re-iterable of (inputs, targets) batches, or of dictionaries with `labels`, that shows the same
            examples in every pass (`curvlab.keep_batches` where augmentation changes them).
        targets: the targets of the batch; None for a re-iterable.
        layers: names of the modules or parameters to analyse; all that is trainable by default.
        l2: λ of λ/2 ‖θ‖², added to the loss; θ are the parameters that have blocks.
        output: which part of what the model returns are the logits: a field, an index or a function. Without
            it `.logits`, `["logits"]`, or the first tensor of a tuple.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2))
    >>> problem = Problem(model, "cross-entropy", torch.zeros(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    >>> list(problem.gradient())
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    network: Network
    criterion: Criterion
    l2: float
    torch_layout: bool

    def __init__(
        self,
        model: nn.Module,
        criterion: str | Criterion | Any,
        inputs: Inputs | Iterable[Any],
        targets: Tensor | None = None,
        *,
        layers: Sequence[str] | None = None,
        l2: float = 0.0,
        output: OutputChoice = None,
    ) -> None:
        try:
            self.l2 = check_number("l2", l2, "a finite number that is not negative", lambda x: 0 <= x < inf)
        except SpecError as error:
            raise ProblemError(str(error)) from None
        self.network = Network.of(model, layers, output)
        self.criterion = criterion_named(criterion)
        # Where both readings of (B, V, V) logits fit, a torch loss means torch's own layout.
        self.torch_layout = isinstance(criterion, nn.Module)
        self._bind(source_of(inputs, targets))
        if isinstance(self._source, Single):
            # A model, a batch and targets that do not go together are found here, not at first use.
            with suppress(AllWeightsZeroError):
                self.recording()

    def with_data(self, inputs: Inputs | Iterable[Any], targets: Tensor | None = None) -> Problem:
        """The same model and criterion on other data, which are looked at when they are first used."""
        return self._like_on(source_of(inputs, targets))

    def _like_on(self, source: Source) -> Problem:
        other = object.__new__(Problem)
        other.network, other.criterion, other.l2 = self.network, self.criterion, self.l2
        other.torch_layout = self.torch_layout
        other._bind(source)
        other._like = self._reading or self._like
        return other

    def empty_like(self) -> Problem:
        """The same model and criterion on no rows: what a rank of a process group has that got none."""
        return self._like_on(EmptySource())

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

    def _bind(self, source: Source) -> None:
        self._source = source
        self._recording: tuple[Versions, Recording] | None = None
        self._joined: JoinedStatistics | None = None
        self._reading: Reading | None = None
        self._like: Reading | None = None  # that of a problem on other data: the answer where there are none
        self._begun: tuple[Versions, Batch, Recording] | None = None
        self._trusted = False
        if isinstance(self._source, Single):
            self._source = Single(self._check_place(self._source.batch, "the batch"))

    @property
    def model(self) -> nn.Module:
        """The model, out of any compile or data-parallel wrapper."""
        return self.network.given

    @property
    def streamed(self) -> bool:
        """Whether the data come as a re-iterable of batches."""
        return not isinstance(self._source, Single)

    @property
    def reading(self) -> Reading:
        """The model's layers as a batch shows them; a stream's first batch is looked at if none was yet."""
        if self._reading is None:
            self._reading = self._first_reading()
        return self._reading

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that have blocks, from input to output where they form a chain."""
        return self.reading.layers

    @property
    def chain(self) -> Chain | None:
        """The chain that the model computes, where it computes one."""
        return self.reading.chain

    def require_chain(self, who: str) -> Chain:
        """The chain, or an error that says why `who` cannot go on without one."""
        if self.chain is None:
            raise ProblemError(
                f"`{who}` follows a recursion from layer to layer and needs Linear layers in a chain with "
                f"element-wise activations, but {self.reading.no_chain}. `fisher`, `hessian`, "
                f"`gauss-newton[kind=rows]`, `gauss-newton[kind=exact]` and `pch[kind=rows]` need no chain"
            )
        return self.chain

    def _first_reading(self) -> Reading:
        batch: Batch | None = None
        if isinstance(self._source, Single):
            batch = self._source.batch
        elif isinstance(self._source, Stream):
            # The next pass goes on with this batch and its recording, so that looking costs no pass.
            batch = self._source.begin()
        if batch is None:
            return self._like or self._read_zeros()
        batch = self._check_place(batch, "the first batch")
        try:
            if isinstance(self._source, Single):
                return Reading.of(self.recording())
            versions = self._versions_with(batch)
            self._begun = versions, batch, self._record(batch)
            return Reading.of(self._begun[2])
        except AllWeightsZeroError:
            # No mean exists, and nothing can be compared; the layers are there all the same.
            return self._take_reading(batch)

    def _take_reading(self, batch: Batch) -> Reading:
        given = (self.network, self.criterion, batch.inputs, batch.targets)
        return Reading.of(record(*given, torch_layout=self.torch_layout)[0])

    def _read_zeros(self) -> Reading:
        """A rank without rows learns the model's layers from an example of zeros."""
        first = next((m for m in self.model.modules() if isinstance(m, nn.Linear)), None)
        if first is None:
            raise ProblemError(
                "this rank has no rows, and the shape of an example cannot be told from the model. Give each "
                "rank at least one row, or make its problem with with_data() from one that has been used"
            )
        inputs = self.network.example.new_zeros(1, first.in_features)
        logits = self.network.call(inputs).detach()
        label = torch.zeros(1, dtype=torch.int64, device=logits.device)
        try:
            return self._take_reading(Batch(inputs, label))
        except ProblemError:
            return self._take_reading(Batch(inputs, torch.zeros_like(logits)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of every result: parameters without a block, and those of low precision."""
        found = []
        left_out, copied = self.network.left_out, self.network.copied
        if left_out:
            found.append(f"no block for {named_briefly(left_out)}: left out by layers=[…]")
        if copied is not None:
            found.append(
                f"the model is in {copied.dtype}: this is the curvature of the float32 function at its values"
            )
        return tuple(found)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that results depend on: parameters, buffers and, for a single batch, its tensors."""
        return self._tensors_with(self._source.batch if isinstance(self._source, Single) else None)

    def _tensors_with(self, batch: Batch | None, members: Members | None = None) -> dict[str, Tensor]:
        members = Members.of(self.model) if members is None else members
        tensors: dict[str, Tensor] = dict(members.parameters)
        tensors |= members.buffers
        if batch is not None:
            first, *others = tensors_of(batch.inputs)
            tensors |= {"the inputs": first, "the targets": batch.targets}
            tensors |= {f"the inputs ({index})": tensor for index, tensor in enumerate(others, start=2)}
        return tensors

    @property
    def versions(self) -> Versions:
        """The present versions of `tensors`, and what the model is beside them."""
        if self._trusted and self._recording is not None:
            return self._recording[0]  # nothing has changed since
        return self._versions_with(self._source.batch if isinstance(self._source, Single) else None)

    def _versions_with(self, batch: Batch | None) -> Versions:
        members = Members.of(self.model)
        watch, now = self.network.settings_watch(), model_settings(members)
        return Versions.of(self._tensors_with(batch, members), watch, now)

    def batches(self) -> Iterator[Batch]:
        """The batches, validated; a stream that differs from its first pass is an error."""
        if isinstance(self._source, Single):
            yield self._source.batch
            return
        for index, batch in enumerate(self._source.batches()):
            yield self._check_place(batch, f"batch {index}")

    def _check_place(self, batch: Batch, what: str) -> Batch:
        """The batch, if it lies where the model does; cheaply, from dtypes and devices."""
        example = self.network.example
        named = [("inputs", tensor) for tensor in tensors_of(batch.inputs)] + [("targets", batch.targets)]
        for name, value in named:
            if value.device != example.device:
                raise ProblemError(
                    f"{name} of {what} are on {value.device} but the model is on {example.device}: move one "
                    f"with .to()"
                )
            given = value if self.network.copied is None else in_float(value)
            if name == "inputs" and given.is_floating_point() and given.dtype != example.dtype:
                raise ProblemError(
                    f"inputs of {what} are {value.dtype} but the model is {example.dtype}: convert one with "
                    f".to()"
                )
        return batch

    def _record(self, batch: Batch) -> Recording:
        recording = record_and_probe(
            self.network, self.criterion, batch.inputs, batch.targets, torch_layout=self.torch_layout
        )
        if self._reading is None:
            self._reading = Reading.of(recording)
        else:
            self._compare_reading(self._reading, recording)
        _ = recording.weights  # a batch of which nothing counts is an error here, not where it is first read
        return recording

    def _compare_reading(self, first: Reading, recording: Recording) -> None:
        """Refuse a batch in which the model computes something of another structure than in the first."""
        now = Reading.of(recording)
        if (first.chain is None) != (now.chain is None) or (
            first.chain is not None and now.chain is not None and not first.chain.same_as(now.chain)
        ):
            raise ProblemError(
                f"the forward of {type(self.model).__name__} takes another way in this batch than in the "
                f"first one, so that their curvatures are not of one kind. Make a problem of the batches "
                f"that take the same way"
            )
        if now.chain is None:
            check_same_layers(first.layers, now.layers)

    def recordings(self) -> Iterator[Recording]:
        """One recording a batch; that of a single batch is kept while nothing it depends on changes."""
        if not self.streamed:
            yield self.recording()
            return
        counted = isinstance(self._source, EmptySource)
        for batch in self.batches():
            with suppress(AllWeightsZeroError):
                yield self._recording_of(batch)
                counted = True
        if not counted:
            raise AllWeightsZeroError

    def _recording_of(self, batch: Batch) -> Recording:
        """The recording of a stream's batch: that which `reading` has made, while nothing has changed."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[1] is batch and not begun[0].differing(self._tensors_with(batch)):
            self.network.check_unchanged()
            return begun[2]
        return self._record(batch)

    def recording(self) -> Recording:
        """The recording of a single batch."""
        if not isinstance(self._source, Single):
            raise ProblemError("a streamed problem has one recording for each batch: use recordings()")
        held = self._recording
        if self._trusted and held is not None:
            return held[1]
        self.network.check_unchanged()
        if held is None or held[0].differing(self.tensors):
            versions = self.versions
            self._reading = None
            held = (versions, self._record(self._source.batch))
            self._recording = held
        return held[1]

    @contextmanager
    def trust_recording(self) -> Iterator[None]:
        """For calls among which nothing can change: the recording is compared with the model at the first."""
        if not self.streamed:
            self.recording()
        before, self._trusted = self._trusted, True
        try:
            yield
        finally:
            self._trusted = before

    def release_recording(self) -> None:
        """Let go of a single batch's recording and its graph: what is asked for next runs the batch anew."""
        held, self._recording = self._recording, None
        if held is not None and isinstance(held[1], GraphRecording):
            held[1].release()

    def examples(self) -> int:
        """Number of examples; a stream is counted in a pass of its own unless one has been made."""
        return self._source.examples()

    def total_weight(self) -> Tensor:
        """Σ c_i over all rows, their logits and targets checked on the way; no layer is recorded."""
        weights = [terms.total_weight for terms in self._all_terms()]
        if not weights:
            if isinstance(self._source, EmptySource):
                return self.network.example.new_zeros(())
            raise AllWeightsZeroError
        return torch.stack(weights).sum()

    def _all_terms(self) -> Iterator[LossTerms]:
        if isinstance(self._source, Single):
            yield self.recording().terms
            return
        self.network.check_unchanged()
        for batch in self.batches():
            with suppress(AllWeightsZeroError), torch.no_grad():
                logits = self.network.call(batch.inputs)
                terms = LossTerms.of(self.criterion, logits, batch.targets, torch_layout=self.torch_layout)
                _ = terms.weights
                yield terms

    def _add_decay(self, gradient: Gradient) -> Gradient:
        """The gradient with λθ added; entries in factors are then formed."""
        return add_decay(gradient, self.network.parameters, self.l2) if self.l2 else gradient

    def _penalty(self) -> Tensor:
        """λ/2 ‖θ‖²."""
        squares = [p.detach().square().sum() for p in self.network.parameters.values()]
        return 0.5 * self.l2 * torch.stack(squares).sum()

    def gradient(self, *, process_group: ProcessGroup | None = None) -> Gradient:
        """E[∇ξ], by parameter name; a weight's gradient is formed only when it is asked for.

        With a `process_group` E is over the rows of all its ranks, each of which must make this call.
        """
        if process_group is not None:
            return self._add_decay(self.join(communicator_of(process_group), gradient=True).gradient)
        if not self.streamed:
            return self._add_decay(gradient_of(self.recording()))
        mean = GradientMean()
        for recording in self.recordings():
            mean.add(recording)
        return self._add_decay(mean.value())

    def per_example_gradients(self) -> dict[str, Tensor]:
        """∇ξ_i of every example, {parameter name: (examples, *shape)}: a copy of the parameters for each.

        Without the example's weight c_i and without λθ of an l2 term (0 where c_i = 0), so that their E is
        the gradient for l2 = 0. The examples are those of all batches, in their order.

        >>> model = nn.Linear(2, 2)
        >>> problem = Problem(model, "cross-entropy", torch.ones(5, 2), torch.tensor([0, 1, 0, 1, 0]))
        >>> {name: tuple(rows.shape) for name, rows in problem.per_example_gradients().items()}
        {'weight': (5, 2, 2), 'bias': (5, 2)}
        """
        found = []
        for batch in self.batches():
            try:
                recording = self._recording_of(batch) if self.streamed else self.recording()
                found.append(example_gradients(recording))
            except AllWeightsZeroError:
                count = len(batch.targets)
                names = [name for layer in self.layers for name in layer.names]
                zeros = {name: torch.zeros_like(self.network.parameters[name]) for name in names}
                found.append({name: zero.detach().expand(count, *zero.shape) for name, zero in zeros.items()})
        return {name: torch.cat([one[name] for one in found]) for name in found[0]}

    def loss(self, *, process_group: ProcessGroup | None = None) -> Tensor:
        """E[ξ], as torch's mean-reduced loss gives it; with a `process_group` over the rows of all ranks."""
        if process_group is not None:
            data = self.join(communicator_of(process_group), loss=True).loss.clone()
        else:
            means = [(recording.loss, recording.total_weight) for recording in self.recordings()]
            data = _mean_loss(*zip(*means, strict=True))
        return data + self._penalty() if self.l2 else data

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
        accumulator: Callable[[Sequence[Any]], Accumulator] | None = None,
        *,
        gradient: bool = False,
        loss: bool = False,
        settings: Mapping[str, object] | None = None,
    ) -> JoinedStatistics:
        """Means over the rows of all ranks, each of which must make this call with a problem of its own rows.

        What was joined is kept with the problem, so that a later call joins only what is lacking, while no
        rank's data change. Models, criteria and `settings` that differ between ranks are refused. See
        `curvlab.distributed.statistics.join_statistics`.
        """
        self._joined = join_statistics(
            self,
            communicator,
            self._joined,
            statistics,
            accumulator,
            gradient=gradient,
            loss=loss,
            settings=settings,
        )
        return self._joined

    def describe(self, settings: Mapping[str, object]) -> Description:
        """What must be the same on all ranks of a process group before their rows are joined."""
        own = {
            "the criterion": self.criterion,
            "l2": self.l2,
            "layers": list(self.network.parameters),
            "output": self.network.call.output,
        }
        return describe_model(self.network, {**own, **settings})

    def __getstate__(self) -> dict[str, Any]:
        """What pickles and copies hold: the model, the criterion and the data, which are recorded again."""
        return {**self.__dict__, "_recording": None, "_joined": None, "_begun": None}

    def __repr__(self) -> str:
        if self._reading is not None and self._reading.chain is not None:
            layers = self._reading.chain.layers
            structure = "-".join(str(n) for n in (layers[0].in_features, *(x.out_features for x in layers)))
        else:
            structure = f"{type(self.model).__name__}, {self.network.numel:,} parameters"
        if self.network.left_out:
            structure += f", no block for {named_briefly(self.network.left_out)}"
        decay = f", l2={self.l2:g}" if self.l2 else ""
        return f"Problem({structure}, criterion={self.criterion.name}{decay}, {self._source})"


def _mean_loss(losses: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """E[ξ] from the loss and the weight of each batch."""
    if len(losses) == 1:
        return losses[0].clone()  # the caller's own, to change as it likes
    weight = torch.stack(list(weights))
    return torch.stack(list(losses)) @ (weight / weight.sum())


def _warn_renamed(old: str, new: str) -> None:
    warnings.warn(
        f"Problem.{old} is now called Problem.{new}; the old name will be gone in the next release",
        DeprecationWarning,
        stacklevel=stacklevel_of_caller(),
    )
