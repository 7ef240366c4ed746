"""`train`: carry out a training plan, and give one row an epoch.

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

`constant_loss` is the loss of the best constant output (`curvlab.studies.plateau`), NaN where there is none,
for a reason that the first `message` gives. `plateau_steps` counts the updates of the last whole epochs in a
row that were on the plateau: both `step_loss` and `train_loss` within 2 % of `constant_loss`. At the first
row where it is 100 or more, the `message` says what was seen and what to try; the status stays `ok`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from curvlab.distributed.communicator import Communicator, communicator_of
from curvlab.studies.run_lock import run_lock
from curvlab.studies.train_folder import TrainFolder, frame_of
from curvlab.studies.train_plan import TrainPlan
from curvlab.studies.train_run import OK, TrainRun

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Progress", "TrainPlan", "train"]


@dataclass(frozen=True)
class Progress:
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
    def of(cls, run: TrainRun) -> Progress:
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
    on_progress: Callable[[Progress], None] | None = None,
    observe: Callable[[TrainRun], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    checkpoint_seconds: float = 60.0,
    checkpoint_steps: int | None = None,
    draw: bool = True,
    process_group: ProcessGroup | None = None,
) -> pd.DataFrame:
    """Train as `plan` says and return one row an epoch, the first of them before training.

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
        draw: draw the learning curve in the folder at the end.
        process_group: train on the ranks of this group, each on its part of every batch; all must make this
            call. The first rank alone has the folder. The run is the one that a single process makes of the
            plan, up to rounding, and any number of ranks may resume it.

    >>> from curvlab.studies.setup import Setup
    >>> frame = train(TrainPlan(Setup(data="digits[train=200]", batch=100), epochs=1))
    >>> frame[["optimizer", "epoch", "status"]].values.tolist()
    [['pch-1 + ea-cg', 0, 'ok'], ['pch-1 + ea-cg', 1, 'ok']]
    """
    communicator = communicator_of(process_group)
    with ExitStack() as held, torch.random.fork_rng():
        outputs = None if folder is None else _opened(folder, plan, fresh, communicator, held)
        torch.manual_seed(plan.setup.seed)
        run = TrainRun(plan, communicator)
        _restore(run, outputs)
        run.begin()
        _carry_out(run, outputs, on_progress, observe, should_stop, checkpoint_seconds, checkpoint_steps)
        if outputs is not None and draw:
            outputs.draw(run)
    return frame_of([row for row in run.rows if row["epoch"] <= plan.epochs])


def _opened(
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


def _carry_out(
    run: TrainRun,
    outputs: TrainFolder | None,
    on_progress: Callable[[Progress], None] | None,
    observe: Callable[[TrainRun], None] | None,
    should_stop: Callable[[], bool],
    checkpoint_seconds: float,
    checkpoint_steps: int | None,
) -> None:
    saved = monotonic()
    if observe is not None:
        observe(run)
    while not run.finished and not _stopped(run, should_stop()):
        run.advance()
        if observe is not None and run.status == OK:
            observe(run)
        due = monotonic() - saved >= checkpoint_seconds
        due = due or (checkpoint_steps is not None and run.steps % checkpoint_steps == 0)
        if outputs is not None and (run.between_epochs or due):
            outputs.save(run)
            saved = monotonic()
        if on_progress is not None:
            on_progress(Progress.of(run))
    if outputs is not None:
        outputs.save(run)


def _stopped(run: TrainRun, asked: bool) -> bool:
    """Whether to stop here: where any rank was asked to, all stop after the same step."""
    return run.communicator.any(asked, run.device)
