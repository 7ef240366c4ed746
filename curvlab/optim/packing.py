"""A kept curvature as plain tensors, texts and numbers, for a `state_dict`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from curvlab.convert import FACTORS
from curvlab.curvature import Curvature, Definiteness, LayerCurvature
from curvlab.linalg import Factor
from curvlab.linalg.inputs import InputFactors

__all__ = ["pack", "unpack"]

Packed = dict[str, Any]


def pack(curvature: Curvature) -> Packed:
    """The Kronecker layers of `curvature` and what it knows of itself; tensors are not copied."""
    return {
        "provider": curvature.provider,
        "criterion": curvature.criterion,
        "psd": curvature.psd,
        "why": curvature.definiteness.why,
        "exact": curvature.exact,
        "notes": list(curvature.notes),
        "layers": [_pack_layer(layer) for layer in curvature.layers],
    }


def unpack(packed: Packed) -> Curvature:
    """What `pack` was given."""
    return Curvature(
        packed["provider"],
        packed["criterion"],
        tuple(_unpack_layer(layer) for layer in packed["layers"]),
        Definiteness(packed["psd"], packed["why"]),
        packed["exact"],
        tuple(packed["notes"]),
    )


def _pack_layer(layer: LayerCurvature) -> Packed:
    assert layer.output is not None
    inputs = layer.inputs
    return {
        "name": layer.name,
        "weight": layer.weight_name,
        "bias": layer.bias_name,
        "output": _pack_factor(layer.output),
        "input": None if inputs is None else _pack_factor(inputs.full),
        "mean": None if inputs is None else inputs.given_mean,
    }


def _unpack_layer(packed: Packed) -> LayerCurvature:
    inputs = None
    if packed["input"] is not None:
        inputs = InputFactors(_unpack_factor(packed["input"]), packed["mean"])
    return LayerCurvature(
        packed["name"], packed["weight"], packed["bias"], _unpack_factor(packed["output"]), inputs
    )


def _pack_factor(factor: Factor) -> dict[str, str | Tensor]:
    return {"kind": factor.kind, **factor.tensors()}


def _unpack_factor(packed: Packed) -> Factor:
    return FACTORS[packed["kind"]](**{key: value for key, value in packed.items() if key != "kind"})
