"""`curvlab train`: one run, with any provider and solver or a baseline."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from curvlab import specs
from curvlab.cli.console import INTERRUPTED, show_rows
from curvlab.cli.options import SchemaCommand, make_setup, option_of, setup_settings
from curvlab.exceptions import SpecError
from curvlab.studies.schema import settings_of
from curvlab.studies.train.optimizers import SecondOrderSpec, optimizers
from curvlab.studies.train.plan import EPOCH, PEAK, TRAIN_BATCH, TrainPlan, rate_words, rates_of

if TYPE_CHECKING:
    import pandas as pd

    from curvlab.studies.train.run import TrainProgress
    from curvlab.studies.train.tracking import Tracking

__all__ = ["command"]

DEFAULT_FOLDER = Path("runs/train")
PLAN, STEP = settings_of(TrainPlan), settings_of(SecondOrderSpec)


@click.command(
    "train",
    cls=SchemaCommand,
    schema=lambda: [*setup_settings(batch=TRAIN_BATCH), *(option_of(one) for one in (*PLAN, *STEP))],
)
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Folder of the run.  [default: runs/train/<optimizer>-<hash of the plan>]")  # fmt: skip
@click.option("--checkpoint-seconds", type=click.FloatRange(min=0), default=60.0, show_default=True,
              metavar="X", help="Checkpoint this often, and after every epoch.")  # fmt: skip
@click.option("--track", metavar="MEASURE,…",
              help="Measure curvature along the way: top-eigenvalue, trace, density, errors.")  # fmt: skip
@click.option("--track-every", type=click.IntRange(min=1), default=50, show_default=True, metavar="N",
              help="Steps between two measurements of --track.")  # fmt: skip
@click.option("--track-examples", type=click.IntRange(min=1), default=500, show_default=True, metavar="N",
              help="Training examples that --track measures on.")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Begin anew; the run in the folder is set aside.")
@click.option("--quiet", is_flag=True, help="No progress and no table.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON on standard output.")
def command(
    output: Path | None,
    checkpoint_seconds: float,
    track: str | None,
    track_every: int,
    track_examples: int,
    fresh: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train one network, and record loss, accuracy, time and memory epoch by epoch.

    The run is checkpointed in its folder and resumed by the same command: after Ctrl-C (exit code 130),
    a kill or a power cut it goes on where it was, and on the CPU it ends with the same bits. A run that
    diverges is a result too: its row has that status, with the epoch, and the exit code is 1. A run that
    ends on its plateau, predicting the same whatever it is shown, is warned about, with what to try.

    Under torchrun every process takes its part of each batch, on a device of its own, and all make the same
    run; the first writes the folder and prints.

    \b
    Examples:
      curvlab train
      curvlab train -p fisher -s kfi --lr 0.05 --alpha 0.1
      curvlab train --data cifar10 --batch 500 --lr 0.2 -o runs/cifar10
      curvlab train --data cifar10 --optimizer 'sgd[lr=0.1,momentum=0.9]'
      curvlab train --track top-eigenvalue,trace --track-every 20
      torchrun --nproc-per-node=4 -m curvlab train --data cifar10 --batch 1000
    """
    from curvlab.distributed.communicator import launched
    from curvlab.studies.train.run import train

    plan = _plan(options)
    if track is None:
        _refuse_alone("track_every", "track_examples")
    tracking = None if track is None else _tracking(track, track_every, track_examples)
    folder = output or DEFAULT_FOLDER / f"{_slug(plan)}-{plan.key[:8]}"
    with launched(plan.setup.device) as launch:
        bar = launch.leads and not quiet and not as_json and sys.stderr.isatty()
        with _stopping() as stop, _progress(bar, plan.epochs) as show:

            def shown(progress: TrainProgress) -> None:
                stop.begin()
                show(progress)

            frame = train(
                plan,
                folder,
                fresh=fresh,
                on_progress=shown,
                should_stop=stop.asked,
                checkpoint_seconds=checkpoint_seconds,
                draw=_learning_curve,
                process_group=launch.process_group,
                track=tracking,
            )
    if launch.leads:
        if tracking is not None:
            _write_tracking(plan, folder)
        _render(frame, folder, quiet, as_json)
        _finish(frame, plan, folder, quiet)


def _learning_curve(frame: pd.DataFrame, title: str) -> bytes:
    """The learning curve as a PNG file; what draws it is imported only now, at the end of the run."""
    from curvlab.report.figures import learning_curve_png

    return learning_curve_png(frame, title)


def _refuse_alone(*names: str) -> None:
    """Refuse options of --track that were given without it, rather than do nothing with them."""
    for name in names:
        if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise SpecError(
                f"--{name.replace('_', '-')} is of --track, which was not given: add --track trace, or leave "
                f"it out"
            )


