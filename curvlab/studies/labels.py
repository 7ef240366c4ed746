"""Names of choices in rows and tables: the canonical text that keys are made of, and a short one to read.

canonical   every field: pch[gamma=-1.0,output_gamma=-1.0]       equal choices, equal texts
label       the nearest registered name and what differs from it: pch-1
"""

from __future__ import annotations

from typing import Any

from curvlab import specs
from curvlab.exceptions import SpecError
from curvlab.registry import Registry

__all__ = ["canonical", "label"]


def canonical(registry: Registry[Any], spec: Any) -> str:
    """The one text of a choice; an instance of a class that is not registered has its `repr`.

    >>> from curvlab.providers.registry import providers
    >>> canonical(providers, "pch-1") == canonical(providers, "pch[gamma=-1]")
    True
    """
    if isinstance(spec, str):
        return registry.canonical(spec)
    try:
        return registry.canonical(spec)
    except SpecError:
        return repr(registry.make(spec))


def label(registry: Registry[Any], spec: Any) -> str:
    """The shortest text of a choice, whichever way it was typed.

    >>> from curvlab.providers.registry import providers
    >>> label(providers, "pch[gamma=-1]"), label(providers, "fisher[kind=mc,samples=1]")
    ('pch-1', 'fisher[kind=mc]')
    """
    text, instance = canonical(registry, spec), registry.make(spec)
    candidates = []
    for row in registry.describe():
        named = _named(registry, row.name)
        if type(named) is type(instance):
            differing = _differing(text, registry.canonical(named))
            # Of two names that fit entirely, such as `pch` and `pch-1`, the longer says more.
            length = len(row.name) if differing else -len(row.name)
            candidates.append((len(differing), length, str(specs.Spec(row.name, differing))))
    return min(candidates)[2] if candidates else text


def _named(registry: Registry[Any], name: str) -> Any:
    """The choice of a bare name; None where it has fields without a default."""
    try:
        return registry.make(name)
    except SpecError:
        return None


def _differing(text: str, other: str) -> dict[str, str]:
    theirs = specs.parse(other).fields
    return {key: value for key, value in specs.parse(text).fields.items() if theirs.get(key) != value}
