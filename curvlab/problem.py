"""A problem: a model, a criterion and the data its curvature is taken on.

    E[f] = Σ c_i f_i / Σ c_i   over the rows of a batch, or of a re-iterable of batches

The model, the criterion and the batch are validated once, at the door. One recording of the batch
serves the gradient and every provider; a stream of batches is recorded batch by batch and never
held whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvlab import device
from curvlab.criteria import Criterion
from curvlab.exceptions import ProblemError, StaleError
from curvlab.gradient import Gradient, accumulate_gradient
from curvlab.names import criterion_named
from curvlab.network import Network
from curvlab.recording import Recording, record
from curvlab.versions import Versions

__all__ = ["Batch", "Problem"]

DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets of some examples."""

    inputs: Tensor
    targets: Tensor


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

    def _bind(self, inputs: Tensor | Iterable[Any], targets: Tensor | None) -> None:
        self.network.check_modes()
        self._recording: tuple[Versions, Recording] | None = None
        self._fingerprint: tuple[int, int, int] | None = None
        self._stream: Iterable[Any] | None = None
        if isinstance(inputs, Tensor):
            if targets is None:
                raise ProblemError("targets are missing: Problem(model, criterion, inputs, targets) needs both tensors")
            self._batch = self._checked(inputs, targets, "the batch")
        else:
            self._stream = _re_iterable(inputs, targets)

    def on(self, inputs: Tensor | Iterable[Any], targets: Tensor | None = None) -> Problem:
        """The same model and criterion on other data, without analysing the model again."""
        other = object.__new__(Problem)
        other.network, other.criterion = self.network, self.criterion
        other._bind(inputs, targets)
        return other

    @property
    def model(self) -> nn.Module:
        """The model, out of any compile or data-parallel wrapper."""
        return self.network.model

    @property
    def streamed(self) -> bool:
        """Whether the data come as a re-iterable of batches."""
        return self._stream is not None

    @property
    def versions(self) -> Versions:
        """The present versions of the parameters and, for a single batch, of its tensors."""
        tensors = dict(self.model.named_parameters())
        if not self.streamed:
            tensors |= {"inputs": self._batch.inputs, "targets": self._batch.targets}
        return Versions.of(tensors)

    def batches(self) -> Iterator[Batch]:
        """The batches, validated; a stream that differs from its first pass is an error."""
        if self._stream is None:
            yield self._batch
            return
        count, rows, digest = 0, 0, 0
        for count, item in enumerate(self._stream, start=1):
            batch = self._checked(*_pair(item, count - 1), f"batch {count - 1}")
            rows += len(batch.inputs)
            digest += _digest(batch)
            yield batch
        if count == 0:
            raise ProblemError("the re-iterable gave no batch: it is empty (or a one-shot iterator already used up)")
        self._compare_pass((count, rows, digest))

    def _compare_pass(self, fingerprint: tuple[int, int, int]) -> None:
        if self._fingerprint is None:
            self._fingerprint = fingerprint
        elif self._fingerprint[1:] != fingerprint[1:]:
            raise StaleError(
                f"the batches changed between two passes: the first had {self._fingerprint[1]} examples, this one "
                f"{fingerprint[1]}, or their contents differ. Curvature needs the same data in every pass: "
                f"turn random augmentation, sampling and drop_last with shuffling off"
            )

    def recordings(self) -> Iterator[Recording]:
        """One recording a batch; that of a single batch is kept while nothing it depends on changes."""
        if not self.streamed:
            yield self.recording()
            return
        first_row = 0
        for batch in self.batches():
            yield record(self.network, self.criterion, batch.inputs, batch.targets, first_row)
            first_row += len(batch.inputs)

    def recording(self) -> Recording:
        """The recording of a single batch."""
        if self.streamed:
            raise ProblemError("a streamed problem has one recording for each batch: use recordings()")
        if self._recording is None or self._recording[0].changed():
            batch = self._batch
            self._recording = (self.versions, record(self.network, self.criterion, batch.inputs, batch.targets))
        return self._recording[1]

    def gradient(self) -> Gradient:
        """E[∇ξ], by parameter name; a weight's gradient is formed only when it is asked for."""
        return accumulate_gradient(self.recordings())

    def loss(self) -> Tensor:
        """E[ξ], as torch's mean-reduced loss gives it."""
        total, weight = 0.0, 0.0
        for recording in self.recordings():
            total = total + recording.total_weight * recording.loss
            weight = weight + recording.total_weight
        return torch.as_tensor(total / weight)

    def _checked(self, inputs: Any, targets: Any, what: str) -> Batch:
        for name, value in (("inputs", inputs), ("targets", targets)):
            if not isinstance(value, Tensor):
                raise ProblemError(f"{name} of {what} must be a tensor, got {type(value).__name__}")
        weight = self.network.layers[0].module.weight
        if inputs.ndim == 0 or len(inputs) == 0:
            raise ProblemError(f"inputs of {what} have shape {tuple(inputs.shape)}: a batch needs at least one example")
        if targets.ndim == 0 or len(targets) != len(inputs):
            raise ProblemError(
                f"{what} has {len(inputs)} inputs but targets of shape {tuple(targets.shape)}: one target an example"
            )
        if weight.dtype not in DTYPES:
            raise ProblemError(
                f"the model is in {weight.dtype}: curvature needs float32 or float64 (model.float() or model.double())"
            )
        if inputs.is_floating_point() and inputs.dtype != weight.dtype:
            raise ProblemError(
                f"inputs of {what} are {inputs.dtype} but the model is {weight.dtype}: convert one with .to()"
            )
        if self.network.chain is not None and not inputs.is_floating_point():
            raise ProblemError(f"inputs of {what} are {inputs.dtype}; expected {weight.dtype}")
        for name, value in (("inputs", inputs), ("targets", targets)):
            if value.device != weight.device:
                raise ProblemError(
                    f"{name} of {what} are on {value.device} but the model is on {weight.device}: move one with .to()"
                )
        return Batch(inputs, targets)

    def __repr__(self) -> str:
        layers = " → ".join(
            [str(self.network.layers[0].module.in_features)]
            + [str(layer.module.out_features) for layer in self.network.layers]
        )
        data = "a stream of batches" if self.streamed else f"{len(self._batch.inputs)} examples"
        structure = "chain" if self.network.chain is not None else "no chain"
        return f"Problem({layers}, {structure}, criterion={self.criterion.name}, {data})"


def _re_iterable(data: Any, targets: Tensor | None) -> Iterable[Any]:
    if targets is not None:
        raise ProblemError("targets go with a tensor of inputs; a re-iterable of batches brings its own")
    if not isinstance(data, Iterable):
        raise ProblemError(f"inputs must be a tensor or a re-iterable of (inputs, targets), got {type(data).__name__}")
    if iter(data) is data:
        raise ProblemError(
            f"inputs are a one-shot {type(data).__name__}: curvature may need several passes. "
            f"Pass a list of batches or a DataLoader"
        )
    return data


def _pair(item: Any, index: int) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ProblemError(f"batch {index} is a {type(item).__name__}; expected a pair (inputs, targets)")
    return item[0], item[1]


def _digest(batch: Batch) -> int:
    """A sum over the bits of the batch: the same however the examples are ordered or batched."""
    if not device.readable(batch.inputs):
        return 0
    return sum(_bit_sum(t) for t in (batch.inputs, batch.targets)) % (1 << 63)


def _bit_sum(tensor: Tensor) -> int:
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor = tensor.contiguous().view({4: torch.int32, 8: torch.int64, 2: torch.int16}[tensor.element_size()])
    return int(tensor.sum(dtype=torch.int64)) % (1 << 63)

