"""Objects by address, `package.module:attribute`: a user's own model, data or criterion."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from curvlab.exceptions import SpecError, UserCodeError

__all__ = ["call", "is_address", "load"]


def is_address(text: str) -> bool:
    """Whether `text` is an address rather than a name.

    >>> is_address("mypackage.nets:build"), is_address("cross-entropy")
    (True, False)
    """
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def load(address: str, what: str) -> Any:
    """The object at `address`; the working folder is searched first.

    >>> load("math:pi", "constant") > 3
    True
    """
    if not is_address(address):
        raise SpecError(f"{what} `{address}` is not an address; write package.module:attribute")
    module_name, _, attribute = address.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise SpecError(
            f"{what} `{address}`: importing {module_name} failed ({type(error).__name__}: {error}). "
            f"Run from the folder that holds it, or install it"
        ) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            known = ", ".join(name for name in dir(found) if not name.startswith("_"))
            raise SpecError(f"{what} `{address}`: {module_name} has no `{part}`; it has {known}") from None
    return found


def call(function: Callable[[], Any], address: str, what: str) -> Any:
    """What the user's function at `address` returns; what it raises is said in a sentence.

    >>> call(dict, "builtins:dict", "data")
    {}
    """
    try:
        return function()
    except Exception as error:
        module_name, _, attribute = address.partition(":")
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise UserCodeError(
            f"{what} `{address}` raised {reason}. Correct the function; to see its full traceback: "
            f'python -c "import {module_name}; {module_name}.{attribute}()"'
        ) from error
