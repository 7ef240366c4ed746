"""Every error curvlab raises on purpose.

Each message says what was given, what was expected and what to do. All derive from
`CurvlabError`, so a caller can tell a mistake of its own from a defect of curvlab; each also
derives from the built-in that fits, so ordinary `except ValueError` works too.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence

__all__ = [
    "ArgumentError",
    "CurvatureFileError",
    "CurvatureFileMissingError",
    "CurvlabError",
    "DataError",
    "DataFolderError",
    "DenseSizeError",
    "ExecutorError",
    "FileWriteError",
    "FolderInUseError",
    "IndefiniteError",
    "MatrixFreeError",
    "NoRowsError",
    "OperandError",
    "PairError",
    "ProblemError",
    "RankError",
    "ResultsFolderError",
    "SolveError",
    "SpecError",
    "StaleError",
    "StoreError",
    "UserCodeError",
    "describe_argument",
    "named_briefly",
    "stacklevel_of_caller",
    "unknown_name",
]


class CurvlabError(Exception):
    """Base class of all errors that curvlab raises on purpose."""


class ProblemError(CurvlabError, ValueError):
    """A model, criterion or batch that cannot be analysed: names the layer or argument."""


class ArgumentError(CurvlabError, TypeError):
    """An argument of another kind than is expected: says what was given, and how to call it."""


class NoRowsError(ProblemError):
    """Data of which no row counts: alone no mean exists, in a process group the other ranks have the rows."""


class SpecError(CurvlabError, ValueError):
    """An unknown name or field in a `name[key=value]` spec: lists the known ones."""


class PairError(CurvlabError, ValueError):
    """A provider and a solver that do not go together: says what to use instead."""


class MatrixFreeError(CurvlabError, TypeError):
    """A matrix-free curvature asked for what needs a matrix: says what to do instead."""


class SolveError(CurvlabError, RuntimeError):
    """A linear solve that failed: names the layer, the reason and the advice."""


class IndefiniteError(CurvlabError, ValueError):
    """A matrix that must be positive definite and is not: gives its smallest eigenvalue, and what to do."""


class StaleError(CurvlabError, RuntimeError):
    """A curvature used after the parameters or the batch it was computed from have changed."""


class CurvatureFileError(CurvlabError, ValueError):
    """A file that holds no curvature that can be read: names it and what was expected."""


class CurvatureFileMissingError(CurvatureFileError, FileNotFoundError):
    """A file of a curvature that is not there."""


class OperandError(CurvlabError, ValueError):
    """A vector that does not fit a curvature: names the entry, and what was expected."""


class DenseSizeError(CurvlabError, MemoryError):
    """A dense matrix that would take more bytes than are allowed: says how many, and what to do instead."""


class DataError(CurvlabError, RuntimeError):
    """A data set that is missing, truncated or corrupt: names the file and what to do."""


class DataFolderError(DataError):
    """A data folder that was named and does not hold the data: says what it should hold."""


class StoreError(CurvlabError, RuntimeError):
    """A results store that cannot be read or written: names the file and the line."""


class ResultsFolderError(StoreError):
    """A results folder that was named and holds no results, or cannot be written to: name another."""


class FileWriteError(StoreError, OSError):
    """A file that cannot be written, locked or set aside: names it and the reason."""


class FolderInUseError(StoreError):
    """A results folder that another run holds: names the process, its command and since when."""


class UserCodeError(CurvlabError, RuntimeError):
    """A function of the user's own that raised: names it, the error, and how to see the traceback."""


class RankError(CurvlabError, RuntimeError):
    """Another rank of a process group failed, or was asked for something else: names the rank."""


class ExecutorError(CurvlabError, RuntimeError):
    """A place to run cells that cannot be reached or was lost: says how to go on."""


