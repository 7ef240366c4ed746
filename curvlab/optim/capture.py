"""Steps of which nothing is read: `SecondOrder(capture=True)`.

    numbers of all checks  →  fine = all(low ≤ number ≤ high)  →  θ ← fine and never failed before ? θ' : θ

A step asks its device nothing. What would be asked (are the labels in range, has a factorisation failed, is
the direction finite?) is judged on the device, against limits that are there since the second step; a step
that fails writes nothing, and neither does any after it, until the host reads. That it does every
`read_every` steps: one read, which raises what was wrong with the number of the step. Conjugate gradients
run all of their iterations, in which a system that has converged is frozen.

Such a step makes the same operations on the same shapes every time. Where the device has graphs
(`torch.cuda.CUDAGraph`, `torch.accelerator.Graph`) they are captured in the third step, and a step is one
launch from then on; elsewhere it runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from curvlab.exceptions import CurvlabError, ProblemError, SolveError, SpecError
from curvlab.linalg.execution import Deferred, deferred
from curvlab.measure.device import Graph, graph_on
from curvlab.optim.guard import Change
from curvlab.specs import check_number

__all__ = ["Capture", "CapturedSteps", "check_capturable"]

Work = Callable[[Tensor, Tensor], tuple[Tensor, list[Change], object]]
"""A batch to the loss, the changes that a step makes, and what has to live as long as a graph of it."""


class _Stepped(Protocol):
    """What is asked of the optimizer that takes the steps."""

    alpha: float
    spring: float
    param_groups: list[dict[str, Any]]
    _steps: int

    @property
    def _provider(self) -> object: ...

    @property
    def _solver(self) -> object: ...


@dataclass(frozen=True)
class Capture:
    """How often the checks of captured steps are read.

    >>> Capture(read_every=10)
    Capture(read_every=10)
    """

    read_every: int = 100

    def __post_init__(self) -> None:
        expected = "1 or more steps, a whole number"
        check_number("read_every", self.read_every, expected, lambda x: x >= 1 and x % 1 == 0)


def check_capturable(given: Mapping[str, object]) -> None:
    """Refuse options of a step that needs a number on the host, or shapes that change; `given` by name."""
    for name, value in given.items():
        if value:
            raise SpecError(f"capture=True with {name}={value!r}: {REASONS[name]}")


REASONS = {
    "adapt": "the damping follows the loss, which would have to be read. Set optimizer.alpha yourself, or "
    "leave capture out",
    "max_grad_norm": "whether a step is scaled depends on the gradient's norm, which would have to be read. "
    "Lower lr, or leave capture out",
    "ema": "the average takes up rows, so that its shape changes from step to step. Leave one of them out",
    "refresh_every": "steps with and without a new curvature are different operations. Leave one of them out",
    "process_group": "the ranks of a step exchange messages by the host. Leave one of them out",
    "batchnorm": "the running statistics are written by the host's hooks. Call model.eval() and train with "
    "fixed statistics, or leave capture out",
}
WAYS = (
    "Captured steps go with `fisher` and `gauss-newton`, and on fully-connected chains `pch-1` and `pch-2`, "
    "where the criterion is convex, by `kfi`, `sm-kfi`, `ea-cg` and `cg`. Use one of these, or leave capture "
    "out"
)


@dataclass(eq=False)
class CapturedSteps:
    """The steps of one optimizer: the first is taken as usual, the second watched, the others captured."""

    capture: Capture
    state: _State | None = None
    shapes: tuple[object, ...] | None = None
    settings: object = None
    graph: _Replayed | None = None
    submitted: int = 0

    def step(self, optimizer: _Stepped, work: Work, usual: Work, inputs: Any, targets: Any) -> Tensor:
        """Take one step; `usual` takes the first, with every check that only a first step makes."""
        settings = _settings(optimizer)
        if self.shapes is None or settings != self.settings:
            self.read(optimizer)
            self.graph, self.settings = None, settings
        if self.shapes is None:
            _check_batch(inputs, targets)
            loss, _, _ = usual(inputs, targets)
            self.shapes = _shapes(inputs, targets)
            return loss
        self._check_same(inputs, targets)
        if self.graph is not None:
            loss = self.graph.step(inputs, targets)
        elif self.state is None:
            loss = self._watched(optimizer, work, inputs, targets)
        else:
            loss = self._begin(work, inputs, targets)
        self.submitted += 1
        optimizer._steps += 1
        if self.submitted % self.capture.read_every == 0:
            self.read(optimizer)
        return loss

    def read(self, optimizer: _Stepped | None = None) -> None:
        """Raise what was wrong in the steps since the last reading, with the number of the step."""
        if self.state is None or not self.submitted:
            return
        submitted, self.submitted = self.submitted, 0
        taken, wrong = self.state.read()
        if wrong is None:
            return
        lost = submitted - taken
        number = "a step" if optimizer is None else f"step {optimizer._steps - lost + 1}"
        if optimizer is not None:
            optimizer._steps -= lost
        after = f", and neither did the {lost - 1} after it" if lost > 1 else ""
        raise SolveError(
            f"{number}: {wrong}. It changed nothing{after}: the parameters are as they were before it. Take "
            f"it again without capture for more about the cause"
        )

    def _watched(self, optimizer: _Stepped, work: Work, inputs: Tensor, targets: Tensor) -> Tensor:
        """The first of them, of which every operation is looked at."""
        pair = f"`{optimizer._provider}` with `{optimizer._solver}`"
        with _Calls(pair), _Operations(pair):
            loss, changes, checks, _ = _observed(work, inputs, targets)
        self.state = _State.of(checks)
        return _written(self.state, loss, changes, checks)

    def _begin(self, work: Work, inputs: Tensor, targets: Tensor) -> Tensor:
        assert self.state is not None
        graph = graph_on(inputs.device)
        if graph is None:
            return _taken(self.state, work, inputs, targets)[0]
        self.graph = _Replayed.of(graph, self.state, work, inputs, targets)
        return self.graph.step(inputs, targets)

    def _check_same(self, inputs: Any, targets: Any) -> None:
        _check_batch(inputs, targets)
        if (given := _shapes(inputs, targets)) != self.shapes:
            raise ProblemError(
                f"the batch has {_words(given)}; the captured steps are for {_words(self.shapes)}. Give "
                f"batches of one shape (drop_last=True in a DataLoader), or leave capture out"
            )


def _settings(optimizer: _Stepped) -> object:
    """What is a number in the operations of a step: where it changes they have to be captured again."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    places = [p.data_ptr() for group in optimizer.param_groups for p in group["params"]]
    return optimizer.alpha, optimizer.spring, groups, places


