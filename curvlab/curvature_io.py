"""The parts of a curvature, and the file that holds them without pickle.

A packed curvature is the tensors of its Kronecker factors, named layer/side/field, and a header of texts and
numbers that JSON can hold. A file holds both in the safetensors format. `Curvature` packs and unpacks itself:
nothing here knows of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from curvlab.files import replaced
from curvlab.linalg import DenseFactor, Factor, GramFactor, RankOneFactor
from curvlab.linalg.factors import InputFactors

__all__ = ["Packed", "load_packed", "save_packed"]

FORMAT = "curvlab-curvature-1"
EXPECTED = "expected a safetensors file that Curvature.save() has written"


KINDS: dict[str, Callable[..., Factor]] = {
    factor.kind: factor for factor in (DenseFactor, GramFactor, RankOneFactor)
}


@dataclass(frozen=True, eq=False)
class Packed:
    """What a curvature is made of; its tensors are not copied."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]

    def factor(self, index: int, kind: str) -> Factor:
        """The output factor of the layer at `index`."""
        return KINDS[kind](**self._fields(index, "output"))

    def input_factors(self, index: int, kind: str) -> InputFactors:
        """The input factors of the layer at `index`."""
        fields = self._fields(index, "input")
        mean = fields.pop("mean", None)
        return InputFactors(KINDS[kind](**fields), mean)

    def _fields(self, index: int, side: str) -> dict[str, Tensor]:
        prefix = f"{index}/{side}/"
        return {key.removeprefix(prefix): t for key, t in self.tensors.items() if key.startswith(prefix)}


def save_packed(packed: Packed, path: str | PathLike[str]) -> None:
    """Write a packed curvature to `path`; where that fails, what was there before stays."""
    header = json.dumps({"format": FORMAT, **packed.header})
    with replaced(fspath(path)) as temporary:
        save_file(_unshared(packed.tensors), temporary, metadata={"curvlab": header})


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("curvlab", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {EXPECTED}") from error
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a curvature saved by curvlab ({FORMAT}); {EXPECTED}")
    return Packed(header, tensors)
