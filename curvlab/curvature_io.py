"""The parts of a curvature, and the file that holds them without pickle.

A packed curvature is the tensors of its factors, named by the layer's number and their path in the layer
(`0/output/matrix`, `1/part0/input/rows`), and a header of texts and numbers that JSON can hold. A file holds
both in the safetensors format. Nothing here knows of `Curvature` and its layers: they pack themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from curvlab.exceptions import (
    ArgumentError,
    CurvatureFileError,
    CurvatureFileMissingError,
    describe_argument,
)
from curvlab.files import replaced
from curvlab.linalg import DenseFactor, DiagonalFactor, ExampleFactor, Factor, GramFactor, RankOneFactor
from curvlab.linalg.example_factors import example_factor_from
from curvlab.linalg.factors import InputFactors

__all__ = ["Packed", "factor_from", "input_factors_from", "load_packed", "save_packed", "tensors_under"]

FORMAT = "curvlab-curvature-2"
READABLE = ("curvlab-curvature-1", FORMAT)
EXPECTED = "expected a safetensors file that Curvature.save() has written"


FACTORS: dict[str, Callable[..., Factor]] = {
    factor.kind: factor for factor in (DenseFactor, GramFactor, RankOneFactor, DiagonalFactor)
} | {ExampleFactor.kind: example_factor_from}


@dataclass(frozen=True, eq=False)
class Packed:
    """What a curvature is made of; its tensors are not copied."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]


def factor_from(kind: str, fields: Mapping[str, Tensor]) -> Factor:
    """The factor of this kind, from its tensors.

    >>> import torch
    >>> factor_from("diagonal", {"values": torch.ones(2)})
    DiagonalFactor(2 × 2, rank ≤ 2, float32)
    """
    return FACTORS[kind](**fields)


def input_factors_from(kind: str, fields: Mapping[str, Tensor]) -> InputFactors:
    """The input factors whose full one is of this kind, from their tensors."""
    own = dict(fields)
    mean = own.pop("mean", None)
    return InputFactors(factor_from(kind, own), mean)


def tensors_under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose path begins with `prefix`, by the rest of it.

    >>> import torch
    >>> list(tensors_under({"0/output/matrix": torch.ones(1), "1/output/matrix": torch.ones(1)}, "0"))
    ['output/matrix']
    """
    start = f"{prefix}/"
    return {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}


def _checked_path(path: object) -> str | PathLike[str]:
    if not isinstance(path, str | PathLike):
        raise ArgumentError(f"the path is a {describe_argument(path)}; expected the name of a file")
    return path


def save_packed(packed: Packed, path: str | PathLike[str]) -> None:
    """Write a packed curvature to `path`; where that fails, what was there before stays."""
    header = json.dumps({"format": FORMAT, **packed.header})
    with replaced(fspath(_checked_path(path))) as temporary:
        save_file(_copy_shared(packed.tensors), temporary, metadata={"curvlab": header})


def _copy_shared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, no two of them on one storage, as safetensors wants them."""
    seen: set[int] = set()
    result = {}
    for key, tensor in tensors.items():
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage().data_ptr()
        result[key] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result


def load_packed(path: str | PathLike[str]) -> Packed:
    """Read what `save_packed` wrote."""
    path = _checked_path(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("curvlab", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CurvatureFileMissingError(f"{path} is not there; {EXPECTED}") from error
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise CurvatureFileError(f"{path} cannot be read ({error}); {EXPECTED}") from error
    if not isinstance(header, dict) or header.get("format") not in READABLE:
        raise CurvatureFileError(
            f"{path} is not a curvature saved by curvlab ({' or '.join(READABLE)}); {EXPECTED}"
        )
    return Packed(header, tensors)
