"""Options that several commands share: what is studied, with what, and where results go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from curvlab import imports
from curvlab.exceptions import SpecError
from curvlab.studies.compare.settings import Settings
from curvlab.studies.setup import Setup
from curvlab.studies.toml import read_settings

__all__ = ["grid_options", "make_settings", "make_setup", "output_options", "setup_options"]

F = TypeVar("F", bound=Callable[..., Any])
FIELDS = ("arch", "activation", "model", "data", "data_dir", "criterion", "batch", "seed", "device", "dtype")
GRID = tuple(field.name for field in fields(Settings) if field.name != "subject")
LISTS = ("providers", "solvers", "baselines")
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(FIELDS, (str,)),
    **dict.fromkeys(LISTS, (list, str)),
    **dict.fromkeys(
        ("batch", "seed", "repetitions", "epochs", "train_batch", "newton_limit", "threads"), (int,)
    ),
    **dict.fromkeys(("alpha", "lr"), (float, int)),
}


def _add(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def setup_options(function: F) -> F:
    """Add the options of a `Setup`; unset ones arrive as None."""
    options = [
        click.option("--arch", metavar="SPEC", help="Architecture: a name, or widths such as 64-32-16-10."),
        click.option(
            "--activation", metavar="NAME", help="Activation of the architecture: sigmoid, tanh, relu, …"
        ),
        click.option("--model", metavar="MODULE:NAME", help="Your own model, or a function that builds it."),
        click.option(
            "--data", metavar="SPEC", help="Data set, or MODULE:NAME of your own batches.  [default: digits]"
        ),
        click.option(
            "--data-dir", metavar="DIR", help="Folder that holds the data set (also: CURVLAB_DATA)."
        ),
        click.option(
            "--criterion", metavar="SPEC", help="Criterion, or MODULE:NAME.  [default: cross-entropy]"
        ),
        click.option("--batch", type=int, metavar="N", help="Examples in a batch."),
        click.option("--seed", type=int, metavar="N", help="Seed of everything random.  [default: 0]"),
        click.option("--device", metavar="NAME", help="auto, cpu, cuda, mps, …  [default: auto]"),
        click.option("--dtype", type=click.Choice(["float32", "float64"]), help="[default: float32]"),
    ]
    return _add(options)(function)


def grid_options(function: F) -> F:
    """Add the providers, the solvers, the damping and a file to read them from."""
    options = [
        click.option(
            "-p",
            "--provider",
            "providers",
            multiple=True,
            metavar="SPEC",
            help="Provider, once for each.  [default: fisher, gauss-newton, pch-1, pch-2]",
        ),
        click.option(
            "-s",
            "--solver",
            "solvers",
            multiple=True,
            metavar="SPEC",
            help="Solver, once for each.  [default: kfi, sm-kfi, cg, ea-cg]",
        ),
        click.option("--alpha", type=float, metavar="X", help="Damping, (1-α)C + αI.  [default: 0.05]"),
        click.option(
            "--config",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Read settings from a TOML file; options given here win.",
        ),
    ]
    return _add(options)(function)


def output_options(function: F) -> F:
    """Add what is printed."""
    options = [
        click.option("--json", "as_json", is_flag=True, help="Print the results as JSON on standard output."),
        click.option("--quiet", is_flag=True, help="No progress and no table."),
    ]
    return _add(options)(function)


def make_setup(options: dict[str, Any], **defaults: Any) -> Setup:
    """A `Setup` from the options that were given, over `defaults` where a command has its own."""
    given = {name: options.pop(name) for name in FIELDS if name in options}
    return Setup(**defaults | {name: value for name, value in given.items() if value is not None})


def make_settings(options: dict[str, Any]) -> Settings:
    """Settings from a configuration file, if there is one, and the options over it."""
    path = options.pop("config", None)
    settings = {} if path is None else _from_file(path)
    given = {name: value for name in (*FIELDS, *GRID) if (value := options.pop(name, None)) not in (None, ())}
    settings |= given
    _check_used(given, settings)
    for name in LISTS:
        if name in settings:
            settings[name] = (settings[name],) if isinstance(settings[name], str) else tuple(settings[name])
    setup = make_setup(settings)
    return Settings.of(setup, **settings)


def _check_used(given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse options of a named data set where the batches are the user's own."""
    data = settings.get("data", "")
    ignored = [f"--{name.replace('_', '-')} {given[name]}" for name in ("batch", "data_dir") if name in given]
    if ignored and imports.is_address(data):
        raise SpecError(
            f"{' and '.join(ignored)} would change nothing: the batches are your own, `{data}`. "
            f"Leave {'it' if len(ignored) == 1 else 'them'} out, or name a data set"
        )


def _from_file(path: str) -> dict[str, Any]:
    found = read_settings(path, (*FIELDS, *GRID))
    for name, value in found.items():
        entries = value if isinstance(value, list) else []
        wrong = not isinstance(value, KINDS[name]) or isinstance(value, bool)
        if wrong or not all(isinstance(entry, str) for entry in entries):
            expected = {str: "text", int: "an integer", float: "a number", list: "a list of names"}[
                KINDS[name][0]
            ]
            raise SpecError(f"{path}: `{name}` is {value!r}; expected {expected}")
    return found
