"""Layers: the parameters of a model in the groups that a curvature has entries for, read off their uses.

| kind | what it is | its blocks |
| --- | --- | --- |
| `linear` | a Linear weight that sees one row per example, with its bias | A ⊗ B and B |
| `shared` | any other weight used as a matrix (convolution, sequence, embedding), its bias | A ⊗ B by part |
| `tied` | a weight that is used as two different matrices, such as a lookup that is also the head | Σ A ⊗ B |
| `plain` | every other parameter | E[g_θ g_θᵀ], dense, by its rows or diagonal |

How a parameter is used is seen in a batch (`curvlab.model.watch`), never guessed from its module's class; a
new kind of use is one class like those in `curvlab.model.uses` and an entry like those in
`curvlab.model.bindings`, in curvlab or in another package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from curvlab.activations import Activation
from curvlab.exceptions import ProblemError
from curvlab.linalg.views import Layout, MatrixView
from curvlab.model.uses import (
    AddedUse,
    LinearUse,
    ShiftUse,
    Use,
    WeightUse,
)
from curvlab.model.watch import SeenUse, leaves_behind

__all__ = [
    "Chain",
    "Layer",
    "MatrixRole",
    "Part",
    "WatchedUses",
    "add_rows",
    "check_same_layers",
    "layers_of",
    "shape_of_rows",
    "view_of_use",
]

LayerKind = Literal["linear", "shared", "tied", "plain"]


@dataclass(frozen=True)
class Part:
    """One matrix of a weight: the rows `first` to `last` of its outputs, and which of the use's parts."""

    rows: tuple[int, int] | None
    index: int


@dataclass(frozen=True)
class MatrixRole:
    """One way in which a weight is used as matrices, (parts, outputs, inputs) in all.

    `lookup` where the inputs are one-hot rows, those of an embedding.
    """

    view: Layout
    groups: int
    slices: tuple[tuple[int, int] | None, ...] = (None,)
    lookup: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """The matrices, in the order of their outputs."""
        return tuple(Part(rows, index) for rows in self.slices for index in range(self.groups))

    def matrix_view(self, shape: tuple[int, ...]) -> MatrixView:
        """How a parameter of this shape is seen as the matrices of all parts."""
        return MatrixView(shape, len(self.parts), self.view)


@dataclass(frozen=True, eq=False)
class Layer:
    """One weight with its bias, or one parameter by itself.

    A name is None where the parameter is missing, frozen or not asked for; `weight` and `bias` are the live
    tensors. `roles` are empty for `linear` and `plain` layers; a plain layer's parameter is its `bias_name`.
    """

    name: str
    kind: LayerKind
    weight_name: str | None
    bias_name: str | None
    parameter: Tensor = field(repr=False)
    bias: Tensor | None = field(default=None, repr=False)
    roles: tuple[MatrixRole, ...] = ()
    selected: bool = field(init=False, repr=False)
    """Whether any parameter of the layer has a block."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "selected", self.weight_name is not None or self.bias_name is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters that have blocks."""
        return tuple(name for name in (self.weight_name, self.bias_name) if name is not None)

    @property
    def weight(self) -> Tensor:
        """The weight (of a plain layer: the parameter), detached."""
        return self.parameter.detach()

    @property
    def in_features(self) -> int:
        """n_{t-1} of a linear layer."""
        return self.parameter.shape[1]

    @property
    def out_features(self) -> int:
        """n_t of a linear layer."""
        return self.parameter.shape[0]

    @property
    def label(self) -> str:
        """The name as error messages show it."""
        return f"layer `{self.name}`" if self.name else "the model's only layer"


@dataclass(frozen=True, eq=False)
class Chain:
    """Linear layers t = 1..k and the activations between them."""

    layers: tuple[Layer, ...]
    activations: tuple[Activation, ...]

    def same_as(self, other: Chain) -> bool:
        """Whether both are the same layers with the same activations."""
        if (len(self.layers), self.activations) != (len(other.layers), other.activations):
            return False
        pairs = zip(self.layers, other.layers, strict=True)
        return all(mine.parameter is theirs.parameter for mine, theirs in pairs)


