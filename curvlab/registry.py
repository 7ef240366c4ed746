"""Registries: what can be asked for by name, built in or brought by another package.

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
import warnings
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from curvlab import specs
from curvlab.exceptions import SpecError

__all__ = ["INTERFACE", "Description", "Registry", "check_interface"]

INTERFACE = 1
"""Numbers the interface that providers and solvers are written for; a change that breaks one raises it."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Description:
    """One line of a registry's listing."""

    name: str
    fields: tuple[specs.FieldText, ...]
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
        if specs.parse(name) != specs.Spec(name):
            raise SpecError(f"`{name}` cannot be registered: a name has no brackets and no spaces.")
        _check_factory(factory, preset)
        held = self._entries.get(name)
        if held and held.plugin:
            self._warn_left_out(name, held.origin, f"{_address(factory)} has that name")
        elif held and _address(held.factory) != _address(factory):
            raise SpecError(f"{self.kind} `{name}` is already {_address(held.factory)}; use another name.")
        origin = factory.__module__.partition(".")[0]
        complete = not specs.missing_fields(factory, preset)
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
                    return named.factory(**named.preset)
            parsed = specs.parse(spec)
            entry = self._entry(parsed.name)
            return specs.build(entry.factory, parsed.fields, name=parsed.name, preset=entry.preset)
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
            Description(name, specs.describe(entry.factory, entry.preset), entry.doc, entry.origin)
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
        return specs.canonical(next((name for name, preset in named if not preset), named[0][0]), instance)

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
        for name in self.names():
            bare = self._without_fields(name)
            if type(bare) is type(instance):
                differing = _differing_fields(text, self.canonical(bare))
                # Of two names that fit entirely, such as `pch` and `pch-1`, the longer says more.
                length = len(name) if differing else -len(name)
                candidates.append((len(differing), length, str(specs.Spec(name, differing))))
        return min(candidates)[2] if candidates else text

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
                raise specs.unknown(self.kind, name, self._entries)
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
            specs.describe(factory)
        # Whatever someone else's module raises on import must not break the rest.
        except Exception as error:
            reason = f"`{point.value}` does not load ({type(error).__name__}: {error})"
            self._warn_left_out(point.name, origin, reason)
            return
        complete = not specs.missing_fields(factory, {})
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
            raise specs.unknown(f"field of `{factory.__name__}`", key, known)


def _address(factory: type) -> str:
    return f"{factory.__module__}.{factory.__qualname__}"


def _first_line(factory: type) -> str:
    doc = (factory.__doc__ or "").strip()
    # A dataclass without a docstring gets its signature as one: no help to a reader.
    return "" if doc.startswith(f"{factory.__name__}(") else doc.partition("\n")[0]


def _differing_fields(text: str, other: str) -> dict[str, str]:
    theirs = specs.parse(other).fields
    return {key: value for key, value in specs.parse(text).fields.items() if theirs.get(key) != value}
