"""Objects by address, `package.module:attribute`: a user's own model, data or criterion.

The module is searched in the working folder first, then among what is installed. `sys.path` is not touched:
with the working folder on it, any file there that has the name of something curvlab imports later (a
`matplotlib.py`, for the report) would be run in its place. Instead a finder stands behind all others on
`sys.meta_path` and gives out modules of the working folder to two parties only:

    an address        `nets:build` is `nets.py` or `nets/__init__.py` of the working folder, if there is one,
                      even where a package `nets` is installed
    code from there   a module that came from the working folder may import its siblings, at its top or later
                      inside a function, where nothing that is installed has their name

So a file of the working folder runs only if the address, or code that the address led to, names it. A module
with the name of an installed one is kept in `sys.modules` under another name (`_working_folder_…`), so that
`import nets` elsewhere is still the installed one; inside a package of that kind write relative imports.
Siblings that share the name of an installed module need another name, or a package and relative imports.

Processes that an executor starts load the address in the same way, each from its own working folder.
The command `curvlab` never has the working folder on `sys.path`. With `python -m curvlab` Python itself puts
it first, and `curvlab.__main__` moves it to the end before torch, or anything else that is installed, is
imported. `python -P -m curvlab` leaves it out.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

from curvlab.exceptions import SpecError, UserCodeError

__all__ = ["call", "guarded", "is_address", "load"]

FEW = 12
IMPORTLIB = ("importlib", "_frozen_importlib", "_frozen_importlib_external")


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
    try:
        found: Any = _module(module_name)
    except (Exception, SystemExit) as error:  # a script without a guard may end the process
        raise SpecError(
            f"{what} `{address}`: importing {module_name} failed ({type(error).__name__}: {error}). "
            f"Run from the folder that holds it, or install it"
        ) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            known = [name for name in dir(found) if not name.startswith("_")]
            raise SpecError(
                f"{what} `{address}`: {module_name} has no `{part}`; {_has(known, part)}"
            ) from None
    return found


def _has(known: Sequence[str], asked: str) -> str:
    """What there is instead: the names that are nearest, or all of them where they are few.

    >>> _has(["HuberLoss", "MSELoss", *(f"Other{i}" for i in range(20))], "HuberLos")
    'did you mean `HuberLoss`?'
    >>> _has(["build"], "made")
    'it has build'
    """
    near = difflib.get_close_matches(asked, known, n=3, cutoff=0.8)
    if near:
        return f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
    shown = ", ".join(known[:FEW])
    return f"it has {shown}{f' and {len(known) - FEW} more' if len(known) > FEW else ''}"


def call(function: Callable[[], Any], address: str, what: str) -> Any:
    """What the user's function at `address` returns; what it raises is said in a sentence.

    >>> call(dict, "builtins:dict", "data")
    {}
    """
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise _user_code_error(error, address, what, "()") from error


def guarded(made: Any, address: str, what: str) -> Any:
    """The user's object at `address`; what a re-iterable raises on the way is said in a sentence.

    >>> guarded([1, 2], "mydata:batches", "data")
    [1, 2]
    """
    plain = (list, tuple, str, Mapping, Iterator)  # the last is used up by one pass, which others refuse
    if isinstance(made, plain) or hasattr(made, "shape") or not isinstance(made, Iterable):
        return made
    return _Guarded(made, address, what)


@dataclass(frozen=True, eq=False)
class _Guarded:
    items: Iterable[Any]
    address: str
    what: str

    def __iter__(self) -> Iterator[Any]:
        called = "()" if callable(load(self.address, self.what)) else ""
        try:
            yield from self.items
        except (Exception, SystemExit) as error:
            raise _user_code_error(error, self.address, self.what, called, "list") from error


def _user_code_error(
    error: BaseException, address: str, what: str, called: str, wrapped: str = ""
) -> UserCodeError:
    module_name, _, attribute = address.partition(":")
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    expression = f"{module_name}.{attribute}{called}"
    expression = f"{wrapped}({expression})" if wrapped else expression
    return UserCodeError(
        f"{what} `{address}` raised {reason}. Correct it; to see its full traceback: "
        f'python -c "import {module_name}; {expression}"'
    )


def _module(name: str) -> ModuleType:
    """The module `name`: that of the working folder where its first part is there, else the installed one."""
    top, dot, rest = name.partition(".")
    here = _finder_of(os.getcwd())
    local, installed = here.locate(top), _find_installed(top)
    if local is None or (local.origin is None and installed is not None):
        # A plain folder, a namespace to Python, yields to what is installed: it may hold anything.
        return importlib.import_module(name)
    if installed is not None and _same_file(installed, local):
        return importlib.import_module(name)
    registered = top if installed is None else here.private_name(top)
    here.serve(registered, local)
    return importlib.import_module(registered + dot + rest)


def _find_installed(top: str) -> ModuleSpec | None:
    """What `import top` would find, or has found, without the finders of this module."""
    if top in sys.modules:
        return getattr(sys.modules[top], "__spec__", None) or ModuleSpec(top, None)  # `__main__` has none
    others = [finder for finder in sys.meta_path if not isinstance(finder, _WorkingFolderFinder)]
    found = (finder.find_spec(top, None) for finder in others)
    return next((spec for spec in found if spec is not None), None)


def _same_file(first: ModuleSpec, second: ModuleSpec) -> bool:
    try:
        return os.path.samefile(str(first.origin), str(second.origin))
    except OSError:
        return False


class _WorkingFolderFinder(MetaPathFinder):
    """Gives out modules of one folder: those that an address named, and to these their siblings."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._addressed: dict[str, ModuleSpec] = {}
        self._given_out: set[str] = set()

    def locate(self, top: str) -> ModuleSpec | None:
        """The module or package of that name in the folder; for a plain folder its `origin` is None."""
        return PathFinder.find_spec(top, [self.folder])

    def private_name(self, top: str) -> str:
        """A name that nothing else has, and the same in every process that runs in this folder."""
        return f"_working_folder_{sha256(self.folder.encode(errors='surrogateescape')).hexdigest()[:8]}_{top}"

    def serve(self, name: str, located: ModuleSpec) -> None:
        """Give out what was located, under `name`, from now on."""
        self._addressed[name] = located
        if self not in sys.meta_path:
            sys.meta_path.append(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a top-level module; submodules are found by the path of their package, as ever."""
        if path is not None:
            return None
        located = self._addressed.get(fullname)
        if located is None and self._asks_for_sibling():
            located = self.locate(fullname)
        if located is None:
            return None
        self._given_out.add(fullname)
        return _spec(fullname, located)

    def _asks_for_sibling(self) -> bool:
        """Whether the import statement under way stands in a module that this finder gave out."""
        importer = next(_frames_outside_importlib(), None)
        name = "" if importer is None else str(importer.f_globals.get("__name__"))
        return name.partition(".")[0] in self._given_out


def _spec(name: str, located: ModuleSpec) -> ModuleSpec | None:
    if located.origin is None:  # a namespace: its folders, fixed, since they are on no search path
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = list(located.submodule_search_locations or [])
        return spec
    return importlib.util.spec_from_file_location(
        name, located.origin, submodule_search_locations=located.submodule_search_locations
    )


def _frames_outside_importlib() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module != __name__ and module.partition(".")[0] not in IMPORTLIB:
            yield frame
        frame = frame.f_back


@cache
def _finder_of(folder: str) -> _WorkingFolderFinder:
    return _WorkingFolderFinder(folder)