def _check_batch(inputs: Any, targets: Any) -> None:
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        kinds = f"{type(inputs).__name__} and {type(targets).__name__}"
        raise ProblemError(
            f"capture=True takes a batch of two tensors, step(inputs, targets); got {kinds}. A closure or a "
            f"stream is asked by the host for what comes next: leave capture out"
        )


def _shapes(inputs: Tensor, targets: Tensor) -> tuple[object, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in (inputs, targets))


def _words(shapes: Any) -> str:
    return " and ".join(f"{shape} {str(dtype).removeprefix('torch.')} on {on}" for shape, dtype, on in shapes)


@dataclass(eq=False)
class _State:
    """What the device knows of the steps since the last reading."""

    checks: Deferred
    low: Tensor
    high: Tensor
    taken: Tensor
    halted: Tensor
    numbers: Tensor
    """Of the step that failed, else of the last one."""

    @classmethod
    def of(cls, checks: Deferred) -> _State:
        numbers = checks.numbers()
        low, high = checks.limits(numbers)
        counts = numbers.new_zeros((), dtype=torch.int32), numbers.new_zeros((), dtype=torch.bool)
        return cls(checks, low, high, *counts, torch.zeros_like(numbers))

    def judge(self, checks: Deferred) -> Tensor:
        """Whether the step may write; all of it is known on the device only."""
        if not checks.same_as(self.checks):
            raise SpecError(f"capture=True: a step made other checks than the one before. {WAYS}")
        numbers = checks.numbers()
        fine = ((numbers >= self.low) & (numbers <= self.high)).all()
        self.numbers.copy_(torch.where(self.halted, self.numbers, numbers))
        self.halted.logical_or_(fine.logical_not())
        goes = self.halted.logical_not()
        self.taken.add_(goes)
        return goes

    def read(self) -> tuple[int, str | None]:
        """How many steps were taken, and what was wrong with the next, in one read; begins anew."""
        taken, halted, *numbers = torch.cat(
            [self.taken.reshape(1), self.halted.reshape(1), self.numbers]
        ).tolist()
        self.taken.zero_()
        self.halted.zero_()
        found = self.checks.wrong(numbers) if halted else None
        if not halted:
            return int(taken), None
        if found is None:
            return int(taken), "a check of the step failed"
        limits, explain = found
        try:
            with explain():
                raise torch.linalg.LinAlgError(limits.says)  # type: ignore[attr-defined]
        except (CurvlabError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            return int(taken), str(error)


def _observed(work: Work, inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Change], Deferred, object]:
    with deferred() as checks:
        loss, changes, held = work(inputs, targets)
    return loss, changes, checks, held


