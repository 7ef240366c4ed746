"""Settings and columns: what can be set, and what is measured, each written once.

A `Setting` is a choice that a user makes: an option of the command line, a key of a configuration file, a
keyword argument and a word of the command that a report shows are all made from it. The settings of a command
are fields of a frozen dataclass, declared with `setting`:

    alpha: float = setting(0.05, "Damping, (1-α)C + αI.", metavar="X")

A `Column` is something that is measured: the frames, the terminal's table and the tables of the page are made
from it. Another package, or a script, adds one of its own to `curvlab compare`:

    register_setting(Setting("top", int, 1, "How many eigenvalues to look at.", least=1))
    register_column(Column("trace", "number", "trace of the curvature", short="Trace", measure=trace_of))

or through the entry-point groups `curvlab.settings` and `curvlab.columns`, whose values are the objects; that
is how worker processes find them too. `measure` is called once for each pair with a `curvlab.studies.compare.
measurements.Cell` and returns a number, a text or None.

This module imports neither torch nor pandas: help pages and shell completion are made from it.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from importlib.metadata import entry_points
from typing import Any, Generic, Literal, TypeVar

from curvlab.exceptions import SpecError

__all__ = [
    "Column",
    "ColumnKind",
    "Setting",
    "check_epochs",
    "check_rate",
    "extra_columns",
    "extra_settings",
    "read_values",
    "register_column",
    "register_setting",
    "setting",
    "settings_of",
]

T = TypeVar("T", "Setting", "Column")
EXPECTED: dict[type, str] = {str: "text", int: "an integer", float: "a number", bool: "true or false"}
METAVARS: dict[type, str] = {str: "SPEC", int: "N", float: "X"}


@dataclass(frozen=True)
class Setting:
    """A choice of the user.

    Args:
        name: the keyword argument, and the key of the configuration file.
        kind: `str`, `int`, `float`, or `bool` (an option `--name/--no-name`).
        default: what holds where nothing is given; None where that depends on other choices.
        help: one sentence for the help page and the docstring.
        flags: options of the command line (default: the name with dashes).
        metavar: what the help page calls the value (default: SPEC, N or X by the kind).
        many: whether several values may be given; the default is then a tuple.
        least: the lower bound of a number.
        most: the upper bound of a number.
        choices: the only values that are allowed.
        default_words: how the help page names the default where that is not a value.
        decides: the rows that depend on it: "study" for all, "solve" or "convergence" for those of that
            kind, "" for none (it chooses which rows there are).
        commands: the commands that have it as an option.

    >>> rounds = Setting("warm_up", int, 3, "Calls before the first that counts.", least=0)
    >>> rounds.flag, rounds.help_text()
    ('--warm-up', 'Calls before the first that counts.  [default: 3]')
    """

    name: str
    kind: type
    default: Any
    help: str
    flags: tuple[str, ...] = ()
    metavar: str = ""
    many: bool = False
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    default_words: str = ""
    decides: Literal["study", "solve", "convergence", ""] = "study"
    commands: tuple[str, ...] = ("compare",)

    @property
    def flag(self) -> str:
        """The option by which a command names it: the shortest.

        >>> Setting("providers", str, (), "", flags=("-p", "--provider"), many=True).flag
        '-p'
        """
        return min(self.flags, key=len) if self.flags else f"--{self.name.replace('_', '-')}"

    @property
    def option_names(self) -> tuple[str, ...]:
        """The options of the command line."""
        if self.kind is bool:
            return (f"{self.flag}/{self._no_flag}",)
        return self.flags or (self.flag,)

    @property
    def _no_flag(self) -> str:
        return f"--no-{self.flag.removeprefix('--')}"

    @property
    def shown_metavar(self) -> str:
        """What the help page calls the value."""
        return self.metavar or METAVARS[self.kind]

    def help_text(self, default: Any = None) -> str:
        """The sentence of the help page, with the default: its own, or that of a command that has another."""
        value = self.default if default is None else default
        words = ", ".join(value) if self.many else "" if value is None else str(value)
        words = self.default_words or words
        return f"{self.help}  [default: {words}]".strip() if words else self.help

    def read(self, value: Any) -> Any:
        """The value as a configuration file has it, checked: a tuple where there may be several.

        >>> Setting("alpha", float, 0.05, "").read("much")
        Traceback (most recent call last):
        curvlab.exceptions.SpecError: `alpha` is 'much'; expected a number
        """
        if self.many:
            values = [value] if isinstance(value, str) else value
            if not isinstance(values, (list, tuple)) or not all(isinstance(item, str) for item in values):
                raise SpecError(f"`{self.name}` is {value!r}; expected a list of names")
            return tuple(values)
        kinds = (float, int) if self.kind is float else (self.kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.kind is not bool):
            raise SpecError(f"`{self.name}` is {value!r}; expected {EXPECTED[self.kind]}")
        return value

    def check(self, value: Any) -> None:
        """Raise `SpecError` where a value is below the bound or not among the choices."""
        if value is None:
            return
        if self.kind is int and isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise SpecError(f"{self.name}={value}: expected a whole number of at most 64 bits")
        if self.least is not None and not value >= self.least:  # NaN is not either
            raise SpecError(f"{self.name}={value}: use {self.least} or more")
        if self.most is not None and value > self.most:
            raise SpecError(f"{self.name}={value}: use {self.most} or less")
        if self.choices and value not in self.choices:
            raise SpecError(f"{self.name} `{value}` is not known; use one of {', '.join(self.choices)}")

    def words(self, value: Any) -> list[str]:
        """The words of a shell command that give it this value; none where that is the default.

        >>> Setting("providers", str, ("fisher",), "", flags=("-p",), many=True).words(["pch-1", "pch-2"])
        ['-p', 'pch-1', '-p', 'pch-2']
        """
        if self.many:
            return [] if tuple(value) == tuple(self.default) else [w for v in value for w in (self.flag, v)]
        if value is None or value == self.default:
            return []
        if self.kind is bool:
            return [self.flag if value else self._no_flag]
        return [self.flag, str(value)]


def setting(default: Any, help: str, *, kind: type | None = None, **more: Any) -> Any:
    """A field of a frozen dataclass that is a `Setting`: its name is the field's, its kind the default's.

    A default that is None, or a tuple of names (`many`), needs `kind`, or is of kind `str`.
    """
    found = kind or (type(default) if type(default) in EXPECTED else str)
    made = Setting("", found, default, help, many=isinstance(default, tuple), **more)
    return dataclasses.field(default=default, metadata={"setting": made})


def settings_of(cls: type, command: str | None = None) -> tuple[Setting, ...]:
    """The settings that the fields of a dataclass are, or those of one command, in their order.

    >>> @dataclass(frozen=True)
    ... class Choices:
    ...     alpha: float = setting(0.05, "Damping.")
    >>> [found.name for found in settings_of(Choices)]
    ['alpha']
    """
    declared = [field for field in dataclasses.fields(cls) if "setting" in field.metadata]
    found = (replace(field.metadata["setting"], name=field.name) for field in declared)
    return tuple(one for one in found if command is None or command in one.commands)


def read_values(values: Mapping[str, Any], known: Iterable[Setting], where: str) -> dict[str, Any]:
    """The values of a configuration file as settings have them; `where` is what messages call the file.

    >>> read_values({"alpha": "much"}, [Setting("alpha", float, 0.05, "")], "config.toml")
    Traceback (most recent call last):
    curvlab.exceptions.SpecError: config.toml: `alpha` is 'much'; expected a number
    """
    by_name = {one.name: one for one in known}
    try:
        return {name: by_name[name].read(value) for name, value in values.items()}
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error


ColumnKind = Literal[
    "text", "label", "flag", "number", "loss", "plain", "count", "percent", "seconds", "bytes", "operations"
]


@dataclass(frozen=True)
class Column:
    """Something that is measured, and how it is shown.

    Args:
        name: its name in the frame.
        kind: how it is read and written: `text`; `label` (a text or a number, as it is); `flag` (yes or
            no); `number` (three digits); `loss` (four); `plain` (as short as it goes); `count` (an integer);
            `percent` (of a ratio); `seconds`, `bytes` and `operations` (with a unit).
        heading: its head in the tables of the page; "": not shown there.
        short: its head in the terminal's table; "": not shown there.
        covers: the part of the parameters that it speaks for, where that is not all that have a block.
        spread: the column with its interquartile range.
        unit_of: the column whose typical value chooses the unit, so that columns compare.
        legend: a sentence under the terminal's table.
        measure: how it is measured for a pair, of a `curvlab.studies.compare.measurements.Cell`; None for
            the columns that curvlab measures itself.

    >>> Column("error_total", "number", "error", covers="bias blocks, from |H|").head()
    'error (bias blocks, from |H|)'
    """

    name: str
    kind: ColumnKind = "number"
    heading: str = ""
    short: str = ""
    covers: str = ""
    spread: str = ""
    unit_of: str = ""
    legend: str = ""
    measure: Callable[[Any], Any] | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is text, or a label that may be."""
        return self.kind in ("text", "label")

    def head(self, unit: str = "") -> str:
        """The head of the page's column, with the unit or with what it covers in brackets."""
        inner = ", ".join(filter(None, (unit, self.covers)))
        return f"{self.heading} ({inner})" if inner else self.heading


