"""The cells of a comparison: what is measured of a scene, provider, pair, control or optimizer, as rows.

    scene         a point, seed and batch: loss, largest eigenvalue of the Hessian, steps that led there
    error         a provider: errors of its bias and weight blocks by layer, eigenvalues of its layers
    solve         a pair: bytes, operations, closeness to Newton's direction, decrease of the loss, residuals
                  and their traces, and the step at further dampings
    control       a control: the same of the gradient step, of SGD's step and of Newton's own
    cost          a pair or a control, and a repetition: seconds of estimate, prepare and apply
    tuning        an optimizer with one choice of learning rate and α: its validation loss (`race`)
    convergence   an optimizer and a seed: losses and accuracy by epoch and by seconds (`race`)

A cell that cannot exist is a row `skipped` with the reason; one that raises is a row `failed` with the
message. A task names everything by value, so that it runs in any process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.exceptions import (
    CurvlabError,
    ExecutorError,
    MatrixFreeError,
    PairError,
    ProblemError,
    SpecError,
)
from curvlab.measure.environment import source_hash
from curvlab.measure.operations import counting
from curvlab.problem import Problem
from curvlab.providers import Provider, estimate
from curvlab.solvers import Solution, solve
from curvlab.solvers.registry import solvers
from curvlab.studies.compare.costs import (
    ControlWatch,
    Pair,
    Patience,
    Stopwatch,
    control_usage,
    fresh,
    gradient_step,
    memory,
    usage,
)
from curvlab.studies.compare.directions import (
    Closeness,
    DescentBench,
    Newton,
    NewtonReference,
    predicted_decrease,
)
from curvlab.studies.compare.race import measure_run, measure_trial
from curvlab.studies.compare.settings import Settings, damping_of
from curvlab.studies.compare.spectra import largest_of_hessian, layer_spectra
from curvlab.studies.compare.tasks import Kind, Scene, SceneProblems, Task
from curvlab.studies.schema import extra_columns
from curvlab.studies.small.errors import errors
from curvlab.studies.small.fake_problem import fake_problem
from curvlab.studies.store import Row

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Cell", "failure", "run_task"]

REFUSALS = (PairError, ProblemError, MatrixFreeError, SpecError)
MESSAGE = 500
PLANNED_ITERATIONS = 3
SWEEP_OPERATIONS = 2e9  # of a gradient, up to which steps are measured at several dampings


def run_task(task: Task) -> Row:
    """The row of a cell; whatever goes wrong in it is in its status and message."""
    try:
        _check_source(task)
        with _threads(task.settings.threads):
            return {**task.head, "status": "ok", "message": "", **_MEASURES[task.kind](task)}
    except Exception as error:
        return failure(task.head, error)


def failure(head: Row, error: BaseException) -> Row:
    """The row of a cell that ended in `error`: skipped where it was refused, failed otherwise.

    `head` is what the row says of itself: its key, its study, the names of the provider and the solver.
    """
    if isinstance(error, REFUSALS):
        return {**head, "status": "skipped", "message": str(error)[:MESSAGE]}
    text = str(error) if isinstance(error, CurvlabError) else f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        text = f"out of memory: {text}"
    return {**head, "status": "failed", "message": text[:MESSAGE]}


def _check_source(task: Task) -> None:
    """Refuse to measure for a process that runs another curvlab, as a machine of a cluster might."""
    wanted = task.head.get("source", source_hash())
    if wanted != source_hash():
        raise ExecutorError(
            f"the worker runs another curvlab (source {source_hash()}) than the study (source {wanted}); "
            f"install the same one there, and measure the cell again with --retry"
        )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Bench:
    """The problem of one scene with what its cells share: references, descents, and watches that are warm."""

    def __init__(self, problems: SceneProblems, scene: Scene) -> None:
        self.scene, self.steps = scene, problems.steps(scene)
        self.problem, self.other = problems.problem(scene), problems.other(scene)
        self.settings = problems.settings
        self._newton: dict[float, Newton] = {}
        self._watches: dict[Pair | str, Stopwatch] = {}
        self._errors: tuple[tuple[str | Provider, ...], pd.DataFrame] | None = None
        self._patience = Patience()

    @cached_property
    def reference(self) -> NewtonReference:
        """The exact Newton directions."""
        chosen = self.settings
        return NewtonReference(
            self.problem, parameters=chosen.newton_limit, operations=chosen.reference_limit
        )

    def newton(self, alpha: float) -> Newton:
        """Newton's direction, or why there is none: it is a yardstick, and its failure is not the cell's."""
        if alpha not in self._newton:
            try:
                self._newton[alpha] = self.reference.at(alpha)
            except Exception as error:
                names = [name for layer in self.problem.layers for name in layer.names]
                self._newton[alpha] = Newton({}, dict.fromkeys(names, f"not solved: {error}"[:MESSAGE]))
        return self._newton[alpha]

    def errors(self, providers: Sequence[str | Provider]) -> pd.DataFrame:
        """The errors of all these providers that exist here: the exact blocks are found once for all of them.

        The frame is kept for the next cell of the same comparison; a comparison of the same problem with
        other providers, in the same process, has its own.
        """
        wanted = tuple(providers)
        if self._errors is None or self._errors[0] != wanted:
            self._errors = wanted, self._measured_errors(wanted)
        return self._errors[1]

    def _measured_errors(self, providers: Sequence[str | Provider]) -> pd.DataFrame:
        existing = []
        for provider in providers:
            with suppress(*REFUSALS):
                estimate(provider, fresh(self.problem))
                existing.append(provider)
        limit = self.settings.reference_limit
        return errors(fresh(self.problem), existing, weights=True, operations=limit)

    @cached_property
    def gradient_operations(self) -> int:
        """Operations of one gradient."""
        again = fresh(self.problem)
        with counting() as counted:
            again.gradient().norm()
        return counted.total

    @cached_property
    def descents(self) -> DescentBench:
        """Where the loss is followed along directions."""
        return DescentBench(self.problem, self.other)

    @cached_property
    def largest(self) -> tuple[float, str]:
        """The largest eigenvalue of the exact Hessian, and of what: its blocks, or the whole."""
        try:
            self.newton(self.settings.alpha)
            if "reference" in self.__dict__ and not math.isnan(found := self.reference.largest_eigenvalue()):
                return found, "blocks"
            return largest_of_hessian(self.problem), "whole"
        except Exception as error:  # a model without second derivatives is compared all the same
            return math.nan, f"not known: {error}"[:MESSAGE]

    def watch(self, pair: Pair) -> Stopwatch:
        """The stopwatch of a pair."""
        return self._watches.setdefault(pair, Stopwatch(pair, self.problem, patience=self._patience))

    def control_watch(self, control: str) -> Stopwatch:
        """The stopwatch of a control."""
        if control not in self._watches:
            self._watches[control] = ControlWatch(control, self.problem, self.settings.alpha, self._patience)
        return self._watches[control]


_problems: SceneProblems | None = None
_bench: _Bench | None = None


def _bench_of(task: Task) -> _Bench:
    """The bench of this process; one at a time, since a problem may fill the memory."""
    global _problems, _bench
    settings = task.settings
    if _problems is None or not _same(_problems.settings, settings):
        _problems, _bench = SceneProblems(settings), None
    if _bench is None or _bench.scene != task.scene:
        _bench = None
        _bench = _Bench(_problems, task.scene)
    return _bench


def _same(one: Settings, other: Settings) -> bool:
    """Whether two comparisons measure the same problems in the same way."""
    if one.subject is not other.subject and one.subject != other.subject:
        return False
    names = (
        "alpha",
        "at",
        "at_lr",
        "checkpoint",
        "batches",
        "train_batch",
        "newton_limit",
        "reference_limit",
    )
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _scene(task: Task) -> Row:
    bench = _bench_of(task)
    largest, largest_of = bench.largest
    trainable = [p for p in bench.problem.model.parameters() if p.requires_grad]
    covered = sum(p.numel() for p in bench.problem.network.parameters.values())
    return {
        "loss": bench.descents.loss,
        "steps": bench.steps,
        "largest_eigenvalue": largest,
        "largest_of": largest_of,
        "examples": bench.problem.examples(),
        "parameters": sum(p.numel() for p in trainable),
        "covered_parameters": covered,
        "second_batch": bench.other is not None,
    }


def _error(task: Task) -> Row:
    bench = _bench_of(task)
    problem = fresh(bench.problem)
    curvature = estimate(task.provider, problem)
    found: Row = {
        "definiteness": str(curvature.definiteness),
        "notes": list(curvature.notes),
        "spectra": [asdict(one) for one in layer_spectra(curvature)],
        "layers": [],
        "error_reason": "",
    }
    try:
        frame = bench.errors(task.settings.providers)
    except Exception as error:  # the reference, not the provider, may be what does not exist
        return found | {"error_reason": f"no errors: {error}"[:MESSAGE]}
    own = frame[frame["provider"] == curvature.provider]
    names = ("bias_share", "weight_share", "weight_probes")
    columns = ["layer", "layer_name", "error", "relative", "weight_error", "weight_relative", "weight_floor"]
    return found | {
        "layers": own[columns].to_dict("records"),
        "error_reason": "; ".join(frame.attrs["left_out"])[:MESSAGE],
        **{name: frame.attrs[name] for name in names},
    }


def _solve(task: Task) -> Row:
    bench, pair = _bench_of(task), Pair(task.provider, task.solver, task.settings.alpha)
    # Of a problem that keeps nothing: what the pairs before have factorised would change the last digits.
    problem = fresh(bench.problem)
    curvature, solution = pair.run(problem)
    reference = bench.newton(task.settings.alpha)
    blocks = solution.blocks.values()
    cell = Cell(problem, curvature, solution, task.settings)
    return {
        **{column.name: column.measure(cell) for column in extra_columns() if column.measure is not None},
        **(_resources(pair, problem) if task.first else {}),
        **_closeness(reference.joint(solution.direction)),
        **_decrease(bench, curvature, solution.direction),
        "zero_step": solution.direction.is_zero(),
        "iterations": max(block.iterations for block in blocks),
        "residual": max(block.residual for block in blocks),
        "residual_full": max(block.residual_full for block in blocks),
        "route": ",".join(dict.fromkeys(block.route for block in blocks)),
        "definiteness": str(curvature.definiteness),
        "notes": list(curvature.notes),
        "blocks": _block_rows(solution, reference),
        "traces": solution.trace().to_dict("list"),
        "dampings": _dampings(bench, task, curvature),
    }


def _resources(pair: Pair, problem: Problem) -> Row:
    measured = usage(pair, problem)
    return {
        "peak_bytes": measured.peak_bytes,
        "planned_bytes": _planned(pair, problem),
        "held_bytes": measured.held_bytes,
        "flops": measured.flops,
    }


def _decrease(bench: _Bench, curvature: Curvature | None, direction: Mapping[str, Tensor]) -> Row:
    """What the step does to the loss, and what its own quadratic model promises."""
    descents = bench.descents
    found = descents.along(direction)
    row: Row = {
        "decrease": found.best,
        "decrease_full": found.full,
        "decrease_other": found.other,
        "rate": found.rate,
        "line": [list(point) for point in found.line],
    }
    if curvature is not None:
        gradient = bench.problem.gradient()
        row["predicted"] = predicted_decrease(curvature, gradient, direction, descents.loss)
    return row


def _dampings(bench: _Bench, task: Task, curvature: Curvature | None) -> list[Row]:
    """The step at each further damping, measured against the Newton step of that damping.

    On the first draw of each point; a pair whose step takes many operations only at its own damping.
    """
    rows: list[Row] = []
    for text in task.settings.alphas if task.first_draw and _affordable(bench) else ():
        largest = bench.largest[0]
        if text.endswith("%") and not largest > 0:
            continue
        alpha = damping_of(text, largest)
        try:
            rows.append({"asked": text, "alpha": alpha, **_damped(bench, task, curvature, alpha)})
        except REFUSALS as error:
            rows.append({"asked": text, "alpha": alpha, "message": str(error)[:MESSAGE]})
    return rows


def _damped(bench: _Bench, task: Task, curvature: Curvature | None, alpha: float) -> Row:
    problem = bench.problem
    if curvature is None:
        direction: Mapping[str, Tensor] = gradient_step(problem, alpha)
    else:
        direction = solve(task.solver, curvature, problem.gradient(), alpha=alpha).direction
    found = _decrease(bench, curvature, direction)
    del found["line"]
    return found | _closeness(bench.newton(alpha).joint(direction))


def _affordable(bench: _Bench) -> bool:
    """Whether a gradient of this problem is cheap enough for the steps at further dampings."""
    return bench.gradient_operations <= SWEEP_OPERATIONS


def _control(task: Task) -> Row:
    """The row of a control: cost, closeness, decrease; that of `sgd` has its cost alone."""
    bench, alpha = _bench_of(task), task.settings.alpha
    problem = fresh(bench.problem)
    if task.control == "newton":
        return _newton_row(bench, task)
    row: Row = dict(control_usage(task.control, problem, alpha)) if task.first else {}
    if task.control == "sgd":
        return row
    direction = gradient_step(problem, alpha)
    return {
        **row,
        **_closeness(bench.newton(alpha).joint(direction)),
        **_decrease(bench, None, direction),
        "zero_step": all(not bool(step.any()) for step in direction.values()),
        "dampings": _dampings(bench, task, None),
    }


def _newton_row(bench: _Bench, task: Task) -> Row:
    """The exact Newton step; its seconds are those of solving it here, in float64, once."""
    reference = bench.newton(task.settings.alpha)
    if reference.reasons or not reference.direction:
        reason = next(iter(reference.reasons.values()), "it was not solved")
        return {"status": "skipped", "message": f"no exact Newton step: {reason}"}
    decrease = _decrease(bench, None, reference.direction)
    return {"cosine": 1.0, "distance": 0.0, "sine": 0.0, **decrease, "flops": int(bench.reference.spent)}


@dataclass(frozen=True)
class Cell:
    """What a registered column is measured of: a pair's curvature and solution on the problem."""

    problem: Problem
    curvature: Curvature
    solution: Solution
    settings: Settings


