"""One forward pass over a batch and the backward passes that follow, and all that providers read of them.

    forward    z = W h + b at every use of a weight, logits, loss terms
    backward   g = ∂ξ_i/∂z, from cotangents at the logits; no gradient of a weight is formed

`record` runs a batch. Where the forward is a chain of Linear layers the backward passes go through its
weights (`ChainRecording`); any other model keeps its graph, and taps in it hear what arrives at each use
(`GraphRecording`). E is the mean over examples: `row_weights` are the weights in it, c_i / Σ c_j, and
`sqrt_row_weights` their square roots. What only some providers read (backward passes, σ', σ'', Jacobians) is
computed when first asked for, and kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from operator import add

import torch
from torch import Tensor

from curvlab.criteria import Criterion
from curvlab.criteria.base import AllWeightsZeroError, LossTerms
from curvlab.exceptions import ProblemError
from curvlab.linalg import GramFactor
from curvlab.linalg.execution import FullPrecision
from curvlab.linalg.steps import Gradient, RowGradient
from curvlab.measure import device
from curvlab.model.chain import KnownChain
from curvlab.model.forward import Forward, check_finite, follow_forward, run_forward
from curvlab.model.layers import Chain, Layer, add_rows, shape_of_rows
from curvlab.model.network import Inputs, Network, tensors_of
from curvlab.model.nodes import Cotangent, NodeInput, NonlinearNode, formed, starting_at_nodes
from curvlab.model.own_curvature import FurtherNode, OwnCurvature, own_curvature
from curvlab.model.uses import Use, WeightUse
from curvlab.model.watch import Listener, ParameterView, SeenUse, SeenWeight, listener_of
from curvlab.staleness import example_hashes

__all__ = [
    "AllWeightsZeroError",
    "ChainRecording",
    "GradientMean",
    "GraphRecording",
    "KnownForward",
    "LayerRecord",
    "Recording",
    "gradient_of",
    "record",
    "record_known",
]


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """What one Linear layer saw: its inputs H (m × n_{t-1}) and the gradients S (m × n_t) at its output."""

    layer: Layer
    inputs: GramFactor
    gradients: GramFactor


@dataclass(frozen=True, eq=False)
class Recording(FullPrecision, ABC):
    """A batch as the model and the criterion saw it."""

    network: Network
    terms: LossTerms
    inputs_given: Inputs
    targets_given: Tensor

    @property
    def criterion(self) -> Criterion:
        """The criterion."""
        return self.terms.criterion

    @property
    def logits(self) -> Tensor:
        """The logits of all loss terms, (examples · terms, K)."""
        return self.terms.logits

    @property
    def targets(self) -> Tensor:
        """The targets of all loss terms."""
        return self.terms.targets

    @property
    def weights(self) -> Tensor:
        """c_i, one for each example."""
        return self.terms.example_weights

    @property
    def examples(self) -> int:
        """Number of examples in the batch."""
        return self.terms.examples

    @property
    def total_weight(self) -> Tensor:
        """Σ c_i: what the batch weighs in a mean over several."""
        return self.terms.total_weight

    @property
    def row_weights(self) -> Tensor:
        """c_i / Σ c_j, the weight of each example in the mean."""
        return self.terms.share

    @cached_property
    def sqrt_row_weights(self) -> Tensor:
        """The square root of `row_weights`."""
        return self.row_weights.sqrt()

    @property
    def loss(self) -> Tensor:
        """E[ξ_i]."""
        return self.terms.loss

    @cached_property
    def example_keys(self) -> Tensor:
        """A hash of each example's content, by which random draws are keyed; without values its number.

        Of numbers it is that of their float32 form, so that a model in float64 draws as in float32.
        """
        tensors = [*tensors_of(self.inputs_given), self.targets_given]
        if not all(device.readable(tensor) for tensor in tensors):
            return torch.arange(self.examples, device=self.logits.device)
        *inputs, targets = [t.float() if t.is_floating_point() else t for t in tensors]
        return example_hashes(inputs, targets)

    @cached_property
    def draws(self) -> dict[Hashable, Tensor]:
        """What was drawn at random for this batch, by what it was drawn for."""
        return {}

    @abstractmethod
    def weighted_gradients(self, weights: Tensor) -> dict[str, Tensor]:
        """Σ_i w_i ∇ξ_i by parameter name, for any weights w of the examples."""

    @cached_property
    def output_hessian(self) -> Tensor:
        """E[∇²ξ(h^k)], summed over an example's terms."""
        weights = (self.row_weights[:, None] * self.terms.within).flatten()
        return self.criterion.mean_hessian(self.logits, self.targets, weights)

    @property
    def no_chain(self) -> str:
        """Why the model is no chain of Linear layers; empty where it is one."""
        return ""

    @property
    @abstractmethod
    def layout(self) -> tuple[Layer, ...]:
        """The layers that have blocks."""

    @property
    @abstractmethod
    def output_layers(self) -> tuple[Layer, ...]:
        """The layers of `layout` whose output is the logits."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Functions of the forward that are neither piecewise linear nor among its non-linear nodes."""
        return ()

    @property
    def unknown_functions(self) -> tuple[str, ...]:
        """Non-linear functions whose local Hessians are not known."""
        return ()

    @property
    def reused_layers(self) -> tuple[Layer, ...]:
        """The layers of `layout` whose weight is used more than once."""
        return ()

    @property
    @abstractmethod
    def layers(self) -> tuple[LayerRecord, ...]:
        """A record for each Linear layer that sees one row per example and has blocks."""


