"""Named choices: the text form ``name[key=value,…]``, and the registries that know the names.

A provider, a solver, a criterion, an architecture and a data set are each a frozen dataclass whose
fields are written as text on the command line, in strings and in the results store::

    spec   = name [ "[" field { "," field } "]" ]
    field  = key "=" value
    value  = text whose brackets "[" "]" "(" ")" balance, or a JSON string in double quotes

The field's annotation says how its value reads: ``int``, ``float``, ``bool`` (``true``/``false``),
``str``, the choices of a ``Literal`` or an ``Enum``, ``X | None`` (``none``) and ``tuple[X, ...]``
(``64-32-10`` for integers that are not negative, ``(0.1,0.2)`` in general).

A registry maps a name to a frozen dataclass and the fields that name presets, so that ``pch-1`` and
``pch[gamma=-1]`` are the same provider. Other packages add theirs through an entry point in the
registry's group, whose name is the name to ask for and whose value is the dataclass::

    [project.entry-points."curvlab.providers"]
    my-curvature = "my_package:MyCurvature"

A choice has two texts: the canonical one with every field, `pch[gamma=-1.0,output_gamma=-1.0]`, which equal
choices share and keys are made of, and a short label to read, the nearest registered name and what differs
from it, `pch-1`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import numbers
import re
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from math import nan
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from curvlab.exceptions import SpecError, unknown_name

__all__ = [
    "INTERFACE",
    "Description",
    "FieldText",
    "Registry",
    "Spec",
    "build",
    "canonical",
    "check_choices",
    "check_interface",
    "check_number",
    "describe",
    "missing_fields",
    "parse",
    "split",
]


T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(?::[A-Za-z_][\w.]*)?", re.ASCII)  # or an address, module:name
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\](),"]', re.DOTALL)
_OPENS = {"]": "[", ")": "("}
_KNOWN: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()
_KNOWN_CHOICES: WeakKeyDictionary[type, dict[str, dict[str, Any]]] = WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Spec:
    """A parsed spec: its name and the text of each field, in the order given.

    >>> str(Spec("pch", {"gamma": "-1"}))
    'pch[gamma=-1]'
    """

    name: str
    fields: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Write the text that `parse` reads back to an equal value."""
        body = ",".join(f"{key}={value}" for key, value in self.fields.items())
        return f"{self.name}[{body}]" if body else self.name


@dataclasses.dataclass(frozen=True)
class FieldText:
    """One field as a help page shows it: its name, what it takes, its default (None: required)."""

    name: str
    takes: str
    default: str | None

    def __str__(self) -> str:
        """Write ``name=default``, or ``name=<what it takes>`` where a value is required."""
        return f"{self.name}={self.default if self.default is not None else f'<{self.takes}>'}"


def split(text: str) -> list[str]:
    """Split at the commas that no bracket and no quote encloses; the parts are stripped.

    >>> split("pch-1, fisher[kind=mc,samples=3]")
    ['pch-1', 'fisher[kind=mc,samples=3]']
    """
    cuts, opened = [-1], []
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark == '"':
            raise SpecError(f"`{text}` opens a double quote that it does not close.")
        if mark in "[(":
            opened.append(mark)
        elif mark in "])":
            if not opened or opened.pop() != _OPENS[mark]:
                raise SpecError(f"`{text}` closes a bracket `{mark}` that it does not open.")
        elif mark == "," and not opened:
            cuts.append(token.start())
    if opened:
        raise SpecError(f"`{text}` opens a bracket `{opened[-1]}` that it does not close.")
    if not text.strip():
        return []
    parts = [text[a + 1 : b].strip() for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    if "" in parts:
        raise SpecError(f"`{text}` has nothing between two commas, or a comma at its end.")
    return parts


def parse(text: str) -> Spec:
    """Read ``name[key=value,…]``; what the name and the fields mean is for `build` to say.

    >>> parse("fcnn[widths=64-32-10, activation=tanh]").fields
    {'widths': '64-32-10', 'activation': 'tanh'}
    """
    head, bracket, body = text.strip().partition("[")
    name = head.strip()
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"`{text}` does not start with a name of letters, digits, dashes and dots; "
            "write `name` or `name[key=value,…]`."
        )
    if bracket and not body.endswith("]"):
        raise SpecError(f"`{text}` does not end with the `]` of its fields; write `name[key=value,…]`.")
    fields: dict[str, str] = {}
    try:
        parts = split(body[:-1])
    except SpecError as error:
        raise SpecError(f"`{text}` cannot be read: {error}") from error
    for part in parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key.isidentifier():
            raise SpecError(f"`{part}` in `{text}` is not of the form `key=value`.")
        if key in fields:
            raise SpecError(f"`{text}` gives `{key}` twice; give it once.")
        fields[key] = value
    return Spec(name, fields)


