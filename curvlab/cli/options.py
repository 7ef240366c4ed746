"""Options that several commands share: what is studied, with what, and where results go.

The options of settings are made from the schema when a command is parsed or its help is shown, so that one
that was registered in the meantime is there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import click

from curvlab import imports
from curvlab.cli.completion import complete_name
from curvlab.exceptions import SpecError
from curvlab.files import read_settings
from curvlab.studies.compare.settings import Settings, all_settings, command_settings
from curvlab.studies.schema import Setting, read_values
from curvlab.studies.setup import SETUP, Setup

__all__ = [
    "SchemaCommand",
    "config_option",
    "executor_option",
    "grid_settings",
    "make_settings",
    "make_setup",
    "output_options",
    "setup_settings",
]

F = TypeVar("F", bound=Callable[..., Any])
Source = Callable[[], Iterable[click.Option]]


class SchemaCommand(click.Command):
    """A command whose options are its own, and those of settings, made anew whenever they are asked for."""

    def __init__(self, *arguments: Any, schema: Source, **named: Any) -> None:
        self.schema = schema
        self._made: list[click.Option] = []
        self._params: list[click.Parameter] = []
        super().__init__(*arguments, **named)

    @property
    def params(self) -> list[click.Parameter]:
        """The options of the settings first, then the command's own.

        It is one list, brought up to date in its place, because click appends to it and takes from it.
        """
        own = [one for one in self._params if one not in self._made]
        self._made = list(self.schema())
        self._params[:] = [*self._made, *own]
        return self._params

    @params.setter
    def params(self, own: list[click.Parameter]) -> None:
        self._params = own


@cache
def option_of(setting: Setting, default: Any = None) -> click.Option:
    """The option of a setting; unset it arrives as None, or as an empty tuple.

    `default` is that of a command whose default is another: the help page shows it.
    """
    if setting.kind is bool:
        return click.Option([*setting.option_names, setting.name], default=None, help=setting.help_text())
    return click.Option(
        [*setting.option_names, setting.name],
        type=_type(setting),
        multiple=setting.many,
        metavar=None if setting.choices else setting.shown_metavar,
        help=setting.help_text(default),
        # Without it click offers the choices of a `click.Choice`.
        shell_complete=None if setting.choices or setting.kind is not str else complete_name,
    )


def _type(setting: Setting) -> Any:
    if setting.choices:
        return click.Choice(setting.choices)
    if setting.least is not None or setting.most is not None:
        return (click.IntRange if setting.kind is int else click.FloatRange)(
            min=setting.least, max=setting.most
        )
    return setting.kind


def setup_settings(**defaults: Any) -> list[click.Option]:
    """The options of a `Setup`, with the defaults that a command has of its own."""
    return [option_of(setting, defaults.get(setting.name)) for setting in SETUP]


def grid_settings(command: str) -> list[click.Option]:
    """The options of `Settings` that a command has, then those of the setup."""
    return [*(option_of(setting) for setting in command_settings(command)), *setup_settings()]


def config_option(function: F) -> F:
    """Add a file to read settings from."""
    return click.option(
        "--config",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Read settings from a TOML file; options given here win.",
    )(function)


def executor_option(default: str | None = "serial", words: str = "") -> Callable[[F], F]:
    """Add where cells run; `words` say what is chosen where there is no default."""
    shown = f"  [default: {words}]" if words else ""
    return click.option(
        "--executor",
        default=default,
        show_default=default is not None,
        metavar="SPEC",
        shell_complete=complete_name,
        help=f"serial, process[workers=N], dask[address=tcp://host:8786], …{shown}",
    )


def output_options(function: F) -> F:
    """Add what is printed."""
    quiet = click.option("--quiet", is_flag=True, help="No progress and no table.")
    as_json = click.option(
        "--json", "as_json", is_flag=True, help="Print the results as JSON on standard output."
    )
    return as_json(quiet(function))


def make_setup(options: dict[str, Any], **defaults: Any) -> Setup:
    """A `Setup` from the options that were given, over `defaults` where a command has its own."""
    given = {setting.name: options.pop(setting.name, None) for setting in SETUP}
    return Setup(**defaults | {name: value for name, value in given.items() if value is not None})


def make_settings(
    options: dict[str, Any], change: Callable[[Setup], Setup] = lambda setup: setup
) -> Settings:
    """Settings from a configuration file, if there is one, and the options over it.

    `change` is what a command makes of the setup that was given, before its names are resolved.
    """
    path = options.pop("config", None)
    known = all_settings()
    names = [one.name for one in known]
    chosen = {} if path is None else read_values(read_settings(path, names), known, path)
    given = {one.name: value for one in known if (value := options.pop(one.name, None)) not in (None, ())}
    chosen |= given
    _check_used(given, chosen)
    return Settings.of(change(make_setup(chosen)), **chosen)


def _check_used(given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse options of a named data set where the batches are the user's own."""
    data = settings.get("data", "")
    ignored = [f"--{name.replace('_', '-')} {given[name]}" for name in ("batch", "data_dir") if name in given]
    if ignored and imports.is_address(data):
        raise SpecError(
            f"{' and '.join(ignored)} would change nothing: the batches are your own, `{data}`. "
            f"Leave {'it' if len(ignored) == 1 else 'them'} out, or name a data set"
        )
