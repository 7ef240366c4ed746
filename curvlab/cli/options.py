"""Options that several commands share: what is studied, and where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from curvlab.studies.setup import Setup

__all__ = ["make_setup", "setup_options"]

F = TypeVar("F", bound=Callable[..., Any])
FIELDS = ("arch", "activation", "model", "data", "data_dir", "criterion", "batch", "seed", "device", "dtype")


def setup_options(function: F) -> F:
    """Add the options of a `Setup`; unset ones arrive as None."""
    options = [
        click.option("--arch", metavar="SPEC", help="Architecture: a name, or widths such as 64-32-16-10."),
        click.option("--activation", metavar="NAME", help="Activation of the architecture: sigmoid, tanh, relu, …"),
        click.option("--model", metavar="MODULE:NAME", help="Your own model, or a function that builds it."),
        click.option("--data", metavar="SPEC", help="Data set, or MODULE:NAME of your own batches.  [default: digits]"),
        click.option("--data-dir", metavar="DIR", help="Folder that holds the data set (also: CURVLAB_DATA)."),
        click.option("--criterion", metavar="SPEC", help="Criterion, or MODULE:NAME.  [default: cross-entropy]"),
        click.option("--batch", type=int, metavar="N", help="Examples in a batch."),
        click.option("--seed", type=int, metavar="N", help="Seed of everything random.  [default: 0]"),
        click.option("--device", metavar="NAME", help="auto, cpu, cuda, mps, …  [default: auto]"),
        click.option("--dtype", type=click.Choice(["float32", "float64"]), help="[default: float32]"),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def make_setup(options: dict[str, Any], **defaults: Any) -> Setup:
    """A `Setup` from the options that were given, over `defaults` where a command has its own."""
    given = {name: options.pop(name) for name in FIELDS if name in options}
    return Setup(**defaults | {name: value for name, value in given.items() if value is not None})