def build(
    cls: type[T], fields: Mapping[str, str], *, name: str = "", preset: Mapping[str, Any] | None = None
) -> T:
    """Make a ``cls`` (a dataclass) whose fields are read from text by their annotations.

    ``preset`` gives values (not text) to fields that the text leaves out; ``name`` is what error
    messages call the thing (default: the class's name).

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class PCH:
    ...     gamma: float = 0.0
    >>> build(PCH, {"gamma": "-1"})
    PCH(gamma=-1.0)
    """
    name = name or cls.__name__
    annotations = _annotations(cls)
    values = dict(preset or {})
    for key, text in fields.items():
        if key not in annotations:
            raise unknown_name(f"field of `{name}`", key, annotations)
        try:
            values[key] = _read_value(text, annotations[key])
        except ValueError as error:
            raise SpecError(f"`{key}` of `{name}` takes {_takes(annotations[key])}; got `{text}`.") from error
    missing = missing_fields(cls, values)
    if missing:
        wanted = ", ".join(f"`{key}` ({_takes(annotations[key])})" for key in missing)
        raise SpecError(f"`{name}` has no default for {wanted}; write `{name}[{missing[0]}=…]`.")
    try:
        return cls(**values)
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(f"`{Spec(name, dict(fields))}` is refused: {error}") from error


def missing_fields(cls: type, values: Mapping[str, Any]) -> list[str]:
    """The fields of a dataclass that have no default and are not among `values`."""
    return [f.name for f in _init_fields(cls) if _is_required(f) and f.name not in values]


def check_choices(instance: object) -> None:
    """Refuse a dataclass instance with a ``Literal`` or ``Enum`` field that holds none of its choices.

    Fields that take numbers alone are looked at, too: whole ones must fit 64 bits. To be called in
    ``__post_init__``: text is checked when it is read, values given in Python are not.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Fisher:
    ...     kind: typing.Literal["empirical", "mc"] = "empirical"
    ...     def __post_init__(self) -> None:
    ...         check_choices(self)
    >>> Fisher(kind="empiric")
    Traceback (most recent call last):
    curvlab.exceptions.SpecError: kind='empiric': expected one of empirical, mc; did you mean `empirical`?
    """
    _check_numbers(instance)
    for key, choices in _choice_fields(type(instance)).items():
        value = getattr(instance, key)
        if value not in choices.values():
            near = difflib.get_close_matches(str(value), choices, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise SpecError(f"{key}={value!r}: expected one of {', '.join(choices)}{hint}")


def _check_numbers(instance: object) -> None:
    for key, hint in _annotations(type(instance)).items():
        value = getattr(instance, key)
        if hint is int or (hint == (int | None) and value is not None):
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if not whole or not -(1 << 63) <= value < 1 << 63:
                raise SpecError(f"{key}={value!r}: expected a whole number of at most 64 bits")
        elif hint is float or (hint == (float | None) and value is not None):
            check_number(key, value, "a number", lambda _: True)


def check_number(name: str, value: Any, expected: str, fits: Callable[[float], bool]) -> float:
    """`value` as a float, or a `SpecError` that says what was `expected` where it is none that `fits`.

    >>> check_number("alpha", 1, "a number in (0, 1]", lambda x: 0 < x <= 1)
    1.0
    >>> check_number("alpha", "x", "a number in (0, 1]", lambda x: 0 < x <= 1)
    Traceback (most recent call last):
    curvlab.exceptions.SpecError: alpha='x': expected a number in (0, 1]
    """
    try:
        number = nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = nan
    known = isinstance(value, float) or number == number  # a given NaN is for `fits` to judge
    if not known or not fits(number):
        raise SpecError(f"{name}={value!r}: expected {expected}")
    return number


def canonical(name: str, instance: object) -> str:
    """Write the one text of a dataclass instance: all fields, sorted, numbers normalised.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class PCH:
    ...     output_gamma: float = -1.0
    ...     gamma: float = 0.0
    >>> canonical("pch", PCH(gamma=-1))
    'pch[gamma=-1.0,output_gamma=-1.0]'
    """
    annotations = _annotations(type(instance))
    texts = {key: _write(getattr(instance, key), annotations[key]) for key in sorted(annotations)}
    return str(Spec(name, texts))


def describe(cls: type, preset: Mapping[str, Any] | None = None) -> tuple[FieldText, ...]:
    """List the fields of a dataclass as a help page shows them, in the order they are declared."""
    annotations = _annotations(cls)
    defaults = {f.name: _default(f) for f in _init_fields(cls) if not _is_required(f)} | dict(preset or {})
    return tuple(
        FieldText(key, _takes(hint), _write(defaults[key], hint) if key in defaults else None)
        for key, hint in annotations.items()
    )


def _init_fields(cls: type) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(cls) if f.init]


