"""Curvatures in other forms: a scipy LinearOperator, and a file without pickle.

A file is in the safetensors format: the factors' tensors, named layer/side/field, and a JSON header
with the kinds of the factors and what the curvature knows of itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from curvlab.curvature import Curvature, Definiteness, LayerCurvature
from curvlab.exceptions import MatrixFreeError
from curvlab.linalg import DenseFactor, Factor, GramFactor, RankOneFactor
from curvlab.linalg.flat import flatten, unflatten
from curvlab.linalg.inputs import InputFactors

if TYPE_CHECKING:
    import numpy as np
    from scipy.sparse.linalg import LinearOperator

__all__ = ["flatten", "load", "save", "to_scipy", "unflatten"]

FACTORS: dict[str, Callable[..., Factor]] = {
    factor.kind: factor for factor in (DenseFactor, GramFactor, RankOneFactor)
}
FORMAT = "curvlab-curvature-1"


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
    """Write a curvature of Kronecker layers to `path`."""
    if curvature.matrix_free:
        raise MatrixFreeError(
            f"`{curvature.provider}` is matrix-free: its products read the model and the batch, so there is "
            f"no matrix to save. Save the model and the batch instead"
        )
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
        "format": FORMAT,
        "provider": curvature.provider,
        "criterion": curvature.criterion,
        "psd": curvature.definiteness.psd,
        "why": curvature.definiteness.why,
        "exact": curvature.exact,
        "notes": curvature.notes,
        "layers": layers,
    }
    save_file(_unshared(tensors), path, metadata={"curvlab": json.dumps(header)})


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
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get("curvlab")
        header = json.loads(text) if text else {}
        if header.get("format") != FORMAT:
            raise ValueError(f"{path} is not a curvature saved by curvlab ({FORMAT})")
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    layers = tuple(_layer(index, row, tensors) for index, row in enumerate(header["layers"]))
    return Curvature(
        header["provider"],
        header["criterion"],
        layers,
        Definiteness(header["psd"], header["why"]),
        header["exact"],
        tuple(header["notes"]),
    )


def _layer(index: int, row: dict[str, Any], tensors: dict[str, Tensor]) -> LayerCurvature:
    def fields(side: str) -> dict[str, Tensor]:
        prefix = f"{index}/{side}/"
        return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}

    inputs = None
    if "input" in row:
        held = fields("input")
        mean = held.pop("mean", None)
        inputs = InputFactors(_factor(row["input"], held), mean)
    return LayerCurvature(
        row["name"], row["weight"], row["bias"], _factor(row["output"], fields("output")), inputs
    )


def _factor(kind: str, tensors: dict[str, Tensor]) -> Factor:
    return FACTORS[kind](**tensors)
