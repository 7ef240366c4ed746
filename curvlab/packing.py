"""A curvature of Kronecker layers as tensors by name and a header of texts and numbers, for files and states.

The tensors are those of the factors, named layer/side/field; the header, which JSON can hold, has the kinds
of the factors and what the curvature knows of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from curvlab.curvature import Curvature, Definiteness, LayerCurvature
from curvlab.linalg import DenseFactor, Factor, GramFactor, RankOneFactor
from curvlab.linalg.inputs import InputFactors

__all__ = ["Packed"]

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
