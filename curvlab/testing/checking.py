"""What the conformance suites share: requiring a sentence, running checks by name, frozen configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

from curvlab.exceptions import SpecError
from curvlab.registry import Registry

__all__ = ["check_exempt", "check_frozen", "check_text", "require", "run"]

T = TypeVar("T")


def require(holds: bool, sentence: str) -> None:
    """Raise AssertionError with `sentence` unless `holds`."""
    if not holds:
        raise AssertionError(sentence)


def run(checks: Mapping[str, Callable[[T], None]], subject: T, exempt: Collection[str], where: str) -> None:
    """Run the checks that are not exempt; whatever one raises is a failure that names it."""
    for name, check in checks.items():
        if name in exempt:
            continue
        try:
            check(subject)
        except AssertionError as error:
            raise AssertionError(f"{where} fails the check `{name}`: {error}") from error
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise AssertionError(f"{where} fails the check `{name}`: it raises {what}") from error


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
