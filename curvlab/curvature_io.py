"""Curvatures in other forms: a scipy LinearOperator, a file without pickle, and their parts.

A packed curvature is the tensors of its Kronecker factors, named layer/side/field, and a header of texts and
numbers that JSON can hold. A file holds both in the safetensors format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from curvlab.curvature import Curvature, Definiteness, LayerCurvature
from curvlab.exceptions import MatrixFreeError
from curvlab.files import replaced
from curvlab.linalg import DenseFactor, Factor, GramFactor, RankOneFactor
from curvlab.linalg.inputs import InputFactors

if TYPE_CHECKING:
    import numpy as np
    from scipy.sparse.linalg import LinearOperator

__all__ = ["Packed", "load", "save", "to_scipy"]

FORMAT = "curvlab-curvature-1"
EXPECTED = "expected a safetensors file that Curvature.save() has written"


def to_scipy(curvature: Curvature) -> LinearOperator:
    """A LinearOperator on the flattened and joined parameters, in the order of `curvature.blocks`."""
    import numpy as np
    from scipy.sparse.linalg import LinearOperator

    example = next(iter(curvature.blocks.values())).example

    def matvec(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        vector = torch.as_tensor(np.asarray(x).reshape(-1), dtype=example.dtype, device=example.device)
        return curvature.flat_product(vector).numpy(force=True)

    dtype = np.dtype("float64" if example.dtype == torch.float64 else "float32")
    return LinearOperator((curvature.numel, curvature.numel), matvec=matvec, rmatvec=matvec, dtype=dtype)


def save(curvature: Curvature, path: str | PathLike[str]) -> None:
    """Write a curvature of Kronecker layers to `path`; a failure leaves the file that was there."""
    if curvature.matrix_free:
        raise MatrixFreeError(
            f"`{curvature.provider}` is matrix-free: its products read the model and the batch, so there is "
            f"no matrix to save. Save the model and the batch instead"
        )
    packed = Packed.of(curvature)
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


def load(path: str | PathLike[str]) -> Curvature:
    """Read what `save` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("curvlab", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {EXPECTED}") from error
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a curvature saved by curvlab ({FORMAT}); {EXPECTED}")
    return Packed(header, tensors).unpack()


KINDS: dict[str, Callable[..., Factor]] = {
    factor.kind: factor for factor in (DenseFactor, GramFactor, RankOneFactor)
}


@dataclass(frozen=True, eq=False)
class Packed:
    """What a curvature is made of; its tensors are not copied."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, curvature: Curvature) -> Packed:
        """The parts of `curvature`, whose layers must have factors."""
        tensors: dict[str, Tensor] = {}
        layers = []
        for index, layer in enumerate(curvature.layers):
            assert layer.output is not None
            row: dict[str, Any] = {"name": layer.name, "weight": layer.weight_name, "bias": layer.bias_name}
            row["output"] = layer.output.kind
            tensors |= {f"{index}/output/{key}": t for key, t in layer.output.tensors().items()}
            if layer.inputs is not None:
                row["input"] = layer.inputs.full.kind
                tensors |= {f"{index}/input/{key}": t for key, t in layer.inputs.tensors().items()}
            layers.append(row)
        header = {
            "provider": curvature.provider,
            "criterion": curvature.criterion,
            "psd": curvature.definiteness.psd,
            "why": curvature.definiteness.why,
            "exact": curvature.exact,
            "notes": list(curvature.notes),
            "layers": layers,
        }
        return cls(header, tensors)

    def unpack(self) -> Curvature:
        """The curvature."""
        header = self.header
        return Curvature(
            header["provider"],
            header["criterion"],
            tuple(self._layer(index, row) for index, row in enumerate(header["layers"])),
            Definiteness(header["psd"], header["why"]),
            header["exact"],
            tuple(header["notes"]),
        )

    def _layer(self, index: int, row: dict[str, Any]) -> LayerCurvature:
        inputs = None
        if "input" in row:
            held = self._fields(index, "input")
            mean = held.pop("mean", None)
            inputs = InputFactors(KINDS[row["input"]](**held), mean)
        output = KINDS[row["output"]](**self._fields(index, "output"))
        return LayerCurvature(row["name"], row["weight"], row["bias"], output, inputs)

    def _fields(self, index: int, side: str) -> dict[str, Tensor]:
        prefix = f"{index}/{side}/"
        return {key.removeprefix(prefix): t for key, t in self.tensors.items() if key.startswith(prefix)}