def _tracking(measures: str, every: int, examples: int) -> Tracking:
    from curvlab.studies.train.tracking import Tracking

    return Tracking([name.strip() for name in measures.split(",") if name.strip()], every, examples)


def _write_tracking(plan: TrainPlan, folder: Path) -> None:
    """The page of the curvature along the run, from the frame that is in its folder."""
    import pandas as pd

    from curvlab.report.tracking import write_tracking

    if not (folder / "curvature.csv").exists():
        click.echo("Nothing was tracked: the run was finished before. --fresh begins it anew.", err=True)
        return
    frame = pd.read_csv(folder / "curvature.csv", keep_default_na=False)
    setup = plan.setup.resolve()
    facts = (("arch", str(setup.arch)), ("data", setup.data), ("optimizer", plan.labels()["optimizer"]))
    write_tracking(frame, facts, folder)


def _plan(options: dict[str, Any]) -> TrainPlan:
    """The plan by the options that were given; those of the step go into the optimizer's spec."""
    setup = make_setup(options, batch=TRAIN_BATCH)
    step = {one.name: options[one.name] for one in STEP}
    chosen = {one.name: options[one.name] for one in PLAN if options[one.name] is not None}
    plan = TrainPlan(setup, **chosen)
    return replace(plan, optimizer=_optimizer(plan.optimizer, step))


def _optimizer(text: str, given: dict[str, Any]) -> str:
    """The optimizer's spec with the fields that have options of their own filled in."""
    name, spec = specs.parse(text).name, optimizers.make(text)
    values = {key: value for key, value in given.items() if value is not None}
    known = [field.name for field in fields(spec)]
    for key in values:
        if key not in known:
            raise SpecError(f"--{key} does not go with `{name}`, which has {', '.join(known)}")
    return specs.canonical(name, replace(spec, **values)) if values else text


def _slug(plan: TrainPlan) -> str:
    labels = plan.labels()
    words = [labels["provider"], labels["solver"]] if labels["provider"] else [labels["optimizer"]]
    return "-".join(specs.parse(word).name for word in words)


class _Stop:
    """Ctrl-C: at once before the first step, after the step under way from then on."""

    def __init__(self) -> None:
        self.requested = self.training = False

    def begin(self) -> None:
        self.training = True

    def asked(self) -> bool:
        return self.requested

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self.training or self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def _stopping() -> Iterator[_Stop]:
    stop = _Stop()
    before = signal.signal(signal.SIGINT, stop.handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress(visible: bool, epochs: int) -> Iterator[Any]:
    if not visible:
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    text = TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}  {task.fields[state]}")
    columns = (text, BarColumn(bar_width=None), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("train", total=None, epoch=0, epochs=epochs, state="")

        def show(p: TrainProgress) -> None:
            state = f"loss {p.loss:.4f}  accuracy {p.accuracy:.1%}  {1000 * p.step_seconds:.1f} ms/step"
            done = p.epoch * p.steps + p.step
            bar.update(task, total=p.epochs * p.steps, completed=done, epoch=p.epoch, state=state)

        yield show


def _render(frame: pd.DataFrame, folder: Path, quiet: bool, as_json: bool) -> None:
    if as_json:
        rows = json.loads(frame.to_json(orient="records"))
        click.echo(json.dumps({"folder": str(folder), "rows": rows}))
    elif not quiet:
        show_rows((*EPOCH[:-1], PEAK, EPOCH[-1]), frame.to_dict("records"))


def _finish(frame: pd.DataFrame, plan: TrainPlan, folder: Path, quiet: bool) -> None:
    """Say where the run is, and end with the exit code of how it ended."""
    from curvlab.measure.environment import mixed_sources
    from curvlab.studies.train.plateau import plateau_note, stays_on_plateau

    last = frame.to_dict("records")[-1]
    mixed = mixed_sources(frame["source"]) if "source" in frame else ""
    if mixed and not quiet:
        click.echo(mixed, err=True)
    if last["status"] != "ok":
        click.echo(f"The run {last['status']} in epoch {last['epoch']}: {last['message']}", err=True)
        sys.exit(1)
    if stays_on_plateau(last):
        click.echo(f"Warning: {plateau_note(plan, last)}", err=True)
    elif frame["message"].iloc[0] and not quiet:
        click.echo(frame["message"].iloc[0], err=True)  # why no plateau could be watched for
    if last["epoch"] < plan.epochs:
        again = shlex.join(["curvlab", *(word for word in sys.argv[1:] if word != "--fresh")])
        click.echo(f"Stopped; the run is kept in {folder}. Resume it with:\n  {again}", err=True)
        sys.exit(INTERRUPTED)
    if not quiet:
        settings = f"{rate_words(rates_of(plan.optimizer))}, schedule {plan.schedule}"
        click.echo(f"{plan.labels()['optimizer']}: {settings}; as given or by default, not tuned.", err=True)
        click.echo(f"The run is in {folder}", err=True)