class _Extras(Generic[T]):
    """Settings or columns that others have added, by name; entry points are loaded when first asked for."""

    def __init__(self, kind: type[T], group: str) -> None:
        self.kind: type[T] = kind
        self.group = group
        self.held: dict[str, T] = {}
        self._loaded = False

    def add(self, one: T) -> None:
        if not isinstance(one, self.kind):
            raise SpecError(f"expected a {self.kind.__name__}, got a {type(one).__name__}")
        if not one.name.isidentifier():
            raise SpecError(f"`{one.name}` is not a name of letters, digits and underscores")
        self.held[one.name] = one

    def all(self) -> tuple[T, ...]:
        if not self._loaded:
            self._loaded = True
            for point in entry_points(group=self.group):
                try:
                    self.add(point.load())
                # Whatever someone else's module raises on import must not break the rest.
                except Exception as error:
                    reason = f"`{point.value}` does not load ({type(error).__name__}: {error})"
                    kind = self.kind.__name__.lower()
                    warnings.warn(
                        f"{kind} `{point.name}` is left out: {reason}.", RuntimeWarning, stacklevel=2
                    )
        return tuple(self.held.values())


_settings = _Extras(Setting, "curvlab.settings")
_columns = _Extras(Column, "curvlab.columns")


def register_setting(one: Setting) -> None:
    """Add a setting to `compare`: its value is `settings.extra[name]` where a column is measured."""
    _settings.add(one)


