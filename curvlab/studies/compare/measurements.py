"""The cells of a comparison: what is measured of a provider, a pair or an optimizer, as rows of the store.

    error         a provider: layer-wise and total error of its bias blocks against the absolute Hessian
    solve         a pair: bytes, operations, closeness to Newton's direction, residuals and their traces
    cost          a pair and a repetition: seconds of estimate, prepare and apply
    tuning        an optimizer with one choice of learning rate and α: its validation loss (`race`)
    convergence   an optimizer and a seed: losses and accuracy by epoch and by seconds (`race`)

A cell that cannot exist is a row `skipped` with the reason; one that raises is a row `failed` with the
message. A task names everything by value, so that it runs in any process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from curvlab.curvature import Curvature
from curvlab.exceptions import (
    CurvlabError,
    ExecutorError,
    MatrixFreeError,
    PairError,
    ProblemError,
    SpecError,
)
from curvlab.measure.source import source_hash
from curvlab.problem import Problem
from curvlab.solvers import Solution
from curvlab.studies.compare.newton import Closeness, Newton, newton
from curvlab.studies.compare.race import measure_run, measure_trial
from curvlab.studies.compare.resources import Pair, fresh, memory, usage
from curvlab.studies.compare.settings import Settings, build
from curvlab.studies.compare.tasks import Kind, Task
from curvlab.studies.compare.timing import Stopwatch
from curvlab.studies.schema import extra_columns
from curvlab.studies.setup import Setup
from curvlab.studies.small.errors import errors
from curvlab.studies.small.fake_problem import fake_problem
from curvlab.studies.store import Row

__all__ = ["Cell", "failure", "run_task"]

REFUSALS = (PairError, ProblemError, MatrixFreeError, SpecError)
MESSAGE = 500


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
    """A problem with what its cells share: Newton's direction, and watches that are warm."""

    def __init__(self, subject: Setup | Problem) -> None:
        self.subject, self.problem = subject, build(subject)
        self._newton: dict[tuple[float, int], Newton] = {}
        self._watches: dict[Pair, Stopwatch] = {}

    def newton(self, alpha: float, limit: int) -> Newton:
        if (alpha, limit) not in self._newton:
            self._newton[alpha, limit] = newton(self.problem, alpha, parameters=limit)
        return self._newton[alpha, limit]

    def watch(self, pair: Pair) -> Stopwatch:
        if pair not in self._watches:
            self._watches[pair] = Stopwatch(pair, self.problem)
        return self._watches[pair]


_bench: _Bench | None = None


def _bench_of(subject: Setup | Problem) -> _Bench:
    """The bench of this process; one at a time, since a problem may fill the memory."""
    global _bench
    if _bench is None or (_bench.subject is not subject and _bench.subject != subject):
        _bench = None
        _bench = _Bench(subject)
    return _bench


def _error(task: Task) -> Row:
    frame = errors(_bench_of(task.settings.subject).problem, [task.provider])
    notes: list[str] = next(iter(frame.attrs["notes"].values()), [])
    columns = frame[["layer", "layer_name", "error", "relative"]]
    return {
        "definiteness": next(iter(frame.attrs["definiteness"].values())),
        "notes": notes,
        "layers": columns.to_dict("records"),
    }


def _solve(task: Task) -> Row:
    bench, pair = _bench_of(task.settings.subject), Pair(task.provider, task.solver, task.settings.alpha)
    # Of a problem that keeps nothing: what the pairs before have factorised would change the last digits.
    problem = fresh(bench.problem)
    curvature, solution = pair.run(problem)
    measured = usage(pair, problem)
    reference = _reference(bench, task, solution.direction)
    blocks = solution.blocks.values()
    cell = Cell(problem, curvature, solution, task.settings)
    return {
        **{column.name: column.measure(cell) for column in extra_columns() if column.measure is not None},
        "peak_bytes": measured.peak_bytes,
        "planned_bytes": _planned(pair, problem),
        "held_bytes": measured.held_bytes,
        "flops": measured.flops,
        **_closeness(reference.joint(solution.direction)),
        "zero_step": solution.direction.is_zero(),
        "iterations": max(block.iterations for block in blocks),
        "residual": max(block.residual for block in blocks),
        "residual_full": max(block.residual_full for block in blocks),
        "route": ",".join(dict.fromkeys(block.route for block in blocks)),
        "definiteness": str(curvature.definiteness),
        "notes": list(curvature.notes),
        "blocks": _block_rows(solution, reference),
        "traces": solution.trace().to_dict("list"),
    }


@dataclass(frozen=True)
class Cell:
    """What a registered column is measured of: a pair's curvature and solution on the problem."""

    problem: Problem
    curvature: Curvature
    solution: Solution
    settings: Settings


def _reference(bench: _Bench, task: Task, names: Iterable[str]) -> Newton:
    """Newton's direction, or why there is none: it is a yardstick, and its failure is not the cell's."""
    try:
        return bench.newton(task.settings.alpha, task.settings.newton_limit)
    except Exception as error:
        return Newton({}, dict.fromkeys(names, f"not solved: {error}"[:MESSAGE]))


def _block_rows(solution: Solution, reference: Newton) -> list[Row]:
    frame = solution.frame()[["block", "status", "iterations", "residual", "residual_full", "rank", "route"]]
    rows: list[Row] = [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
    for row in rows:
        row |= _closeness(reference.block(solution.direction, row["block"]))
    return rows


def _closeness(close: Closeness) -> Row:
    return {"cosine": close.cosine, "distance": close.distance, "newton_reason": close.reason}


def _planned(pair: Pair, problem: Problem) -> int | None:
    """The peak that fake tensors predict; None where a provider or solver cannot run on them."""
    try:
        with fake_problem(problem) as fake:
            return memory(pair, fake).peak_bytes
    except Exception:
        return None


def _cost(task: Task) -> Row:
    pair = Pair(task.provider, task.solver, task.settings.alpha)
    return _bench_of(task.settings.subject).watch(pair).measure().row()


_MEASURES: dict[Kind, Callable[[Task], Row]] = {
    "error": _error,
    "solve": _solve,
    "cost": _cost,
    "tuning": measure_trial,
    "convergence": measure_run,
}