def _block_rows(solution: Solution, reference: Newton) -> list[Row]:
    frame = solution.frame()[["block", "status", "iterations", "residual", "residual_full", "rank", "route"]]
    rows: list[Row] = [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
    for row in rows:
        row |= _closeness(reference.block(solution.direction, row["block"]))
    return rows


def _closeness(close: Closeness) -> Row:
    return {
        "cosine": close.cosine,
        "distance": close.distance,
        "sine": close.sine,
        "newton_reason": close.reason,
    }


def _planned(pair: Pair, problem: Problem) -> int | None:
    """The peak that fake tensors predict; None where a provider or solver cannot run on them.

    Iterations without values never converge, and after the first few each needs what the last one did:
    planning all that are allowed would take longer than all the rest of a pair's cell.
    """
    solver: Any = solvers.make(pair.solver)
    if getattr(solver, "max_iter", 0) > PLANNED_ITERATIONS:
        solver = replace(solver, max_iter=PLANNED_ITERATIONS)
    try:
        with fake_problem(problem) as fake:
            return memory(replace(pair, solver=solver), fake).peak_bytes
    except Exception:
        return None


def _cost(task: Task) -> Row:
    bench = _bench_of(task)
    pair = Pair(task.provider, task.solver, task.settings.alpha)
    watch = bench.control_watch(task.control) if task.control else bench.watch(pair)
    return watch.measure().row()


_MEASURES: dict[Kind, Callable[[Task], Row]] = {
    "scene": _scene,
    "control": _control,
    "error": _error,
    "solve": _solve,
    "cost": _cost,
    "tuning": measure_trial,
    "convergence": measure_run,
}