@dataclass(frozen=True, eq=False)
class ChainRecording(Recording):
    """A pass through a chain; `inputs`[t] is h^t and `preactivations`[t] is z^{t+1} (t from 0)."""

    chain: Chain
    inputs: tuple[Tensor, ...]
    preactivations: tuple[Tensor, ...]

    @property
    def layout(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.chain.layers if layer.selected)

    @property
    def output_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.chain.layers[-1:] if layer.selected)

    @cached_property
    def activation_slopes(self) -> tuple[Tensor, ...]:
        """σ'(z^t) for the hidden layers."""
        hidden = zip(self.chain.activations, self.preactivations, self.inputs[1:], strict=False)
        return tuple(activation.first(z, h) for activation, z, h in hidden)

    @cached_property
    def _backward(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        gradient = self.criterion.gradients(self.logits, self.targets)
        gradients, errors = [gradient], []
        for layer, slope in zip(self.chain.layers[:0:-1], self.activation_slopes[::-1], strict=True):
            error = gradient @ layer.weight
            gradient = slope * error
            gradients.append(gradient)
            errors.append(error)
        return tuple(gradients[::-1]), tuple(errors[::-1])

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """g^t for all layers of the chain."""
        return self._backward[0]

    @property
    def backpropagated(self) -> tuple[Tensor, ...]:
        """e^t = W^{t+1}ᵀ g^{t+1} for the hidden layers."""
        return self._backward[1]

    @cached_property
    def second_order_terms(self) -> tuple[Tensor | None, ...]:
        """σ''(z^t) ⊙ e^t for the hidden layers: the diagonal term of the Hessian recursion (None: zero)."""
        result = []
        for activation, z, h, error in zip(
            self.chain.activations, self.preactivations, self.inputs[1:], self.backpropagated, strict=False
        ):
            second = activation.derivatives(z, h)[1]
            result.append(None if second is None else second * error)
        return tuple(result)

    @cached_property
    def layers(self) -> tuple[LayerRecord, ...]:
        roots = self.sqrt_row_weights
        return tuple(
            LayerRecord(layer, GramFactor(h, roots), GramFactor(g, roots))
            for layer, h, g in zip(self.chain.layers, self.inputs, self.gradients, strict=True)
            if layer.selected
        )

    def weighted_gradients(self, weights: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for record in self.layers:
            rows = record.gradients.rows * weights[:, None]
            if record.layer.weight_name is not None:
                found[record.layer.weight_name] = rows.T @ record.inputs.rows
            if record.layer.bias_name is not None:
                found[record.layer.bias_name] = rows.sum(0)
        return found

    def pullback(
        self, cotangents: Tensor, at_nodes: Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor, ...]:
        """J_iᵀ v for each cotangent v at the logits: (r, m, K) to (r, m, n_t) for each layer of `layers`.

        `at_nodes` are cotangents at the hidden layers' pre-activations, (r, m, n_t), which start there.
        """
        pulled = [cotangents] if self.chain.layers[-1].selected else []
        for index in range(len(self.chain.layers) - 1, 0, -1):
            cotangents = (cotangents @ self.chain.layers[index].weight) * self.activation_slopes[index - 1]
            starting = None if at_nodes is None else at_nodes[index - 1]
            if starting is not None:
                cotangents = cotangents + starting
            if self.chain.layers[index - 1].selected:
                pulled.append(cotangents)
        return tuple(pulled[::-1])

    @cached_property
    def jacobians(self) -> tuple[Tensor, ...]:
        """J_i = ∂h^k/∂z^t, (K, m, n_t) for each layer of `layers`."""
        outputs = self.logits.shape[1]
        basis = torch.eye(outputs, dtype=self.logits.dtype, device=self.logits.device)
        return self.pullback(basis[:, None, :].expand(outputs, self.examples, outputs))

    def apply_output_hessian(self, jacobian: Tensor) -> Tensor:
        """∇²ξ_i J_i in the same layout as J_i, (K, m, n)."""
        hessians = self.criterion.hessians(self.logits, self.targets)
        return torch.einsum("mkl,lmn->kmn", hessians, jacobian)


HearWeight = Callable[[Layer, SeenWeight, Tensor], None]


@dataclass(frozen=True, eq=False)
class GraphRecording(Recording):
    """A call of any model, its graph kept for further backward passes."""

    forward: Forward

    @property
    def layout(self) -> tuple[Layer, ...]:
        return self.forward.layers

    @property
    def output_layers(self) -> tuple[Layer, ...]:
        last = listener_of(self.forward.logits)
        return tuple(
            layer
            for layer in self.layout
            if layer.roles and any(seen.listener is last for seen in self.weight_uses(layer))
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        return self.forward.left_out

    @property
    def unknown_functions(self) -> tuple[str, ...]:
        return self.forward.unknown

    @property
    def reused_layers(self) -> tuple[Layer, ...]:
        def places(layer: Layer) -> list[object]:
            return [seen.view.rows for seen in self.weight_uses(layer) if seen.view is not None]

        found = ((layer, places(layer)) for layer in self.layout if layer.weight_name is not None)
        return tuple(layer for layer, used in found if len(used) > len(set(used)))

    @property
    def no_chain(self) -> str:
        if self.forward.no_chain:
            return self.forward.no_chain
        return f"its loss has {self.terms.per_example} terms per example"

    def release(self) -> None:
        """Let go of what only further backward passes need; there can be none after it."""
        object.__setattr__(self, "forward", replace(self.forward, logits=self.logits, nodes=(), further=()))

    @cached_property
    def _by_name(self) -> dict[str, Layer]:
        """The layer of each parameter that is a weight."""
        return {layer.weight_name: layer for layer in self.layout if layer.weight_name is not None}

    @cached_property
    def _plain(self) -> dict[str, Tensor]:
        """The parameters by themselves."""
        return {
            layer.bias_name: layer.weight
            for layer in self.layout
            if layer.kind == "plain" and layer.bias_name is not None
        }

    @cached_property
    def _calls(self) -> dict[Listener, list[SeenUse]]:
        """The uses that each listener hears the gradient of."""
        calls: dict[Listener, list[SeenUse]] = {}
        watched = self.forward.watched
        every = [seen for found in watched.direct.values() for seen in found] + [s for s, _ in watched.made]
        for seen in every:
            calls.setdefault(seen.listener, []).append(seen)
        return calls

    def weight_uses(self, layer: Layer) -> tuple[SeenUse, ...]:
        """The uses of a layer's weight."""
        return self.forward.watched.direct[str(layer.weight_name)]

    def backward(
        self, cotangent: Tensor, hear: HearWeight, at_nodes: Mapping[NodeInput, Cotangent] | None = None
    ) -> dict[str, Tensor]:
        """One backward pass from a cotangent at the logits, in the shape of the model's own.

        `hear(layer, use, gradient)` is told what arrives at the output of each use of a weight, as it
        arrives; nothing is held. `at_nodes` are cotangents at the inputs of non-linear nodes, which start
        there. Returns the gradients of every example for the plain parameters, {name: (examples, *shape)}.
        """
        at_nodes = at_nodes or {}
        found: dict[str, Tensor] = {}
        made: dict[int, tuple[Tensor, Tensor]] = {}
        for listener, uses in self._calls.items():
            listener.receive = partial(self._receive, uses, hear, found, made)
        try:
            with torch.inference_mode(False), torch.enable_grad(), starting_at_nodes(at_nodes):
                self._send_back(cotangent)
        finally:
            for listener in self._calls:
                listener.receive = None
        with torch.inference_mode(False), torch.enable_grad():
            self._carry_back(made, found)
            self._one_by_one(cotangent, at_nodes, found)
        for name, parameter in self._plain.items():
            if name not in found:
                found[name] = parameter.new_zeros(self.examples, *parameter.shape)
        return found

    def _send_back(self, cotangent: Tensor) -> None:
        torch.autograd.grad(
            self.forward.logits, [self.forward.token], cotangent, retain_graph=True, allow_unused=True
        )

    def node_curvatures(self, *, with_gradient: bool = False) -> tuple[Tensor, ...]:
        """M̄ of every non-linear node, the mean of its local Hessians over examples and positions.

        (G, n) where they are diagonal and (G, n, n) where not, for G groups of n units; heard in a backward
        pass of the gradient, `with_gradient` in the very one that `mean_gradients` are of.
        """
        if self._mean_curvatures:
            return self._mean_curvatures[0]
        found: dict[NonlinearNode, Tensor] = {}

        def listen(node: NonlinearNode, gradient: Tensor) -> None:
            found[node] = node.mean_curvature(gradient, self.row_weights)

        nodes = self.forward.nodes
        self._hear_nodes({node: partial(listen, node) for node in nodes}, with_gradient)
        means = (found[node] if node in found else node.no_curvature() for node in nodes)
        self._mean_curvatures.append(tuple(means))
        return self._mean_curvatures[0]

    @cached_property
    def _mean_curvatures(self) -> list[tuple[Tensor, ...]]:
        return []  # what `node_curvatures` has found, if it was asked for

    def own_curvatures(self) -> tuple[OwnCurvature | None, ...]:
        """M_{i,n} of every example at every node, in factors; None where the loss does not depend on it."""
        found: dict[NonlinearNode | FurtherNode, OwnCurvature] = {}

        def listen(node: NonlinearNode | FurtherNode, gradient: Tensor) -> None:
            found[node] = own_curvature(node, gradient.detach())

        nodes = (*self.forward.nodes, *self.forward.further)
        self._hear_nodes({node: partial(listen, node) for node in nodes})
        return tuple(found.get(node) for node in nodes)

    def _hear_nodes(
        self,
        listeners: Mapping[NonlinearNode | FurtherNode, Callable[[Tensor], None]],
        with_gradient: bool = False,
    ) -> None:
        """One backward pass of the gradient, in which each listener is told ∂ξ_i/∂f at its node."""
        for node, listener in listeners.items():
            node.receive = torch.no_grad()(listener)
        try:
            if with_gradient and "_gradient_pass" not in vars(self):
                _ = self._gradient_pass
            else:
                with torch.inference_mode(False), torch.enable_grad():
                    self._send_back(self.terms.gradient_cotangent())
        finally:
            for node in listeners:
                node.receive = None

    @torch.no_grad()
    def _receive(
        self,
        uses: list[SeenUse],
        hear: HearWeight,
        found: dict[str, Tensor],
        made: dict[int, tuple[Tensor, Tensor]],
        gradient: Tensor,
    ) -> None:
        for seen in uses:
            if seen.use is None or (seen.view is None and seen.made is None):
                continue
            self._check_unwritten(seen)
            arrived = seen.examples_first(gradient)
            if seen.view is None and seen.made is not None:
                rows = seen.use.example_gradients(arrived, tuple(seen.made.shape))
                before = made.get(id(seen.made))
                made[id(seen.made)] = (seen.made, rows if before is None else before[1] + rows)
                continue
            if seen.view is None or seen.view.name in self.forward.watched.unknown:
                continue
            name = seen.view.name
            if name in self._by_name and isinstance(seen.use, WeightUse):
                hear(self._by_name[name], SeenWeight(seen, seen.use, seen.view), arrived)
            elif name in self._plain:
                rows = self._example_gradients(seen.use, seen.view, arrived, self._plain[name])
                found[name] = rows if name not in found else found[name] + rows

    def _example_gradients(
        self, use: Use, view: ParameterView, gradient: Tensor, parameter: Tensor
    ) -> Tensor:
        """The gradients of every example in the parameter's own shape, from one use of a view of it."""
        shape = tuple(parameter.shape)
        if view.transposed and not isinstance(use, WeightUse):
            return use.example_gradients(gradient, shape[::-1]).mT
        if view.rows is None:
            return use.example_gradients(gradient, shape)
        first, last = view.rows
        rows = parameter.new_zeros(self.examples, *shape)
        rows[:, first:last] = use.example_gradients(gradient, (last - first, *shape[1:]))
        return rows

    def _check_unwritten(self, seen: SeenUse) -> None:
        use = seen.use
        if use is not None and seen.version >= 0 and use.inputs._version != seen.version:
            what = "a constant" if seen.view is None else f"`{seen.view.name}`"
            raise ProblemError(
                f"the forward overwrites in place what {what} was multiplied with, so its gradient cannot be "
                f"computed (nor can torch's backward compute it). Take the in-place operation out"
            )

    def _carry_back(self, made: Mapping[int, tuple[Tensor, Tensor]], found: dict[str, Tensor]) -> None:
        """From gradients of constants made of parameters to those of the parameters behind them."""
        behind = {id(seen.made): names for seen, names in self.forward.watched.made}
        for key, (constant, rows) in made.items():
            names = [n for n in behind[key] if n in self._plain and n not in self.forward.watched.unknown]
            if not names:
                continue
            parameters = [self.network.parameters[name] for name in names]
            pieces = [
                torch.autograd.grad(constant, parameters, row, retain_graph=True, allow_unused=True)
                for row in rows
            ]
            for name, parameter, column in zip(names, parameters, zip(*pieces, strict=True), strict=True):
                values = [torch.zeros_like(parameter) if g is None else g for g in column]
                stacked = torch.stack(values).detach()
                found[name] = stacked if name not in found else found[name] + stacked

    def _one_by_one(
        self, cotangent: Tensor, at_nodes: Mapping[NodeInput, Cotangent], found: dict[str, Tensor]
    ) -> None:
        """Parameters that were used in ways curvlab does not know: one backward pass for each example."""
        names = [name for name in self._plain if name in self.forward.watched.unknown]
        if not names:
            return
        parameters = [self.network.parameters[name] for name in names]
        pieces = []
        for index in range(self.examples):
            alone = torch.zeros_like(cotangent)
            alone[index] = cotangent[index]
            with starting_at_nodes(
                {node: node.rows.only(formed(value), index) for node, value in at_nodes.items()}
            ):
                gradients = torch.autograd.grad(
                    self.forward.logits, parameters, alone, retain_graph=True, allow_unused=True
                )
            pieces.append(
                [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]
            )
        for name, column in zip(names, zip(*pieces, strict=True), strict=True):
            found[name] = torch.stack(column).detach()

    def _weigh(self, weights: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Σ_i w_i ∇ξ_i by parameter, but the rows g_i of the Linear layers as they are, by their names."""
        # Equal weights are a factor of the sum: nothing of the rows' size need be multiplied.
        equal = weights is self.row_weights and self.terms.equal_weights
        gradients: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}

        def hear(layer: Layer, seen: SeenWeight, gradient: Tensor) -> None:
            use, view = seen.use, seen.view
            if layer.kind == "linear":
                rows[layer.name] = gradient
                return
            arrived = use.output_rows(gradient)
            if layer.weight_name is not None:
                shape = shape_of_rows(layer.weight, view.rows)
                value = use.gradient(arrived, shape, None if equal else weights)
                value = value.mul_(weights[0]) if equal else value
                add_rows(gradients, layer.weight_name, layer.weight, view.rows, value)
            if layer.bias_name is not None and layer.bias is not None:
                value = weights @ arrived.sum(1).flatten(1)
                add_rows(gradients, layer.bias_name, layer.bias.detach(), view.rows, value)

        plain = self.backward(self.terms.gradient_cotangent(), hear)
        for name, value in plain.items():
            gradients[name] = torch.tensordot(weights, value, 1)
        for layer in self.layout:
            if layer.kind == "linear" and layer.name not in rows:
                rows[layer.name] = layer.weight.new_zeros(self.examples, layer.out_features)
            for name in layer.names:
                if layer.kind != "linear" and name not in gradients:
                    gradients[name] = torch.zeros_like(self.network.parameters[name])
        return gradients, rows

    @cached_property
    def _gradient_pass(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self._weigh(self.row_weights)

    def weighted_gradients(self, weights: Tensor) -> dict[str, Tensor]:
        gradients, rows = self._weigh(weights)
        for layer in self.layout:
            if layer.kind == "linear":
                scaled = rows[layer.name] * weights[:, None]
                if layer.weight_name is not None:
                    gradients[layer.weight_name] = scaled.T @ self.linear_inputs(layer)
                if layer.bias_name is not None:
                    gradients[layer.bias_name] = scaled.sum(0)
        return gradients

    @property
    def mean_gradients(self) -> dict[str, Tensor]:
        """E[∇ξ] of all parameters but those of the Linear layers in `layers`."""
        return self._gradient_pass[0]

    @cached_property
    def layers(self) -> tuple[LayerRecord, ...]:
        roots, rows = self.sqrt_row_weights, self._gradient_pass[1]
        return tuple(
            LayerRecord(
                layer,
                GramFactor(self.linear_inputs(layer), roots),
                GramFactor(rows[layer.name], roots),
            )
            for layer in self.layout
            if layer.kind == "linear"
        )

    def linear_inputs(self, layer: Layer) -> Tensor:
        """H of a Linear layer that sees one row per example."""
        return next(seen.use.inputs for seen in self.weight_uses(layer) if seen.use is not None)


def record(
    network: Network,
    criterion: Criterion,
    inputs: Inputs,
    targets: Tensor,
    *,
    torch_layout: bool = False,
    sequences_first: bool = False,
) -> tuple[Recording, Forward]:
    """Run one batch through the network and keep what providers need; the model is left as it was."""
    forward = run_forward(network, inputs, sequences_first=sequences_first)
    read, chain = forward.read, forward.chain
    hidden = None if read is None else [layer.preactivation for layer in read.layers[:-1]]
    check_finite(network, inputs, forward.logits, hidden)
    terms = LossTerms.of(criterion, forward.logits, targets.detach(), torch_layout=torch_layout)
    given = (network, terms, inputs, targets)
    if read is None or chain is None or terms.per_example != 1:
        return GraphRecording(*given, forward), forward
    inputs_of = tuple(layer.inputs.detach() for layer in read.layers)
    outputs_of = tuple(layer.preactivation.detach() for layer in read.layers)
    return ChainRecording(*given, chain, inputs_of, outputs_of), forward


@dataclass(frozen=True, eq=False)
class KnownForward:
    """A forward that was a chain and nothing else, in a structure of the model's modules."""

    structure: Hashable
    calls: KnownChain
    chain: Chain


def record_known(
    network: Network,
    criterion: Criterion,
    inputs: Inputs,
    targets: Tensor,
    known: KnownForward,
    *,
    torch_layout: bool = False,
) -> ChainRecording | None:
    """`record` of a batch on which the model is expected to do what it did; None where it did not."""
    if known.calls.has_hooks():
        return None
    followed = follow_forward(network, inputs, known.calls)
    if followed is None or network.structure_key() != known.structure:
        return None
    logits, follower = followed
    check_finite(network, inputs, logits, follower.preactivations[:-1])
    terms = LossTerms.of(criterion, logits, targets.detach(), torch_layout=torch_layout)
    if terms.per_example != 1:
        return None
    inputs_of = tuple(h.detach() for h in follower.inputs)
    outputs_of = tuple(z.detach() for z in follower.preactivations)
    return ChainRecording(network, terms, inputs, targets, known.chain, inputs_of, outputs_of)


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
