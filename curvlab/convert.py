"""Curvatures in other forms: a scipy LinearOperator, and a file without pickle.

A file is in the safetensors format: the tensors of the packed curvature, and its header as JSON.
"""

from __future__ import annotations

import json
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.exceptions import MatrixFreeError
from curvlab.files import replaced
from curvlab.packing import Packed

if TYPE_CHECKING:
    import numpy as np
    from scipy.sparse.linalg import LinearOperator

__all__ = ["load", "save", "to_scipy"]

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
