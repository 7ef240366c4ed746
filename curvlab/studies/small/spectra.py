"""`curvlab spectrum`: everything about the spectrum of one curvature of one setup, as frames.

eigenvalues   the k largest, with true residuals      layers    the largest of each layer's block
density       on a grid, with its band                measures  trace, negative mass, outliers, the ends
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvlab.analysis.density import Density, density
from curvlab.analysis.spectrum import LayerSpectra, Spectrum, spectrum
from curvlab.curvature import Curvature
from curvlab.files import csv_text
from curvlab.imports import is_address
from curvlab.linalg.estimators import Estimate
from curvlab.linalg.krylov import search_rows
from curvlab.matrix_functions import check_rows
from curvlab.providers.base import estimate
from curvlab.studies.setup import load_weights
from curvlab.studies.small.fake_problem import fake_problem

if TYPE_CHECKING:
    import pandas as pd

    from curvlab.studies.setup import Setup

__all__ = ["SpectrumStudy", "run_spectrum", "study_spectrum"]

TRACE_PROBES = 30


@dataclass(frozen=True, eq=False)
class SpectrumStudy:
    """The spectrum of a curvature, from every side; `config` says of what."""

    config: dict[str, Any]
    top: Spectrum
    smallest: float
    density: Density
    layers: LayerSpectra
    trace: Estimate
    parameters: int

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        """The frames by the name of their file: eigenvalues, density, layers, measures."""
        return {
            "eigenvalues": self.top.frame(),
            "density": self.density.frame(),
            "layers": self.layers.frame(),
            "measures": self.measures(),
        }

    def measures(self) -> pd.DataFrame:
        """One row per measure of the whole matrix: its value and its standard error."""
        import pandas as pd

        error = self.trace.standard_error
        rows = [
            ("trace", float(self.trace), error),
            ("mean eigenvalue", float(self.trace) / self.parameters, float(error) / self.parameters),  # type: ignore[arg-type]
            ("largest eigenvalue", float(self.top.eigenvalues[0]), 0.0),
            ("smallest eigenvalue", self.smallest, 0.0),
            ("negative mass", self.density.negative_mass, self.density.negative_mass_error),
            ("outliers", float(len(self.density.outliers)), 0.0),
            ("parameters", float(self.parameters), 0.0),
        ]
        return pd.DataFrame(rows, columns=["measure", "value", "standard_error"])

    def frame_texts(self) -> dict[str, str]:
        """Every frame as the text of a CSV file, by the file's name."""
        return {f"{name}.csv": csv_text(frame) for name, frame in self.frames.items()}


def check_memory(curvature: Curvature, k: int, probes: int) -> None:
    """Refuse, with the bytes, a study whose vectors of all parameters the device cannot hold.

    A curvature of tensors without memory may be asked too: no value is read.
    """
    searched = curvature.matrix_free or curvature.full_product is not None
    count = min(k, curvature.numel)
    rows = max(probes, search_rows(curvature.numel, count)) if searched else count
    check_rows(curvature.matrix, rows, f"a spectrum (k={k:,}, probes={probes:,})")


def study_spectrum(
    curvature: Curvature,
    config: dict[str, Any] | None = None,
    *,
    k: int = 20,
    probes: int = 10,
    steps: int = 80,
    seed: int = 0,
) -> SpectrumStudy:
    """The spectrum of a curvature, from every side.

    >>> import curvlab, torch
    >>> problem = curvlab.Problem(
    ...     torch.nn.Linear(3, 2), "cross-entropy", torch.randn(8, 3), torch.tensor([0, 1] * 4)
    ... )
    >>> sorted(study_spectrum(curvlab.estimate("fisher", problem), k=3).frames)
    ['density', 'eigenvalues', 'layers', 'measures']
    """
    check_memory(curvature, k, probes)
    found = density(curvature, probes, steps, seed=seed)
    top = spectrum(curvature, k, seed=seed)
    if curvature.matrix_free:
        trace = curvature.trace(estimator="hutch++", probes=TRACE_PROBES, seed=seed)
    else:
        trace = curvature.trace(probes=TRACE_PROBES)
    layers = spectrum(curvature, 1, by="layer", seed=seed)
    return SpectrumStudy(config or {}, top, found.ends[0], found, layers, trace, curvature.numel)


def run_spectrum(
    setup: Setup,
    provider: str = "hessian[full=true]",
    *,
    checkpoint: str | Path | None = None,
    k: int = 20,
    probes: int = 10,
    steps: int = 80,
) -> SpectrumStudy:
    """The study of a setup by name; `checkpoint` is a file with the model's state."""
    resolved = setup.resolve()
    if resolved.arch is not None and not is_address(resolved.data):
        # Planned first: a network that fits takes minutes to build and record, and its vectors may not fit.
        resolved.check_size()
        with fake_problem(resolved) as planned:
            check_memory(estimate(provider, planned), k, probes)
    problem = resolved.build_problem()
    if checkpoint is not None:
        load_weights(problem.model, checkpoint)
    config = {
        **resolved.fields(),
        "provider": provider,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "k": k,
        "probes": probes,
        "steps": steps,
    }
    curvature = estimate(provider, problem)
    return study_spectrum(curvature, config, k=k, probes=probes, steps=steps, seed=resolved.seed)
