"""`train`: carry out a training plan, one step at a time, and give one row per epoch.

Without a folder nothing is read or written. With one, the run is checkpointed and resumed: killed at any
moment and started again, it ends with the parameters of an uninterrupted run, to the bit on the CPU.

Columns. `epoch` 0 is before training. `seconds` is time spent in steps and in fetching their batches, without
evaluation and checkpoints; `cpu_seconds` the processor time of the same, which other programs on a busy
machine do not lengthen (it adds up over threads, and says nothing of an accelerator). `train_loss` and
`train_accuracy` are over (at most `evaluate_examples` of) the training set after the epoch, `step_loss` the
mean of the losses the steps saw. `peak_bytes` counts parameters, optimizer state, the batch and all that the
first step of the epoch allocated. `cg_iterations` is the mean over all steps and blocks, `blocks_…` the share
of blocks that ended in each status at the last step of the epoch, by their true residuals. These two steps
count with the mean time of the others, because what is measured on them slows them down. `status` is `ok`,
`diverged` (a loss that is not finite, or a step that was refused) or `failed` (the solver refused the
curvature), with the reason in `message`. `source` is the hash of the curvlab that wrote the row: a run may be
resumed after a change of the code.

`constant_loss` is the loss of the best constant output (`curvlab.studies.train.plateau`), NaN where there is
none, for a reason that the first `message` gives. `plateau_steps` counts the updates of the last whole epochs
in a row that were on the plateau: both `step_loss` and `train_loss` within 2 % of `constant_loss`. At the
first row where it is 100 or more, the `message` says what was seen and what to try; the status stays `ok`.

The order of the examples, the first weights and the schedule depend on the plan alone, so that the tree that
`TrainRun.state` gives is all a run needs to go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, nan
from pathlib import Path
from time import monotonic, perf_counter, process_time
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves, tree_map_only

from curvlab.criteria import Criterion
from curvlab.data import Dataset, Examples
from curvlab.distributed.agreement import agree, any_agreed
from curvlab.distributed.communicator import LOCAL, Communicator, communicator_of, rank_batches
from curvlab.exceptions import PairError, ProblemError, SolveError
from curvlab.measure import device as devices
from curvlab.measure.environment import source_hash
from curvlab.measure.memory import peak_bytes
from curvlab.optim import SecondOrder
from curvlab.solvers import Solution, Status
from curvlab.specs import check_number
from curvlab.studies.store import Row, run_lock
from curvlab.studies.train.evaluate import Score, evaluate
from curvlab.studies.train.folder import TrainFolder, frame_of
from curvlab.studies.train.plan import TrainPlan
from curvlab.studies.train.plateau import Plateau, plateau_note, stays_on_plateau

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from curvlab.studies.train.tracking import Tracking

__all__ = ["OK", "TrainPlan", "TrainProgress", "TrainRun", "train"]


@dataclass(frozen=True)
class TrainProgress:
    """Where a run is, for a progress bar."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float
    step_seconds: float
    epoch_closed: bool

    @classmethod
    def of(cls, run: TrainRun) -> TrainProgress:
        """The present place of `run`."""
        last = run.rows[-1] if run.rows else {}
        mean = run.seconds / run.steps if run.steps else nan
        return cls(
            run.epoch,
            run.plan.epochs,
            run.tally.steps,
            run.batches_per_epoch,
            run.last_loss,
            last.get("test_accuracy", nan),
            mean,
            run.between_epochs,
        )


