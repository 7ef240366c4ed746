"""Curvature along training: measures of the problem at every so many steps, beside any training loop.

    tracker = curvlab.Tracker(problem, every=50, measures=["top-eigenvalue", "trace"])
    for step, (inputs, targets) in enumerate(loader):
        tracker(step)                      # measures where step % every == 0
        ...                                # the training step, as it was

Training goes on as it would without: the model is evaluated in eval mode and set back to its modes, random
numbers come from generators of their own, gradients and parameters are only read.

    top-eigenvalue   the largest eigenvalue of the whole Hessian: its sharpness
    trace            its trace, Hutch++ with a standard error
    density          its spectral density: kept in `densities`; rows: outliers, negative mass, the two ends
    errors           the layer errors of providers, as `curvlab.errors` gives them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from curvlab.analysis.density import Density, density
from curvlab.analysis.figures import axes_for, new_figure
from curvlab.analysis.spectrum import spectrum
from curvlab.curvature import Curvature
from curvlab.defaults import PROVIDERS
from curvlab.exceptions import SpecError
from curvlab.problem import Problem
from curvlab.providers.base import estimate
from curvlab.studies.small.errors import errors

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn

__all__ = ["MEASURES", "Tracker", "log_to_tensorboard"]

Log = Callable[[str, float, int], None]
Measure = Callable[["Reading"], "Iterator[Measured]"]
TRACE_PROBES = 20


@dataclass(frozen=True)
class Measured:
    """One number: of what (a layer, an end, empty for the whole), and its standard error."""

    value: float
    of: str = ""
    standard_error: float = 0.0


class Reading:
    """The problem at one step; its Hessian is made once for all measures."""

    def __init__(self, problem: Problem, providers: Sequence[Any]) -> None:
        self.problem, self.providers = problem, providers
        self.density: Density | None = None
        self._hessian: Curvature | None = None

    @property
    def hessian(self) -> Curvature:
        """The whole Hessian at the present parameters."""
        if self._hessian is None:
            self._hessian = estimate("hessian[structure=full]", self.problem)
        return self._hessian


def _top_eigenvalue(reading: Reading) -> Iterator[Measured]:
    yield Measured(float(spectrum(reading.hessian, k=1, tol=1e-4).eigenvalues[0]))


def _trace(reading: Reading) -> Iterator[Measured]:
    found = reading.hessian.trace(estimator="hutch++", probes=TRACE_PROBES)
    assert isinstance(found.standard_error, float)
    yield Measured(float(found), "", found.standard_error)


def _density(reading: Reading) -> Iterator[Measured]:
    found = density(reading.hessian)
    reading.density = found
    low, high = found.ends
    yield Measured(float(len(found.outliers)), "outliers")
    yield Measured(found.negative_mass, "negative mass", found.negative_mass_error)
    yield Measured(low, "smallest")
    yield Measured(high, "largest")


def _errors(reading: Reading) -> Iterator[Measured]:
    for row in errors(reading.problem, reading.providers).to_dict("records"):
        yield Measured(row["error"], f"{row['provider']}, layer {row['layer']}")


MEASURES: Mapping[str, Measure] = {
    "top-eigenvalue": _top_eigenvalue,
    "trace": _trace,
    "density": _density,
    "errors": _errors,
}


@dataclass(eq=False)
class Tracker:
    """A callback for any training loop: `tracker(step)` measures where step % every == 0.

    Args:
        problem: the model that is trained, with a criterion and the data to measure on.
        every: steps between two measurements.
        measures: names among `top-eigenvalue`, `trace`, `density` and `errors`.
        providers: of `errors`.
        log: a function of (name, value, step) that is told every number: TensorBoard's
            `writer.add_scalar`, or `lambda name, value, step: wandb.log({name: value}, step=step)`.

    >>> import curvlab
    >>> model = torch.nn.Linear(3, 2)
    >>> problem = curvlab.Problem(model, "cross-entropy", torch.randn(8, 3), torch.tensor([0, 1] * 4))
    >>> tracker = curvlab.Tracker(problem, every=2, measures=["top-eigenvalue"])
    >>> for step in range(5):
    ...     tracker(step)
    >>> tracker.frame()["step"].tolist()
    [0, 2, 4]
    """

    problem: Problem
    every: int = 50
    measures: Sequence[str] = ("top-eigenvalue", "trace")
    providers: Sequence[Any] = PROVIDERS
    log: Log | None = None
    rows: list[dict[str, object]] = field(default_factory=list, init=False, repr=False)
    densities: dict[int, Density] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        unknown = [name for name in self.measures if name not in MEASURES]
        if unknown or isinstance(self.measures, str) or not self.measures:
            raise SpecError(
                f"measures={self.measures!r}: expected a list of names among {', '.join(MEASURES)}"
            )
        if self.every < 1:
            raise SpecError(f"every={self.every}: expected a number of steps of at least 1")

    def __call__(self, step: int) -> None:
        """Measure, where it is this step's turn."""
        if step % self.every:
            return
        with _evaluating(self.problem.model):
            reading = Reading(self.problem, self.providers)
            for name in self.measures:
                for found in MEASURES[name](reading):
                    self._note(step, name, found)
        if reading.density is not None:
            self.densities[step] = reading.density

    def _note(self, step: int, name: str, found: Measured) -> None:
        row = {"step": step, "measure": name, "of": found.of, "value": found.value}
        self.rows.append({**row, "standard_error": found.standard_error})
        if self.log is not None:
            self.log(f"{name}/{found.of}" if found.of else name, found.value, step)

    def frame(self) -> pd.DataFrame:
        """One row per number: step, measure, of (a layer, an end), value, standard_error."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=["step", "measure", "of", "value", "standard_error"])

    def plot(self) -> Figure:
        """A panel for each measure, by step."""
        frame = self.frame()
        figure = new_figure(6.4, 2.4 * len(self.measures))
        panels = figure.subplots(len(self.measures), 1, squeeze=False, sharex=True)[:, 0]
        for axes, name in zip(panels, self.measures, strict=True):
            shown = frame[frame["measure"] == name]
            for of, rows in shown.groupby("of", sort=False):
                ends = (rows["value"] - rows["standard_error"], rows["value"] + rows["standard_error"])
                axes_for(axes).plot(rows["step"], rows["value"], marker="o", markersize=3, label=str(of))
                axes.fill_between(rows["step"], *ends, alpha=0.25, linewidth=0)
            axes.set_ylabel(name)
            if shown["of"].nunique() > 1:
                axes.legend(frameon=False, fontsize="small")
        panels[-1].set_xlabel("step")
        return figure

    def _repr_html_(self) -> str:
        return self.frame().to_html(index=False)


def log_to_tensorboard(writer: Any, prefix: str = "curvature/") -> Log:
    """What a tracker tells its numbers to, for a `torch.utils.tensorboard.SummaryWriter`.

    >>> class Writer:
    ...     def add_scalar(self, *given):
    ...         print(given)
    >>> log_to_tensorboard(Writer())("trace", 1.5, 20)
    ('curvature/trace', 1.5, 20)
    """
    return lambda name, value, step: writer.add_scalar(prefix + name, value, step)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, every module back in its own afterwards; torch's random state untouched."""
    modes = [(module, module.training) for module in model.modules()]
    state = torch.get_rng_state()
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        torch.set_rng_state(state)