@dataclass(frozen=True, eq=False)
class WatchedUses:
    """What a forward did with each parameter, by name.

    `made` are the uses of constants made of parameters, with the parameters behind each; `unknown` are the
    parameters that met the batch in a function that curvlab does not know, with its name.
    """

    direct: Mapping[str, tuple[SeenUse, ...]]
    made: tuple[tuple[SeenUse, tuple[str, ...]], ...]
    unknown: Mapping[str, str]

    @classmethod
    def of(
        cls,
        uses: Iterable[SeenUse],
        unknown: Iterable[tuple[Tensor, str]],
        parameters: Mapping[str, Tensor],
    ) -> WatchedUses:
        """Sort what a watch has seen by parameter."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        direct: dict[str, list[SeenUse]] = {name: [] for name in parameters}
        made: list[tuple[SeenUse, tuple[str, ...]]] = []
        unclear: dict[str, str] = {}
        for tensor, function in unknown:
            for leaf in leaves_behind(tensor):
                if id(leaf) in names:
                    unclear.setdefault(names[id(leaf)], function)
        for seen in uses:
            if seen.view is not None:
                direct[seen.view.name].append(seen)
            elif seen.made is not None:
                behind = tuple(names[id(leaf)] for leaf in leaves_behind(seen.made) if id(leaf) in names)
                made.append((seen, behind))
        return cls({name: tuple(found) for name, found in direct.items()}, tuple(made), unclear)

    def indirect(self) -> set[str]:
        """Parameters that are (also) used through a constant made of them."""
        return {name for _, behind in self.made for name in behind}

    def has_own_gradients(self, name: str) -> bool:
        """Whether the gradients of the examples have a closed form in every use of this parameter."""
        return name not in self.unknown


def layers_of(parameters: Mapping[str, Tensor], watched: WatchedUses) -> tuple[Layer, ...]:
    """The layers of the parameters, in their order; the bias of a weight stands with it."""
    indirect = watched.indirect()
    roles = {
        name: None if name in indirect or name in watched.unknown else _roles(parameter, watched.direct[name])
        for name, parameter in parameters.items()
    }
    biases = _biases(parameters, watched, roles)
    owned = {bias for bias in biases.values() if bias is not None}
    taken: set[str] = set()
    layers = []
    for name, parameter in parameters.items():
        found = roles[name]
        if name in owned:
            continue
        if found is None:
            layers.append(Layer(name, "plain", None, name, parameter))
            continue
        bias = biases[name]
        label = layer_name(name, parameters, roles)
        label = name if label in taken else label
        taken.add(label)
        of_bias = None if bias is None else parameters[bias]
        layers.append(Layer(label, _kind(found, watched.direct[name]), name, bias, parameter, of_bias, found))
    return tuple(layers)


def layer_name(
    name: str, parameters: Mapping[str, Tensor], roles: Mapping[str, tuple[MatrixRole, ...] | None]
) -> str:
    """The module's name where it has this one weight; else the parameter's own."""
    module = name.rpartition(".")[0]
    rivals = [
        other for other, found in roles.items() if found is not None and other.rpartition(".")[0] == module
    ]
    return module if len(rivals) == 1 else name


def _roles(parameter: Tensor, seen: Sequence[SeenUse]) -> tuple[MatrixRole, ...] | None:
    """How a parameter is used as matrices; None where it is not, or not only."""
    if not seen:
        return None
    found: dict[tuple[Layout, int, bool], set[tuple[int, int] | None]] = {}
    for one in seen:
        seen_as = None if one.view is None else view_of_use(one.use)
        if seen_as is None or one.view is None:
            return None
        found.setdefault(seen_as, set()).add(one.view.rows)
    roles = []
    for (view, groups, lookup), slices in found.items():
        ordered = sorted(slices, key=lambda rows: (-1, -1) if rows is None else rows)
        if not _tile(ordered, len(parameter)) or (groups > 1 and ordered != [None]):
            return None
        roles.append(MatrixRole(view, groups, tuple(ordered), lookup))
    return tuple(roles)


def _tile(slices: Sequence[tuple[int, int] | None], length: int) -> bool:
    """Whether row slices of one size cover a parameter once."""
    if None in slices:
        return len(slices) == 1
    spans = [rows for rows in slices if rows is not None]
    ends, starts = [0, *(rows[1] for rows in spans)], [*(rows[0] for rows in spans), length]
    return ends == starts and len({rows[1] - rows[0] for rows in spans}) == 1


def view_of_use(use: Use | None) -> tuple[Layout, int, bool] | None:
    """How a use sees its weight as matrices, how many, and whether it looks rows up; None if it does not."""
    return (use.layout, use.parts, use.lookup) if isinstance(use, WeightUse) else None


def _kind(roles: Sequence[MatrixRole], seen: Sequence[SeenUse]) -> LayerKind:
    if len(roles) > 1:
        return "tied"
    use = seen[0].use
    simple = len(seen) == 1 and isinstance(use, LinearUse) and use.inputs.ndim == 2 and use.folds == 1
    return "linear" if simple and roles[0] == MatrixRole("rows", 1) else "shared"


def _biases(
    parameters: Mapping[str, Tensor],
    watched: WatchedUses,
    roles: Mapping[str, tuple[MatrixRole, ...] | None],
) -> dict[str, str | None]:
    """For each weight, the bias that is added in the very calls that use the weight, and in no others."""

    def calls(name: str) -> frozenset[object]:
        return frozenset(
            (one.listener, one.view.rows) for one in watched.direct[name] if one.view is not None
        )

    indirect = watched.indirect()
    by_calls = {
        calls(name): name
        for name, seen in watched.direct.items()
        if seen and parameters[name].ndim == 1 and all(_adds(one.use) for one in seen)
        if name not in indirect and name not in watched.unknown
    }
    return {
        name: by_calls.get(calls(name)) if len(found) == 1 else None
        for name, found in roles.items()
        if found is not None
    }


def _adds(use: Use | None) -> bool:
    return (isinstance(use, AddedUse) and use.coefficient == 1) or isinstance(use, ShiftUse)


def check_same_layers(first: Sequence[Layer], now: Sequence[Layer]) -> None:
    """Refuse a batch in which a parameter is used otherwise than in the first one."""
    kinds = {name: (layer.kind, layer.roles) for layer in first for name in layer.names}
    for layer in now:
        for name in layer.names:
            if kinds.get(name, (layer.kind, layer.roles)) != (layer.kind, layer.roles):
                raise ProblemError(
                    f"`{name}` is used in another way in this batch ({layer.kind}) than in the first one "
                    f"({kinds[name][0]}): its blocks would be of two kinds. Use batches that take one way"
                )


def shape_of_rows(parameter: Tensor, rows: tuple[int, int] | None) -> tuple[int, ...]:
    """The shape of some rows of a parameter."""
    return tuple(parameter.shape) if rows is None else (rows[1] - rows[0], *parameter.shape[1:])


def add_rows(
    sums: dict[str, Tensor], name: str, parameter: Tensor, rows: tuple[int, int] | None, value: Tensor
) -> None:
    """Add a value for some rows of a parameter to its sum."""
    if rows is None:
        sums[name] = value if name not in sums else sums[name] + value
        return
    if name not in sums:
        sums[name] = torch.zeros_like(parameter)
    sums[name][rows[0] : rows[1]] += value