def _annotations(cls: type) -> dict[str, Any]:
    """The fields' types; kept, because they are asked for at every solve and take a compilation each."""
    if cls not in _KNOWN:
        _KNOWN[cls] = _read_annotations(cls)
    return _KNOWN[cls]


def _choice_fields(cls: type) -> dict[str, dict[str, Any]]:
    """The choices of each field that has some; kept for the same reason."""
    if cls not in _KNOWN_CHOICES:
        found = {key: _choices(hint) for key, hint in _annotations(cls).items()}
        _KNOWN_CHOICES[cls] = {key: choices for key, choices in found.items() if choices}
    return _KNOWN_CHOICES[cls]


def _read_annotations(cls: type) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise SpecError(
            f"the annotations of `{cls.__name__}` cannot be read ({error}); "
            "import the names they use at run time, not only for type checking."
        ) from error
    return {f.name: hints[f.name] for f in _init_fields(cls)}


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


# How each annotation reads and writes. A reader raises ValueError; `build` words it.


def _read_bool(text: str) -> bool:
    try:
        return {"true": True, "false": False}[text.lower()]
    except KeyError as error:
        raise ValueError(text) from error


def _read_text(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _write_text(value: str) -> str:
    try:
        plain = split(value) == [value]
    except SpecError:
        plain = False
    plain = plain and value.isprintable() and '"' not in value and value.lower() != "none"
    return value if plain else json.dumps(value)


# Adding 0.0 turns -0.0, which equals 0.0, into it: equal values must have equal texts.
_SCALARS: dict[type, tuple[str, Callable[[str], Any], Callable[[Any], str]]] = {
    bool: ("true|false", _read_bool, lambda value: str(bool(value)).lower()),
    int: ("an integer", int, lambda value: str(int(value))),
    float: ("a number", float, lambda value: repr(float(value) + 0.0)),
    str: ("text", _read_text, _write_text),
}


def _union(annotation: Any) -> tuple[Any, ...]:
    """Members of ``X | Y`` or ``Optional[X]`` without None; empty where it is no union."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return ()
    return tuple(m for m in typing.get_args(annotation) if m is not types.NoneType)


def _choices(annotation: Any) -> dict[str, Any]:
    """Text to value, for a ``Literal`` or an ``Enum``; empty for anything else."""
    if typing.get_origin(annotation) is typing.Literal:
        return {str(choice): choice for choice in typing.get_args(annotation)}
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return {str(member.value): member for member in annotation}
    return {}


def _element(annotation: Any) -> Any:
    """``X`` of ``tuple[X, ...]``; None for anything else."""
    args = typing.get_args(annotation)
    variadic = typing.get_origin(annotation) is tuple and len(args) == 2 and args[1] is Ellipsis
    return args[0] if variadic else None


def _takes(annotation: Any) -> str:
    if members := _union(annotation):
        optional = types.NoneType in typing.get_args(annotation)
        return " or ".join([_takes(m) for m in members] + ["none"] * optional)
    if choices := _choices(annotation):
        return "|".join(choices)
    if (element := _element(annotation)) is not None:
        return "integers such as 64-32-10" if element is int else f"a list ({_takes(element)},…)"
    return _SCALARS[annotation][0] if annotation in _SCALARS else "a value that no text can give"


def _read_value(text: str, annotation: Any) -> Any:
    if members := _union(annotation):
        if text.lower() == "none" and types.NoneType in typing.get_args(annotation):
            return None
        return _read_union(text, members)
    if choices := _choices(annotation):
        if text not in choices:
            raise ValueError(text)
        return choices[text]
    if (element := _element(annotation)) is not None:
        return tuple(_read_value(part, element) for part in _parts(text, element))
    if annotation not in _SCALARS:
        raise ValueError(f"no text form for {annotation}")
    return _SCALARS[annotation][1](text)


def _read_union(text: str, members: tuple[Any, ...]) -> Any:
    for member in members[:-1]:
        try:
            return _read_value(text, member)
        except ValueError:
            continue
    return _read_value(text, members[-1])


def _parts(text: str, element: Any) -> list[str]:
    if text.startswith("(") and text.endswith(")"):
        return split(text[1:-1])
    return text.split("-") if element is int else split(text)


def _write(value: Any, annotation: Any) -> str:
    if value is None:
        return "none"
    if members := _union(annotation):
        return _write(value, next((m for m in members if _fits(value, m)), members[-1]))
    if _choices(annotation):
        return str(value.value if isinstance(value, Enum) else value)
    if (element := _element(annotation)) is not None:
        dashes = element is int and value and min(value) >= 0
        texts = [_write(item, element) for item in value]
        return "-".join(texts) if dashes else f"({','.join(texts)})"
    if annotation not in _SCALARS:
        raise SpecError(f"`{value!r}` has no text form: its field is annotated `{annotation}`.")
    return _SCALARS[annotation][2](value)


def _fits(value: Any, annotation: Any) -> bool:
    """Whether the text of ``value``, read by this member of a union, gives ``value`` back."""
    try:
        return bool(_read_value(_write(value, annotation), annotation) == value)
    except (AttributeError, OverflowError, TypeError, ValueError):
        return False


INTERFACE = 1
"""Numbers the interface that providers and solvers are written for; a change that breaks one raises it."""


@dataclasses.dataclass(frozen=True)
class Description:
    """One line of a registry's listing."""

    name: str
    fields: tuple[FieldText, ...]
    doc: str
    origin: str

    @property
    def usage(self) -> str:
        """The name with every field and its default, as it could be typed."""
        return f"{self.name}[{','.join(map(str, self.fields))}]" if self.fields else self.name


@dataclasses.dataclass(frozen=True)
class _Entry(Generic[T]):
    factory: type[T]
    preset: dict[str, Any]
    doc: str
    origin: str
    plugin: bool
    complete: bool

    @functools.cached_property
    def made(self) -> T:
        """What the name alone stands for: a frozen value, made once."""
        return self.factory(**self.preset)


class Registry(Generic[T]):
    """Names of one kind of thing, each a frozen dataclass with some of its fields preset.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class PCH:
    ...     "The positive-curvature Hessian."
    ...     gamma: float = 0.0
    >>> providers = Registry("provider")
    >>> providers.register("pch", PCH)
    >>> providers.register("pch-1", PCH, "absolute values", gamma=-1.0)
    >>> providers.make("pch-1")
    PCH(gamma=-1.0)
    >>> providers.canonical("pch-1") == providers.canonical("pch[gamma=-1]")
    True
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        """Start empty; ``kind`` is the word for error messages, ``group`` the entry-point group."""
        self.kind = kind
        self.group = group
        self._entries: dict[str, _Entry[T]] = {}
        self._loaded = False

    def __repr__(self) -> str:
        """Show the kind and the names, without importing any plugin."""
        return f"Registry({self.kind!r}: {', '.join(sorted(self._entries))})"

    def register(self, name: str, factory: type[T], doc: str = "", **preset: Any) -> None:
        """Let ``name`` stand for ``factory`` with the fields of ``preset`` as its defaults.

        ``doc`` is one line for listings (default: the first of the class's docstring). A name is
        taken once; registering the same class again, as a notebook does, replaces it.
        """
        if parse(name) != Spec(name):
            raise SpecError(f"`{name}` cannot be registered: a name has no brackets and no spaces.")
        _check_factory(factory, preset)
        held = self._entries.get(name)
        if held and held.plugin:
            self._warn_left_out(name, held.origin, f"{_address(factory)} has that name")
        elif held and _address(held.factory) != _address(factory):
            raise SpecError(f"{self.kind} `{name}` is already {_address(held.factory)}; use another name.")
        origin = factory.__module__.partition(".")[0]
        complete = not missing_fields(factory, preset)
        line = doc or _first_line(factory)
        self._entries[name] = _Entry(factory, preset, line, origin, plugin=False, complete=complete)

    def make(self, spec: str | T) -> T:
        """Read a spec such as ``pch[gamma=-1]``; an instance passes through as it is."""
        if isinstance(spec, str):
            self._load_plugins()
            named = self._entries.get(spec)
            if named is not None and named.complete:
                # A name alone has nothing to read; a class that refuses its own defaults is told of below.
                with suppress(ValueError):
                    return named.made
            parsed = parse(spec)
            entry = self._entry(parsed.name)
            return build(entry.factory, parsed.fields, name=parsed.name, preset=entry.preset)
        if isinstance(spec, type):
            raise SpecError(f"{self.kind}: got the class `{spec.__name__}`; write `{spec.__name__}(…)`.")
        if type(spec).__module__ == "builtins":
            raise SpecError(
                f"{self.kind}: got {spec!r} of type `{type(spec).__name__}`; give a name or an instance."
            )
        return spec

    def names(self) -> list[str]:
        """List the known names, plugins included, sorted."""
        self._load_plugins()
        return sorted(self._entries)

    def describe(self) -> list[Description]:
        """List name, fields with defaults, one line of documentation and the package of each name."""
        self._load_plugins()
        return [
            Description(name, describe(entry.factory, entry.preset), entry.doc, entry.origin)
            for name, entry in sorted(self._entries.items())
        ]

    def canonical(self, spec: str | T) -> str:
        """Write the one text that equal choices share: every field, under the class's plainest name."""
        instance = self.make(spec)
        self._load_plugins()
        named = [(name, e.preset) for name, e in self._entries.items() if e.factory is type(instance)]
        if not named:
            raise SpecError(
                f"`{type(instance).__name__}` is registered as no {self.kind}, so it has no text form; "
                "register it first."
            )
        return canonical(next((name for name, preset in named if not preset), named[0][0]), instance)

    def identity(self, spec: str | T) -> str:
        """The canonical text of a choice; an instance of a class that is not registered has its `repr`."""
        if isinstance(spec, str):
            return self.canonical(spec)
        try:
            return self.canonical(spec)
        except SpecError:
            return repr(self.make(spec))

    def label(self, spec: str | T) -> str:
        """The shortest text of a choice, whichever way it was typed.

        >>> from curvlab.providers.registry import providers
        >>> providers.label("pch[gamma=-1]"), providers.label("fisher[kind=mc,samples=1]")
        ('pch-1', 'fisher[kind=mc]')
        """
        text, instance = self.identity(spec), self.make(spec)
        candidates = []
        for name in self._names_of(type(instance)):
            bare = self._without_fields(name)
            if bare is not None:
                differing = _differing_fields(text, self.canonical(bare))
                # Of two names that fit entirely, such as `pch` and `pch-1`, the longer says more.
                length = len(name) if differing else -len(name)
                candidates.append((len(differing), length, str(Spec(name, differing))))
        return min(candidates)[2] if candidates else text

    def _names_of(self, factory: type) -> list[str]:
        """The names that stand for a class, sorted."""
        return [name for name in self.names() if self._entries[name].factory is factory]

    def _without_fields(self, name: str) -> T | None:
        """The choice of a bare name; None where it has fields without a default."""
        try:
            return self.make(name)
        except SpecError:
            return None

    def _entry(self, name: str) -> _Entry[T]:
        self._load_plugins()
        if name not in self._entries:
            made = self._make_entry(name)
            if made is None:
                raise unknown_name(self.kind, name, self._entries)
            self.register(name, made)
        return self._entries[name]

    def _make_entry(self, name: str) -> type[T] | None:
        """The class of a name that is not registered, for a registry that can make one; then it is kept."""
        return None

    def _load_plugins(self) -> None:
        if self._loaded or self.group is None:
            return
        # Set first: a plugin that uses this registry while it is imported must not load it again.
        self._loaded = True
        for point in entry_points(group=self.group):
            self._load_plugin(point)

    def _load_plugin(self, point: EntryPoint) -> None:
        origin = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
        if held := self._entries.get(point.name):
            self._warn_left_out(point.name, origin, f"{_address(held.factory)} has that name")
            return
        try:
            factory = point.load()
            _check_factory(factory, {})
            check_interface(factory)
            describe(factory)
        # Whatever someone else's module raises on import must not break the rest.
        except Exception as error:
            reason = f"`{point.value}` does not load ({type(error).__name__}: {error})"
            self._warn_left_out(point.name, origin, reason)
            return
        complete = not missing_fields(factory, {})
        self._entries[point.name] = _Entry(
            factory, {}, _first_line(factory), origin, plugin=True, complete=complete
        )

    def _warn_left_out(self, name: str, origin: str, reason: str) -> None:
        message = f"{self.kind} `{name}` of {origin} is left out: {reason}."
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def check_interface(factory: Any) -> None:
    """Refuse a class that is written for an interface which this curvlab does not have yet.

    A class without the attribute `interface` is one of curvlab 0.1, whose interface is number 1.
    """
    number = getattr(factory, "interface", 1)
    if type(number) is not int or number < 1:
        raise SpecError(f"its `interface` is {number!r}; expected a whole number, such as {INTERFACE}.")
    if number > INTERFACE:
        raise SpecError(
            f"it is written for interface {number} of curvlab and this curvlab has interface {INTERFACE}: "
            "install a newer curvlab, or an older version of that package."
        )


def _check_factory(factory: Any, preset: dict[str, Any]) -> None:
    params = getattr(factory, "__dataclass_params__", None) if isinstance(factory, type) else None
    if params is None or not params.frozen:
        raise SpecError(f"{factory!r} is not a frozen dataclass; decorate it with `@dataclass(frozen=True)`.")
    known = [field.name for field in dataclasses.fields(factory) if field.init]
    for key in preset:
        if key not in known:
            raise unknown_name(f"field of `{factory.__name__}`", key, known)


def _address(factory: type) -> str:
    return f"{factory.__module__}.{factory.__qualname__}"


def _first_line(factory: type) -> str:
    doc = (factory.__doc__ or "").strip()
    # A dataclass without a docstring gets its signature as one: no help to a reader.
    return "" if doc.startswith(f"{factory.__name__}(") else doc.partition("\n")[0]


def _differing_fields(text: str, other: str) -> dict[str, str]:
    theirs = parse(other).fields
    return {key: value for key, value in parse(text).fields.items() if theirs.get(key) != value}
