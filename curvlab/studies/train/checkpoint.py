"""Checkpoints: a tree of tensors and plain values in one safetensors file, replaced atomically.

Tensors are stored as they are; their places in the tree, and every other value, are in the file's JSON
header. There is no pickle: reading a checkpoint runs nothing. Dictionaries keep the types of their keys,
tuples become lists, and floats come back to the bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from curvlab.exceptions import StoreError
from curvlab.files import replaced

__all__ = ["read_checkpoint", "write_checkpoint"]

FORMAT = "curvlab-checkpoint-1"
TENSOR, PAIRS = "__tensor__", "__pairs__"


def write_checkpoint(path: Path, tree: dict[str, Any]) -> None:
    """Write `tree` to `path`: a crash leaves the old checkpoint or the new one, never a part.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "checkpoint.safetensors"
    >>> write_checkpoint(path, {"state": {0: {"buffer": torch.ones(2), "lr": 0.1}}})
    >>> read_checkpoint(path)
    {'state': {0: {'buffer': tensor([1., 1.]), 'lr': 0.1}}}
    """
    tensors: dict[str, Tensor] = {}
    header = json.dumps({"format": FORMAT, "tree": _encode(tree, tensors)})
    with replaced(path) as temporary:
        save_file(tensors, temporary, metadata={"curvlab": header})


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `write_checkpoint` wrote; tensors are on the CPU, in memory of their own."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("curvlab", "{}"))
            # A copy lies aligned in memory, as the original did: the same bits come out of it.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            tree: Any = _decode(header.get("tree"), tensors) if isinstance(header, dict) else None
    except (OSError, SafetensorError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise StoreError(f"cannot read the checkpoint {path}: {error}; start again with --fresh") from error
    if not isinstance(tree, dict) or header.get("format") != FORMAT:
        raise StoreError(f"{path} is not a checkpoint of curvlab ({FORMAT}); start again with --fresh")
    return tree


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = str(len(tensors))
        # Each a copy on the CPU: safetensors takes no two tensors of one storage.
        tensors[key] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {TENSOR: key}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _encode(item, tensors) for key, item in value.items()}
        return {PAIRS: [[key, _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_encode(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StoreError(f"a checkpoint holds tensors, numbers and texts; got a {type(value).__name__}")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if PAIRS in value:
        return {key: _decode(item, tensors) for key, item in value[PAIRS]}
    return {key: _decode(item, tensors) for key, item in value.items()}