def train(
    plan: TrainPlan,
    folder: str | Path | None = None,
    *,
    fresh: bool = False,
    on_progress: Callable[[TrainProgress], None] | None = None,
    observe: Callable[[TrainRun], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    checkpoint_seconds: float = 60.0,
    checkpoint_steps: int | None = None,
    draw: Callable[[pd.DataFrame, str], bytes] | None = None,
    process_group: ProcessGroup | None = None,
    count_memory: bool = True,
    track: Tracking | None = None,
) -> pd.DataFrame:
    """Train as `plan` says and return one row per epoch, the first of them before training.

    Args:
        plan: what to train and how.
        folder: where to checkpoint and resume; None keeps everything in memory.
        fresh: begin anew in `folder`; the first checkpoint sets the old run aside (`previous-1/`, …).
        on_progress: called after every step.
        observe: called with the run at the parameters it begins with and at those after every step; it may
            read the model, not change it. A resumed run shows the parameters since its checkpoint again.
        should_stop: asked after every step; a run that stops is checkpointed and can be resumed.
        checkpoint_seconds: checkpoint after this many seconds, and after every epoch.
        checkpoint_steps: checkpoint after this many steps too.
        draw: what draws the learning curve that is put in the folder at the end: from the frame and a title
            to a PNG file, as `curvlab.report.figures.learning_curve_png` does; None for no curve.
        process_group: train on the ranks of this group, each on its part of every batch; all must make this
            call. The first rank alone has the folder. The run is the one that a single process makes of the
            plan, up to rounding, and any number of ranks may resume it.
        count_memory: whether the first step of every epoch is watched for its peak, which takes as long as
            many steps of a small network; without, `peak_bytes` is NaN.
        track: what to measure of the curvature along the way, on the first rank; the folder has the numbers
            as curvature.csv.

    >>> from curvlab.studies.setup import Setup
    >>> frame = train(TrainPlan(Setup(data="digits[train=200]", batch=100), epochs=1))
    >>> frame[["optimizer", "epoch", "status"]].values.tolist()
    [['pch-1 + ea-cg', 0, 'ok'], ['pch-1 + ea-cg', 1, 'ok']]
    """
    check_number("checkpoint_seconds", checkpoint_seconds, "0 or more seconds", lambda x: x >= 0)
    if checkpoint_steps is not None:
        check_number("checkpoint_steps", checkpoint_steps, "1 or more steps", lambda x: x >= 1 and x % 1 == 0)
    communicator = communicator_of(process_group)
    with ExitStack() as held, devices.random_state_restored(devices.resolve(plan.setup.device)):
        outputs = None if folder is None else _open_folder(folder, plan, fresh, communicator, held)
        torch.manual_seed(plan.start_seed)
        run = TrainRun(plan, communicator, count_memory)
        _restore(run, outputs)
        run.begin()
        observe = _agreed_observer(run, observe, track)
        _carry_out(run, outputs, on_progress, observe, should_stop, checkpoint_seconds, checkpoint_steps)
        if outputs is not None and draw is not None:
            outputs.draw(run, draw)
    return frame_of([row for row in run.rows if row["epoch"] <= plan.epochs])


def _open_folder(
    folder: str | Path, plan: TrainPlan, fresh: bool, communicator: Communicator, held: ExitStack
) -> TrainFolder | None:
    """The folder, locked until `held` ends, on the first rank; what is wrong with it is raised on all."""
    opened: list[TrainFolder] = []

    def open_folder() -> None:
        opened.append(TrainFolder(held.enter_context(run_lock(folder, "train")), plan, fresh))

    communicator.first_rank(open_folder)
    return opened[0] if opened else None


def _restore(run: TrainRun, outputs: TrainFolder | None) -> None:
    """Bring the run to where its folder left it; all ranks begin with the first one's state."""

    def restored() -> Any:
        if outputs is not None:
            outputs.restore(run)
        if run.communicator.size == 1:
            return None
        # On the CPU, because the ranks have devices of their own.
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), run.state())

    state = run.communicator.first_rank(restored)
    if run.communicator.rank:
        run.restore(state)


def _agreed_observer(
    run: TrainRun, observe: Callable[[TrainRun], None] | None, track: Tracking | None
) -> Callable[[TrainRun], None] | None:
    """`observe`, and on the first rank the tracking too; where that cannot begin, all ranks raise."""

    def both() -> Callable[[TrainRun], None] | None:
        if track is None or run.communicator.rank:
            return observe
        tracked = track.observer(run)
        if observe is None:
            return tracked

        def observe_both(run: TrainRun) -> None:
            observe(run)
            tracked(run)

        return observe_both

    return agree(run.communicator, both, on=run.device)


