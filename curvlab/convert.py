"""Curvatures in other forms: a scipy LinearOperator, and a file without pickle.

A file is in the safetensors format: the factors' tensors, named layer/side/field, and a JSON header
with the kinds of the factors and what the curvature knows of itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from curvlab.curvature import Curvature, Definiteness, LayerCurvature
from curvlab.linalg import DenseFactor, Factor, GramFactor, RankOneFactor
from curvlab.linalg.inputs import InputFactors

if TYPE_CHECKING:
    import numpy as np
    from scipy.sparse.linalg import LinearOperator

__all__ = ["flatten", "load", "save", "to_scipy", "unflatten"]

FACTORS: dict[str, type[Factor]] = {cls.kind: cls for cls in (DenseFactor, GramFactor, RankOneFactor)}
FORMAT = "curvlab-curvature-1"


def flatten(vectors: dict[str, Tensor], names: list[str]) -> Tensor:
    """The entries called `names`, flattened and joined."""
    return torch.cat([vectors[name].flatten() for name in names])


def unflatten(vector: Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The inverse of `flatten`."""
    parts = vector.split([int(torch.Size(shape).numel()) for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def to_scipy(curvature: Curvature) -> LinearOperator:
    """A LinearOperator on the flattened and joined parameters, in the order of `curvature.blocks`."""
    import numpy as np
    from scipy.sparse.linalg import LinearOperator

    blocks = curvature.blocks
    example = next(iter(blocks.values())).example
    shapes = {name: block.shape for name, block in blocks.items()}

    def matvec(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        vector = torch.as_tensor(np.asarray(x).reshape(-1), dtype=example.dtype, device=example.device)
        return flatten(curvature @ unflatten(vector, shapes), list(shapes)).numpy(force=True)

    dtype = np.dtype("float64" if example.dtype == torch.float64 else "float32")
    return LinearOperator((curvature.numel, curvature.numel), matvec=matvec, rmatvec=matvec, dtype=dtype)


def save(curvature: Curvature, path: str) -> None:
    """Write a curvature of Kronecker layers to `path`."""
    if curvature.matrix_free:
        raise TypeError(
            f"`{curvature.provider}` is matrix-free: its products read the model and the batch, so there is no matrix "
            f"to save. Save the model and the batch, or the bias blocks with safetensors"
        )
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, layer in enumerate(curvature.layers):
        assert layer.output is not None
        row: dict[str, Any] = {"name": layer.name, "weight": layer.weight_name, "bias": layer.bias_name}
        row["output"] = layer.output.kind
        tensors |= {f"{index}/output/{k}": t.contiguous() for k, t in layer.output.tensors().items()}
        if layer.inputs is not None:
            row["input"] = layer.inputs.full.kind
            tensors |= {f"{index}/input/{k}": t.contiguous() for k, t in layer.inputs.tensors().items()}
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
    save_file(tensors, path, metadata={"curvlab": json.dumps(header)})


def load(path: str) -> Curvature:
    """Read what `save` wrote."""
    with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
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
        inputs = InputFactors(FACTORS[row["input"]](**held), mean)
    output = FACTORS[row["output"]](**fields("output"))
    return LayerCurvature(row["name"], row["weight"], row["bias"], output, inputs)
