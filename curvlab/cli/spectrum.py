"""`curvlab spectrum`: density, largest eigenvalues, trace and layer sharpness of one curvature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from curvlab.cli.completion import complete_name
from curvlab.cli.console import paragraph, print_json, records, table
from curvlab.cli.options import SchemaCommand, make_setup, output_options, setup_settings

if TYPE_CHECKING:
    from curvlab.studies.small.spectra import SpectrumStudy

__all__ = ["command"]


@click.command("spectrum", cls=SchemaCommand, schema=setup_settings)
@click.option(
    "-p",
    "--provider",
    default="hessian[full=true]",
    show_default=True,
    metavar="SPEC",
    shell_complete=complete_name,
    help="Curvature, such as fisher[structure=full] or pch-1.",
)
@click.option("--checkpoint", metavar="FILE", help="The model's state, as torch.save wrote it.")
@click.option(
    "-k", "count", type=click.IntRange(1), default=20, show_default=True, help="Largest eigenvalues."
)
@click.option(
    "--probes",
    type=click.IntRange(2),
    default=10,
    show_default=True,
    help="Random vectors of the density.",
)
@click.option(
    "--steps", type=click.IntRange(2), default=80, show_default=True, help="Products for each of them."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False),
    default="runs/spectrum",
    show_default=True,
    metavar="DIR",
    help="Folder for the page and the frames.",
)
@output_options
def command(
    provider: str,
    checkpoint: str | None,
    count: int,
    probes: int,
    steps: int,
    output: str,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Show the spectrum of a curvature: density, largest eigenvalues, layers.

    Writes spectrum.html with the density, the largest eigenvalues with their residuals, the trace with its
    standard error, the sharpness of every layer and the share of negative eigenvalues, and every frame as a
    CSV file beside it.

    \b
    Examples:
      curvlab spectrum
      curvlab spectrum --arch resnet8 --batch 200 -k 10
      curvlab spectrum --model mine:network --data mine:batches \\
          --checkpoint state.pt
    """
    from curvlab.report.spectra import write_spectrum
    from curvlab.studies.small.spectra import run_spectrum
    from curvlab.studies.store import run_lock

    setup = make_setup(options)
    with run_lock(output, "spectrum"):  # whoever cannot write there is told before anything is measured
        study = run_spectrum(setup, provider, checkpoint=checkpoint, k=count, probes=probes, steps=steps)
        page = write_spectrum(study, output)
    if as_json:
        frames = {name: records(frame) for name, frame in study.frames.items()}
        print_json({"config": study.config, "page": str(page), **frames})
    elif not quiet:
        _show(study)
        paragraph(f"Page: {page}")


def _show(study: SpectrumStudy) -> None:
    from curvlab.report.numbers import digits

    measured = study.measures().to_dict("records")
    rows = [[row["measure"], digits(row["value"], 5), _error(row["standard_error"])] for row in measured]
    table({"Measure": "name", "Value": "right", "Standard error": "right"}, rows)
    top = study.top.frame().head(5).to_dict("records")
    shown = [[str(r["number"]), digits(r["eigenvalue"], 5), f"{r['residual']:.1e}", r["status"]] for r in top]
    heads = {"Number": "right", "Eigenvalue": "right", "Residual": "right", "Status": "left"}
    table(heads, shown, title="Largest eigenvalues")


def _error(value: float) -> str:
    return f"{value:.2g}" if value else ""