def _carry_out(
    run: TrainRun,
    outputs: TrainFolder | None,
    on_progress: Callable[[TrainProgress], None] | None,
    observe: Callable[[TrainRun], None] | None,
    should_stop: Callable[[], bool],
    checkpoint_seconds: float,
    checkpoint_steps: int | None,
) -> None:
    """Step after step; what a rank does by itself between two of them may fail there, and then ends all."""
    saved = monotonic()

    def begin() -> bool:
        if observe is not None:
            observe(run)
        return should_stop()

    def after_step() -> bool:
        nonlocal saved
        if observe is not None and run.status == OK:
            observe(run)
        due = monotonic() - saved >= checkpoint_seconds
        due = due or (checkpoint_steps is not None and run.steps % checkpoint_steps == 0)
        if outputs is not None and (run.between_epochs or due):
            outputs.save(run)
            saved = monotonic()
        if on_progress is not None:
            on_progress(TrainProgress.of(run))
        return should_stop()

    def save() -> None:
        if outputs is not None:
            outputs.save(run)

    # Where any rank was asked to stop, all stop after the same step.
    stops = any_agreed(run.communicator, begin, on=run.device)
    while not run.finished and not stops:
        run.advance()
        stops = any_agreed(run.communicator, after_step, on=run.device)
    agree(run.communicator, save, on=run.device)


OK, DIVERGED, FAILED = "ok", "diverged", "failed"


@dataclass
class Tally:
    """What an epoch has added up so far."""

    steps: int = 0
    timed: int = 0
    timed_seconds: float = 0.0
    other_seconds: float = 0.0
    timed_cpu: float = 0.0
    other_cpu: float = 0.0
    loss: float = 0.0
    iterations: float = 0.0
    solves: int = 0
    peak_bytes: float = nan
    statuses: dict[str, float] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """Mean of the steps that did nothing but train, or of all where there is none."""
        if self.timed:
            return self.timed_seconds / self.timed
        return self.other_seconds / self.steps if self.steps else nan

    @property
    def seconds(self) -> float:
        """All steps, those that also measured counted as the mean of the others."""
        return self.steps * self.step_seconds if self.steps else 0.0

    @property
    def cpu_seconds(self) -> float:
        """The same in processor time."""
        if self.timed:
            return self.steps * self.timed_cpu / self.timed
        return self.other_cpu

    def count(self, solution: Solution) -> None:
        """Add the iterations of a step's blocks."""
        solution.read(residuals=False)
        self.iterations += sum(block.iterations for block in solution.blocks.values()) / len(solution.blocks)
        self.solves += 1

    def sample(self, solution: Solution) -> None:
        """Count, and note the share of blocks that ended in each status, which takes their true residuals."""
        solution.read()
        self.count(solution)
        ended = Counter(block.status.slug for block in solution.blocks.values())
        self.statuses = {status.slug: ended[status.slug] / len(solution.blocks) for status in Status}


