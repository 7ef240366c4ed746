"""A problem: a model, a criterion and the data its curvature is taken on.

    E[f] = Σ c_i f_i / Σ c_i   over the rows of a batch, or of a re-iterable of batches

The model, the criterion and the batch are validated once, at the door. One recording of the batch
serves the gradient and every provider; a stream of batches is recorded batch by batch and never
held whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from curvlab.batches import Batch, Nothing, Single, Stream, checked, source
from curvlab.criteria import Criterion
from curvlab.exceptions import ProblemError
from curvlab.gradient import Gradient, gradient_of, mean_gradient
from curvlab.names import criterion_named
from curvlab.network import Network
from curvlab.recorder import Weightless, call, record, row_weights
from curvlab.recording import Recording
from curvlab.versions import Versions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from curvlab.distributed.joint import Joint

__all__ = ["Batch", "Problem"]


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

    def on(self, inputs: Tensor | Iterable[Any], targets: Tensor | None = None) -> Problem:
        """The same model and criterion on other data, without analysing the model again."""
        other = object.__new__(Problem)
        other.network, other.criterion = self.network, self.criterion
        self.network.check_modes()
        other._bind(inputs, targets)
        return other

    def without_rows(self) -> Problem:
        """The same model and criterion on no rows: what a rank of a process group has that has none."""
        other = self.on([])
        other._source = Nothing()
        return other

    def _bind(self, inputs: Tensor | Iterable[Any], targets: Tensor | None) -> None:
        self._source: Single | Stream | Nothing = source(inputs, targets)
        self._recording: tuple[Versions, Recording] | None = None
        # What the ranks of a process group know of their rows together.
        self.joint: Joint | None = None
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
        first_row, counted = 0, isinstance(self._source, Nothing)
        for batch in self.batches():
            with suppress(Weightless):
                yield record(self.network, self.criterion, batch.inputs, batch.targets, first_row)
                counted = True
            first_row += len(batch.inputs)
        if not counted:
            raise Weightless

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
            with suppress(Weightless):
                weights.append(row_weights(self.criterion, logits, batch.targets).sum())
        if not weights:
            if isinstance(self._source, Nothing):
                return self.network.layers[0].weight.new_zeros(())
            raise Weightless
        return torch.stack(weights).sum()

    def gradient(self, *, process_group: ProcessGroup | None = None) -> Gradient:
        """E[∇ξ], by parameter name; a weight's gradient is formed only when it is asked for.

        With a `process_group` E is over the rows of all its ranks, each of which must make this call.
        """
        if process_group is not None:
            from curvlab.distributed.joint import joined

            return joined(self, process_group, gradient=True).gradient
        return mean_gradient(self.recordings()) if self.streamed else gradient_of(self.recording())

    def loss(self, *, process_group: ProcessGroup | None = None) -> Tensor:
        """E[ξ], as torch's mean-reduced loss gives it; with a `process_group` over the rows of all ranks."""
        if process_group is not None:
            from curvlab.distributed.joint import joined

            return joined(self, process_group, loss=True).loss
        means = [(recording.loss, recording.total_weight) for recording in self.recordings()]
        losses, weights = (torch.stack(column) for column in zip(*means, strict=True))
        return losses @ (weights / weights.sum())

    def __getstate__(self) -> dict[str, Any]:
        """What pickles and copies hold: the model, the criterion and the data, which are recorded again."""
        return {**self.__dict__, "_recording": None, "joint": None}

    def __repr__(self) -> str:
        chain = self.network.chain
        layers = (self.network if chain is None else chain).layers
        widths = [layers[0].module.in_features, *(layer.module.out_features for layer in layers)]
        structure = (
            "-".join(map(str, widths)) if chain is not None else f"{len(layers)} Linear layers, no chain"
        )
        return f"Problem({structure}, criterion={self.criterion.name}, {self._source})"
