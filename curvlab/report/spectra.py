"""The page of `curvlab spectrum`: density, largest eigenvalues, layers, trace and negative mass."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from curvlab.files import set_file_aside, write_text_atomic
from curvlab.report.content import Answer, Content, Drawing, Section
from curvlab.report.drawing import SMALL, Look, dress, get_axes, log_axis
from curvlab.report.numbers import digits
from curvlab.report.pages import write_pages
from curvlab.report.tables import frame_table, mapping_table
from curvlab.studies.small.spectra import SpectrumStudy
from curvlab.studies.store import run_lock

__all__ = ["spectrum_content", "write_spectrum"]

LONGEST_LAYER = 22
FACTS = ("arch", "model", "data", "criterion", "batch", "provider", "checkpoint", "dtype")


def write_spectrum(study: SpectrumStudy, folder: str | Path) -> Path:
    """The frames as CSV files and the page, spectrum.html; returns the path of the page.

    Frames of another spectrum, or files of the same names, are set aside as eigenvalues.previous-1.csv, or
    the next number that is free, with their page.
    """
    with run_lock(folder, "spectrum") as held:
        texts = study.frame_texts()
        if any(_differs(held / name, text) for name, text in texts.items()):
            for name in (*texts, "spectrum.md", "spectrum.html"):
                set_file_aside(held / name)
        for name, text in texts.items():
            write_text_atomic(held / name, text)
        return write_pages(spectrum_content(study), held, "spectrum")


def _differs(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() != text.encode()
    except FileNotFoundError:
        return False
    except OSError:  # a folder, or what may not be read: setting it aside raises the error
        return True


def spectrum_content(study: SpectrumStudy) -> Content:
    """What the page says."""
    config = {key: value for key, value in study.config.items() if value is not None}
    return Content(
        title="What does the spectrum look like?",
        facts=tuple((key, str(config[key])) for key in FACTS if key in config),
        answer=_answer(study),
        sections=(_density(study), _eigenvalues(study), _layers(study), _measures(study)),
        look=lambda theme: Look.of([study.top.label], theme=theme),
        names=(),
    )


def _answer(study: SpectrumStudy) -> Answer:
    top, outliers = float(study.top.eigenvalues[0]), len(study.density.outliers)
    error = study.trace.standard_error
    sharpest = max(study.layers, key=lambda name: float(study.layers[name].eigenvalues[0]))
    exact = "exact" if study.trace.probes == 0 else f"± {error:.2g}"
    found = study.density
    negative = f"{found.negative_mass:.1%}"
    if found.probes:
        negative += f" (± {found.negative_mass_error:.1%})"
        below = f"lie below {digits(found.negative_from, 2)}, nearer to zero the density tells no sign"
    else:
        below = "are negative"
    return Answer(
        f"The largest eigenvalue is {digits(top, 4)}; {outliers} stand apart from the others",
        (
            f"The trace is {digits(float(study.trace), 4)} ({exact}) over {study.parameters:,} parameters. "
            f"{negative} of the eigenvalues {below}; the smallest is {digits(study.smallest, 4)}. "
            f"The sharpest layer is `{sharpest}`.",
        ),
    )


def _density(study: SpectrumStudy) -> Section:
    how = "exact, from its factors" if study.density.probes == 0 else f"{study.density.probes} probes"

    def draw(look: Look) -> Axes:
        axes, found = get_axes(None, SMALL, 3.2), study.density
        colour = look.theme.series[0]
        floor = 0.5 / study.parameters / max(found.ends[1] - found.ends[0], 1e-300)
        grid, (low, high) = found.grid.tolist(), found.band.clamp(min=floor).tolist()
        axes.fill_between(grid, low, high, color=colour, alpha=0.25, linewidth=0)
        axes.plot(grid, found.density.clamp(min=floor).tolist(), color=colour, linewidth=1.3)
        marks = found.outliers.tolist()
        axes.plot(marks, [floor] * len(marks), "|", color=look.theme.series[1], markersize=10)
        axes.set(xlabel="eigenvalue", ylabel="density")
        log_axis(axes, "y")
        return dress(axes, look)

    caption = f"Spectral density ({how}), with two standard errors; marks: the outliers."
    return Section(
        "density", "Density", drawings=(Drawing("density", caption, draw),), links=(("data", "density.csv"),)
    )


def _eigenvalues(study: SpectrumStudy) -> Section:
    def draw(look: Look) -> Axes:
        axes = get_axes(None, SMALL, 3.0)
        values = study.top.eigenvalues.tolist()
        axes.plot(range(1, len(values) + 1), values, "o", color=look.theme.series[0], markersize=4)
        axes.set(xlabel="number", ylabel="eigenvalue")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return dress(axes, look)

    return Section(
        "eigenvalues",
        "Largest eigenvalues",
        text="Each with its true residual, ‖Cv - λv‖.",
        drawings=(Drawing("eigenvalues", "The largest eigenvalues, in order.", draw),),
        tables=(frame_table("Largest eigenvalues", study.top.frame()),),
        links=(("data", "eigenvalues.csv"),),
    )


def _layers(study: SpectrumStudy) -> Section:
    frame = study.layers.frame()

    def draw(look: Look) -> Axes:
        axes = get_axes(None, SMALL, 1.0 + 0.32 * len(frame))
        axes.barh(range(len(frame)), frame["eigenvalue"], color=look.theme.series[0])
        axes.set_yticks(range(len(frame)), [_end_of(name) for name in frame["layer"].astype(str)])
        axes.invert_yaxis()
        axes.set(xlabel="largest eigenvalue of the layer's block")
        return dress(axes, look, grid="x")

    return Section(
        "layers",
        "Layer sharpness",
        drawings=(Drawing("layers", "The largest eigenvalue of each layer's own block.", draw),),
        tables=(frame_table("Layers", frame),),
        links=(("data", "layers.csv"),),
    )


def _end_of(name: str) -> str:
    """The end of a layer's name, which tells it from others of the same module."""
    return name if len(name) <= LONGEST_LAYER else f"…{name[1 - LONGEST_LAYER :]}"


def _measures(study: SpectrumStudy) -> Section:
    return Section(
        "measures",
        "Measures of the whole matrix",
        tables=(frame_table("Measures", study.measures()),),
        folded=(mapping_table("Settings", study.config),),
        links=(("data", "measures.csv"),),
    )