class TrainRun:
    """A plan being carried out: by one process, or by several ranks, each on its part of every batch."""

    def __init__(
        self, plan: TrainPlan, communicator: Communicator = LOCAL, count_memory: bool = True
    ) -> None:
        self.plan, self.communicator, self.count_memory = plan.resolve(), communicator, count_memory
        self.device = devices.resolve(self.plan.setup.device)
        # A rank without the data ends all of them.
        self.data, self.model, self.criterion = agree(communicator, self._subject, on=self.device)
        self.stepper = self.plan.spec.build(self.model, self.criterion, communicator)
        self.rates = [float(group["lr"]) for group in self.stepper.param_groups]
        self.evaluated = self._evaluation_examples()
        self.epoch = self.steps = 0
        self.closed_seconds = self.closed_cpu = 0.0
        self.last_loss = nan
        self.tally = Tally()
        self.status = OK
        self.rows: list[Row] = []
        self.tracked: list[Row] = []
        self._batches: Iterator[tuple[Tensor, Tensor]] | None = None

    def _subject(self) -> tuple[Dataset, nn.Module, Criterion]:
        """The data, the model and the criterion."""
        setup = self.plan.setup
        data = self.plan.load_data().to(self.device, setup.torch_dtype)
        # One function for all optimizers: layers that are random in training mode stay quiet.
        return data, self.plan.build_model().eval(), setup.build_criterion()

    def _evaluation_examples(self) -> Examples:
        return self.data.train.at_most(self.plan.evaluate_examples, self.plan.setup.seed)

    @cached_property
    def plateau(self) -> Plateau:
        """The plateau of the examples behind the training loss."""
        with torch.no_grad():
            outputs = self.model(self.evaluated.batch(torch.arange(1))[0]).shape[-1]
        return Plateau.of(self.criterion, self.evaluated, outputs, self.plan.setup.torch_dtype)

    @property
    def batches_per_epoch(self) -> int:
        """Steps in one epoch."""
        return len(self.data.batches(self.plan.setup.batch))

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self.closed_seconds + self.tally.seconds

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or the run has ended before."""
        return self.status != OK or self.epoch >= self.plan.epochs

    @property
    def between_epochs(self) -> bool:
        """Whether no epoch is under way."""
        return self.tally.steps == 0

    def begin(self) -> None:
        """Record the scores before training, once."""
        if not self.rows:
            self._close(self._score())

    def advance(self) -> None:
        """One step, and after the last of an epoch its row."""
        started, cpu_started = perf_counter(), process_time()
        inputs, targets = self._next_batch()
        self._set_rates()
        last = self.tally.steps + 1 == self.batches_per_epoch
        counted = self.count_memory and self.tally.steps == 0
        self._observe(last)
        try:
            loss = self._counted_step(inputs, targets) if counted else self._step(inputs, targets)
        except (SolveError, LinAlgError) as error:
            return self._end(DIVERGED, str(error))
        except PairError as error:
            if not self.steps:
                raise
            return self._end(FAILED, str(error))
        except ProblemError as error:
            if not self.steps or self._outputs_finite(inputs):
                raise
            return self._end(DIVERGED, str(error))
        seconds, cpu_seconds = perf_counter() - started, process_time() - cpu_started
        self._count(loss, seconds, cpu_seconds, plain=not counted and not last)
        if not isfinite(loss):
            return self._end(DIVERGED, f"the loss is {loss}")
        if last:
            self._close_epoch()
        return None

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        if self._batches is None:
            plan, start = self.plan, self.tally.steps
            batches = self.data.batches(plan.setup.batch, plan.start_seed, self.epoch, start=start)
            self._batches = rank_batches(batches, self.communicator.rank, self.communicator.size)
        return next(self._batches)

    def _set_rates(self) -> None:
        progress = self.epoch + self.tally.steps / self.batches_per_epoch
        factor = self.plan.schedule_value.factor(progress, self.plan.epochs)
        for group, rate in zip(self.stepper.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def _observe(self, sample: bool) -> None:
        """Let the next step's solution be counted, and its blocks' statuses read if it is to be a sample."""
        if isinstance(self.stepper, SecondOrder):
            self.stepper.on_solution = self.tally.sample if sample else self.tally.count

    def _step(self, inputs: Tensor, targets: Tensor) -> float:
        return float(self.stepper.step(inputs, targets))

    def _counted_step(self, inputs: Tensor, targets: Tensor) -> float:
        """A step whose peak memory is counted."""
        losses: list[float] = []

        def work() -> None:
            losses.append(self._step(inputs, targets))

        held = [*self.model.parameters(), *_tensors(self.stepper.state_dict()), inputs, targets]
        self.tally.peak_bytes = peak_bytes(work, device=self.device, baseline=held)
        return losses[0]

    def _count(self, loss: float, seconds: float, cpu_seconds: float, plain: bool) -> None:
        tally = self.tally
        tally.steps += 1
        tally.loss += loss
        if plain:
            tally.timed += 1
            tally.timed_seconds += seconds
            tally.timed_cpu += cpu_seconds
        else:
            tally.other_seconds += seconds
            tally.other_cpu += cpu_seconds
        self.steps += 1
        self.last_loss = loss

    def _outputs_finite(self, inputs: Tensor) -> bool:
        with torch.no_grad():
            finite = bool(torch.isfinite(self.model(inputs)).all())
        return not self.communicator.any(not finite, self.device)

    def _score(self) -> dict[str, float]:
        train = evaluate(self.model, self.criterion, self.evaluated, self.communicator)
        test = evaluate(self.model, self.criterion, self.data.test, self.communicator)
        return _scores(train, test)

    def _close_epoch(self) -> None:
        self.epoch += 1
        scores = self._score()
        if not isfinite(scores["train_loss"]) or not isfinite(scores["test_loss"]):
            self.epoch -= 1
            return self._end(DIVERGED, "the loss after the epoch is not finite")
        return self._close(scores)

    def _end(self, status: str, message: str) -> None:
        self.status = status
        self.epoch += 1
        self._close(_scores(Score(nan, nan), Score(nan, nan)), message)

    def _close(self, scores: dict[str, float], message: str = "") -> None:
        tally = self.tally
        row = {
            "kind": "epoch",
            "key": self.plan.row_key(self.epoch),
            **self.plan.labels(),
            "epoch": self.epoch,
            "steps": self.steps,
            "seconds": self.seconds,
            "cpu_seconds": self.closed_cpu + tally.cpu_seconds,
            "step_seconds": tally.step_seconds,
            "step_loss": tally.loss / tally.steps if tally.steps else nan,
            **scores,
            "constant_loss": self.plateau.height,
            "peak_bytes": tally.peak_bytes,
            "cg_iterations": tally.iterations / tally.solves if tally.solves else nan,
            **{f"blocks_{s.slug.replace('-', '_')}": tally.statuses.get(s.slug, nan) for s in Status},
            "status": self.status,
            "source": source_hash(),
        }
        row["plateau_steps"] = self._plateau_steps(row)
        self.rows.append(row | {"message": message or self._plateau_message(row)})
        self.closed_seconds, self.closed_cpu = self.seconds, self.closed_cpu + tally.cpu_seconds
        self.tally, self._batches = Tally(), None

    def _plateau_steps(self, row: Row) -> int:
        """Updates up to this row in whole epochs on the plateau, without a break."""
        if not (self.plateau.holds(row["step_loss"]) and self.plateau.holds(row["train_loss"])):
            return 0
        before = self.rows[-1].get("plateau_steps", 0) if self.rows else 0
        return int(before) + self.tally.steps

    def _plateau_message(self, row: Row) -> str:
        """The note, at the first row of a stay on the plateau; before training, why no plateau is known."""
        if not self.rows:
            return self.plateau.reason and f"No plateau is watched for: {self.plateau.reason}."
        new = stays_on_plateau(row) and not stays_on_plateau(self.rows[-1])
        return plateau_note(self.plan, row) if new else ""

    def state(self) -> dict[str, Any]:
        """All that the run needs to go on."""
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.stepper.state_dict(),
            "random": {"cpu": torch.get_rng_state(), "device": devices.random_state(self.device)},
            "epoch": self.epoch,
            "steps": self.steps,
            "closed_seconds": self.closed_seconds,
            "closed_cpu": self.closed_cpu,
            "last_loss": self.last_loss,
            "status": self.status,
            "tally": dict(vars(self.tally)),
            "rows": self.rows,
            "tracked": self.tracked,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.model.load_state_dict(state["model"])
        self.stepper.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"]["cpu"])
        if state["random"]["device"] is not None:
            devices.set_random_state(self.device, state["random"]["device"])
        self.epoch, self.steps, self.closed_seconds = state["epoch"], state["steps"], state["closed_seconds"]
        self.closed_cpu = state["closed_cpu"]
        self.last_loss, self.status = state["last_loss"], state["status"]
        self.tally, self.rows = Tally(**state["tally"]), list(state["rows"])
        self.tracked = list(state.get("tracked", ()))  # which runs of before do not have


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _scores(train: Score, test: Score) -> dict[str, float]:
    return {
        "train_loss": train.loss,
        "train_accuracy": train.accuracy,
        "test_loss": test.loss,
        "test_accuracy": test.accuracy,
    }
