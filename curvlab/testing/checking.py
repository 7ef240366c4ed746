"""What the conformance suites share: a named check, running many of them, frozen configuration.

A check is a callable with a name, so that a test of another package has one item per promise::

    @pytest.mark.parametrize("check", curvlab.testing.provider_checks(MyProvider()), ids=str)
    def test_my_provider_keeps_its_promises(check):
        check()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from curvlab.exceptions import SpecError
from curvlab.specs import Registry

__all__ = [
    "Check",
    "check_exempt",
    "check_frozen",
    "check_text",
    "hold_all",
    "require",
    "run_all",
]

T = TypeVar("T")


def require(holds: bool, sentence: str) -> None:
    """Raise AssertionError with `sentence` unless `holds`."""
    if not holds:
        raise AssertionError(sentence)


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
    """One promise of one provider or solver: call it, and it raises AssertionError where it is broken.

    Attributes:
        name: the promise, as `exempt` names it; also the text of the check, for `ids=str`.
        subject: whose promise it is, for the sentence of a failure.
    """

    name: str
    subject: str
    _body: Callable[[], None]

    def __str__(self) -> str:
        return self.name

    def __call__(self) -> None:
        """Raise AssertionError, naming the subject and the check, unless the promise is kept."""
        # The gradient mode is put back, or one plugin that leaves it changed would fail every later check.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            try:
                self._body()
            except Exception as error:
                what = f"`{self.subject}` fails the check `{self.name}`: {_sentence(error)}"
                raise AssertionError(what) from error


def run_all(checks: Iterable[Check]) -> None:
    """Run every check; one AssertionError has the sentences of all that fail."""
    sentences = []
    for check in checks:
        try:
            check()
        except AssertionError as error:
            sentences.append(str(error))
    require(not sentences, "\n".join(sentences))


def hold_all(promise: Callable[[T], None], subjects: Mapping[str, T]) -> None:
    """Hold every subject to one promise; the first that breaks it is told, and how many do."""
    broken: list[tuple[str, Exception]] = []
    for label, subject in subjects.items():
        try:
            promise(subject)
        except Exception as error:
            broken.append((label, error))
    if broken:
        label, first = broken[0]
        many = f"; it fails on {len(broken)} of {len(subjects)} problems" if len(broken) > 1 else ""
        raise AssertionError(f"{_sentence(first)} (on {label}{many})") from first


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, AssertionError) else f"it raises {type(error).__name__}: {error}"


def check_exempt(exempt: Collection[str], known: Collection[str]) -> None:
    """Refuse an exemption from a check that does not exist."""
    unknown = sorted(set(exempt) - set(known))
    if unknown:
        raise SpecError(f"exempt={unknown}: there is no such check; the checks are {list(known)}")


class _Operations(TorchDispatchMode):
    """Notes every torch operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def check_frozen(instance: Any) -> None:
    """A frozen dataclass, equal by value, whose constructor does no work."""
    # Looked up in the class itself: a plain class inherits the marks of a base that is a dataclass.
    own: Any = vars(type(instance)).get("__dataclass_params__")
    frozen = own is not None and own.frozen
    require(frozen, "it is no frozen dataclass: decorate it with `@dataclass(frozen=True)`")
    with _Operations() as operations:
        again = dataclasses.replace(instance)
    require(not operations.seen, f"its constructor does work: {', '.join(operations.seen[:3])}")
    require(again == instance and hash(again) == hash(instance), "two of the same fields are not equal")


def check_text(registry: Registry[T], instance: T) -> None:
    """A registered instance is what its own text says."""
    try:
        text = registry.canonical(instance)
    except SpecError:
        return  # used as an instance only: there is no text to read back
    made = registry.make(text)
    require(made == instance, f"`{text}` makes {made}, not {instance}")
