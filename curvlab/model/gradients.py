"""The gradients of a batch: their mean over its examples, and that of every example by itself, ∇ξ_i.

The mean is held in factors where a layer sees one row per example. Those of the examples take one backward
pass of any model:

    weight   Σ_p g_ip h_ipᵀ        bias   Σ_p g_ip        over the positions p of example i

An example of weight c_i = 0 has gradient 0; no weight is in the others, so that E[∇ξ_i] is the gradient
of the mean loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
from torch import Tensor

from curvlab.linalg.steps import Gradient, RowGradient
from curvlab.model.layers import Layer
from curvlab.model.recording import ChainRecording, GraphRecording, LayerRecord, Recording
from curvlab.model.watch import SeenWeight

__all__ = ["GradientMean", "example_gradients", "gradient_of"]


def example_gradients(recording: Recording) -> dict[str, Tensor]:
    """∇ξ_i of every example of a batch, {parameter name: (examples, *shape)}."""
    if isinstance(recording, ChainRecording):
        return _of_chain(recording)
    assert isinstance(recording, GraphRecording)
    return _of_graph(recording)


def _of_chain(recording: ChainRecording) -> dict[str, Tensor]:
    counted = (recording.weights > 0).to(recording.logits)[:, None]
    found: dict[str, Tensor] = {}
    for record in recording.layers:
        rows = record.gradients.rows * counted
        if record.layer.weight_name is not None:
            found[record.layer.weight_name] = rows[:, :, None] * record.inputs.rows[:, None, :]
        if record.layer.bias_name is not None:
            found[record.layer.bias_name] = rows
    return found


def _of_graph(recording: GraphRecording) -> dict[str, Tensor]:
    parameters = recording.network.parameters
    found: dict[str, Tensor] = {}

    def add(name: str, place: tuple[int, int] | None, rows: Tensor) -> None:
        """Count the rows of one use of a parameter, or of some of its rows."""
        if name not in found:
            found[name] = rows.new_zeros(recording.examples, *parameters[name].shape)
        first, last = place or (0, found[name].shape[1])
        found[name][:, first:last] += rows

    def hear(layer: Layer, seen: SeenWeight, gradient: Tensor) -> None:
        use, view = seen.use, seen.view
        if layer.bias_name is not None:
            add(layer.bias_name, view.rows, use.output_rows(gradient).sum(1).flatten(1))
        if layer.weight_name is not None:
            shape = tuple(layer.weight.shape)
            shape = shape if view.rows is None else (view.rows[1] - view.rows[0], *shape[1:])
            add(layer.weight_name, view.rows, use.example_gradients(gradient, shape))

    plain = recording.backward(recording.terms.gradient_cotangent(), hear)
    names = [name for layer in recording.layout for name in layer.names]
    everything = found | {name: rows for name, rows in plain.items() if name in names}
    return {
        name: everything[name].detach()
        if name in everything
        else torch.zeros_like(parameters[name]).expand(recording.examples, *parameters[name].shape).clone()
        for name in names
    }


def gradient_of(recording: Recording) -> Gradient:
    """The gradient of one batch, in factors where a layer sees one row per example."""
    entries = {name: entry for record in recording.layers for name, entry in _entries(record).items()}
    if isinstance(recording, GraphRecording):
        entries |= recording.mean_gradients
    return Gradient({name: entries[name] for layer in recording.layout for name in layer.names})


@dataclass
class GradientMean:
    """The gradient over several batches, as running sums: no batch is held."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    weights: list[Tensor] = field(default_factory=list)

    def add(self, recording: Recording) -> None:
        """Count a batch with its weight."""
        weight = recording.total_weight
        gradient = gradient_of(recording)
        for name in gradient:
            counted = gradient.view(name) * weight
            self.sums[name] = counted if name not in self.sums else self.sums[name].add_(counted)
        self.weights.append(weight)

    def value(self) -> Gradient:
        """The mean so far."""
        weight = reduce(add, self.weights)
        return Gradient({name: total / weight for name, total in self.sums.items()})


def _entries(record: LayerRecord) -> dict[str, Tensor | RowGradient]:
    entries: dict[str, Tensor | RowGradient] = {}
    if record.layer.weight_name is not None:
        entries[record.layer.weight_name] = RowGradient(record.gradients, record.inputs)
    if record.layer.bias_name is not None:
        entries[record.layer.bias_name] = record.gradients.mean
    return entries
