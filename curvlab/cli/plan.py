"""`curvlab plan`: memory and operations predicted on fake tensors."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from curvlab.cli.console import paragraph, print_json, progress_bar, records, say, table
from curvlab.cli.options import (
    SchemaCommand,
    config_option,
    executor_option,
    grid_settings,
    make_settings,
    output_options,
)
from curvlab.defaults import PLAN_FORMS

if TYPE_CHECKING:
    import pandas as pd

    from curvlab.studies.setup import Setup
    from curvlab.studies.small.floor import Calibration, Rates

__all__ = ["command"]

TITLES = {
    "sample-space": "In the sample-space form, which curvlab runs",
    "textbook": "In the textbook's form",
}


@click.command("plan", cls=SchemaCommand, schema=lambda: grid_settings("plan"))
@config_option
@click.option("--memory", metavar="SIZE", help="Memory of the device, such as 11GB or 16GiB: says what fits.")
@click.option(
    "--form",
    "forms",
    multiple=True,
    type=click.Choice(PLAN_FORMS),
    help="Only this form of the solvers.  [default: both]",
)
@executor_option(None, "processes where there is much to plan")
@output_options
def command(
    memory: str | None,
    forms: tuple[str, ...],
    executor: str | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Predict memory and operations without allocating: would it fit?

    Providers and solvers run as they are, on tensors without memory. Two forms of each solver are planned:
    the sample-space form that curvlab runs, and the textbook's, which forms the factors of the input side.
    A named architecture needs no data set. The peak includes the parameters and the batch.
    With --device (h100, a100, 4090, mps, cpu, cuda or another, here or not) launches, host reads and traffic
    are counted as they are there, and a floor of the seconds is given: what its data sheet does not let any
    run be faster than, or for --device cpu what was calibrated here. A floor is no measurement.

    \b
    Examples:
      curvlab plan --arch imagenet10-fcnn --batch 100 --memory 11GB
      curvlab plan --arch imagenet10-fcnn --batch 100 -s kfi --memory 11GB
      curvlab plan --arch 3072-1024-512-10 --batch 500 --device h100
      curvlab plan --config runs/compare/config.toml
    """
    from dataclasses import asdict

    from curvlab.measure.device import available
    from curvlab.studies.small.floor import calibrate, rates_of
    from curvlab.studies.small.plan import bytes_of, plannable, run_plan

    asked: list[str] = []

    def here(setup: Setup) -> Setup:
        asked.append(setup.device)
        return plannable(setup)

    settings = make_settings(options, here)
    device = next((name for name in asked if name != "auto"), None)
    calibration = calibrate(device) if device is not None and device in available() else None
    rates = calibration.rates if calibration is not None else None if device is None else rates_of(device)
    limit = None if memory is None else bytes_of(memory)
    with progress_bar(not quiet, "planning") as show:
        frame = run_plan(
            settings,
            forms or PLAN_FORMS,
            memory=limit,
            device=device,
            rates=rates,
            executor=executor or _executor(len(settings.pairs) * len(forms or PLAN_FORMS)),
            on_progress=lambda done, total: show(done, total, "planning"),
        )
    if as_json:
        known = {"memory": limit, "device": device, "rates": None if rates is None else asdict(rates)}
        print_json({"config": settings.fields(), **known, "cells": records(frame)})
    elif not quiet:
        _show(frame, limit if limit is not None or rates is None else rates.memory)
        if device is not None:
            _show_device(frame, device, rates, calibration)
    failed = frame[frame["status"] == "failed"]
    for message in dict.fromkeys(failed["message"]):
        say(f"failed: {_cells(failed[failed['message'] == message])}: {message}")
    if len(failed):
        sys.exit(1)


def _cells(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    others = f" and {len(frame) - 1} others" if len(frame) > 1 else ""
    return f"{first['provider']} + {first['solver']}, {first['form']}{others}"


def _executor(cells: int) -> str:
    """Processes share the work, at the price of starting them; nothing is timed, so they may."""
    workers = min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, cells // 4
    )
    return f"process[workers={workers}]" if workers > 1 else "serial"


def _show(frame: pd.DataFrame, limit: int | None) -> None:
    names = {"Provider": "name", "Solver": "name"}
    numbers = dict.fromkeys(("Peak", "Held", "Operations"), "right")
    answer = {"Fits": "left"} if limit is not None else {}
    for form in frame["form"].unique():
        rows = [_row(row, limit) for row in frame[frame["form"] == form].to_dict("records")]
        table(names | numbers | answer, rows, title=TITLES[form])
    skipped = frame[frame["status"] == "skipped"]
    for message in dict.fromkeys(skipped["message"]):
        paragraph(f"Left out: {message}")
    if limit is not None:
        from curvlab.report.numbers import byte_words

        too_large = frame[frame["fits"].eq(False)]
        for (form, largest), group in too_large.groupby(["form", "largest"], sort=False):
            pairs = ", ".join(f"{row['provider']} + {row['solver']}" for row in group.to_dict("records"))
            paragraph(f"Does not fit {byte_words(limit)}: {pairs} ({form}); largest tensor {largest}.")


def _show_device(
    frame: pd.DataFrame, device: str, rates: Rates | None, calibration: Calibration | None
) -> None:
    """What every pair asks of the device, and its floor, in a table of its own beside nothing measured."""
    from curvlab.report.numbers import byte_words, number_words

    columns = {"Provider": "name", "Solver": "name"}
    columns |= dict.fromkeys(("Launches", "Reads", "Traffic", "Operations", "Floor"), "right")
    for form in frame["form"].unique():
        rows = []
        for row in frame[(frame["form"] == form) & (frame["status"] == "ok")].to_dict("records"):
            floor = row["floor_seconds"]
            shown = "" if floor is None or floor != floor else f"≥ {1e3 * floor:.3g} ms"
            counts = [f"{row['launches']:.0f}", f"{row['reads']:.0f}", byte_words(row["traffic_bytes"])]
            counts.append(number_words("operations", row["flops"]))
            rows.append([row["provider"], row["solver"], *counts, shown])
        table(columns, rows, title=f"On {device if rates is None else rates.name}, counted: {TITLES[form]}")
    for bound, group in frame[frame["bound"].fillna("") != ""].groupby("bound", sort=False):
        pairs = ", ".join(dict.fromkeys(f"{r['provider']} + {r['solver']}" for r in group.to_dict("records")))
        paragraph(f"{pairs}: {bound}.")
    if rates is None:
        paragraph(f"No floor: `{device}` is no one device. Name h100, a100, 4090 or mps for one.")
        return
    peaks = f"{rates.flops / 1e12:.3g} TFLOP/s in float32, {byte_words(rates.bandwidth)}/s"
    costs = f"{1e6 * rates.launch:.3g} µs a launch, {1e6 * rates.read:.3g} µs a read"
    paragraph(f"The floor is predicted, not measured: {peaks}, {costs}. Source: {rates.source}.")
    if calibration is not None:
        paragraph(
            f"A run that was not used to calibrate took {1e3 * calibration.measured:.3g} ms where "
            f"{1e3 * calibration.predicted:.3g} were predicted: an error of {100 * calibration.error:+.0f} %."
        )


def _row(row: dict[Any, Any], limit: int | None) -> list[str]:
    from curvlab.report.numbers import byte_words, number_words

    answer = [] if limit is None else [{True: "yes", False: "no"}.get(row["fits"], row["status"])]
    numbers = [byte_words(row["peak_bytes"]), byte_words(row["held_bytes"])]
    return [row["provider"], row["solver"], *numbers, number_words("operations", row["flops"]), *answer]