def _taken(state: _State, work: Work, inputs: Tensor, targets: Tensor) -> tuple[Tensor, object]:
    loss, changes, checks, held = _observed(work, inputs, targets)
    return _written(state, loss, changes, checks), (changes, checks, held)


def _written(state: _State, loss: Tensor, changes: Sequence[Change], checks: Deferred) -> Tensor:
    """Write the changes if all is well; one parameter's copy at a time."""
    goes = state.judge(checks)
    for change in changes:
        written = [t for t in (change.parameter, change.buffer) if t is not None]
        before = [tensor.detach().clone() for tensor in written]
        change.apply()
        for tensor, old in zip(written, before, strict=True):
            torch.where(goes, tensor.detach(), old, out=tensor.detach())
    return loss


@dataclass(eq=False)
class _Replayed:
    """The graph of a step, and the memory that a batch is brought to for it."""

    graph: Graph
    inputs: Tensor
    targets: Tensor
    loss: Tensor
    written: list[Tensor]
    held: object = field(repr=False)

    @classmethod
    def of(cls, graph: Graph, state: _State, work: Work, inputs: Tensor, targets: Tensor) -> _Replayed:
        own = inputs.clone(), targets.clone()
        found: list[Any] = []
        graph.capture(lambda: found.append(_taken(state, work, *own)), inputs.device)
        ((loss, held),) = found
        changes = held[0]
        written = [t for change in changes for t in (change.parameter, change.buffer) if t is not None]
        return cls(graph, *own, loss, written, held)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One launch, and what brings the batch and takes the loss away."""
        self.inputs.copy_(inputs, non_blocking=True)
        self.targets.copy_(targets, non_blocking=True)
        self.graph.replay()
        # A replay is unseen by autograd: what knows parameters by their version has to hear of it.
        torch.autograd.graph.increment_version([t for t in self.written if isinstance(t, nn.Parameter)])
        return self.loss.clone()


def _refused(pair: str, what: str) -> SpecError:
    return SpecError(f"capture=True: {pair} cannot be captured here: {what}. {WAYS}")


class _Operations(TorchDispatchMode):
    """Refuses operations that a captured step cannot have."""

    def __init__(self, pair: str) -> None:
        super().__init__()
        self.pair = pair

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if torch.Tag.data_dependent_output in func.tags or name in READS:
            raise _refused(self.pair, f"the host would read a number in the middle of the step, by {name}")
        if torch.Tag.dynamic_output_shape in func.tags:
            raise _refused(self.pair, f"a shape would depend on values, by {name}")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refused(self.pair, f"random numbers would be drawn, by {name}")
        if any(word in name for word in DECOMPOSITIONS):
            raise _refused(self.pair, f"a decomposition waits for its device, {name}")
        return func(*args, **(kwargs or {}))


READS = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default")
DECOMPOSITIONS = ("linalg_eigh", "linalg_svd", "linalg_eig.", "linalg_lstsq")
KINDS = ("bool", "float", "int", "index")


class _Calls(TorchFunctionMode):
    """Refuses what reads a tensor past all operations."""

    def __init__(self, pair: str) -> None:
        super().__init__()
        self.pair = pair

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in PAST_OPERATIONS:
            raise _refused(self.pair, f"numbers would be read in the middle of the step, by {func.__name__}")
        return func(*args, **(kwargs or {}))


PAST_OPERATIONS = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.item,
    *(getattr(Tensor, f"__{kind}__") for kind in KINDS),
}
