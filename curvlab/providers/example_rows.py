"""Rows of examples for whole parameters: R_i = Σ_p v_ip h_ipᵀ of a weight, from what arrives at its outputs.

    structure=block    E[vec R_i vec R_iᵀ] of each parameter by itself
    structure=layer    of a layer's weight and bias together
    structure=full     of all parameters, cross-layer blocks included

No R_i is kept: a weight's rows are the v_ip of every backward pass and the inputs h_ip of the recording.
With k = passes · examples rows, S positions, o outputs and n inputs the kernel is

    K_ij = Σ_pq (v_ip·v_jq)(h_ip·h_jq)      by Gram matrices:     (kS)² o + (mS)² n    multiplications
    K_ij = ⟨R_i, R_j⟩                       by R, in pieces:      k S o n + k² o n

whichever is less. ⟨R_i, X⟩ is a forward pass of the layer with X in the place of its weight. Σ_i y_i R_i, of
which a solver makes its direction, is a re-weighted backward pass, its part that gives a weight's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlab.exceptions import StaleError
from curvlab.linalg import ExampleFactor, Factor, FormedRows, GramFactor, ParameterRows, gram
from curvlab.model.layers import Layer
from curvlab.model.nodes import Cotangent, NodeInput
from curvlab.model.recording import ChainRecording, GraphRecording
from curvlab.model.uses import LinearUse, WeightUse
from curvlab.model.watch import ParameterView, SeenUse, SeenWeight
from curvlab.staleness import Stamp

__all__ = ["ExampleSums", "UseRows", "WeightRows", "chain_example_factors", "groups_of", "modules_of"]

PIECE_ENTRIES = 1 << 24  # of R, formed at once
LARGEST_GRAM = 1 << 26  # entries of a Gram matrix over positions


@dataclass(frozen=True, eq=False)
class UseRows:
    """What arrives at the output of one use of a weight, (passes, m, S, G, o).

    `place` says which rows of the weight are used; None: all.
    """

    use: WeightUse
    place: tuple[int, int] | None
    outputs: Tensor
    stamp: Stamp = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stamp", Stamp.of(self.use.inputs))

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: their tensors are new ones, with a stamp of their own."""
        return {"use": self.use, "place": self.place, "outputs": self.outputs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def check_unwritten(self) -> None:
        """Refuse to go on where the batch was overwritten."""
        if Stamp.of(self.use.inputs) != self.stamp:
            raise StaleError(
                "a batch was overwritten, and the rows of its examples are still needed: estimate again, and "
                "let a re-iterable give a new tensor for every batch"
            )

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part of a parameter that is used here."""
        return shape if self.place is None else (self.place[1] - self.place[0], *shape[1:])

    def matrices(self, first: int, last: int) -> Tensor:
        """R_i of some examples as matrices, (passes, examples, G, o, n)."""
        rows = self.use.input_rows(first, last).to(self.outputs)
        return torch.einsum("pbsgo,bsgn->pbgon", self.outputs[:, first:last], rows)

    def all_matrices(self) -> Tensor:
        """R_i of all examples; only the patches of some of them are held at a time."""
        spans = list(self.use.chunks())
        if len(spans) == 1:
            return self.matrices(*spans[0])
        passes, examples, _, parts, outputs = self.outputs.shape
        found = self.outputs.new_empty(passes, examples, parts, outputs, self.use.input_size)
        for first, last in spans:
            found[:, first:last] = self.matrices(first, last)
        return found


@dataclass(frozen=True, eq=False)
class WeightRows(ParameterRows):
    """R_i = Σ_uses Σ_p v_ip h_ipᵀ of a weight, row (pass, example) by row; nothing of it is formed."""

    uses: tuple[UseRows, ...]

    @property
    def count(self) -> int:
        passes, examples = self.uses[0].outputs.shape[:2]
        return passes * examples

    @property
    def _examples(self) -> int:
        return self.uses[0].use.examples

    def kernel(self) -> Tensor:
        for one in self.uses:
            one.check_unwritten()
        return self._kernel_by_grams() if self._grams_are_cheaper() else self._kernel_by_products()

    def _grams_are_cheaper(self) -> bool:
        if len(self.uses) != 1 or self.uses[0].place is not None:
            return False
        use, (passes, examples, positions, parts, outputs) = self.uses[0].use, self.uses[0].outputs.shape
        rows, inputs = examples * positions, use.input_size
        if (passes * rows) ** 2 > LARGEST_GRAM:
            return False
        by_grams = parts * (rows**2 * inputs + (passes * rows) ** 2 * outputs)
        size = parts * outputs * inputs
        return by_grams <= passes * rows * size + (passes * examples) ** 2 * size

    def _kernel_by_grams(self) -> Tensor:
        (one,) = self.uses
        passes, examples, positions, parts, _ = one.outputs.shape
        inputs = one.use.input_rows().to(one.outputs)
        total = one.outputs.new_zeros(self.count, self.count)
        for part in range(parts):
            left = gram(one.outputs[:, :, :, part].reshape(self.count * positions, -1))
            right = gram(inputs[:, :, part].reshape(examples * positions, -1))
            shape = (passes, examples * positions, passes, examples * positions)
            product = left.reshape(shape) * right[None, :, None]
            total += product.reshape(self.count, positions, self.count, positions).sum((1, 3))
        return total

    def _kernel_by_products(self) -> Tensor:
        total = self.uses[0].outputs.new_zeros(self.count, self.count)
        if len(self.uses) == 1 and self.uses[0].place is None:
            (one,) = self.uses
            outputs = one.outputs.shape[-1]
            parts, inputs = one.use.parts, one.use.input_size
            step = max(1, PIECE_ENTRIES // max(1, self.count * parts * inputs))
            for start in range(0, outputs, step):
                piece = replace(one, outputs=one.outputs[..., start : start + step])
                total += gram(piece.all_matrices().reshape(self.count, -1))
            return total
        return gram(self.form())

    def inner(self, x: Tensor) -> Tensor:
        total = self.uses[0].outputs.new_zeros(self.uses[0].outputs.shape[:2])
        for one in self.uses:
            one.check_unwritten()
            own = x if one.place is None else x[one.place[0] : one.place[1]]
            total = total + torch.einsum("pbsgo,bsgo->pb", one.outputs, one.use.image(own))
        return total.reshape(-1)

    def combination(self, y: Tensor) -> Tensor:
        total = y.new_zeros(self.shape)
        for one in self.uses:
            one.check_unwritten()
            weighed = torch.einsum("pb,pbsgo->bsgo", y.reshape(one.outputs.shape[:2]), one.outputs)
            value = one.use.gradient(weighed, one.shape_of(self.shape))
            first, last = one.place or (0, len(total))
            total[first:last] += value
        return total

    def squares(self, weights: Tensor) -> Tensor:
        if len(self.uses) > 1 or self.uses[0].place is not None:
            return (weights @ self.form().square()).reshape(self.shape)
        (one,) = self.uses
        by_pass = weights.reshape(one.outputs.shape[:2])
        total = y = one.outputs.new_zeros(one.use.parts, one.outputs.shape[-1], one.use.input_size)
        for first, last in one.use.ranges(len(one.outputs) * y.numel()):
            squares = one.matrices(first, last).square()
            total = total + torch.einsum("pb,pbgon->gon", by_pass[:, first:last], squares)
        return one.use.from_matrix(total, self.shape).reshape(self.shape)

    def form(self) -> Tensor:
        passes, examples = self.uses[0].outputs.shape[:2]
        rows = self.uses[0].outputs.new_zeros(passes, examples, *self.shape)
        for one in self.uses:
            one.check_unwritten()
            shape = one.shape_of(self.shape)
            value = one.use.from_matrix(one.all_matrices(), shape).reshape(passes, examples, *shape)
            first, last = one.place or (0, rows.shape[2])
            rows[:, :, first:last] += value
        return rows.reshape(passes * examples, -1)

    def join(self, other: ParameterRows) -> ParameterRows:
        if not isinstance(other, WeightRows):
            return FormedRows(self.shape, torch.cat([self.form(), other.form()]))
        pairs = zip(self.uses, other.uses, strict=True)
        return replace(
            self, uses=tuple(replace(a, outputs=torch.cat([a.outputs, b.outputs])) for a, b in pairs)
        )

    def held(self) -> dict[str, Tensor]:
        found = {f"outputs{i}": one.outputs for i, one in enumerate(self.uses)}
        return found | {f"inputs{i}": one.use.inputs for i, one in enumerate(self.uses)}


def groups_of(layers: Sequence[Layer], structure: str) -> list[tuple[str, tuple[str, ...]]]:
    """The groups of parameters whose rows are joined, with the name of each: parameters, layers, or all."""
    if structure == "full":
        return [("network", tuple(name for layer in layers for name in layer.names))]
    if structure == "layer":
        return [
            (name, tuple(n for one in members for n in one.names)) for name, members in modules_of(layers)
        ]
    return [(name, (name,)) for layer in layers for name in layer.names]


def modules_of(layers: Sequence[Layer]) -> list[tuple[str, tuple[Layer, ...]]]:
    """Layers, with those that are the weight and the bias of one module in one group, as of a normalisation.

    The scale and the shift of a normalisation have no Kronecker structure, so each is a layer to all else.
    """
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        owners = {_owner(name) for name in layer.names}
        owner = next(iter(owners)) if len(owners) == 1 else None
        groups.setdefault(layer.name if owner is None else f"{owner}.weight", []).append(layer)
    return [
        (members[0].name if len(members) == 1 else key.removesuffix(".weight"), tuple(members))
        for key, members in groups.items()
    ]


def _owner(parameter: str) -> str | None:
    """The module whose `weight` or `bias` a parameter is, or makes by a parametrization."""
    path = parameter.split(".")
    if "parametrizations" in path:
        path = [*path[: (at := path.index("parametrizations"))], path[at + 1]]
    return ".".join(path[:-1]) if path[-1] in ("weight", "bias") else None


def _factors(
    rows: Mapping[str, ParameterRows], layers: Sequence[Layer], structure: str, root: Tensor
) -> tuple[Factor, ...]:
    return tuple(
        ExampleFactor(tuple(rows[name] for name in names), root) for _, names in groups_of(layers, structure)
    )


class ExampleSums:
    """The rows of all parameters, from one backward pass after the other; a factor for each group of them."""

    def __init__(self, recording: GraphRecording, structure: str) -> None:
        self.recording, self.structure = recording, structure
        self._roots: list[Tensor] = []
        self._passes: list[tuple[dict[SeenUse, Tensor], dict[str, Tensor]]] = []

    def add_pass(
        self, cotangent: Tensor, weight: float = 1.0, at_nodes: Mapping[NodeInput, Cotangent] | None = None
    ) -> None:
        """One backward pass, from cotangents at the logits and at nodes; its rows count with `weight`."""
        outputs: dict[SeenUse, Tensor] = {}
        biases: dict[str, Tensor] = {}

        def hear(layer: Layer, seen: SeenWeight, gradient: Tensor) -> None:
            use, view = seen.use, seen.view
            rows = use.output_rows(gradient)
            if layer.weight_name is not None:
                outputs[seen.seen] = rows
            if layer.bias_name is not None and layer.bias is not None:
                total = biases.setdefault(layer.bias_name, rows.new_zeros(len(rows), len(layer.bias)))
                first, last = view.rows or (0, total.shape[1])
                total[:, first:last] += rows.sum(1).flatten(1)

        plain = self.recording.backward(cotangent, hear, at_nodes)
        self._passes.append((outputs, biases | plain))
        self._roots.append(self.recording.sqrt_row_weights * weight**0.5)

    def factors(self) -> tuple[Factor, ...]:
        """A factor for each group of parameters."""
        layers, rows = self.recording.layout, dict(self._parameter_rows())
        return _factors(rows, layers, self.structure, torch.cat(self._roots))

    def _parameter_rows(self) -> Iterator[tuple[str, ParameterRows]]:
        for layer in self.recording.layout:
            if layer.weight_name is not None:
                uses = [self._use_rows(seen) for seen in self.recording.weight_uses(layer)]
                shape = tuple(layer.weight.shape)
                yield layer.weight_name, WeightRows(shape, tuple(one for one in uses if one is not None))
            if layer.bias_name is not None:
                yield layer.bias_name, self._formed_rows(layer.bias_name)

    def _use_rows(self, seen: SeenUse) -> UseRows | None:
        """What arrived at one use in all passes; zeros where a pass began behind it."""
        use, view = seen.use, seen.view
        if not isinstance(use, WeightUse) or view is None:
            return None
        # What one pass has heard is kept as it is, without a copy; of several the stack takes its place.
        heard = [outputs.pop(seen, None) for outputs, _ in self._passes]
        like = next((rows for rows in heard if rows is not None), None)
        if like is None:
            outputs_of = self._outputs_of(use, view)
            like = use.inputs.new_zeros(1, dtype=self.recording.logits.dtype).expand(
                use.examples, use.positions, use.parts, outputs_of
            )
        found = [torch.zeros_like(like) if rows is None else rows for rows in heard]
        return UseRows(use, view.rows, found[0][None] if len(found) == 1 else torch.stack(found))

    def _outputs_of(self, use: WeightUse, view: ParameterView) -> int:
        """How many outputs each part of a use has, from its parameter's matrix."""
        parameter = self.recording.network.parameters[view.name].detach()
        own = parameter if view.rows is None else parameter[view.rows[0] : view.rows[1]]
        return use.matrix(own).shape[-2]

    def _formed_rows(self, name: str) -> FormedRows:
        parameter = self.recording.network.parameters[name]
        silent = parameter.detach().new_zeros(self.recording.examples, parameter.numel())
        found = [formed.get(name) for _, formed in self._passes]
        rows = [silent if one is None else one.reshape(len(silent), -1) for one in found]
        return FormedRows(tuple(parameter.shape), torch.cat(rows))


@dataclass(frozen=True, eq=False)
class _ChainLayer:
    """The rows of a layer of a chain, (passes · m, n_t), beside its inputs."""

    layer: Layer
    inputs: GramFactor
    outputs: GramFactor

    @cached_property
    def rows(self) -> dict[str, ParameterRows]:
        layer, examples = self.layer, len(self.inputs.rows)
        found: dict[str, ParameterRows] = {}
        if layer.weight_name is not None:
            use = LinearUse(self.inputs.rows, examples)
            outputs = self.outputs.rows.reshape(-1, examples, 1, 1, self.outputs.size)
            found[layer.weight_name] = WeightRows(tuple(layer.weight.shape), (UseRows(use, None, outputs),))
        if layer.bias_name is not None:
            found[layer.bias_name] = FormedRows((self.outputs.size,), self.outputs.rows)
        return found


def chain_example_factors(
    recording: ChainRecording, products: Sequence[GramFactor], structure: str
) -> tuple[Factor, ...]:
    """The same of a chain, from the rows at its layers' outputs."""
    pairs = zip(recording.layers, products, strict=True)
    layers = [_ChainLayer(record.layer, record.inputs, output) for record, output in pairs]
    rows = {name: found for one in layers for name, found in one.rows.items()}
    return _factors(rows, recording.layout, structure, products[0].root)
