"""Products with the Gauss-Newton matrix of the network whose outputs are its logits *and* its nodes' inputs.

With u_n the inputs of the non-linear nodes f_n (`curvlab.model.nodes`), J = ∂logits/∂θ and J_n = ∂u_n/∂θ,

    v ↦ Σ_i c_i [ Jᵀ P_i J v + Σ_n J_nᵀ M_n J_n v ]

for any symmetric matrices P_i at the logits and M_n at the nodes: with ∇²ξ_i and the nodes' local Hessians
every diagonal block by parameter is the Hessian's. A backward pass that starts at the logits with r and at
every node with s_n gives g = Jᵀ r + Σ_n J_nᵀ s_n, which is linear in both, so that

    J v = ∂(g·v)/∂r,      J_n v = ∂(g·v)/∂s_n

are one backward pass through the graph of that one; a third brings the curved vectors back to θ. A chain's
recording has both directions in closed form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from curvlab.model.double_backward import backward_pass, refuse_broken_graphs
from curvlab.model.nodes import NodeInput, NonlinearNode, starting_at_nodes
from curvlab.model.products import differentiating_twice
from curvlab.model.recording import ChainRecording, GraphRecording, Recording
from curvlab.model.watch import Watch

__all__ = ["AugmentedBatch", "ChainAugmented", "GraphAugmented", "OutputCurvature", "augmented"]


class OutputCurvature(Protocol):
    """The curvature at the outputs of the augmented network."""

    def at_logits(self, recording: Recording, vectors: Tensor) -> Tensor:
        """P_i y for vectors y of all loss terms, (examples · terms, K)."""

    def at_node(self, number: int, rows: Tensor) -> Tensor:
        """M_n y for rows y of a node's input, (examples, positions, groups, units)."""


class AugmentedBatch(Protocol):
    """The augmented network on one batch."""

    @property
    def total_weight(self) -> Tensor:
        """Σ c_i: what the batch weighs in a mean over several."""

    def product(self, vectors: Mapping[str, Tensor], curvature: OutputCurvature) -> dict[str, Tensor]:
        """Σ_i c_i of the matrix over the parameters named in `vectors`, times them."""


def augmented(recording: Recording) -> AugmentedBatch:
    """The augmented network on the batch of a recording."""
    if isinstance(recording, ChainRecording):
        return ChainAugmented(recording)
    assert isinstance(recording, GraphRecording)
    return GraphAugmented(recording)


class ChainAugmented:
    """On a chain of Linear layers; its nodes are the activations, at the hidden layers' pre-activations."""

    def __init__(self, recording: ChainRecording) -> None:
        self.recording = recording

    @property
    def total_weight(self) -> Tensor:
        """Σ c_i."""
        return self.recording.total_weight

    def product(self, vectors: Mapping[str, Tensor], curvature: OutputCurvature) -> dict[str, Tensor]:
        """Σ_i c_i of the matrix over the parameters named in `vectors`, times them."""
        recording, weights = self.recording, self.recording.weights[:, None]
        along = self._along(vectors)
        top = weights * curvature.at_logits(recording, along[-1])
        inner = [
            weights * curvature.at_node(number, z[:, None, None]).reshape(z.shape)
            for number, z in enumerate(along[:-1])
        ]
        pulled = recording.pullback(top[None], [rows[None] for rows in inner])
        found = {}
        for record, rows in zip(recording.layers, pulled, strict=True):
            weight, bias = record.layer.weight_name, record.layer.bias_name
            if weight in vectors:
                found[str(weight)] = rows[0].T @ record.inputs.rows
            if bias in vectors:
                found[str(bias)] = rows[0].sum(0)
        return {name: found[name] for name in vectors}

    def _along(self, vectors: Mapping[str, Tensor]) -> list[Tensor]:
        """∂z^t · v at every pre-activation, the logits last."""
        recording = self.recording
        found: list[Tensor] = []
        for index, layer in enumerate(recording.chain.layers):
            z = torch.zeros_like(recording.preactivations[index])
            if layer.weight_name in vectors:
                z = z + recording.inputs[index] @ vectors[str(layer.weight_name)].T
            if layer.bias_name in vectors:
                z = z + vectors[str(layer.bias_name)]
            if index:
                z = z + (found[-1] * recording.activation_slopes[index - 1]) @ layer.weight.T
            found.append(z)
        return found


class GraphAugmented:
    """On any model: it runs once more, so that its backward pass can be differentiated; both graphs stay."""

    def __init__(self, recording: GraphRecording) -> None:
        self.recording, network = recording, recording.network
        self._parameters, inputs = dict(network.parameters), recording.inputs_given
        model = network.model
        known = {id(parameter) for parameter in self._parameters.values()}
        rest = (t for t in (*model.parameters(), *model.buffers()) if id(t) not in known)
        watch = Watch(self._parameters, recording.examples, constants=rest)
        with differentiating_twice(inputs, self._parameters), torch.enable_grad():
            self._logits = network.call(inputs, watch)
            refuse_broken_graphs(self._logits)
            self._nodes: Sequence[NonlinearNode] = watch.finder.nodes
            self._starts = [
                torch.zeros_like(self._logits).copy_(recording.terms.gradient_cotangent()).requires_grad_(),
                *(torch.zeros_like(node.inputs).requires_grad_() for node in self._nodes),
            ]
            starts: dict[NodeInput, Tensor] = dict(zip(self._nodes, self._starts[1:], strict=True))
            with starting_at_nodes(starts):
                gradients = backward_pass(
                    [self._logits], list(self._parameters.values()), self._starts[:1], create_graph=True
                )
        self._gradients = dict(zip(self._parameters, gradients, strict=True))

    @property
    def total_weight(self) -> Tensor:
        """Σ c_i."""
        return self.recording.total_weight

    def product(self, vectors: Mapping[str, Tensor], curvature: OutputCurvature) -> dict[str, Tensor]:
        """Σ_i c_i of the matrix over the parameters named in `vectors`, times them."""
        with differentiating_twice(self.recording.inputs_given, self._parameters):
            top, *inner = self._along(vectors)
            terms = self.recording.terms
            moved = top.movedim(1, -1) if terms.classes_first else top
            curved = curvature.at_logits(self.recording, moved.reshape(-1, terms.outputs))
            at_nodes: dict[NodeInput, Tensor] = {
                node: self._curve_node(number, y, curvature)
                for number, (node, y) in enumerate(zip(self._nodes, inner, strict=True))
            }
            with starting_at_nodes(at_nodes):
                values = backward_pass(
                    [self._logits],
                    [self._parameters[name] for name in vectors],
                    [terms.as_logits(curved, terms.weights)],
                )
        return {
            name: torch.zeros_like(vectors[name]) if value is None else value.detach()
            for name, value in zip(vectors, values, strict=True)
        }

    def _along(self, vectors: Mapping[str, Tensor]) -> list[Tensor]:
        """J v and every J_n v."""
        pairs = [(self._gradients[name], vector) for name, vector in vectors.items()]
        live = [(g, v) for g, v in pairs if g is not None and g.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(self._starts)
        if live:
            found = backward_pass([g for g, _ in live], self._starts, [v for _, v in live])
        return [
            torch.zeros_like(start) if y is None else y for start, y in zip(self._starts, found, strict=True)
        ]

    def _curve_node(self, number: int, vector: Tensor, curvature: OutputCurvature) -> Tensor:
        rows = self.recording.forward.nodes[number].rows
        weights = self.recording.weights[:, None, None, None]
        return rows.back(weights * curvature.at_node(number, rows.of(vector)))
