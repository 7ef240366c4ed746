"""The gradient of every example by itself, ∇ξ_i, for any model, from one backward pass.

    weight   Σ_p g_ip h_ipᵀ        bias   Σ_p g_ip        over the positions p of example i

An example of weight c_i = 0 has gradient 0; no weight is in the others, so that E[∇ξ_i] is the gradient
of the mean loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlab.model.layers import Layer
from curvlab.model.recording import ChainRecording, GraphRecording, Recording
from curvlab.model.watch import SeenWeight

__all__ = ["example_gradients"]


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