def describe_argument(value: object) -> str:
    """What an argument is, in a few words, for the sentence that refuses it.

    >>> import torch
    >>> describe_argument(torch.zeros(2, 3)), describe_argument("cg"), describe_argument(None)
    ('Tensor of shape (2, 3)', "str ('cg')", 'NoneType')
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{type(value).__name__} of shape {tuple(shape)}"
    return f"str ({value!r})" if isinstance(value, str) else type(value).__name__


def named_briefly(names: Sequence[str], shown: int = 6) -> str:
    """Names of parameters or layers in a sentence; of many the first few, and how many more.

    >>> named_briefly(["0.weight", "0.bias"]), named_briefly(["a", "b", "c"], shown=1)
    ('`0.weight`, `0.bias`', '`a` and 2 more')
    """
    first = ", ".join(f"`{name}`" for name in names[:shown])
    return first if len(names) <= shown else f"{first} and {len(names) - shown} more"


def stacklevel_of_caller() -> int:
    """The `stacklevel` with which a warning points at the first line outside of curvlab."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("curvlab."):
        frame, level = frame.f_back, level + 1
    return level


_KFAC = "KFAC is the provider `fisher[kind=mc]` (or `fisher`) with the solver `kfi` here."
_GGN = "The Gauss-Newton matrix is `gauss-newton[kind=exact]` here."
_BASELINE = "It is an optimizer, no curvature: train it beside the pairs with --epochs N --baseline "
USUAL_NAMES = {
    "kfac": _KFAC,
    "k-fac": _KFAC,
    "ekfac": "EKFAC is the provider `fisher[structure=ekfac]` with the solver `exact` here.",
    "ggn": _GGN,
    "gauss-newton-exact": _GGN,
    "kfra": "KFRA is the provider `gauss-newton` (kind=recursive) here.",
    "kflr": "KFLR is the provider `gauss-newton[kind=rows]` here.",
    "empirical-fisher": "The empirical Fisher is the provider `fisher` (kind=empirical, its default) here.",
    "ef": "The empirical Fisher is the provider `fisher` (kind=empirical, its default) here.",
    "fim": "The Fisher matrix is the provider `fisher[kind=exact]` here.",
    "natural-gradient": "That is the provider `fisher[kind=exact]` with any solver here.",
    "newton": "Newton's step is the provider `hessian` with the solver `cg`; it is a control of `compare`.",
    "identity": "The gradient step is a control that every comparison measures: it needs no name.",
    **{name: f"{_BASELINE}{name}." for name in ("adam", "adamw", "sgd", "lbfgs", "muon")},
    "shampoo": f"{_BASELINE}pytorch_optimizer:Shampoo (pip install pytorch-optimizer).",
    "soap": f"{_BASELINE}pytorch_optimizer:SOAP (pip install pytorch-optimizer).",
}
"""What other names of the field are called here."""


def unknown_name(kind: str, given: str, known: Iterable[str]) -> SpecError:
    """Word the error for a name that is not known: lists the known ones and the nearest match.

    >>> print(unknown_name("provider", "phc-1", ["fisher", "pch-1"]))
    `phc-1` is not a provider; known: `fisher`, `pch-1`. Did you mean `pch-1`?
    >>> print(unknown_name("provider", "ggn", ["fisher"]))
    `ggn` is not a provider; known: `fisher`. The Gauss-Newton matrix is `gauss-newton[kind=exact]` here.
    """
    known = sorted(known)
    near = difflib.get_close_matches(given, known, n=1)
    article = "an" if kind[0] in "aeiou" else "a"
    hint = f" Did you mean `{near[0]}`?" if near else ""
    if kind in ("provider", "solver"):
        hint = f" {USUAL_NAMES[usual]}" if (usual := given.lower().replace("_", "-")) in USUAL_NAMES else hint
    if kind == "criterion":
        hint += " Any loss of torch is one too, by its address: `torch.nn:HuberLoss`."
    return SpecError(f"`{given}` is not {article} {kind}; known: {_listing(known) or 'none'}.{hint}")


def _listing(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