def register_column(one: Column) -> None:
    """Add a column to the cells of `compare`; it needs `measure`."""
    if one.measure is None:
        raise SpecError(f"column `{one.name}` has no `measure`: nothing would fill it")
    _columns.add(one)


def extra_settings() -> tuple[Setting, ...]:
    """The settings that were added to curvlab's own."""
    return _settings.all()


def extra_columns() -> tuple[Column, ...]:
    """The columns that were added to curvlab's own."""
    return _columns.all()


def check_rate(lr: float, name: str = "lr") -> None:
    """Raise `SpecError` unless the learning rate is a finite number above zero: else nothing would train.

    >>> check_rate(0.1)
    """
    if not 0 < lr < math.inf:
        raise SpecError(f"{name}={lr}: a learning rate is a finite number above 0, such as 0.1")


EPOCHS_OF_A_YEAR = 10_000 * 86_400 * 365
"""At the least that an epoch takes, a tenth of a millisecond: one step of the smallest network."""


def check_epochs(epochs: int) -> None:
    """Refuse epochs that take more than a year even if each were one step of the smallest network.

    >>> check_epochs(10**26)
    Traceback (most recent call last):
    curvlab.exceptions.SpecError: epochs=1.00e+26 take at least 3.2e+14 years, ...
    """
    if epochs > EPOCHS_OF_A_YEAR:
        count = Decimal(epochs)  # no float has more than 308 digits
        raise SpecError(
            f"epochs={count:.3g} take at least {count / EPOCHS_OF_A_YEAR:.2g} years, at a tenth of a "
            f"millisecond for each. Use fewer: a larger number continues a finished run"
        )
