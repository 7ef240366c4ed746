"""`plan`: what a comparison would take, predicted without its memory.

Providers and solvers run as they are, on fake tensors, under the same counters that measure real ones: the
bytes and operations are those of the code, and agree with the measured ones byte for byte. Two forms of
each solver are planned: the sample-space form that curvlab runs by default, and the textbook's, which
forms E[hhᵀ] and the dense gradient. Iterative solvers run all their iterations: nothing converges on
tensors without values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from curvlab import defaults
from curvlab.exceptions import SpecError
from curvlab.measure import device as devices
from curvlab.measure.operations import operations
from curvlab.problem import Problem
from curvlab.providers import Provider
from curvlab.solvers import Solver
from curvlab.solvers.registry import solvers as solver_registry
from curvlab.studies.compare.costs import Pair, fresh, usage
from curvlab.studies.compare.measurements import failure
from curvlab.studies.compare.settings import Settings
from curvlab.studies.compare.tasks import labels
from curvlab.studies.executor import Place, run
from curvlab.studies.setup import Setup
from curvlab.studies.small.fake_problem import fake_problem
from curvlab.studies.small.floor import Rates, rates_of
from curvlab.studies.store import Row

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FORMS", "bytes_of", "plan", "plannable", "run_plan"]

FORMS = defaults.PLAN_FORMS
COLUMNS = [
    "provider",
    "solver",
    "form",
    "status",
    "message",
    "peak_bytes",
    "held_bytes",
    "flops",
    "launches",
    "reads",
    "traffic_bytes",
    "floor_seconds",
    "bound",
    "largest",
    "fits",
]
UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def plan(
    subject: Problem | Setup,
    providers: Sequence[str | Provider] = defaults.PROVIDERS,
    solvers: Sequence[str | Solver] = defaults.SOLVERS,
    *,
    alpha: float = defaults.ALPHA,
    forms: Sequence[str] = FORMS,
    memory: str | int | None = None,
    device: str | None = None,
) -> pd.DataFrame:
    """Predict the bytes and operations of every pair, one row per pair and form.

    Args:
        subject: a problem, or a setup by name: a named architecture needs no data.
        providers: names or instances.
        solvers: names or instances.
        alpha: the damping.
        forms: `"sample-space"`, `"textbook"` or both.
        memory: bytes of the device, or text such as `"11GB"`: the column `fits` says whether each fits it.
        device: `h100`, `a100`, `4090`, `mps`, `cpu`, `cuda` or any other, here or not; that of a setup by
            default. With it launches, host reads (but those of an iteration's convergence, which depend on
            values) and traffic are counted as they are there, and with its data sheet
            (on a device that is here: calibrated) `floor_seconds` are what no run can be faster than. They
            are no measurement.

    >>> frame = plan(Setup(arch="9000-8-10", batch=100), ["fisher"], ["kfi"], memory="200MB")
    >>> frame[["form", "fits"]].values.tolist()
    [['sample-space', True], ['textbook', False]]
    """
    if isinstance(subject, Setup):
        device = device or (None if subject.device == "auto" else subject.device)
        subject = plannable(subject)
    settings = Settings.of(subject, providers=tuple(providers), solvers=tuple(solvers), alpha=alpha)
    return run_plan(settings, forms, memory=memory, device=device)


def plannable(setup: Setup) -> Setup:
    """The setup on a device on which it can be planned here: bytes and operations are those of the CPU.

    >>> plannable(Setup(device="xpu:3")).device
    'cpu'
    """
    return replace(setup, device=devices.stand_in(setup.device))


def run_plan(
    settings: Settings,
    forms: Sequence[str] = FORMS,
    *,
    memory: str | int | None = None,
    device: str | None = None,
    rates: Rates | None = None,
    executor: str | Place | Executor = "serial",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> pd.DataFrame:
    """Carry out a plan whose settings are resolved; see `plan`."""
    import pandas as pd

    for form in forms:
        if form not in FORMS:
            raise SpecError(f"form `{form}` is not known; use {' or '.join(FORMS)}")
    rates = rates or (None if device is None else rates_of(device))
    room = None if rates is None else rates.memory
    limit = room if memory is None else bytes_of(memory)
    found = [_cell(settings, *pair, form) for pair in settings.pairs for form in forms]
    cells = [replace(cell, device=device, rates=rates) for cell in found if cell is not None]
    rows: dict[int, Row] = {}
    on_progress(0, len(cells))
    for done in run(_run_cell, list(enumerate(cells)), executor):
        index, cell = done.argument
        row = done.result if done.result is not None else failure(cell.head, done.error)  # type: ignore[arg-type]
        rows[index] = row | {
            "fits": None if limit is None or "peak_bytes" not in row else row["peak_bytes"] <= limit
        }
        on_progress(len(rows), len(cells))
    frame = pd.DataFrame([rows[index] for index in sorted(rows)], columns=COLUMNS)
    numbers = ("peak_bytes", "held_bytes", "flops", "launches", "reads", "traffic_bytes", "floor_seconds")
    return frame.astype(dict.fromkeys(numbers, float))


@dataclass(frozen=True)
class _Cell:
    subject: Setup | Problem
    pair: Pair
    named: tuple[str, str]
    form: str
    device: str | None = None
    rates: Rates | None = None

    @property
    def head(self) -> Row:
        """What the cell's row says of itself."""
        provider, solver = self.named
        return {"provider": provider, "solver": solver, "form": self.form}


def _cell(settings: Settings, provider: Any, solver: Any, form: str) -> _Cell | None:
    """A pair in one form; None where the solver has no such form."""
    planned: Any = solver_registry.make(solver)
    own = getattr(planned, "formulation", None)
    if own is None or own == "explicit":
        if (form == "textbook") != (own == "explicit"):
            return None
    else:
        planned = replace(planned, formulation="explicit" if form == "textbook" else "reduced")
    return _Cell(settings.subject, Pair(provider, planned, settings.alpha), labels(provider, solver), form)


def _run_cell(indexed: tuple[int, _Cell]) -> Row:
    _, cell = indexed
    try:
        with fake_problem(cell.subject) as problem:
            used = usage(cell.pair, problem)
            asked = {} if cell.device is None else _demand_row(cell, problem)
    except Exception as error:
        return failure(cell.head, error)
    return cell.head | {
        "status": "ok",
        "message": "",
        "peak_bytes": used.peak_bytes,
        "held_bytes": used.held_bytes,
        "flops": used.flops,
        **asked,
        "largest": ""
        if used.largest is None
        else f"{'×'.join(map(str, used.largest.shape))} ({used.largest.operation})",
    }


def _demand_row(cell: _Cell, problem: Problem) -> Row:
    """What the pair asks of the device, and the floor of its seconds."""
    elsewhere = str(cell.device).partition(":")[0] != "cpu"
    with operations(elsewhere) as asked:
        cell.pair.run(fresh(problem))
    rates = cell.rates
    return {
        "launches": len(asked.launches),
        "reads": asked.reads if elsewhere else 0,
        "traffic_bytes": asked.bytes,
        "floor_seconds": None if rates is None else rates.floor(asked),
        "bound": "" if rates is None else rates.verdict(asked),
    }


def bytes_of(text: str | int) -> int:
    """Bytes from text: decimal KB, MB, GB, TB, or binary KiB, MiB, GiB, TiB.

    >>> bytes_of("11GB"), bytes_of("1.5 GiB")
    (11000000000, 1610612736)
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None or float(match.group(1)) == 0:
        raise SpecError(f"memory `{text}` is not a number of bytes above 0; write e.g. 11GB or 16GiB")
    return int(float(match.group(1)) * unit)
