"""Table 1 as a study: what one layer's curvature and one layer's solve cost as one size grows.

A point is one provider or solver at one set of sizes, and gives one row: seconds, operations, peak bytes. It
is a frozen task that names everything by value, so that it runs in any process.

    curvature   from the recorded pass to B. `fisher`: B^t of the first layer of n_{t-1}-n_t-10.
                `gauss-newton`, `pch-1`: the recursion's step from B^t to B^{t-1} through the weight of
                n_t × n_{t-1} in 10-n_{t-1}-n_t, with E[∇²ξ] and E[σ'σ'ᵀ], which it reads.
    solve       from B^t (by `pch-1`) to the direction, for the first layer of n_{t-1}-n_t-10.

    textbook       the paper's equations: B formed; E[hhᵀ] formed, torch.linalg.inv, CG on n_t × n_{t-1}
                   matrices. The gradient is given as a matrix.
    sample space   curvlab's: Fisher's B kept as rows; M of D = M H. The gradient is given in factors and D
                   stays so: the product that formed the textbook's gradient is that of the update here.

Seconds are processor time of the thread, with one torch thread: other work on the machine changes them
little. They are medians over calls that each start from a pass of which nothing has been computed. Bytes are
those of the tensors that the call makes, at their peak, and for a solve those of B; operations are those of
`curvlab.measure.operations`, so element-wise work counts as none. Both are counted in a call of their own.

One more question of Table 1 is whether KFI fits an 11 GB card at 150,528 inputs. The paper says that it does
not; `curvlab plan` is asked (`card_frame`). The paper's network 150528-1024-512-256-128-64-32-16-10 at batch
100, in float32: KFI's input factor E[hhᵀ] of the first layer alone takes 150528² · 4 B = 90.6 GB. Peaks are
those of a whole estimate and solve, counted on fake tensors, with the parameters and the batch; SGD's is that
of a step with momentum, counted the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from statistics import median
from time import thread_time
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from curvlab.architectures import FCNN
from curvlab.exceptions import SolveError
from curvlab.measure.environment import source_hash
from curvlab.measure.memory import Allocation, Tracker, collector_off, track
from curvlab.measure.operations import counting
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.reproduce.experiment import Places, Row, ShowShare
from curvlab.reproduce.growth_sweeps import ITERATIVE, SAMPLE_SPACE, SCALES, TEXTBOOK, Sizes, sweeps
from curvlab.solvers import Solution, Solver, solve
from curvlab.solvers.registry import solvers
from curvlab.studies.compare.costs import fresh
from curvlab.studies.setup import Setup
from curvlab.studies.small.fake_problem import fake_problem
from curvlab.studies.small.plan import FORMS, bytes_of, plan
from curvlab.studies.store import Store, key_of

__all__ = ["CARD", "SOLVERS", "GrowthTask", "card_frame", "growth_tasks", "run_growth_task"]

KIND = "growth"
END = 10  # width of the other end of the network, next to nothing beside the layer that is looked at
DTYPE = torch.float32
# So small that CG runs all the iterations it is given; what an iteration costs does not depend on it.
CG_ALPHA = 1e-5
INVERSE_ALPHA = 0.05
ENOUGH_SECONDS = 0.05


@dataclass(frozen=True)
class GrowthTask:
    """One point: `subject`, a provider or a solver, at these sizes, on the ladder of `variable`."""

    quantity: str
    subject: str
    formulation: str
    variable: str
    sizes: Sizes
    repetitions: int = 5
    seed: int = 0

    @property
    def label(self) -> str:
        """What to call it in progress and messages."""
        return f"{self.subject}, {self.formulation}, {self.variable} {self.value}"

    @property
    def value(self) -> int:
        """The size that grows, here."""
        size: int = getattr(self.sizes, self.variable)
        return size

    @property
    def key(self) -> str:
        """The key of its row: all that the numbers depend on."""
        return key_of({"kind": KIND, **asdict(self)})

    def finished(self, store: Store) -> bool:
        """Whether the store has its row."""
        return store.has(self.key)

    def prepare(self) -> None:
        """Build the problem."""
        _problem(self)

    def run(self, places: Places, show: ShowShare) -> None:
        """Measure, unless the store has the row."""
        store = Store(places.store)
        if not self.finished(store):
            show(0.0, self.label)
            store.append(run_growth_task(self))


def growth_tasks(scale_name: str) -> list[GrowthTask]:
    """All points of a scale: `smoke`, `laptop` or `paper`.

    >>> growth_tasks("smoke")[0].label
    'fisher, textbook, outputs 128'
    """
    repetitions = SCALES[scale_name].repetitions if scale_name in SCALES else 1
    return [
        GrowthTask(sweep.quantity, subject, formulation, sweep.variable, sizes, repetitions)
        for sweep, sizes in sweeps(scale_name)
        for subject in sweep.subjects
        for formulation in sweep.formulations
    ]


def run_growth_task(task: GrowthTask) -> Row:
    """Measure one point.

    >>> row = run_growth_task(GrowthTask("solve", "kfi", "textbook", "inputs", Sizes(8, 32, 16), 1))
    >>> row["variable"], row["value"], row["peak_bytes"] > 4 * 32**2
    ('inputs', 32, True)
    """
    with _one_thread():
        problem = _problem(task)
        work = _curvature_work if task.quantity == "curvature" else _solve_work
        counted = _count(*work(task, problem))
        seconds = _seconds(lambda: work(task, problem)[0], task.repetitions)
    return {
        "kind": KIND,
        "key": task.key,
        "source": source_hash(),
        "quantity": task.quantity,
        "subject": task.subject,
        "formulation": task.formulation,
        "variable": task.variable,
        "value": task.value,
        **asdict(task.sizes),
        "seed": task.seed,
        "seconds": median(seconds),
        "calls": len(seconds),
        **counted,
    }


Work = tuple[Callable[[], object], Iterable[Tensor]]
"""A call that may be made once, and the tensors that count as held when it starts."""


def _problem(task: GrowthTask) -> Problem:
    sizes = task.sizes
    recursion = task.quantity == "curvature" and task.subject != "fisher"
    widths = (END, sizes.inputs, sizes.outputs) if recursion else (sizes.inputs, sizes.outputs, END)
    draws = torch.Generator().manual_seed(task.seed)
    inputs = torch.randn(sizes.batch, widths[0], generator=draws, dtype=DTYPE)
    targets = torch.randint(widths[-1], (sizes.batch,), generator=draws)
    model = FCNN(widths=widths).build(task.seed, dtype=DTYPE)
    return Problem(model, "cross-entropy", inputs, targets, layers=["0"])


def _run_passes(problem: Problem) -> Problem:
    """The same problem after its forward and backward pass, and nothing more."""
    again = fresh(problem)
    again.gradient()
    return again


def _curvature_work(task: GrowthTask, problem: Problem) -> Work:
    passed = _run_passes(problem)

    def call() -> object:
        curvature = estimate(task.subject, passed)
        outputs = [layer.output for layer in curvature.layers if layer.output is not None]
        return outputs if task.formulation == SAMPLE_SPACE else [output.to_dense() for output in outputs]

    return call, ()


def _solve_work(task: GrowthTask, problem: Problem) -> Work:
    passed = _run_passes(problem)
    curvature, gradient = estimate("pch-1", passed), passed.gradient()
    (output,) = (layer.output for layer in curvature.layers if layer.output is not None)
    given = dict(gradient.items()) if task.formulation == TEXTBOOK else gradient
    solver = _solver(task)
    alpha = CG_ALPHA if task.subject in ITERATIVE else INVERSE_ALPHA

    def call() -> object:
        return _complete(task, solve(solver, curvature, given, alpha=alpha))

    return call, list(output.tensors().values())


def _solver(task: GrowthTask) -> Solver:
    """The solver in one form whatever the sizes: by default its route would change along the ladder."""
    options: dict[str, Any] = (
        # The explicit form asks a route for the trace of the input factor only: this one forms nothing.
        {"formulation": "explicit", "route": "dense"}
        if task.formulation == TEXTBOOK
        else {"formulation": "reduced", "route": "sample"}
    )
    if task.subject in ITERATIVE:
        options |= {"max_iter": task.sizes.iterations, "tol": 0.0}
    made: Solver = replace(solvers.make(task.subject), **options)
    return made


def _complete(task: GrowthTask, solution: Solution) -> Solution:
    """The solution, of which CG is to have run every iteration: a ladder of fewer would be another one."""
    found = solution.blocks["0.weight"].iterations
    if task.subject in ITERATIVE and found != task.sizes.iterations:
        raise SolveError(
            f"{task.label}: CG ended after {found} iterations of {task.sizes.iterations}, so the point does "
            f"not measure what it says. Ask for fewer iterations, or for a wider layer"
        )
    return solution


def _count(call: Callable[[], object], held: Iterable[Tensor]) -> Row:
    with counting() as operations, collector_off(), Tracker(held) as tracker:
        call()
    return {"operations": operations.total, "peak_bytes": tracker.peak_bytes}


def _seconds(make: Callable[[], Callable[[], object]], repetitions: int) -> list[float]:
    """Processor seconds of each call; short ones are made up to three times as often."""
    seconds: list[float] = []
    while len(seconds) < repetitions or (sum(seconds) < ENOUGH_SECONDS and len(seconds) < 3 * repetitions):
        call = make()
        with collector_off():
            start = thread_time()
            kept = call()
            seconds.append(thread_time() - start)
        del kept
    return seconds


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


CARD = "11GB"
NETWORK = Setup(arch="imagenet10-fcnn", data="imagenet10", batch=100, device="cpu")
# An iteration makes the tensors that the one before it made: a plan of two has the peak of any number.
SOLVERS = ("kfi", "sm-kfi", "ea-cg[max_iter=2]")
GB = 1e9


def card_frame(
    setup: Setup = NETWORK, *, provider: str = "pch-1", solvers: Sequence[str] = SOLVERS, card: str = CARD
) -> pd.DataFrame:
    """One row for each solver and form, and one for SGD with momentum; sizes in GB (10⁹ B).

    Columns: provider, solver, form, peak_gb, largest (shape of the largest tensor that is made), largest_gb,
    fits.

    >>> frame = card_frame(Setup(arch="9000-8-10", batch=100), solvers=["kfi"], card="200MB")
    >>> frame[["solver", "form", "fits"]].values.tolist()
    [['kfi', 'textbook', False], ['kfi', 'sample-space', True], ['sgd', 'momentum 0.9', True]]
    """
    planned = plan(setup, [provider], solvers, forms=FORMS[::-1], memory=card)
    rows = [_planned_row(row, torch.finfo(setup.torch_dtype).bits // 8) for row in planned.to_dict("records")]
    return pd.DataFrame([*rows, _sgd(setup, bytes_of(card))])


def _planned_row(row: dict[Any, Any], element_size: int) -> dict[str, Any]:
    shape = row["largest"].partition(" ")[0]
    return {
        "provider": row["provider"],
        "solver": row["solver"].partition("[")[0],
        "form": row["form"],
        "peak_gb": row["peak_bytes"] / GB,
        "largest": shape,
        "largest_gb": prod(map(int, shape.split("×"))) * element_size / GB,
        "fits": bool(row["fits"]),
    }


def _sgd(setup: Setup, limit: int) -> dict[str, Any]:
    """A second step of SGD with momentum: the first makes the buffers that every later one holds."""
    with fake_problem(setup) as problem:
        given = list(problem.tensors.values())
        optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9)
        batch = next(problem.batches())
        with track(given, record=True) as tracker:
            for _ in range(2):
                optimizer.zero_grad()
                with torch.enable_grad():
                    torch.nn.functional.cross_entropy(problem.model(batch.inputs), batch.targets).backward()
                optimizer.step()
        largest: Allocation = tracker.largest(1)[0]
        optimizer.zero_grad()
    return {
        "provider": "",
        "solver": "sgd",
        "form": "momentum 0.9",
        "peak_gb": tracker.peak_bytes / GB,
        "largest": "×".join(map(str, largest.shape)),
        "largest_gb": largest.bytes / GB,
        "fits": tracker.peak_bytes <= limit,
    }
